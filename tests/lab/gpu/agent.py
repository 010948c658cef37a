"""Prove on a GPU the agent's promises: exact figures, no bytes, no context, no time, right verdicts.

``python -m tests.lab.gpu.agent --out DIR`` writes ``agent.json`` (every figure), ``agent.md`` (the table)
and the out-of-memory reports. ``--rehearse`` goes through the same motions without a GPU. Some minutes.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.listening import FAKE, PROJECT, STARTUP, FakeExporter

HERE = Path(__file__).resolve().parent
MIB = 2**20
VERDICTS = {None: "", True: "met", False: "MISSED"}

Facts = dict[str, Any]


class NvmlExporter(FakeExporter):
    """Receive reports as the exporter does, and say who holds the devices, from NVML."""

    def __init__(self, path: Path, holders: Callable[[], list[Facts]]) -> None:
        self._holders = holders
        super().__init__(path)

    def answer_to(self, pid: int, told: Facts) -> Facts | None:
        """Return the devices with their holders; the client's own is marked."""
        if told.get("ask") != "devices":
            return None
        devices = self._holders()
        for holder in (each for device in devices for each in device["holders"]):
            if holder.get("pid") == pid:
                holder["self"] = True
        return {"version": 1, "ok": True, "devices": devices}


class Machine:
    """The GPUs by NVML; none in a rehearsal."""

    def __init__(self, *, rehearse: bool) -> None:
        self.handles: list[Any] = []
        self.nvml: Any = None
        self.tenants: list[Facts] = []
        if not rehearse:
            import pynvml

            self.nvml = pynvml
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self.handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def holdings(self) -> list[dict[int, int]]:
        listed = [self.nvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in self.handles]
        return [{process.pid: process.usedGpuMemory for process in processes} for processes in listed]

    def memory(self) -> list[Any]:
        return [self.nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self.handles]

    def holders(self) -> list[Facts]:
        """Return the exporter's answer to ``devices``."""
        if self.nvml is None:
            total = 80 * 2**30
            return [{"uuid": "GPU-0", "index": 0, "total": total, "free": total, "holders": self.tenants}]
        return [
            {
                "uuid": self.nvml.nvmlDeviceGetUUID(handle), "index": index,
                "total": memory.total, "free": memory.free, "used": memory.used,
                "holders": [{"pid": pid, "state": "active", "bytes": size} for pid, size in held.items()],
            }
            for index, (handle, memory, held) in enumerate(
                zip(self.handles, self.memory(), self.holdings(), strict=True)
            )
        ]  # fmt: skip


