"""Set up every situation on this host's GPUs, record it, judge it, and report.

``python -m tests.lab.recordings``, or ``make recordings``.

One scenario that fails costs itself; whatever was started is gone at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[3]
PATHS = [ROOT / "exporter", ROOT / "exporter" / "agent", ROOT]
sys.path[:0] = map(str, PATHS)

from tests.lab.recordings.faults import FAULTS  # noqa: E402 they need the path above
from tests.lab.recordings.rehearsal import Rehearsal  # noqa: E402
from tests.lab.recordings.scenarios import PLAYS, Scenario  # noqa: E402
from tests.lab.recordings.stage import Outcome, Stage, python_with_torch  # noqa: E402
from tests.lab.recordings.uncharged import UNCHARGED  # noqa: E402
from tests.support import judging  # noqa: E402 they need the path above
from tests.support.judging import Entry  # noqa: E402

_VERSIONS = """
import importlib.metadata as m, platform, sys
print("python", platform.python_version(), sys.executable)
for name in "torch jax cupy-cuda13x nvidia-ml-py aiohttp prometheus-client psutil".split():
    try: print(name, m.version(name))
    except m.PackageNotFoundError: print(name, "-")
"""


class Report:
    """A text file and the terminal, written as things happen."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._begun = time.monotonic()

    def say(self, text: str, *, aloud: bool = False) -> None:
        """Write to the report, and with ``aloud`` to the terminal as well."""
        self._file.write(text + "\n")
        self._file.flush()
        if aloud:
            print(text, flush=True)

    def elapsed(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._begun


def main() -> int:
    """Run the requested scenarios; the exit status is 1 when anything failed."""
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            # Under nohup the programs would inherit this, and it marks a job that was detached on purpose.
            signal.signal(ignored, signal.SIG_DFL)
    parser = argparse.ArgumentParser(prog="python -m tests.lab.recordings", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / ".cache" / "recordings", help="for report and archive"
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="these scenarios alone")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on the stand-in library")
    parser.add_argument(
        "--golden",
        action="store_true",
        help="record nothing: judge what is there anew, and rewrite its golden scrapes",
    )
    parser.add_argument("--limit", type=float, default=450.0, help="seconds after which nothing new begins")
    args = parser.parse_args()
    if args.golden:
        return _rewrite_golden()
    plays = [*PLAYS, *UNCHARGED, FAULTS]
    known = [play.name for play in plays]
    only = [name for name in args.only.split(",") if name]
    if unknown := set(only) - set(known):
        parser.error(f"no scenario {sorted(unknown)}; there are {', '.join(known)}")
    args.output.mkdir(parents=True, exist_ok=True)
    report = Report(args.output / "report.txt")
    with tempfile.TemporaryDirectory(prefix="recordings-") as scratch, _stage(args, Path(scratch)) as stage:
        return _perform(stage, report, args, [play for play in plays if not only or play.name in only])


@contextlib.contextmanager
def _stage(args: argparse.Namespace, scratch: Path) -> Iterator[Stage]:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PATHS), *filter(None, given)])
    rehearsal = None
    home = judging.HOME
    if args.rehearse:
        rehearsal = Rehearsal(scratch / "rehearsal")
        os.environ.update(rehearsal.env())
        home = args.output / "rehearsed"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
    stage = Stage(home, scratch, sys.executable if args.rehearse else python_with_torch(), rehearsal)

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        yield stage
    finally:
        stage.clear()


def _perform(stage: Stage, report: Report, args: argparse.Namespace, plays: list[Scenario]) -> int:
    _guard(stage, args.output, args.limit + 100)
    report.say(_host(stage))
    stage.gpu = _gpu(stage)
    report.say(f"GPU: {stage.gpu}; programs run on {stage.python}", aloud=True)
    for play in plays:
        if report.elapsed() + play.seconds > args.limit:
            stage.outcomes.append(Outcome(play.name, good=False, problems=["skipped: no time left"]))
            report.say(f"SKIP {play.name}: no time left", aloud=True)
            continue
        if (
            play.needs
            and subprocess.run([stage.python, "-c", f"import {play.needs}"], check=False).returncode
        ):
            report.say(
                f"LEFT OUT {play.name}: {stage.python} has no {play.needs}; put it on PYTHONPATH", aloud=True
            )
            continue
        _play(stage, report, play)
        _keep(stage)
    report.say("\n== stderr of the programs")
    for log in sorted(stage.scratch.glob("*.stderr")):
        if text := log.read_text(errors="replace").strip():
            report.say(f"-- {log.stem}\n{text[-3000:]}")
    report.say("\n== nvidia-smi at the end\n" + _run(["nvidia-smi"]))
    left = stage.marked()
    bad = [outcome.name for outcome in stage.outcomes if not outcome.good]
    report.say(
        f"\n{len(stage.outcomes) - len(bad)} of {len(stage.outcomes)} good in {report.elapsed():.0f} s;"
        f" failed: {bad or 'none'}; processes left: {left or 'none'}",
        aloud=True,
    )
    _pack(stage, args.output)
    return 1 if bad else 0


