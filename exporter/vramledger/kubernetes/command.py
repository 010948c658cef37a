"""Run ``vramledger taint``: mark this Kubernetes node while its GPUs hold memory of work that has ended.

Read and write the marks of one node through the API of Kubernetes, with the token of this pod.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from aiohttp.connector import Connection
from msgspec import Struct
from msgspec.structs import replace

from vramledger.commands.interrupts import run_until_interrupted
from vramledger.config import SERVICE_ACCOUNT, SamplingConfig
from vramledger.errors import StartupError
from vramledger.exchange import read_json
from vramledger.kubernetes.api_client import ClusterError, find_api_server
from vramledger.logs import fields, log
from vramledger.model.public_ledger import LeftoverReason, Leftovers
from vramledger.model.records import RecordError, read_record, write_record
from vramledger.readers.hosts.host import Host
from vramledger.web.access.local_users import Socket, find_listener, is_of_this_host
from vramledger_agent.commands.parser import Commands, add_log, duration
from vramledger_agent.printable import printable

CONDITION = "GpuMemoryLeftOver"
"""The type of the node's condition. As with MemoryPressure, True is the bad news."""

MAX_MESSAGE_CHARS = 1024
MAX_ANNOTATED = 64
"""The maximum number of processes in the annotation: with more of them, one that is left is among these."""

MAX_AGE = 60.0
"""Seconds after which a sample is too old to say anything. The exporter samples every second."""

Process = tuple[int, int]
"""Pid, and start time in ticks since boot."""


class Leftover(NamedTuple):
    """What is left over: a device, the kind of leftover, and the process if there is one."""

    uuid: str
    kind: str
    process: Process | None


class Observation(NamedTuple):
    """One answer of the exporter."""

    verdict: str  # ``clean``, ``not-clean`` or ``cannot-tell``
    message: str  # the reasons, one line
    leftovers: frozenset[Leftover] = frozenset()  # what makes a device not clean
    holders: frozenset[Process] = frozenset()  # every process that holds memory, guilty or not


def cannot_tell(why: str) -> Observation:
    """Return the observation of an exporter that said nothing usable."""
    return Observation("cannot-tell", shorten(why))


def shorten(text: str) -> str:
    """Return a text that fits into a condition."""
    text = printable(text)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 1]}…"


def read_answer(answer: object, now: float) -> Observation:
    """Read what ``/api/v1/leftovers`` said, at a Unix time."""
    try:
        said = msgspec.convert(answer, Leftovers)
    except (msgspec.ValidationError, UnicodeEncodeError):  # a lone surrogate
        return cannot_tell(
            "the exporter's answer has another form; use the vramledger that runs the exporter"
        )
    if said.version != 1:
        return cannot_tell("the exporter's answer is of another version")
    reasons = [(device, reason) for device in said.devices for reason in device.reasons]
    telling = [
        f"GPU {device.gpu}: {reason.said}"
        for device, reason in reasons
        if reason.counts or (said.verdict == "cannot-tell" and device.verdict == said.verdict)
    ]
    message = shorten("; ".join(telling) or "no GPU holds leftovers")
    if said.verdict == "cannot-tell":
        return Observation(said.verdict, message)
    if said.time is None or not -MAX_AGE <= now - said.time <= MAX_AGE:
        return cannot_tell("the exporter's newest sample is not new")
    if not said.devices:
        return cannot_tell("the driver lists no GPU")
    leftovers = frozenset(
        Leftover(device.uuid, reason.kind, _process(reason)) for device, reason in reasons if reason.counts
    )
    holders = frozenset(found for _, reason in reasons if (found := _process(reason)) is not None)
    return Observation(said.verdict, message, leftovers, holders)


def _process(reason: LeftoverReason) -> Process | None:
    return None if reason.pid is None or reason.start is None else (reason.pid, reason.start)