class Bench:
    def __init__(self, out: Path, cases: list[str], *, rehearse: bool) -> None:
        self.out = out
        self.rehearse = rehearse
        self.cases = cases
        self.machine = Machine(rehearse=rehearse)
        self.reports = out / "reports"
        self.exporter = NvmlExporter(Path(f"/tmp/vramledger-gpu-{os.getpid()}.sock"), self.machine.holders)  # noqa: S108
        self.figures: Facts = {}
        self.rows: list[tuple[str, str, str, bool | None]] = []

    @contextlib.contextmanager
    def program(self, *arguments: str, agent: bool = True, **environ: str) -> Iterator[tuple[int, Facts]]:
        """Run a program up to its report; it ends with the block."""
        path = [str(PROJECT)] + ([str(FAKE)] if self.rehearse else [])
        told = {**os.environ, **environ, "VRAMLEDGER_AGENT_SOCKET": str(self.exporter.path)}
        told["VRAMLEDGER_AGENT_REPORTS"] = str(self.reports)
        told.pop("VRAMLEDGER_AGENT", None)
        if agent:
            told["VRAMLEDGER_AGENT"] = "1"
            path.insert(0, str(STARTUP))
        told["PYTHONPATH"] = os.pathsep.join(path)
        command = [sys.executable, str(HERE / "programs.py"), *arguments]
        with (self.out / "stderr.txt").open("a") as errors:
            process = subprocess.Popen(
                command, env=told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield process.pid, json.loads(line) if line else {"failed": arguments}
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            process.stdout.close()

    def row(self, what: str, figure: str, bar: str, *, met: bool | None) -> None:
        self.rows.append((what, figure, bar, met))
        print(f"{what}: {figure} (bar: {bar}) {VERDICTS[met]}", flush=True)

    def last(self, pid: int) -> Facts:
        reports = self.exporter.reports.get(pid)
        return reports[-1] if reports else {}


NAMES = {
    **{
        name: f"{name}_bytes.all.current"
        for name in ("reserved", "allocated", "active", "requested", "inactive_split")
    },
    "reserved_peak": "reserved_bytes.all.peak",
    "allocated_peak": "allocated_bytes.all.peak",
    "allocations": "allocation.all.allocated",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


def exact(bench: Bench) -> None:
    """Compare the reported figures with torch.cuda.memory_stats of the same moment."""
    several = len(bench.machine.handles) > 1
    cases = {
        "native": ("0", "plain", {}),
        "expandable": ("0", "plain", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        "graph": ("0", "graph", {}),
        "async": ("0", "plain", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    }
    if several:
        cases["second device"] = ("1", "plain", {})
        cases["visible 1,0"] = ("0", "plain", {"CUDA_VISIBLE_DEVICES": "1,0"})
    for name, (ordinal, graph, environ) in cases.items():
        if bench.rehearse and name == "async":
            environ = {"FAKE_TORCH_BACKEND": "cudaMallocAsync"}  # noqa: PLW2901
        with bench.program("stats", ordinal, graph, agent=True, **environ) as (pid, told):
            report = bench.last(pid)
            holdings = bench.machine.holdings()
        entry: Facts = next(iter(report.get("frameworks", [])), {})
        bench.figures[f"exact {name}"] = {"told": told, "report": report, "holdings": holdings}
        if name == "async":
            met = entry.get("supported") is False and not entry.get("devices")
            figure = f"supported {entry.get('supported')}"
            bench.row(f"figures, {name}", figure, "not supported, no figure", met=met)
            continue
        devices = (each for each in entry.get("devices", []) if each["ordinal"] == int(ordinal))
        device: Facts = next(devices, {})
        theirs = told.get("stats", {})
        pairs = {key: (device.get(key), theirs.get(flat)) for key, flat in NAMES.items()}
        wrong = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        extras = {key: device.get(key) for key in ("reclaimable", "largest_free_block", "private_pools")}
        bench.row(f"figures, {name}", f"{len(NAMES) - len(wrong)} equal {wrong or ''} {extras}",
                  "all equal torch.cuda.memory_stats", met=bool(theirs) and not wrong)  # fmt: skip
        strangers = sum(pid in held for held in holdings) if holdings else 1
        bench.row(f"devices with a context, {name}", str(strangers), "1", met=strangers == 1)


def nothing_held(bench: Bench) -> None:
    """Compare NVML's bytes of a process with the agent and without it, and of the whole device."""
    if bench.rehearse:
        with bench.program("hold", "2048") as (_, told):
            bench.row("bytes held more with the agent", f"rehearsed {told}", "0", met=None)
        return
    seen: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for agent in (False, True, True, False):
        with bench.program("hold", "2048", agent=agent) as (pid, _):
            time.sleep(3)
            of_process = sum(held.get(pid, 0) for held in bench.machine.holdings())
            seen[agent].append((of_process, sum(memory.used for memory in bench.machine.memory())))
        time.sleep(1)
    bench.figures["bytes held"] = {str(agent): values for agent, values in seen.items()}
    more = max(value[0] for value in seen[True]) - min(value[0] for value in seen[False])
    used = max(value[1] for value in seen[True]) - min(value[1] for value in seen[False])
    bench.row("bytes held more with the agent (process)", str(more), "0", met=more == 0)
    bench.row("bytes used more with the agent (devices)", str(used), "0", met=used == 0)


def categories(bench: Bench) -> None:
    """Compare the categories with the tensors' own sizes."""
    with bench.program("gradients") as (pid, told):
        report = bench.last(pid)
    devices = (each for entry in report.get("frameworks", []) for each in entry.get("devices", []))
    device: Facts = next(devices, {})
    ours = device.get("categories", {})
    bench.figures["categories"] = {"told": told, "report": device}
    wrong = {name: (ours.get(name), told.get(name)) for name in ("parameters", "gradients", "optimizer")
             if ours.get(name) != told.get(name)}  # fmt: skip
    met = bool(ours) and not wrong
    bench.row("categories with gradients kept", f"{ours} {wrong or ''}", "the tensors' own bytes", met=met)


def locked(bench: Bench) -> None:
    """Measure the cost of a report with 2,000 live blocks."""
    with bench.program("lock", "2000") as (_, told):
        bench.figures["lock"] = told
    median, late = told.get("report", (0.0, 0.0))
    figure = f"{median:.1f} µs, p99 {late:.1f} µs, {told}"
    bench.row("CPU time a report, 2,000 live blocks", figure, "50 µs", met=0 < median <= 50)


def hook(bench: Bench) -> None:
    """Measure what the hook adds to each optimizer step: the agent's cost between two reports."""
    with bench.program("hooked", "3" if bench.rehearse else "15") as (_, told):
        bench.figures["hook"] = told
    middle, low, high = spread(told.get("more", [float("nan")]))
    bench.row(
        "CPU time an optimizer step",
        f"{middle:.2f} µs (95 % of resamplings {low:.2f} to {high:.2f}), {middle / 1000:.3%} of 1 ms",
        "1 µs",
        met=middle <= 1,
    )


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the median of the paired differences, and the range of 95 % of resamplings."""
    chance = random.Random(1)  # noqa: S311
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[-51]


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

FAILURES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("too-big", "too_big", {}),
    ("fragmented", "fragmented", {}),
    ("hoarded", "hoarded", {}),
    ("leaking", "leaking", {}),
    ("limited", "too_big", {}),
    ("limited-fragmented", "fragmented", {}),
    # What is free between pieces can be mapped elsewhere, so that only what is too big fails.
    ("expandable", "too_big", EXPANDABLE),
    ("alone", "too_big", {}),
    ("late-leak", "leaking", {}),
    ("early", "leaking", {}),
)
"""How a program runs out of memory, the verdict, and its variables."""


def verdicts(bench: Bench) -> None:
    """Run out of memory in several ways, and read the verdict and the advice."""
    for case, expected, environ in FAILURES:
        if bench.cases and case not in bench.cases:
            continue
        with contextlib.ExitStack() as tenants:
            if case == "hoarded":
                size = 40 * 1024 if bench.rehearse else bench.machine.memory()[0].total // MIB * 7 // 10
                pid, _ = tenants.enter_context(bench.program("hold", str(size), agent=False))
                bench.machine.tenants = [{"pid": pid, "bytes": size * MIB, "state": "active", "self": False}]
            if bench.rehearse:
                bench.machine.tenants.append({"self": True, "bytes": MIB, "state": "active"})
            with bench.program("out_of_memory", case, agent=True, **environ) as (pid, told):
                time.sleep(1.5)
                last = bench.last(pid).get("last_oom", {})
            bench.machine.tenants = []
        path = last.get("report")
        facts, text = read_report(path)
        figures = {"told": told, "last_oom": last, "report": facts, "text": text}
        bench.figures[f"out of memory, {case}"] = figures
        if case == "expandable":
            advised = "expandable_segments:True" in text
            met = None if bench.rehearse else bool(text) and not advised
            bench.row("advice where expandable segments are on", f"names them: {advised}", "not", met=met)
        exception = told.get("exception")
        right = last.get("verdict") == expected and exception == "OutOfMemoryError"
        figure = f"{last.get('verdict')}; the program saw {exception}; report {path and Path(path).name}"
        bench.row(f"out of memory, {case}", figure, expected, met=None if bench.rehearse else right)


def read_report(path: str | None) -> tuple[Facts, str]:
    if path is None or not Path(path).exists():
        return {}, ""
    facts: Facts = json.loads(Path(path).read_text())
    facts.pop("flight", None)
    text = Path(path).with_suffix(".txt")
    return facts, text.read_text() if text.exists() else ""


STAGES = {
    "exact": exact, "nothing": nothing_held, "categories": categories, "lock": locked, "hook": hook,
    "verdicts": verdicts,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "agent-gpu")))
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: only the motions")
    parser.add_argument("--only", action="append", choices=STAGES, default=[])
    cases = [case for case, *_ in FAILURES]
    parser.add_argument("--case", action="append", choices=cases, default=[], help="only these failures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.out, args.case, rehearse=args.rehearse)
    begun = time.monotonic()
    try:
        for name, stage in STAGES.items():
            if args.only and name not in args.only:
                continue
            try:
                stage(bench)
            except Exception as error:  # noqa: BLE001 after one failed stage the others run
                bench.row(name, f"FAILED: {type(error).__name__}: {error}", "", met=False)
            write(bench)
    finally:
        bench.exporter.path.unlink(missing_ok=True)
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if any(met is False for *_, met in bench.rows) else 0


def write(bench: Bench) -> None:
    figures = json.dumps({"figures": bench.figures, "rows": bench.rows}, indent=1)
    (bench.out / "agent.json").write_text(figures)
    lines = ["| what | measured | bar | |", "| --- | --- | --- | --- |"]
    lines += [f"| {what} | {figure} | {bar} | {VERDICTS[met]} |" for what, figure, bar, met in bench.rows]
    (bench.out / "agent.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
