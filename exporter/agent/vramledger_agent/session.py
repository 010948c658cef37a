"""Exchange messages with the exporter over one connection; a report is the full state, wire format 1."""

from __future__ import annotations

import _thread
import gc
import json
import os
import sys
import time

from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.distributed_ranks import (
    LONGEST_VALUE,
    find_rank,
    is_rank,
    name_file,
    name_rendezvous,
)
from vramledger_agent.protocol.messages import FORMAT_VERSION, MAX_MESSAGE_BYTES
from vramledger_agent.requests import Handler, RequestHandler, agent_version
from vramledger_agent.transport import AgentTransport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from vramledger_agent.frameworks.poller import ProviderPoller
    from vramledger_agent.settings import Settings

PYTHON_VERSION = sys.version.split(maxsplit=1)[0]

FULL_GENERATION = 2


def collector_entry() -> dict[str, object]:
    """Return the cyclic collector's counts, without a callback: there a Ctrl-C would be lost."""
    return {"enabled": gc.isenabled(), "collections": gc.get_stats()[FULL_GENERATION]["collections"]}


_encode = json.JSONEncoder(separators=(",", ":")).encode


def drop_unknown(entry: dict[str, object]) -> dict[str, object]:
    """Return an entry without what is None (not known is never zero), or negative, which would be refused."""
    found: dict[str, object] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            found[name] = drop_unknown(value)
        elif isinstance(value, list):
            found[name] = [drop_unknown(each) if isinstance(each, dict) else each for each in value]
        elif value is not None and not (isinstance(value, int) and value < 0):
            found[name] = value
    return found


def encode_report(report: dict[str, object]) -> bytes:
    """Return the message, without the frameworks' figures if it would be too long for the wire."""
    message = _encode(report).encode()
    if len(message) <= MAX_MESSAGE_BYTES:
        return message
    return _encode({**report, "frameworks": []}).encode()


class ExporterSession:
    """The reports and requests of one process; a forked child has a session of its own."""

    def __init__(
        self, settings: Settings, poller: ProviderPoller, handlers: dict[str, Handler], errors: dict[str, int]
    ) -> None:
        self.transport = AgentTransport(settings.socket_path)
        self.last_oom: dict[str, object] | None = None  # the newest failed allocation, as the report has it
        self.sequence = 0  # the number of the newest report
        self._settings = settings
        self._poller = poller
        self._errors = errors
        self._request_handler = RequestHandler(handlers)
        self._sent_oom: dict[str, object] | None = None
        self._lock = _thread.RLock()

    def exchange(self, now: float) -> None:
        """Send a report, and handle the requests that have arrived, if there is a connection."""
        with self._lock:
            if self.transport.open(now):
                self._send_report()
                self._accept_requests()

    def send_now(self, timeout: float) -> bool:
        """Send a report from the calling thread.

        Return False without a connection, or if another send blocks it. For reports that cannot wait for the
        agent's thread, because the program may have ended by then.
        """
        try:
            # A signal handler may raise directly after this call, so only the lock knows who has it.
            if not self._lock.acquire(timeout=timeout):
                return False
            return self.transport.open(time.monotonic()) and self._send_report()
        finally:
            try:
                self._lock.release()
            except RuntimeError as error:  # it is another thread's
                if belongs_to_program(error):
                    raise

    def has_unsent_oom(self) -> bool:
        return self.last_oom is not self._sent_oom

    def close(self) -> None:
        self.transport.close()

    def _send_report(self) -> bool:
        self.sequence += 1
        failure = self.last_oom
        sent = self.transport.send(encode_report(self._build_report()))
        if sent:
            self._sent_oom = failure
        return sent

    def _build_report(self) -> dict[str, object]:
        return {
            "version": FORMAT_VERSION,
            "sequence": self.sequence,
            "dropped": self.transport.dropped,
            "agent": agent_version(),
            "interval": self._settings.interval,
            "monotonic": time.clock_gettime(time.CLOCK_BOOTTIME),
            "python": PYTHON_VERSION,
            "visible": dict(self._poller.visibility),
            "consents": sorted(self._request_handler.handlers),
            "errors": dict(self._errors),
            "collector": collector_entry(),
            "frameworks": [drop_unknown(entry) for entry in self._poller.read()],
            **({"last_oom": self.last_oom} if self.last_oom is not None else {}),
            **({"rank": rank} if (rank := self._read_rank()) is not None else {}),
        }

    def _read_rank(self) -> dict[str, object] | None:
        try:
            return rank_entry()
        except Exception as error:  # another version, or the program changes its group just now
            if belongs_to_program(error):
                raise
            self._errors["agent"] = self._errors.get("agent", 0) + 1
            return None

    def _accept_requests(self) -> None:
        while (received := self.transport.receive()) is not None:
            self._request_handler.accept(*received)


_MAX_STORES = 8
"""Stores wrap each other; we search this number of them for the one with an address."""

Found = tuple[int, int, str]
"""Rank, number of ranks, and job; the job is empty where it is not known."""


def rank_entry() -> dict[str, object] | None:
    """Return the rank, None if unknown; the environment may tell it where a group of one does not."""
    named = find_rank(_read_variable)
    groups = (each for each in (_torch_group(), _jax_cluster()) if each is not None)
    found = next((each for each in groups if is_rank(*each[:2])), named)
    if found is not None and named is not None and not found[2] and found[:2] == named[:2]:
        found = named
    return None if found is None else {"number": found[0], "size": found[1], "job": found[2]}


def _read_variable(name: str) -> str:
    value = os.environ.get(name)
    return value[:LONGEST_VALUE] if isinstance(value, str) else ""  # a program may replace os.environ


def _torch_group() -> Found | None:
    """Return what the default group of PyTorch (2.0 and later) says, None without one."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    group = getattr(world, "default_pg", None)
    kinds = sys.modules.get("torch._C._distributed_c10d")
    if kinds is None or group is None or type(group) is not getattr(kinds, "ProcessGroup", None):
        return None
    known = getattr(world, "pg_map", {}).get(group)
    return int(group.rank()), int(group.size()), "" if known is None else _name_store(kinds, known[1])


def _name_store(kinds: ModuleType, store: object) -> str:
    for _ in range(_MAX_STORES):
        if type(store) is not getattr(kinds, "PrefixStore", None):
            break
        store = getattr(store, "underlying_store", None)
    if type(store) is getattr(kinds, "TCPStore", None):
        return name_rendezvous(str(store.host)[:LONGEST_VALUE], str(int(store.port)))  # type: ignore[attr-defined]
    if type(store) is getattr(kinds, "FileStore", None):
        return name_file(str(store.path))  # type: ignore[attr-defined]
    return ""


def _jax_cluster() -> Found | None:
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(state, "client", None) is None:
        return None
    address, _, port = str(getattr(state, "coordinator_address", None) or "").rpartition(":")
    job = name_rendezvous(address.strip("[]")[:LONGEST_VALUE], port) if address and port.isdigit() else ""
    return int(state.process_id), int(state.num_processes), job  # type: ignore[union-attr]
