"""Exchange messages with the exporter: reports go out, requests come in, over one connection.

A report is the full state each time, in the wire format's version 1.
"""

from __future__ import annotations

import _thread
import gc
import time

from vramledger.agent.distributed_rank import rank_entry
from vramledger.agent.message import PYTHON_VERSION, agent_version, drop_unknown, encode_report
from vramledger.agent.program_errors import belongs_to_program
from vramledger.agent.requests import Handler, RequestHandler
from vramledger.agent.transport import AgentTransport
from vramledger.agent_protocol.messages import FORMAT_VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vramledger.agent.frameworks.poller import ProviderPoller
    from vramledger.agent.settings import Settings

FULL_GENERATION = 2
"""The generation of a full collection of Python's cyclic collector."""


def collector_entry() -> dict[str, object]:
    """Return what the report has about Python's cyclic collector.

    We ask the collector for its counts. It does not call us: a program's Ctrl-C that Python delivers during
    a callback of the collector is lost.
    """
    return {"enabled": gc.isenabled(), "collections": gc.get_stats()[FULL_GENERATION]["collections"]}


class ExporterSession:
    """The reports and requests of one process; a forked child has a session of its own.

    Attributes:
        last_oom: the newest failed allocation, as the report has it.
        sequence: the number of the newest report.
    """

    def __init__(
        self, settings: Settings, poller: ProviderPoller, handlers: dict[str, Handler], errors: dict[str, int]
    ) -> None:
        self.transport = AgentTransport(settings.socket_path)
        self.last_oom: dict[str, object] | None = None
        self.sequence = 0
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

        Return False without a connection, or if another send blocks it. For reports that cannot wait for
        the agent's thread, because the program may have ended by then.
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
        """Return whether a failed allocation is not yet in a report that was sent."""
        return self.last_oom is not self._sent_oom

    def close(self) -> None:
        """Close the connection."""
        self.transport.close()

    def _send_report(self) -> bool:
        self.sequence += 1
        failure = self.last_oom
        sent = self.transport.send(encode_report(self._build_report()))
        if sent:
            self._sent_oom = failure
        return sent

    def _build_report(self) -> dict[str, object]:
        """Return the full state of this process as it is now, without what is not known."""
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
