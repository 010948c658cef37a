"""Strangers: what each kind of attack does to scrapes, memory and what is stored, beside a quiet run.

The attackers are ordinary users of the same machine, so their own work is in the figures too.
"""

import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests.lab.bench.scene import scene
from tests.lab.soak.table import Row
from tests.support.agent_client import report, torch
from tests.support.exporter import QUICK, Exporter, serving
from tests.support.lingering import lingering
from tests.support.standin.library import GIB, StandIn
from tests.support.stranger import USER, strange
from tests.support.waiting import wait_until

RATE = 10
_MOST_P99 = 1.0
"""Seconds: a tenth of Prometheus' timeout."""

_GROWTH = 64 * 2**20
_OLDEST = 8.0
"""Seconds that the newest stored reading may be old: 5 are promised, and a busy machine is late."""

Attack = Callable[[ExitStack], object]


class _Place:
    """An exporter and what is around it."""

    def __init__(self, exporter: Exporter, standin: StandIn, sockets: Path) -> None:
        self.exporter, self.standin = exporter, standin
        self.agents, self.control = str(sockets / "agents"), str(sockets / "control")

    def memory(self) -> int:
        found = 0
        for each in {self.exporter.process, *self.exporter.process.children(recursive=True)}:
            with suppress(psutil.Error):
                found += each.memory_info().rss
        return found

    def lost(self) -> tuple[float, float]:
        """Return the readings that were not stored, and the Unix time of the newest that was."""
        page = self.exporter.scrape()
        figures = [
            page.value(f"storage_{name}") for name in ("dropped_samples_total", "newest_timestamp_seconds")
        ]
        return figures[0] or 0.0, figures[1] or 0.0


def _attacks(at: _Place) -> Iterator[tuple[str, Attack]]:
    port = at.exporter.port
    now = time.time()

    def enter(*contexts: AbstractContextManager[object]) -> Attack:
        return lambda stack: [stack.enter_context(each) for each in contexts]

    def held(program: str, *arguments: str) -> Attack:
        def attack(stack: ExitStack) -> None:
            process = stack.enter_context(strange(program, *arguments))
            at.standin.device(1).set_processes([(process.pid, GIB)])

        return attack

    costly = json.dumps(report(zz=[[] for _ in range(16_000)], frameworks=[torch()]))
    page = f"GET /api/v1/past/scale?from={now - 86400:.0f}&to={{}} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    commas = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {',' * 57_000}\r\n\r\n"
    packed = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 63000\r\n\r\n"
    yield "nobody", lambda _: None
    both, past = (at.agents, at.control), f"GET /past?ask=since&from=1&to={now:.0f}"
    yield "descriptors that linger, on both sockets", enter(*(_linger(path) for path in both * 3))
    yield "connections of a program with 20,000 threads", enter(strange("threads", "20000", *both))
    yield "connections of a program with 5,000 mounts", enter(strange("mounts", "5000", *both))
    yield (
        "questions about the past, by 8 visitors and 4 users",
        enter(
            *(_visit(port, lambda number: page.format(f"{now + number:.0f}")) for _ in range(8)),
            *(strange("ask", at.control, past, user=USER + number) for number in range(4)),
        ),
    )
    yield (
        "bodies that unpack, and 57 KB of commas",
        enter(
            *(_visit(port, lambda _: commas) for _ in range(4)),
            *(_visit(port, lambda _: packed + "\x1f" * 63_000) for _ in range(4)),
        ),
    )
    yield (
        "requests that are refused",
        enter(*(strange("ask", at.control, "POST /resume", user=USER + number) for number in range(4))),
    )
    yield (
        "8 users' reports of 64 KiB",
        enter(*(strange("reports", at.agents, costly, user=USER + number) for number in range(8))),
    )
    yield "a holder that changes its name and its program all the time", held("rename")
    yield "a holder with 20,000 threads", held("threads", "20000")
    yield "100,000 files and sockets", held("descriptors", "100000")


@contextmanager
def _linger(path: str) -> Iterator[None]:
    """Send a descriptor that lingers twice a second."""
    with _repeated(0.5) as again, lingering(20) as lingerer:

        def send() -> None:
            for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as connection:
                    connection.connect(path)
                    lingerer.send(connection, b"GET /snapshot HTTP/1.1\r\n\r\n")

        again(send)
        yield


@contextmanager
def _visit(port: int, request: Callable[[int], str]) -> Iterator[None]:
    """Send one request after the other, each on a connection of its own, and read its answer."""
    with _repeated(0.01) as again:
        count = [0]

        def visit() -> None:
            count[0] += 1
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                connection.sendall(request(count[0]).encode("latin-1"))
                connection.recv(1 << 16)

        again(visit)
        yield


@contextmanager
def _repeated(pause: float) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Give a function that repeats another one in a thread until the end."""
    stop, threads = threading.Event(), list[threading.Thread]()

    def repeat(what: Callable[[], None]) -> None:
        def run() -> None:
            while not stop.wait(pause):
                what()

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()

    try:
        yield repeat
    finally:
        stop.set()


def _scrape(exporter: Exporter, seconds: float) -> list[float]:
    taken, begun = [], time.monotonic()
    for number in range(round(seconds * RATE)):
        time.sleep(max(0.0, begun + number / RATE - time.monotonic()))
        before = time.perf_counter()
        status, _ = exporter.get("/metrics")
        assert status == 200
        taken.append(time.perf_counter() - before)
        if time.monotonic() - begun > seconds:
            break
    return taken


def _measure(at: _Place, what: str, attack: Attack, seconds: float) -> Row:
    with ExitStack() as stack:
        attack(stack)
        before, memory = at.lost(), at.memory()
        taken, highest = [], memory
        for _ in range(4):
            taken += _scrape(at.exporter, seconds / 4)
            highest = max(highest, at.memory())
        dropped, newest = at.lost()
        now = time.time()
    at.standin.device(1).set_processes([])
    wait_until(lambda: at.lost()[1] > now, "what is sampled after it to be stored")
    p50, p99 = statistics.median(taken), statistics.quantiles(taken, n=100, method="inclusive")[98]
    grown, lost = highest - memory, dropped - before[0]
    figures = f"{p50 * 1e3:.1f} ms | {p99 * 1e3:.0f} ms | {memory / 2**20:.0f} MiB, {grown / 2**20:+.0f} | "
    return Row(
        what,
        f"{figures}{lost:.0f}; {now - newest:.1f} s",
        good=p99 < _MOST_P99 and grown < _GROWTH and lost == 0 and now - newest < _OLDEST,
    )


def run(directory: Path, *, seconds: float) -> Iterator[Row]:
    """Yield rows of p50, p99, memory and its growth, readings that were lost, and the age of the newest."""
    with scene(directory, 2, 8) as here, TemporaryDirectory(prefix="attacked-", dir="/run") as name:
        sockets = Path(name)
        sockets.chmod(0o755)
        flags = (
            f"--agent.socket={sockets}/agents",
            f"--control.socket={sockets}/control",
            f"--storage.path={directory / 'past'}",
        )
        with serving(*QUICK, *flags, driver=here.env) as exporter:
            at = _Place(exporter, here.standin, sockets)
            wait_until(lambda: at.lost()[1] > 0, "the first reading on the disk")
            for what, attack in _attacks(at):
                yield _measure(at, what, attack, seconds)
