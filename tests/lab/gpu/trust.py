"""Prove on a GPU what a monitor must do right: ``python -m tests.lab.gpu.trust OUT``.

The exporter releases a real driver and reopens it, recovers from a sampler or an exporter that is killed
or stopped, has no privilege but those that it needs, and neither grows nor drifts while real holders come,
grow, shrink and go, 20 samples a second. ``OUT/trust.md`` has what was found, ``OUT/endurance.jsonl`` the
figures of the last part as they come. ``--rehearse`` does the same on the stand-in driver.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from tests.lab.recordings.rehearsal import Rehearsal
from tests.lab.soak import endurance
from tests.lab.soak.table import Row, markdown
from tests.support.exporter import QUICK, SOURCES, Exporter, Page, run, serving
from tests.support.standin.library import GIB, MIB
from tests.support.waiting import wait_until

ROOT = SOURCES.parent
HOLDERS = 8
ROUNDS = 5
NOBODY = 65534


class Told:
    """A program that answers each line with one of its own."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, ROOT))), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def tell(self, line: object) -> None:
        """Send it a line, without waiting for the answer."""
        print(line, file=self._stream(self.process.stdin), flush=True)

    def answer(self) -> str:
        """Return its next line.

        Raises:
            RuntimeError: it has ended.
        """
        line = self._stream(self.process.stdout).readline()
        if not line:
            message = f"{self.process.args!r} has ended with {self.process.wait()}"
            raise RuntimeError(message)
        return line

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        if stream is None:  # pragma: no cover - PIPE gives both
            raise RuntimeError
        return stream


class Booked(NamedTuple):
    """The bystander's answer."""

    byte_seconds: float
    holders: Mapping[str, int]


