"""Prove on a GPU that each policy of TensorFlow and JAX is reported right, through the exporter.

``python -m tests.lab.gpu.frameworks --out DIR`` writes ``frameworks.json``; ``--python`` names another
interpreter, ``--rehearse`` needs no GPU.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.exporter import SOURCES, Exporter, command, serving

MIB = 2**20
REPORTED = 4.5
"""Seconds after which a report of an agent (every half second) is in a sample (every two)."""
SETTLED = 20.0
"""Seconds more until uncharged bytes must have their holder: mappings are read every 3 to 10 s."""

Found = dict[str, list[tuple[dict[str, str], float]]]


class Case(NamedTuple):
    """A way to take memory, and the exporter's expected policy; None: nothing at all.

    ``uncharged`` are the bytes of unified memory that it fills, which NVML charges to no process.
    """

    framework: str
    mode: str
    policy: str | None
    environ: Mapping[str, str] = {}
    limit: int | None = None
    uncharged: int | None = None


UNIFIED = {"TF_FORCE_UNIFIED_MEMORY": "1"}
GROWING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

CASES = (
    Case("tensorflow", "default", "preallocate"),
    Case("tensorflow", "growth", "growth"),
    Case("tensorflow", "limit", "limit", limit=1024 * MIB),
    Case("tensorflow", "logical", "limit", limit=3072 * MIB),
    Case("tensorflow", "hidden", None),
    Case("tensorflow", "env growth", "growth", {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}),
    Case("tensorflow", "env async", "cuda_malloc_async", {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}),
    # TensorFlow 2.21 ignores a fraction of the old session's configuration: NVML listed 141,418 MiB on an
    # H200, as without it.
    Case("tensorflow", "fraction", "preallocate"),
    Case("tensorflow", "unified session", "fraction", uncharged=2048 * MIB),
    # TensorFlow 2.21 ignores these two: its memory is ordinary memory (measured on an H100).
    Case("tensorflow", "unified eager", "preallocate", uncharged=0),
    Case("tensorflow", "env unified", "growth", UNIFIED | {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, uncharged=0),
    Case("jax", "unified", "fraction", UNIFIED, uncharged=2048 * MIB),
    Case("jax", "unified", "growth", UNIFIED | GROWING, uncharged=2048 * MIB),
    Case("jax", "default", "fraction"),
    Case("jax", "growth", "growth", GROWING),
    Case("jax", "fraction", "fraction", {"XLA_CLIENT_MEM_FRACTION": ".30"}),
    Case("jax", "platform", "platform", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
    Case("jax", "async", "cuda_malloc_async", {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}),
)


class Bench:
    def __init__(self, place: Path, python: str, exporter: Exporter) -> None:
        self.place = place
        self.python = python
        self.exporter = exporter
        self.checks: list[tuple[bool, str, str]] = []
        self.figures: dict[str, Any] = {}

    def check(self, what: str, detail: object, *, met: bool) -> None:
        self.checks.append((met, what, str(detail)))
        print(f"{'met' if met else 'MISSED'}: {what} [{detail}]", flush=True)

    def series(self, pid: int) -> Found:
        found: Found = {}
        for (name, labels), value in self.exporter.scrape().samples.items():
            if ("pid", str(pid)) in labels:
                found.setdefault(name, []).append((dict(labels), value))
        return found

    @contextlib.contextmanager
    def program(self, case: Case) -> Iterator[subprocess.Popen[str]]:
        """Start a case's program with the agent inside; ``run`` becomes it, so its pid stays."""
        flags = (f"--agent.socket={self.place / 'agent.sock'}", "--agent.interval=500ms", "--", self.python)
        taking = (str(Path(__file__).with_name("policies.py")), case.framework, case.mode)
        environ = {**os.environ, "PYTHONPATH": f"{SOURCES}:{SOURCES / 'agent'}", **case.environ}
        pipe = subprocess.PIPE
        with (self.place / f"{case.framework} {case.mode}.log").open("wb") as log:
            process = subprocess.Popen(
                command("run", *flags, *taking), env=environ, stdin=pipe, stdout=pipe, stderr=log, text=True
            )
        try:
            yield process
        finally:
            process.communicate(timeout=60)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        message = f"the program ended with status {process.wait()}; see its log"
        raise RuntimeError(message)
    said: dict[str, Any] = json.loads(line)
    return said


