"""Prove on a GPU what a recording tells of a program: at a failed allocation, and within its steps.

``python -m tests.tools.gpu.flight --out DIR`` writes ``flight.md`` (the table), ``flight.json`` (what each
program and its report said), ``flight.txt`` (the reports, and what the command shows of their snapshots) and
the snapshot of one program. The programs run side by side, so it takes under a minute. ``--rehearse`` goes
through the same motions without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.listening import FAKE, PROJECT, STARTUP

HERE = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 90
GIVEN_SHARE = 0.01
"""Torch's own peaks and ours may differ by this share."""

Facts = dict[str, Any]

PROGRAMS = {
    "steps": ("train", "clear", "full"),
    "kept": ("train", "keep", "full"),
    "mixed": ("train", "clear", "mixed"),
    "batch": ("batch",),
    "backward": ("backward",),
    "cycles": ("cycles",),
}


class Outcome(NamedTuple):
    """What a program told, its first report, and what the command shows of its snapshot."""

    told: Facts
    report: Facts
    text: str
    shown: str


class Bench:
    """Starts the programs, and collects the figures."""

    def __init__(self, place: Path, *, rehearse: bool) -> None:
        self.place = place
        self.rehearse = rehearse
        self.rows: list[tuple[str, str, bool | None]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.errors: dict[str, str] = {}

    def run(self) -> None:
        """Run all programs side by side."""
        running = {name: self._start(name, arguments) for name, arguments in PROGRAMS.items()}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for name, process in running.items():
            try:
                out, errors = process.communicate(timeout=max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, errors = process.communicate()
            self.errors[name] = errors[-5000:]
            lines = [line for line in out.splitlines() if line.startswith("{")]
            told = json.loads(lines[-1]) if lines else {"failed": errors[-500:]}
            self.outcomes[name] = self._collect(name, told)

    def _start(self, name: str, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
        path = [str(STARTUP), *([str(FAKE)] if self.rehearse else []), str(PROJECT)]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "VRAMLEDGER_AGENT": "1",
            "VRAMLEDGER_AGENT_SNAPSHOT_FROM_START": "1",
            "VRAMLEDGER_AGENT_SOCKET": str(self.place / "none.sock"),
            "VRAMLEDGER_AGENT_REPORTS": str(self.place / name),
        }
        command = [sys.executable, str(HERE / "flight_programs.py"), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)

    def _collect(self, name: str, told: Facts) -> Outcome:
        paths = sorted((self.place / name).glob("*.json"))
        if not paths:
            return Outcome(told, {}, "", "")
        report = json.loads(paths[0].read_text())
        shown = ""
        if report.get("snapshot"):
            command = [sys.executable, "-m", "vramledger", "snapshot", "show", report["snapshot"]]
            environ = {**os.environ, "PYTHONPATH": str(PROJECT / "exporter")}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            shown = done.stdout + done.stderr
        return Outcome(told, report, paths[0].with_suffix(".txt").read_text(), shown)

    def check(self, what: str, detail: object, *, met: bool | None) -> None:
        """Record a verdict, and print it; a rehearsal cannot judge what only a GPU shows."""
        self.rows.append((what, str(detail), met))
        print(f"{'' if met is None else 'met: ' if met else 'MISSED: '}{what} [{detail}]", flush=True)


def last_step(report: Facts) -> Facts:
    """Return the last finished step of a report."""
    steps = [step for step in (report.get("flight") or {}).get("steps", []) if step["finished"]]
    return steps[-1] if steps else {"phases": {}}


def judge_failure(bench: Bench) -> None:
    """Judge the report of a failed allocation, and the recording from the start."""
    told, report, _, shown = bench.outcomes["steps"]
    functions = [frame["function"] for frame in report.get("stack", {}).get("frames", [])]
    flight = report.get("flight") or {}
    lines = {line["function"]: line["bytes"] for line in flight.get("lines", [])}
    bench.check(
        "the program sees its own error",
        told.get("exception"),
        met=told.get("exception") == "OutOfMemoryError",
    )
    bench.check("no error in the agent", told.get("errors"), met=told.get("errors") == {})
    bench.check("failing stack", functions[:3], met="allocate_too_much" in functions)
    bench.check("a snapshot that can be read", shown[:60].strip(), met="live of" in shown)
    bench.check("no byte without a line", lines, met="before the recording" not in shown and bool(lines))
    parameters = told.get("tensors", {}).get("parameters")
    met = None if bench.rehearse else lines.get("build_model", 0) >= (parameters or 1)
    bench.check("the line of the parameters", lines.get("build_model"), met=met)
    bench.check("missing bytes", report.get("missing"), met=bool(report.get("missing")))
    failed = bench.outcomes["backward"].report.get("stack", {})
    functions = [frame["function"] for frame in failed.get("frames", [])]
    met = None if bench.rehearse else failed.get("phase") == "backward" and "start_backward" in functions
    bench.check("a failure in the backward pass", (failed.get("phase"), functions[:8]), met=met)


def judge_steps(bench: Bench) -> None:
    """Judge the peaks within the steps, kept gradients and types of numbers."""
    told, report, _, _ = bench.outcomes["steps"]
    phases = last_step(report)["phases"]
    for name in ("forward", "backward", "optimizer"):
        ours = phases.get(name, {}).get("bytes")
        theirs = told.get("peaks", {}).get(name)
        met = None if bench.rehearse else bool(ours and theirs and abs(ours / theirs - 1) <= GIVEN_SHARE)
        bench.check(f"peak of {name}, ours and torch's", (ours, theirs), met=met)
    found = phases.get("optimizer", {}).get("categories", {})
    for name, size in told.get("tensors", {}).items():
        bench.check(f"bytes of {name} at the optimizer's peak", (found.get(name), size),
                    met=bool(found.get(name)) and abs(found[name] / size - 1) <= GIVEN_SHARE)  # fmt: skip
    bench.check("batch", last_step(report).get("batch"), met=last_step(report).get("batch") == 4096)
    for name, kept in (("steps", False), ("kept", True)):
        report = bench.outcomes[name].report
        before = last_step(report).get("gradients_before_backward")
        met = bool(before) is kept and report.get("gradients_kept") is kept
        bench.check(
            f"gradients before the backward pass, {name}", (before, report.get("gradients_kept")), met=met
        )
    for name, expected, autocast in (("steps", "float32", "off"), ("mixed", "bfloat16", "bfloat16")):
        report = bench.outcomes[name].report
        types = (report.get("flight") or {}).get("forward_types", {})
        most = max(types, key=types.__getitem__, default=None)
        met = most == expected and report.get("autocast") == autocast
        bench.check(f"types of numbers, {name}", (types, report.get("autocast")), met=met)
    told = bench.outcomes["batch"].told
    met = None if bench.rehearse else told.get("outcome", {}).get("1.0") == "fits"
    bench.check("the batch that fits", (told.get("fits"), told.get("outcome")), met=met)
    told = bench.outcomes["cycles"].told
    objects = [each["function"] for cycle in told.get("found", []) for each in cycle["objects"]]
    met = (
        [cycle["cycles"] for cycle in told.get("found", [])] == [4]
        and told.get("again") == []
        and "__init__" in objects
    )
    bench.check("reference cycles by place", told.get("found", [])[:1], met=met)


def main() -> int:
    """Run the programs and write the results; 1 when a promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "flight-gpu")))
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: only the motions")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vl-flight-") as place:
        bench = Bench(Path(place), rehearse=args.rehearse)
        bench.run()
        judge_failure(bench)
        judge_steps(bench)
        write(bench, args.out)
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if any(met is False for *_, met in bench.rows) else 0


def write(bench: Bench, out: Path) -> None:
    """Write all figures, the texts, one snapshot and the table."""
    figures = {
        name: {"told": each.told, "report": each.report, "stderr": bench.errors[name]}
        for name, each in bench.outcomes.items()
    }
    (out / "flight.json").write_text(json.dumps({"figures": figures, "rows": bench.rows}, indent=1))
    texts = [f"== {name}\n{each.text}\n{each.shown}" for name, each in bench.outcomes.items()]
    (out / "flight.txt").write_text("\n".join(texts))
    snapshot = bench.outcomes["steps"].report.get("snapshot")
    if snapshot:
        shutil.copyfile(snapshot, out / "steps.pickle")
    lines = ["| what | measured | |", "| --- | --- | --- |"]
    lines += [
        f"| {what} | {detail} | {'' if met is None else 'met' if met else 'MISSED'} |"
        for what, detail, met in bench.rows
    ]
    (out / "flight.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