class Recorded(msgspec.Struct, frozen=True):
    """The annotation beside a taint: for which processes it was set, and in which boot of the node."""

    boot: str
    processes: frozenset[Process]

    def to_text(self) -> str:
        """Write the annotation."""
        listed = sorted(self.processes)[:MAX_ANNOTATED]
        return write_record({"boot": self.boot, "processes": listed}).decode()


def read_recorded(text: str) -> Recorded | None:
    """Read an annotation; None when it is not one of ours."""
    try:
        return read_record(text, Recorded)
    except RecordError:
        return None


class NodeMarks(Struct, frozen=True):
    """The marks of a node."""

    tainted: bool  # it has our taint
    annotation: str = ""  # the text beside the taint; empty without one
    status: str = ""  # of the condition, ``True``, ``False`` or ``Unknown``; empty when it has none
    message: str = ""  # of the condition


class NodeJudge:
    """Follow the exporter's answers, and say how the node should be marked. It fails closed.

    A taint is set only for a leftover that every answer of a whole span has named. It is removed when every
    answer of a span was "clean", and none of the processes for which it was set holds memory any more: an
    exporter that has restarted may not know them. Any other answer, or none, changes no taint.
    """

    def __init__(self, after: float, gap: float, boot: str) -> None:
        """Start without knowledge, in a ``boot`` of the node.

        ``after``: seconds for which the same must be seen. ``gap``: seconds between answers that hide what
        was.
        """
        self._after = after
        self._gap = gap
        self._boot = boot
        self._last: float | None = None
        self._since = 0.0
        self._newest = cannot_tell("no answer yet")
        self._seen: dict[Leftover, float] = {}

    def observe(self, observation: Observation, now: float) -> None:
        """Take an answer in, at a monotonic time."""
        broken = self._last is None or now - self._last > self._gap
        if broken or observation.verdict != self._newest.verdict:
            self._since = now
        if broken:
            self._seen = {}
        self._seen = {each: self._seen.get(each, now) for each in observation.leftovers}
        self._newest, self._last = observation, now

    def marks(self, present: NodeMarks, now: float) -> NodeMarks:
        """Return how the node should be marked, given how it is marked now."""
        newest = self._newest
        steady = now - self._since >= self._after
        lasting = {each for each, since in self._seen.items() if now - since >= self._after}
        if newest.verdict == "not-clean" and lasting:
            return self._tainted(present, lasting)
        if newest.verdict == "clean" and steady:
            kept = self._kept(present)
            if kept:
                return replace(present, status="True", message=kept)
            return NodeMarks(tainted=False, status="False", message=newest.message)
        if newest.verdict == "cannot-tell" and steady:
            return replace(present, status="Unknown", message=newest.message)
        return present

    def _tainted(self, present: NodeMarks, lasting: set[Leftover]) -> NodeMarks:
        guilty = frozenset(each.process for each in lasting if each.process is not None)
        before = read_recorded(present.annotation) if present.tainted else None
        if before is not None and before.boot == self._boot:
            # A process that was guilty before stays recorded while it holds memory.
            guilty |= before.processes & self._newest.holders
        annotation = Recorded(self._boot, guilty).to_text()
        return NodeMarks(tainted=True, annotation=annotation, status="True", message=self._newest.message)

    def _kept(self, present: NodeMarks) -> str:
        """Say why a taint stays although the exporter calls the node clean; empty if it does not stay."""
        if not present.tainted or not present.annotation:
            return ""
        recorded = read_recorded(present.annotation)
        if recorded is None:
            return "the annotation beside the taint cannot be read; remove the annotation to let the taint go"
        if recorded.boot != self._boot:
            return ""
        left = sorted(pid for pid, start in recorded.processes & self._newest.holders)
        if not left:
            return ""
        pids = ", ".join(map(str, left[:8]))
        return f"was found left over before the exporter restarted, and still holds memory: pid {pids}"


_ATTEMPTS = 5
"""How often a change is tried that another program's change of the node came before."""