def _has_uncharged(case: Case, found: Found) -> bool:
    """Tell whether the exporter shows as many uncharged bytes as the case has, if it has a number."""
    ours = sum(value for _, value in found.get("vramledger_process_uncharged_memory_bytes", []))
    return case.uncharged is None or abs(ours - case.uncharged) <= 256 * MIB


def examine(bench: Bench, case: Case, *, rehearse: bool) -> None:
    """Run one case, and compare the exporter's figures with the framework's."""
    name = f"{case.framework} {case.mode}"
    with bench.program(case) as process:
        begun = told(process)["initialised"]
        before = bench.series(process.pid)
        bench.check(f"{name}: the import initialises nothing", begun, met=not begun and not before)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        said = told(process)
        time.sleep(REPORTED)
        begun_waiting = time.monotonic()
        while True:
            found = bench.series(process.pid)
            waited = time.monotonic() - begun_waiting
            if _has_uncharged(case, found) or waited > SETTLED:
                break
            time.sleep(0.5)
        text = bench.exporter.scrape().text
        device = [line for line in text.splitlines() if line.startswith("vramledger_device_memory")]
    bench.figures[f"{name} {case.policy}"] = {"said": said, "series": found, "device": device}
    if rehearse:
        return
    infos = found.get("vramledger_framework_policy_info", [])
    policies = [(labels["framework"], labels["policy"], labels["source"]) for labels, _ in infos]
    if case.policy is None:
        bench.check(f"{name}: no memory, no series", policies, met=not found)
        return
    expected = (case.framework, case.policy, "agent")
    bench.check(f"{name}: policy", policies, met=expected in policies)
    if case.uncharged is not None:
        told_after = f"{case.uncharged} bytes, {waited:.1f} s after the report"
        bench.check(f"{name}: uncharged", told_after, met=_has_uncharged(case, found))
    limits = {} if case.limit is None else {"limit": case.limit}
    for figure, value in {**said, **limits}.items():
        if value is not None and value >= 0:
            family = f"vramledger_framework_{figure}_bytes"
            ours = [each for labels, each in found.get(family, []) if labels["framework"] == case.framework]
            bench.check(f"{name}: {figure}", (ours, value), met=ours == [value])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "frameworks-gpu")))
    parser.add_argument("--python", default=sys.executable, help="has TensorFlow and JAX")
    parser.add_argument("--only", action="append", choices=("tensorflow", "jax"), default=[])
    parser.add_argument("--mode", default="", help="modes with this text in their names alone")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: only what the imports do")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vl-") as directory:
        flags = (f"--agent.socket={directory}/agent.sock", "--sample.interval=500ms")
        driver = {"PYTHONPATH": f"{SOURCES}:{SOURCES / 'agent'}"}
        with serving(*flags, driver=driver) as exporter:
            bench = Bench(Path(directory), args.python, exporter)
            for case in CASES:
                if (args.only and case.framework not in args.only) or args.mode not in case.mode:
                    continue
                try:
                    examine(bench, case, rehearse=args.rehearse)
                except Exception as error:  # noqa: BLE001 after one failed case the others run
                    bench.check(f"{case.framework} {case.mode}", repr(error), met=False)
        (args.out / "serve.log").write_text(exporter.ended.log)
        for log in Path(directory).glob("*.log"):
            (args.out / log.name.replace(" ", "-")).write_bytes(log.read_bytes())
    content = json.dumps({"checks": bench.checks, "figures": bench.figures}, indent=1)
    (args.out / "frameworks.json").write_text(content)
    missed = sum(not met for met, *_ in bench.checks)
    print(f"{len(bench.checks) - missed} of {len(bench.checks)} met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
