"""What the threads of real notebooks and web servers say of them: idle, and with requests."""

import importlib.util
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support import requirements
from tests.support.ports import free_port
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.accounting.work.thread_times import (
    HELPER_BEYOND,
    HELPER_WAKE,
    ThreadQuiet,
    ThreadTimesTracker,
)
from vramledger.model.reading import DeviceReading, ProcessEntry, Reading, ThreadTimes
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.stat import read_row
from vramledger.readers.hosts.thread_times import ThreadTimesReader

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

PERIOD, LOOKS, LOOKS_MAX = 10.0, 4, 15
"""Seconds between two looks, and how many: each is as good as those of the exporter, which are 30 s apart.
Beside others a rhythm may be lost for a look, so there are more until it was kept."""

SERVER = """
import threading
async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})
def wsgi(environ, start_response):
    start_response("200 OK", [])
    return [b"ok"]
"""


Ask = Callable[[], object]


class Program(NamedTuple):
    """A server or a notebook, and what gives it work."""

    pid: int
    ask: Ask | None


def _server(ending: ExitStack, folder: Path, *command: str) -> tuple[int, Ask]:
    port = free_port()
    (folder / "served.py").write_text(SERVER, encoding="utf-8")
    arguments = [sys.executable, "-m", *(each.format(port=port) for each in command)]
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ending.callback(process.wait)
    ending.callback(process.terminate)

    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                return bool(answer.read() == b"ok")
        except OSError:
            return False

    wait_until(ask, "the server answers")
    return process.pid, ask


def _uvicorn(ending: ExitStack, folder: Path, *, asked: bool) -> Program:
    pid, ask = _server(ending, folder, "uvicorn", "--port={port}", "--log-level=critical", "served:app")
    return Program(pid, ask if asked else None)


def _gunicorn(ending: ExitStack, folder: Path, *, asked: bool) -> Program:
    pid, ask = _server(ending, folder, "gunicorn", "--bind=127.0.0.1:{port}", "served:wsgi")
    (worker,) = psutil.Process(pid).children()
    return Program(worker.pid, ask if asked else None)


NOTEBOOK = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
print(manager.provisioner.pid, flush=True)
for line in sys.stdin:
    client.execute_interactive("sum(range(100_000))", output_hook=print, timeout=30)
    print("done", flush=True)
manager.shutdown_kernel(now=True)
"""
"""A client of a kernel, in a process of its own: it leaves its event loop open."""


def _notebook(ending: ExitStack, _: Path, *, asked: bool) -> Program:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", NOTEBOOK]
    client = ending.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1))
    told, answers = sure(client.stdin), sure(client.stdout)

    def ask() -> None:
        told.write("\n")
        while answers.readline() not in ("done\n", ""):
            pass

    kernel = int(answers.readline())
    ask()
    return Program(kernel, ask if asked else None)


def _steady(known: ThreadQuiet) -> float:
    return 0.0 if known.steady_since is None else known.until - known.steady_since[0]


class Seen(NamedTuple):
    """What is known of each program after all looks, and the looks at each."""

    known: dict[tuple[str, bool], ThreadQuiet | None]
    looks: dict[tuple[str, bool], list[ThreadTimes]]


KINDS = {"uvicorn": _uvicorn, "gunicorn": _gunicorn, "notebook": _notebook}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Look at each kind of program, idle and with a request each second."""
    for module in ("ipykernel", "uvicorn", "gunicorn"):
        if importlib.util.find_spec(module) is None:
            requirements.do_without(f"{module} is not installed")
    with ExitStack() as ending:
        programs = {
            (kind, asked): start(ending, tmp_path_factory.mktemp(kind), asked=asked)
            for kind, start in KINDS.items()
            for asked in (False, True)
        }
        over = threading.Event()
        for program in programs.values():
            if program.ask is not None:
                asking = threading.Thread(target=_ask_on, args=(program.ask, over))
                asking.start()
                ending.callback(asking.join)
        ending.callback(over.set)
        yield _look(programs, over)


def _ask_on(ask: Ask, over: threading.Event) -> None:
    while not over.wait(1.0):
        ask()


def _look(programs: dict[tuple[str, bool], Program], over: threading.Event) -> Seen:
    reader = ThreadTimesReader("/proc", Host(Path("/proc")).cpu_seconds)
    tracker = ThreadTimesTracker({})
    rows = [row for each in programs.values() if (row := read_row("/proc", each.pid)) is not None]
    device = DeviceReading(0, "GPU-0", processes=tuple(ProcessEntry(row.pid, 2**30, "C") for row in rows))
    found: dict[tuple[int, int], ThreadQuiet] = {}
    looks: list[ThreadTimes] = []
    idle = programs["notebook", False].pid
    for number in range(LOOKS_MAX + 1):
        reader.update([device], rows)
        reader.search()
        times = reader.update([device], rows)
        looks += times
        reading = Reading(time.time(), time.monotonic(), devices=(device,), threads=tuple(times))
        found = dict(tracker.update(reading, after_gap=False))
        rhythm = [_steady(each) for (pid, _), each in found.items() if pid == idle]
        if number >= LOOKS and rhythm and rhythm[0] >= 2 * PERIOD:
            break
        over.wait(PERIOD)
    known = {pid: each for (pid, _), each in found.items()}
    return Seen(
        {name: known.get(each.pid) for name, each in programs.items()},
        {name: [look for look in looks if look.pid == each.pid] for name, each in programs.items()},
    )


def _may_have_worked(look: ThreadTimes) -> bool:
    """Return whether a wake took as long as work, or for a time that is not known."""
    longest, beyond = look.longest, look.beyond
    return longest is None or beyond is None or longest > HELPER_WAKE or beyond > HELPER_BEYOND


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_requests_is_never_quiet(kind: str, seen: Seen) -> None:
    """One request a second is enough: neither still, nor a rhythm that lasts for half of the looks."""
    known = sure(seen.known[kind, True])
    assert known.still_since is None
    assert _steady(known) < 2 * PERIOD


def test_an_idle_notebook_keeps_its_rhythm(seen: Seen) -> None:
    """Its main thread does not run, and its helpers wake up by a clock: that is seen in look after look.

    On a machine that is so slow, or so busy, that such a wake takes as long as work, nothing is said.
    """
    known = sure(seen.known["notebook", False])
    sleeping = [look for look in seen.looks["notebook", False] if not look.main_runs and not look.changed]
    assert sleeping
    assert _steady(known) >= 2 * PERIOD or all(map(_may_have_worked, sleeping))


@pytest.mark.parametrize("kind", ["uvicorn", "gunicorn"])
def test_an_idle_server_is_not_called_quiet(kind: str, seen: Seen) -> None:
    """Its main thread ticks: whether that was a request cannot be told, so its idleness stays inferred."""
    known = sure(seen.known[kind, False])
    assert (known.still_since, known.steady_since) == (None, None)