class Taint(NamedTuple):
    """The taint: its key, which is also that of the annotation, and its effect."""

    key: str
    effect: str


class KubernetesNode:
    """One node of the cluster in which this pod runs."""

    def __init__(
        self, name: str, taint: Taint, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT
    ) -> None:
        """Find the API server by the environment. Raises StartupError outside of a pod with a token."""
        server = find_api_server(environ, account)
        if server is None or not (account / "token").is_file():
            raise StartupError(
                f"this is not a pod with a token (KUBERNETES_SERVICE_HOST, {account}/token);"
                " the chart runs this command with nodeTaint.enabled=true"
            )
        self._server = server
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"
        self._taint = taint

    async def read(self) -> NodeMarks:
        """Return the marks of the node. Raises ClusterError if the API server did not say it."""
        return self._marks(await self._request("GET"))

    async def write(self, marks: NodeMarks, present: NodeMarks) -> None:
        """Change the node's marks to these; others stay. Raises ClusterError if the API server did not."""
        if (marks.tainted, marks.annotation) != (present.tainted, present.annotation):
            await self._write_taint(marks)
        await self._write_condition(marks, changed=marks.status != present.status)

    async def _write_taint(self, marks: NodeMarks) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            node = await self._request("GET")
            others = [each for each in node["spec"].get("taints") or [] if each.get("key") != self._taint.key]
            own = [{"key": self._taint.key, "effect": self._taint.effect}] if marks.tainted else []
            change = {
                # A patch replaces the whole list. With the version it fails if somebody else has changed it.
                "metadata": {
                    "resourceVersion": node["metadata"]["resourceVersion"],
                    "annotations": {self._taint.key: marks.annotation or None},
                },
                "spec": {"taints": [*others, *own] or None},
            }
            try:
                await self._request("PATCH", "", change, "application/merge-patch+json")
            except ClusterError as error:
                if error.status != HTTPStatus.CONFLICT or attempt == _ATTEMPTS:
                    raise
                continue
            return

    async def _write_condition(self, marks: NodeMarks, *, changed: bool) -> None:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        reason = {"True": "LeftOver", "False": "Clean", "Unknown": "CannotTell"}[marks.status]
        condition = {
            "type": CONDITION,
            "status": marks.status,
            "reason": reason,
            "message": marks.message,
            "lastHeartbeatTime": now,
        }
        if changed:
            condition["lastTransitionTime"] = now
        # The strategic merge changes the one condition of this type and keeps all others.
        kind = "application/strategic-merge-patch+json"
        await self._request("PATCH", "/status", {"status": {"conditions": [condition]}}, kind)

    def _marks(self, node: Mapping[str, Any]) -> NodeMarks:
        taints = node["spec"].get("taints") or []
        conditions = node.get("status", {}).get("conditions") or []
        ours: Mapping[str, str] = next((each for each in conditions if each.get("type") == CONDITION), {})
        return NodeMarks(
            any(each.get("key") == self._taint.key for each in taints),
            (node["metadata"].get("annotations") or {}).get(self._taint.key, ""),
            ours.get("status", ""),
            ours.get("message", ""),
        )

    async def _request(
        self, method: str, of: str = "", body: Mapping[str, Any] | None = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        path = self._path + of
        about = f"{method} {path} at {self._server.host}:{self._server.port}"
        content = b"" if body is None else json.dumps(body).encode()
        try:
            # It ends in time by itself: to wait for less would leave its thread behind.
            said = await asyncio.to_thread(
                self._server.request, method, path, {"Content-Type": kind}, content
            )
            found = read_json(said)
        except (ClusterError, ValueError) as error:
            raise ClusterError(
                f"{about}: {str(error) or type(error).__name__}", getattr(error, "status", None)
            ) from error
        if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
            raise ClusterError(f"{about}: the answer is not a node")
        return found


ASK_INTERVAL = 5.0
"""Seconds from one question to the exporter to the next."""

HEARTBEAT = 300.0
"""Seconds after which the node's condition is written again; writes cost the API server of a fleet."""

MAX_ANSWER_BYTES = 4 * 2**20
GAPS = 4
"""How many questions may fail to be asked in time before nothing is known of the time between them."""

EFFECTS = ("NoSchedule", "PreferNoSchedule")
_KEY = re.compile(
    r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII
)
_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


class ExporterAddress(Struct, frozen=True):
    """Where the exporter is, and how to be let in."""

    url: str  # its address
    server_name: str | None = None  # the name in its certificate, if it is not that of the address
    # a folder that may have ca.crt, username, password, tls.crt and tls.key; None without one
    credentials: Path | None = None


def add_command(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add_parser(
        "taint",
        help="mark this Kubernetes node while its GPUs hold memory of work that has ended",
        description="Ask the exporter of this node what is left over, and mark the node with the condition "
        "GpuMemoryLeftOver and with a taint. Where the exporter cannot tell, the condition is Unknown and "
        "the taint stays as it is. The chart runs this with nodeTaint.enabled=true.",
    )
    command.add_argument("--node", type=_node, required=True, metavar="NAME", help="the name of this node")
    command.add_argument(
        "--exporter.url", dest="url", default="http://127.0.0.1:10839", metavar="URL",
        help="where the exporter is (default %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--exporter.server-name", dest="server_name", metavar="NAME",
        help="the name in the exporter's certificate, if it is not that of the address",
    )  # fmt: skip
    command.add_argument(
        "--exporter.credentials", dest="credentials", type=Path, metavar="DIR",
        help="a folder with what the exporter asks for: ca.crt, username, password, tls.crt, tls.key",
    )  # fmt: skip
    command.add_argument(
        "--taint.key", dest="key", type=_key, default="vramledger/leftover", metavar="KEY",
        help="the key of the taint, and of the annotation beside it (default %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--taint.effect", dest="effect", choices=EFFECTS, default=EFFECTS[0],
        help="what the taint does (default %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--taint.after", dest="after", type=duration, default=60.0, metavar="DURATION",
        help="for how long the same must be seen before the taint is set or removed (default 1m)",
    )  # fmt: skip
    add_log(command)
    command.set_defaults(run=run)


def _matching(form: re.Pattern[str], problem: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not form.fullmatch(text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {problem}")
        return text

    return read


_key = _matching(_KEY, "a key with a prefix; write for example vramledger/leftover")
_node = _matching(_NODE, "the name of a node; give spec.nodeName of this pod")


def run(args: argparse.Namespace) -> int:
    """Keep the node's marks up to date until SIGTERM; they then stay as they are."""
    node = KubernetesNode(args.node, Taint(args.key, args.effect), os.environ)
    address = ExporterAddress(args.url.rstrip("/"), args.server_name, args.credentials)
    return run_until_interrupted(_run_until_terminated(node, address, args.after))


async def _run_until_terminated(node: KubernetesNode, address: ExporterAddress, after: float) -> int:
    """Follow the exporter until SIGTERM: a DaemonSet that is updated ends us so."""
    boot = Host(SamplingConfig().procfs).boot_id  # that of the node, in every container
    following = asyncio.create_task(follow(node, address, NodeJudge(after, GAPS * ASK_INTERVAL, boot)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, following.cancel)
    with suppress(asyncio.CancelledError):
        await following
    return 0


async def follow(
    node: KubernetesNode, address: ExporterAddress, judge: NodeJudge, interval: float = ASK_INTERVAL
) -> None:
    """Keep the marks of the node by the exporter's answers; a refusal is logged, and tried again."""
    present: NodeMarks | None = None
    written = 0.0
    while True:
        observation = await ask_exporter(address)
        now = time.monotonic()
        judge.observe(observation, now)
        try:
            due = present is None or now - written >= HEARTBEAT
            present = await node.read() if present is None or due else present
            wanted = judge.marks(present, now)
            changed = replace(wanted, message=present.message) != present
            if wanted.status and (changed or due):
                await node.write(wanted, present)
                if wanted.tainted != present.tainted:
                    done = "Tainted the node" if wanted.tainted else "Removed the taint of the node"
                    log.warning(done, extra=fields(why=wanted.message))
                present, written = wanted, now
            elif due:
                written = now
        except ClusterError as error:
            log.error("Cannot mark the node", extra=fields(err=str(error)))
            present = None  # what is there now is not known
        await asyncio.sleep(interval)


_NOT_KNOWN = "it is not known who listens there; use https"


async def ask_exporter(address: ExporterAddress) -> Observation:
    """Return what the exporter says is left over; that it cannot be asked is an answer, too."""
    try:
        headers, trust = _credentials(address)
        secret = "Authorization" in headers
        before = await asyncio.to_thread(_find_listeners, address.url, secret=secret)
        async with (
            aiohttp.ClientSession(
                connector=None if before is None else _CheckedConnector(before, secret=secret),
                timeout=aiohttp.ClientTimeout(total=ASK_INTERVAL),
                headers={**headers, "Accept-Encoding": "identity"},
                auto_decompress=False,  # a few bytes may unpack to gigabytes
            ) as session,
            session.get(
                f"{address.url}/api/v1/leftovers",
                ssl=trust,
                server_hostname=address.server_name,
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status != 200:  # noqa: PLR2004 OK
                return cannot_tell(f"the exporter answers {answer.status} {answer.reason}")
            content = bytearray()
            async for piece in answer.content.iter_any():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    return cannot_tell("the exporter's answer is too long")
            return read_answer(read_json(content), time.time())
    except (OSError, aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        return cannot_tell(f"the exporter does not answer: {str(error) or type(error).__name__}")


def _find_listeners(url: str, *, secret: bool) -> set[Socket | None] | None:
    """Return who listens there, None if TLS tells. Raises ValueError if nobody may get a password."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return None
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    listeners = {find_listener(each[4]) for each in found}
    if secret and listeners <= {None}:
        raise ValueError(f"no password is sent to {url}: {_NOT_KNOWN}")
    return listeners


class _CheckedConnector(aiohttp.TCPConnector):
    """Before anything is sent without TLS, have the kernel say who of this host gets it, and answers."""

    def __init__(self, before: Collection[Socket | None], *, secret: bool) -> None:
        super().__init__()
        self._before = before
        self._secret = secret

    async def connect(self, *args: Any, **named: Any) -> Connection:  # noqa: ANN401 aiohttp's
        """Connect. Raises ValueError if who listens may be a stranger."""
        connection = await super().connect(*args, **named)
        peer = connection.transport and connection.transport.get_extra_info("peername")
        listener = find_listener(peer) if peer else None
        near = not peer or is_of_this_host(peer[0])
        problem = ""
        if listener is not None and listener.user not in {0, os.geteuid()}:
            problem = f"a program of user {listener.user} listens there, and not the exporter"
        # One that has taken its place since then may not be the one that is connected.
        elif listener not in self._before or (listener is None and (near or self._secret)):
            problem = _NOT_KNOWN
        if problem:
            connection.close()
            raise ValueError(problem)
        return connection


def _credentials(address: ExporterAddress) -> tuple[dict[str, str], ssl.SSLContext | bool]:
    """Read what lets us in; each time, because a Secret may be renewed."""
    folder = address.credentials
    if folder is None:
        return {}, True
    trust = ssl.create_default_context(cafile=folder / "ca.crt" if (folder / "ca.crt").is_file() else None)
    if (folder / "tls.crt").is_file():
        trust.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    headers = {}
    if (folder / "username").is_file():
        parts = ((folder / each).read_bytes().rstrip(b"\r\n") for each in ("username", "password"))
        headers["Authorization"] = f"Basic {base64.b64encode(b':'.join(parts)).decode()}"
    return headers, trust