def _play(stage: Stage, report: Report, play: Scenario) -> None:
    begun = report.elapsed()
    first = len(stage.outcomes)
    stage.scenario = play.name
    try:
        play.play(stage)
    except Exception as error:  # noqa: BLE001 the next scenario goes on
        trace = "".join(traceback.format_exception(error)) if not str(error) else str(error)
        stage.outcomes.append(Outcome(play.name, good=False, problems=[f"{type(error).__name__}: {trace}"]))
        report.say(traceback.format_exc())
    finally:
        stage.clear()
        stage.scenario = ""
    took = report.elapsed() - begun
    for outcome in stage.outcomes[first:]:
        verdict = "PASS" if outcome.good else "FAIL"
        report.say(f"{verdict} {outcome.name} ({took:.1f} s)", aloud=True)
        for line in [f"  PROBLEM: {problem}" for problem in outcome.problems] + outcome.lines:
            report.say(line, aloud=True)


def _keep(stage: Stage) -> None:
    """Write the manifest and the golden scrapes; failed ones are kept separately, without a promise."""
    made = {outcome.name: outcome for outcome in stage.outcomes if outcome.entry}
    old = [entry for entry in judging.load(stage.home) if entry.name not in made]
    older = [entry for entry in judging.load(stage.home, judging.FAILED) if entry.name not in made]
    good = [outcome.entry for outcome in made.values() if outcome.good and outcome.entry]
    failed = [outcome.entry for outcome in made.values() if not outcome.good and outcome.entry]
    judging.save(stage.home, [*old, *good])
    judging.save(stage.home, [*older, *failed], judging.FAILED)
    for entry in good:
        _write_golden(stage.home, entry)


def _write_golden(directory: Path, entry: Entry) -> None:
    page = judging.golden(judging.replay(directory, entry)[-1])
    judging.golden_path(directory, entry).write_bytes(page)


def _rewrite_golden() -> int:
    """Judge every recording again; a good one gets its golden scrape, a bad one is reported."""
    good: list[Entry] = []
    failed: list[Entry] = []
    for entry in [*judging.load(), *judging.load(name=judging.FAILED)]:
        snapshots = judging.replay(judging.HOME, entry)
        problems = judging.problems(entry, snapshots)
        (failed if problems else good).append(entry)
        print(f"{'FAIL' if problems else 'PASS'} {entry.name} {'; '.join(problems)}")
        if not problems:
            _write_golden(judging.HOME, entry)
    judging.save(judging.HOME, good)
    judging.save(judging.HOME, failed, judging.FAILED)
    return 1 if failed else 0


def _pack(stage: Stage, output: Path) -> None:
    """Put everything to keep into one archive, with paths from the project's root."""
    files = [
        path for path in sorted(stage.home.iterdir()) if path.name.endswith((".gz", ".metrics", ".json"))
    ]
    with tarfile.open(output / "recordings.tar.gz", "w:gz") as archive:
        for path in files:
            archive.add(path, arcname=path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)


def _guard(stage: Stage, output: Path, seconds: float) -> None:
    """End everything, this process too, if it hangs in spite of all deadlines."""

    def end() -> None:
        print(f"recordings: not done after {seconds:.0f} s, ending everything", file=sys.stderr, flush=True)
        for pid in stage.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _pack(stage, output)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _host(stage: Stage) -> str:
    parts = [
        ("uname", _run(["uname", "-a"])),
        ("pid 1", _run(["cat", "/proc/1/comm"])),
        ("versions", _run([stage.python, "-c", _VERSIONS])),
        ("nvidia-smi at the beginning", _run(["nvidia-smi"])),
    ]
    return "\n".join(f"== {title}\n{text}" for title, text in parts)


def _gpu(stage: Stage) -> str:
    if stage.rehearsing:
        return "stand-in"
    lines = _run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()
    return f"{len(lines)} x {lines[0]}" if lines else "?"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


if __name__ == "__main__":
    sys.exit(main())