class Card:
    """Real holders of the first GPU, and a bystander that integrates them."""

    def __init__(self, env: Mapping[str, str], seed: int) -> None:
        self._env = env
        self._random = random.Random(seed)  # noqa: S311 - a scenario, no secret
        self._bystander = Told("tests.lab.gpu.bystander", env=env)
        self._holders = [self._start() for _ in range(HOLDERS)]

    def _start(self) -> Told:
        holder = Told("tests.lab.gpu.holder", "0", env=self._env)
        holder.tell(GIB)
        return holder

    def change(self, turn: int) -> None:
        """Make one holder hold other bytes; at times end it, and start another in its place."""
        which = turn % HOLDERS
        holder = self._holders[which]
        if self._random.random() < 0.05:
            holder.end()
            self._holders[which] = self._start()
        else:
            holder.tell(self._random.randrange(1, 8 * GIB // MIB) * MIB)

    def settle(self) -> dict[int, int]:
        """Give every holder new bytes; return NVML's figures by pid."""
        for holder in self._holders:
            size = self._random.randrange(1, 8 * GIB // MIB) * MIB
            holder.tell(size)
            while int(holder.answer()) != size:
                pass  # its earlier bytes
        wait_until(lambda: len(self.holders()) == HOLDERS, "all holders to be listed")
        return self.holders()

    def holders(self) -> dict[int, int]:
        """Return the bytes of each pid that NVML lists now, by the bystander."""
        return {int(pid): size for pid, size in self._ask().holders.items()}

    def integral(self) -> float:
        """Return the bystander's byte-seconds."""
        return self._ask().byte_seconds

    def samples(self) -> None:
        """Return None: a real driver's calls are not counted."""

    def _ask(self) -> Booked:
        self._bystander.tell("")
        return Booked(**json.loads(self._bystander.answer()))

    def end(self) -> None:
        """End the holders, and then the bystander."""
        for holder in (*self._holders, self._bystander):
            holder.end()


@contextmanager
def card(env: Mapping[str, str]) -> Iterator[Card]:
    """Run holders for the length of the block."""
    here = Card(env, seed=1)
    try:
        here.settle()
        yield here
    finally:
        here.end()


def shown(page: Page) -> dict[int, int]:
    """Return the bytes of each pid that a page shows."""
    values = page.values("process_memory_bytes").items()
    return {int(dict(key)["pid"]): int(value) for key, value in values}


def right(truth: Mapping[int, int], page: Page) -> bool:
    """Tell whether a page shows exactly these bytes."""
    return page.up and shown(page) == truth


def strangers() -> list[str]:
    """Return every process of this host, by pid and name, that has a device file of a GPU open or mapped."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            home = Path("/proc", str(process.pid))
            targets = [os.readlink(each) for each in (home / "fd").iterdir()]  # noqa: PTH115 need not exist
            if any(
                each.startswith("/dev/nvidia") for each in (*targets, *(home / "maps").read_text().split())
            ):
                found.append(f"{process.pid} {process.name()}")
    return found


def releases(env: Mapping[str, str], control: str) -> Iterator[Row]:
    """Yield the effect of ``vramledger release`` on a driver with holders, and on one without."""
    with serving(*QUICK, control, driver=env) as exporter:
        exporter.until(lambda page: page.up, "data")
        with card(env) as here:
            took, back = [], []
            for _ in range(ROUNDS):
                yes = exporter.drivers()
                if len(yes) != 1:
                    yield Row("who has the driver open before", str(yes), good=False)
                begun = time.monotonic()
                assert run("release", "--for=2s", control, driver=env).returncode == 0
                took.append(time.monotonic() - begun)
                if left := exporter.drivers():
                    yield Row("who has it open once released", str(left), good=False)
                released = exporter.scrape().value("released_until_timestamp_seconds")
                truth = here.settle()
                exporter.until(partial(right, truth), "the GPUs again")
                back.append(time.time() - (released or 0.0))
            yield _times("released, with 8 holders: the command", took)
            yield _times("taken back by itself, every byte right, after its time", back)
        assert run("release", "--for=1h", control, driver=env).returncode == 0
        wait_until(lambda: not strangers(), "the holders' device files to be closed")
        yield Row("device files open on the host, released, no holder", "none", good=True)
        assert not exporter.scrape().up
        begun = time.monotonic()
        assert run("release", "--resume", control, driver=env).returncode == 0
        exporter.until(lambda page: page.up, "data")
        yield _times("--resume: the command and the first sample", [time.monotonic() - begun])


def _times(what: str, seconds: list[float]) -> Row:
    median = statistics.median(seconds)
    return Row(what, f"{len(seconds)} times; {median:.2f} s (at most {max(seconds):.2f} s)", good=None)


class Fault(NamedTuple):
    """What is done to a process, by which signal, and for how many seconds."""

    name: str
    who: Callable[[Exporter], psutil.Process]
    number: signal.Signals
    lasts: float = 0.0


FAULTS = (
    Fault("sampler killed", lambda exporter: exporter.sampler, signal.SIGKILL),
    Fault("sampler stopped for 2 s", lambda exporter: exporter.sampler, signal.SIGSTOP, 2.0),
    Fault("exporter stopped for 2 s", lambda exporter: exporter.process, signal.SIGSTOP, 2.0),
)


def faults(env: Mapping[str, str], control: str) -> Iterator[Row]:
    """Yield how soon after the end of a fault every holder has its current bytes."""
    with card(env) as here, serving(*QUICK, control, driver=env) as exporter:
        for fault in FAULTS:
            took = []
            for _ in range(ROUNDS):
                exporter.until(lambda page: page.up, "data")
                victim = fault.who(exporter)
                victim.send_signal(fault.number)
                truth = here.settle()
                time.sleep(fault.lasts)
                ended = time.monotonic()
                with suppress(psutil.NoSuchProcess):  # a process that stops for too long is replaced
                    victim.send_signal(signal.SIGCONT)
                exporter.until(partial(right, truth), fault.name)
                took.append(time.monotonic() - ended)
            yield _times(f"{fault.name}: right again", took)


def privileges(env: Mapping[str, str], control: str) -> Iterator[Row]:
    """Yield the capabilities that the parts keep, and what another user's exporter sees of our holders."""
    with card(env) as here:
        with serving(*QUICK, control, driver=env) as exporter:
            exporter.until(lambda page: page.up, "data")
            for name, process in (("exporter", exporter.process), ("sampler", exporter.sampler)):
                status = Path(f"/proc/{process.pid}/status").read_text()
                kept = [line.replace("\t", " ") for line in status.splitlines() if line.startswith("Cap")]
                yield Row(f"capabilities of the {name}", ", ".join(kept), good=None)
        wrapper = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        if not _others_may_run_this():
            yield Row(
                "an ordinary user's exporter", f"not tried: {sys.executable} is not for others", good=None
            )
            return
        with serving(*QUICK, "--control.socket=/tmp/nobody-control", driver=env, wrapper=wrapper) as exporter:
            page = exporter.until(lambda page: page.up, "data")
            same = right(here.holders(), page)
            states = sorted({str(page.state(pid)) for pid in here.holders()})
            unreadable = {
                dict(key)["file"]: value for key, value in page.values("unreadable_processes").items()
            }
            figure = f"{same}; states {states}; unreadable_processes {unreadable}"
            yield Row("an ordinary user's exporter shows every byte of root's holders", figure, good=same)


def _others_may_run_this() -> bool:
    """Tell whether another user may run this Python: only root can run one below /root."""
    command = [sys.executable, "-c", ""]
    try:
        return subprocess.run(command, user=NOBODY, group=NOBODY, check=False).returncode == 0
    except OSError:
        return False


def endured(env: Mapping[str, str], control: str, out: Path, seconds: float) -> Iterator[Row]:
    """Yield the growth of an exporter in this number of seconds."""
    with card(env) as here, serving(*endurance.FLAGS, control, driver=env) as exporter:
        yield from endurance.judge(endurance.watch(exporter, here, out, seconds=seconds))


def main() -> int:
    """Run all parts; 1 when a figure is bad."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.gpu.trust", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="of the last part (default 30: its first half fills the live page's 15 minutes)",
    )
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on the stand-in driver")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trust-")))
        scratch.chmod(0o755)
        env: Mapping[str, str] = {}
        if args.rehearse:
            rehearsal = Rehearsal(scratch / "rehearsal")
            rehearsal.standin.path.chmod(0o666)  # for the ordinary user too, as a GPU's device file is
            env = rehearsal.env()
        control = f"--control.socket={scratch}/control"
        parts = (
            releases(env, control),
            faults(env, control),
            privileges(env, control),
            endured(env, control, args.out / "endurance.jsonl", args.minutes * 60),
        )
        for part in parts:
            for row in part:
                print(row, flush=True)
                rows.append(row)
                (args.out / "trust.md").write_text("\n".join(markdown(rows)) + "\n", encoding="utf-8")
    return int(any(row.good is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
