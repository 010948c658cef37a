"""See on two GPUs how distributed jobs hang and wait: ``python -m tests.tools.gpu.jobs OUT``.

A real exporter samples and is scraped while programs (``jobs_programs.py``) run in five parts, each with a
masked recording of its own, ``OUT/PART.jsonl.gz``. ``OUT/truth.jsonl`` has what the programs did and when,
by the clock of the readings; ``OUT/pages.jsonl.gz`` the scraped pages: each fifth as a whole, of the others
what they say of states and waits. ``--rehearse`` does the same, faster, on the stand-in driver.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.exporter import SOURCES, Exporter, command, environment, serving
from tests.tools.recordings.rehearsal import Rehearsal

ROOT = SOURCES.parent
LONGEST = 525.0
"""Seconds after which nothing is begun or waited for any more."""

IDLE_AFTER = 10.0
SHORT = (
    "process_state_since", "process_busy_without_work", "process_rank_info", "device_up", "vramledger_up",
    "device_power", "sample_timestamp",
)  # fmt: skip
"""What is kept of each page; of each fifth all is."""

WHOLE_EVERY = 5


class Bench:
    """Starts programs and writes down what is scraped."""

    def __init__(self, out: Path, home: Path, env: Mapping[str, str], rehearsal: Rehearsal | None) -> None:
        self.out, self.home, self.env, self.rehearsal = out, home, env, rehearsal
        self.begun = time.monotonic()
        self.truth = out / "truth.jsonl"
        self.truth.touch()
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        self.log = (out / "log.txt").open("ab", buffering=0)
        self._end = threading.Event()

    def say(self, text: str) -> None:
        """Write a line to the log and to the screen."""
        line = f"{time.monotonic() - self.begun:6.1f} {text}"
        print(line, flush=True)
        self.log.write(f"== {line}\n".encode())

    def note(self, event: str, **facts: object) -> None:
        """Write down what the bench does."""
        line = {"t": time.monotonic(), "pid": 0, "name": "bench", "event": event, **facts}
        with self.truth.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.say(f"{event} {facts or ''}")

    def told(self, name: str, event: str) -> list[dict[str, Any]]:
        """Return what the programs of this name have written down of an event."""
        lines = map(json.loads, self.truth.read_text().splitlines())
        return [each for each in lines if each["name"] == name and each["event"] == event]

    def start(self, name: str, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        """Start a program under a name."""
        path = os.pathsep.join(map(str, (SOURCES, ROOT)))
        more = {"PYTHONPATH": path, "VRAMLEDGER_TRUTH": str(self.truth), "VRAMLEDGER_NAME": name}
        more["VRAMLEDGER_CUES"] = str(self.home)
        self.programs[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.gpu.jobs_programs", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **self.env, **more, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.log,
        )

    def job(self, name: str, *arguments: object) -> None:
        """Start the two ranks of a job as Slurm or a script does: without a launcher that ends the others."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in (0, 1):
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
            self.start(f"{name}-{rank}", *arguments, env=env)

    def pause(self, seconds: float) -> None:
        """Wait, shorter in a rehearsal, and not beyond the end."""
        left = self.begun + LONGEST - time.monotonic()
        time.sleep(max(0.0, min(seconds * (0.1 if self.rehearsal else 1), left)))

    def until(self, names: list[str], event: str, seconds: float) -> None:
        """Wait until programs have written down an event, or have ended."""
        deadline = min(time.monotonic() + seconds, self.begun + LONGEST)
        missing = list(names)
        while missing and time.monotonic() < deadline:
            missing = [
                name for name in missing if not self.told(name, event) and self.programs[name].poll() is None
            ]
            time.sleep(0.2)
        never = [name for name in names if not self.told(name, event)]
        self.note(f"all {event}" if not never else f"not {event}", names=never)

    def signal(self, name: str, number: int) -> None:
        """Send a signal, and reap what it killed."""
        self.note(f"sends {signal.Signals(number).name}", to=name)
        self.programs[name].send_signal(number)
        if number == signal.SIGKILL:
            self.programs[name].wait(10)

    def clear(self) -> None:
        """End every program of this part; what has ended by itself is written down."""
        for name, program in self.programs.items():
            if program.poll() is not None:
                self.note("has ended", who=name, code=program.returncode)
        for program in self.programs.values():
            with suppress(ProcessLookupError):
                program.kill()
        for program in self.programs.values():
            with suppress(subprocess.TimeoutExpired):
                program.wait(10)
        self.programs.clear()

    def scrape(self, exporter: Exporter) -> None:
        """Write pages until the end, each second."""
        count = 0
        with gzip.open(self.out / "pages.jsonl.gz", "wt") as file:
            while not self._end.wait(max(0.05, 1 - time.time() % 1)):
                try:
                    _, text = exporter.get("/metrics", 5)
                except OSError as error:
                    self.say(f"scrape failed: {error}")
                    continue
                lines = [line for line in text.splitlines() if not line.startswith("#")]
                if count % WHOLE_EVERY:
                    lines = [line for line in lines if any(each in line for each in SHORT)]
                page = {"time": time.time(), "t": time.monotonic(), "whole": count % WHOLE_EVERY == 0}
                file.write(json.dumps({**page, "lines": lines}) + "\n")
                count += 1
                if count % 20 == 0:
                    file.flush()

    def end(self) -> None:
        """Stop to scrape."""
        self._end.set()

    @contextmanager
    def part(self, name: str, note: str) -> Iterator[None]:
        """Record a part; end its programs in any case."""
        self.note("part", part=name)
        log = self.log
        recorder = subprocess.Popen(
            command("capture", str(self.out / f"{name}.jsonl.gz"), "--duration=10m", f"--note={note}"),
            env=environment(self.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield
        except Exception as error:  # noqa: BLE001 the other parts go on
            self.note("part failed", part=name, error=repr(error))
        finally:
            self.clear()
            recorder.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                recorder.wait(10)
            recorder.kill()
            self.note("part ends", part=name)


def hangs(bench: Bench) -> None:
    """Let four jobs hang at the same moment, each in its own way, for two minutes and a half."""
    cases = ("stop", "kill", "exit", "deadlock")
    for case in cases:
        bench.job(case, "hang", case)
    bench.until([f"{case}-{rank}" for case in cases for rank in (0, 1)], "ready", 75)
    bench.pause(12)
    bench.signal("stop-1", signal.SIGSTOP)
    bench.signal("kill-1", signal.SIGKILL)
    (bench.home / "go").touch()
    bench.note("go")
    if bench.rehearsal:
        for index in (0, 1):
            card = bench.rehearsal.standin.device(index)
            card.set(gpu_utilization=100)
            card.set_activity(sm=18.0)
    bench.pause(145)
    for name, program in bench.programs.items():
        bench.note("runs" if program.poll() is None else "has ended", who=name, code=program.returncode)
    bench.signal("stop-1", signal.SIGCONT)
    bench.pause(6)
    bench.signal("deadlock-0", signal.SIGKILL)
    bench.signal("deadlock-1", signal.SIGKILL)
    bench.pause(6)


def turns(bench: Bench) -> None:
    """Let two programs take turns on each GPU, without a pause and with one, beside those that do nothing."""
    bench.start("turns-a", "turns", 0, 0, 3, 6)
    bench.start("turns-b", "turns", 0, 3, 3, 6)
    bench.start("paused-a", "turns", 1, 0, 3, 18)
    bench.start("paused-b", "turns", 1, 3, 3, 18)
    kinds = ("bare", "torch", "jax", "cupy", "notebook", "server", "threads", "loader", "spin")
    for kind in kinds:
        bench.start(f"idle-{kind}", "idle", 1, kind)
    for kind in ("torch", "server"):
        bench.start(f"beside-{kind}", "idle", 0, kind)
    bench.until(list(bench.programs), "ready", 45)
    bench.pause(60)


def kernels(bench: Bench) -> None:
    """Run kernels that stay: some spin, some work without memory traffic."""
    from tests.tools.gpu.jobs_programs import KERNELS

    names = list(KERNELS)
    half = len(names) // 2
    for device, some in enumerate((names[:half], names[half:])):
        bench.start(f"kernels-{device}", "kernels", device, 5, *some)
    bench.until(list(bench.programs), "done", 65)


def waits(bench: Bench) -> None:
    """Let a healthy rank wait for the other one, for long and again and again."""
    bench.job("waits", "waits")
    bench.until(["waits-0", "waits-1"], "done", 120)


def others(bench: Bench) -> None:
    """Share symmetric memory, decode pictures, copy between GPUs; then the second rank is killed."""
    bench.start("video", "video", 1)
    bench.job("symmetric", "symmetric")
    bench.until(["symmetric-0", "symmetric-1"], "shared", 25)
    bench.until(["video"], "done", 40)
    bench.pause(2)
    bench.start("peer", "peer")
    bench.until(["peer"], "ready", 20)
    bench.pause(5)
    bench.signal("symmetric-1", signal.SIGKILL)
    bench.pause(20)


PARTS = {
    hangs: "four jobs of two ranks on two GPUs: a rank is stopped, killed, leaves, or waits elsewhere",
    waits: "a training of two ranks that waits for checkpoints and data",
    turns: "programs that take turns, beside programs that do nothing",
    kernels: "persistent kernels that spin, or work without memory traffic",
    others: "symmetric memory of two ranks, pictures, copies between GPUs",
}


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.gpu.jobs", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--part", action="append", choices=[each.__name__ for each in PARTS], help="only these"
    )
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on the stand-in driver")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jobs-")))
        rehearsal = Rehearsal(home / "rehearsal") if args.rehearse else None
        env = {} if rehearsal is None else rehearsal.env()
        bench = Bench(args.out, home, env, rehearsal)
        try:
            with serving(f"--idle-after={IDLE_AFTER}s", driver=env) as exporter:
                scraper = threading.Thread(target=bench.scrape, args=(exporter,), daemon=True)
                scraper.start()
                for part, note in PARTS.items():
                    if args.part is None or part.__name__ in args.part:
                        with bench.part(part.__name__, note):
                            part(bench)
                bench.end()
                scraper.join(10)
        except Exception as error:  # noqa: BLE001 what was written stays
            bench.note("bench failed", error=repr(error))
            return 1
        finally:
            bench.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main())
