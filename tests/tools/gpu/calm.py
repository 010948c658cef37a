"""How late a calm exporter shows what happens: ``python -m tests.tools.gpu.calm OUT``.

Four programs hold memory of a GPU, one of them works all the time. Each time after the exporter has gone over
to a sample every fifth second, something happens, and the page is read 20 times a second until it shows that.
Writes ``OUT/calm.md``. ``--rehearse`` uses the stand-in driver. About two minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.support.exporter import SOURCES, Exporter, Page, serving
from tests.support.standin.library import GIB
from tests.tools.recordings.rehearsal import Rehearsal

ROOT = SOURCES.parent
QUIET_HOLDERS = 3
CALM, LATEST = 4.5, 60.0
"""Seconds: between two samples of a calm exporter at least; until which something must show."""

HOLDER = """
import sys
from tests.tools.recordings.programs.gpu import open_gpu
card = open_gpu()
card.hold(2**30)
print("ready", flush=True)
for line in sys.stdin:
    what, amount = line.split()
    if what == "hold":
        card.hold(int(amount))
    elif what == "work":
        card.work(float(amount))
    else:
        while True:
            card.work(0.5)
    print("done", flush=True)
"""


class Holder:
    """A program with 1 GiB of the GPU that does what it is told."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            cwd=ROOT,
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, ROOT)))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def tell(self, line: str, *, wait: bool = True) -> None:
        """Send it a line, and wait until it has done that."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        if wait:
            self.process.stdout.readline()

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def wait_for_calm(exporter: Exporter) -> None:
    """Wait until two samples are as far apart as only those of a calm exporter are."""
    before = exporter.scrape().time
    deadline = time.monotonic() + LATEST
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = exporter.scrape().time
        if now - before >= CALM:
            return
        before = now
    message = "the exporter has not become calm"
    raise RuntimeError(message)


def seen_after(exporter: Exporter, happen: Callable[[], object], shown: Callable[[Page], bool]) -> float:
    """Return the seconds from what happens to the first page that shows it."""
    wait_for_calm(exporter)
    happen()
    begun = time.monotonic()
    while not shown(exporter.scrape()):
        if time.monotonic() - begun > LATEST:
            message = "it was never shown"
            raise RuntimeError(message)
        time.sleep(0.05)
    return time.monotonic() - begun


def measure(
    exporter: Exporter, holders: list[Holder], busy: Holder, env: dict[str, str], burst: float
) -> list[tuple[str, float]]:
    """Let one thing after the other happen, and return how late each was seen."""
    one, two, three = (each.process.pid for each in holders)
    told: list[tuple[str, float]] = []

    def note(what: str, happen: Callable[[], object], shown: Callable[[Page], bool]) -> None:
        told.append((what, seen_after(exporter, happen, shown)))
        print(*told[-1], flush=True)

    def held(page: Page, pid: int) -> float:
        return sum(page.values("process_memory_bytes", pid=pid).values())

    def worked(page: Page) -> float:
        return max(page.values("process_last_active_timestamp_seconds", pid=one).values(), default=0.0)

    grow = partial(holders[0].tell, f"hold {GIB}")
    note("a holder allocates 1 GiB", grow, lambda page: held(page, one) > 2 * GIB)
    note(
        "a holder is stopped",
        partial(os.kill, two, signal.SIGSTOP),
        lambda page: page.state(two) == "stopped",
    )
    note("it goes on", partial(os.kill, two, signal.SIGCONT), lambda page: page.state(two) != "stopped")
    note("a holder is killed", holders[2].end, lambda page: not held(page, three))
    note(
        "a program comes",
        lambda: holders.append(Holder(env)),
        lambda page: held(page, holders[-1].process.pid) > 0,
    )
    note("the busy program is killed", busy.end, lambda page: not held(page, busy.process.pid))
    begun = worked(exporter.scrape())
    note(
        f"a quiet GPU works for {1000 * burst:.0f} ms",
        partial(holders[0].tell, f"work {burst}"),
        lambda page: worked(page) > begun,
    )
    return told


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="with the stand-in driver")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="calm-") as directory, ExitStack() as stack:
        env = Rehearsal(Path(directory)).env() if args.rehearse else {}
        holders = [Holder(env) for _ in range(QUIET_HOLDERS)]
        busy = Holder(env)
        for each in (*holders, busy):
            stack.callback(each.end)
        busy.tell("spin 0", wait=False)
        exporter = stack.enter_context(serving(driver=env))
        told = measure(exporter, holders, busy, env, 2.0 if args.rehearse else 0.02)
        holders[-1].end()
    rows = [f"| {what} | {seconds:.2f} s |" for what, seconds in told]
    text = "\n".join(["| what happens | seen after |", "|---|---|", *rows])
    (args.out / "calm.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
