"""What a program feels of the agent: forks, objects, collections, and the start by ``vramledger run``.

``python -m tests.tools.bench.felt --json FILE``. Every figure is a difference or a ratio of pairs of runs,
one with the agent and one without, in turns. With it is the median of all pairs, and the range in which
95 % of the medians of resampled pairs lie. ``--torch fake`` runs the programs under the torch of the tests,
which is small, so that a fork of it is short; ``--torch real`` under the machine's own, with CUDA in use.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.listening import FAKE, PROJECT, STARTUP, FakeExporter

FORK_MOST = 1.1
RUN_MOST_SECONDS = 0.030

PROGRAM = """
import gc, json, os, sys, time, torch
fake = "fake" in torch.__version__
kept = torch.Tensor(8) if fake else torch.empty(8, device="cuda")
if os.environ.get("VRAMLEDGER_AGENT") == "1":
    from vramledger.agent.worker import worker
    end = time.monotonic() + 30
    while (worker.session is None or worker.session.sequence < 2) and time.monotonic() < end:
        time.sleep(0.01)
def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
def allocate():
    for _ in range(300):
        made = [{"a": [number], "b": (number,)} for number in range(300)]
def collect():
    gc.collect(0)
def span(work, times):
    begun = time.perf_counter_ns()
    for _ in range(times):
        work()
    return (time.perf_counter_ns() - begun) / times
# With CUDA in use a fork copies the tables of a large process.
WORK = {"fork": (fork, 60 if fake else 10), "allocate": (allocate, 3), "collect": (collect, 200_000)}
for work, times in WORK.values():
    span(work, max(1, times // 10))
print(flush=True)
for line in sys.stdin:
    print(span(*WORK[line.strip()]), flush=True)
"""


class Interval(NamedTuple):
    """The median of pairs, and the range of 95 % of the medians of resampled pairs."""

    median: float
    low: float
    high: float
    pairs: int


def interval(values: Sequence[float]) -> Interval:
    """Return it."""
    chance = random.Random(1)  # noqa: S311
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return Interval(statistics.median(values), medians[50], medians[-51], len(values))


class Program:
    """A Python program that does a piece of work when asked, with or without the agent."""

    def __init__(self, environ: dict[str, str], directory: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environ, cwd=directory, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ready(self) -> None:
        """Wait until it has begun."""
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            message = "the program did not begin"
            raise RuntimeError(message)

    def ask(self, work: str) -> float:
        """Return the nanoseconds of a piece of work."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{work}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self) -> None:
        """End it."""
        self.process.communicate(timeout=60)


def inside(torch: str, *, starts: int, pairs: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure the work in pairs of programs, each pair asked in turns; several pairs of programs."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"ratios": [], "without": [], "with": [], "noise": []}
        for name in ("fork", "allocate", "collect")
    }
    for _ in range(starts):
        with (
            tempfile.TemporaryDirectory(prefix="vl-") as directory,
            FakeExporter(Path(directory, "a")) as heard,
        ):
            path = [str(FAKE)] if torch == "fake" else []
            bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            bare["PYTHONPATH"] = os.pathsep.join(path)
            agent = {
                **bare,
                "PYTHONPATH": os.pathsep.join([str(STARTUP), *path]),
                "VRAMLEDGER_AGENT": "1",
                "VRAMLEDGER_AGENT_SOCKET": str(heard.path),
            }
            # A second one without the agent shows how far two equal programs lie apart.
            programs = [Program(environ, directory) for environ in (bare, agent, bare)]
            for each in programs:
                each.ready()
            for name, lists in found.items():
                for turn in range(pairs):
                    order = programs[turn % 3 :] + programs[: turn % 3]
                    took = {id(each): each.ask(name) for each in order}
                    without, with_, again = (took[id(each)] for each in programs)
                    lists["without"].append(without)
                    lists["with"].append(with_)
                    lists["ratios"].append(with_ / ((without + again) / 2))
                    lists["noise"].append(again / without)
                keep(_summary(torch, found))
            for each in programs:
                each.end()
            assert heard.reports, "no agent reported"


def _summary(torch: str, found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    return {
        f"{name}, {torch} torch": {
            "ratio": interval(lists["ratios"]),
            "equal programs": interval(lists["noise"]),
            "without_ns": statistics.median(lists["without"]),
            "with_ns": statistics.median(lists["with"]),
        }
        for name, lists in found.items()
        if lists["ratios"]
    }


def starts(times: int) -> dict[str, Any]:
    """Measure ``vramledger run -- true`` against ``true`` and against an interpreter that does nothing."""
    environ = {**os.environ, "PYTHONPATH": str(PROJECT / "exporter")}
    beside = Path(sys.executable).with_name("vramledger")
    script = [str(beside)] if beside.exists() else [sys.executable, "-m", "vramledger"]
    commands = {
        "true": ["true"],
        "python -c pass": [sys.executable, "-c", "pass"],
        "run -- true": [*script, "run", "--", "true"],
    }
    took: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(times):
        for name in sorted(commands, reverse=turn % 2 == 1):
            begun = time.perf_counter()
            subprocess.run(commands[name], env=environ, check=True)
            took[name].append(time.perf_counter() - begun)
    return {
        "run": {
            "command": script,
            "beyond true, s": interval(
                [a - b for a, b in zip(took["run -- true"], took["true"], strict=True)]
            ),
            "beyond an interpreter's start, s": interval(
                [a - b for a, b in zip(took["run -- true"], took["python -c pass"], strict=True)]
            ),
            **{name: statistics.median(values) for name, values in took.items()},
        }
    }


def main() -> int:
    """Measure, print and write; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--torch", action="append", choices=("fake", "real"), default=[])
    parser.add_argument("--quick", action="store_true", help="fewer pairs: only the motions")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    begun = time.monotonic()

    def keep(more: dict[str, Any]) -> None:
        figures.update(more)
        args.json.write_text(json.dumps(figures, indent=1))
        print(*(f"{name}: {each}" for name, each in more.items()), sep="\n", flush=True)

    keep(starts(5 if args.quick else 60))
    for torch in args.torch or ["fake"]:
        inside(torch, starts=1 if args.quick else 2, pairs=3 if args.quick else 12, keep=keep)
    missed = figures["run"]["beyond an interpreter's start, s"].median > RUN_MOST_SECONDS
    for name, each in figures.items():
        if name.startswith("fork"):
            missed |= each["ratio"].low > FORK_MOST
        elif name != "run":
            missed |= each["ratio"].low > max(1.0, each["equal programs"].high)
    figures["machine"] = {"cpus": os.cpu_count(), "python": sys.version, "load": os.getloadavg()}
    args.json.write_text(json.dumps(figures, indent=1))
    print(f"{time.monotonic() - begun:.0f} s")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
