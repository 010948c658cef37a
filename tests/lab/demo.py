"""Write the recording that comes with the package: ``python -m tests.lab.demo [FILE]``.

It is simulated, and says so in its header; the same seed writes the same readings. What happens, by minute:

    1  a notebook on an A100 has finished its work; it is idle from then on, beside a training
    1  TensorFlow takes all that is left of GPU 1
    3  a training begins to leak 2 GiB a minute on GPU 0
    5  the launcher of a rank on GPU 3 is killed; the rank stays, an orphan
    6  a program on GPU 1 needs 9 GiB, runs out of memory, and tries again every half minute
   44  the leak has filled GPU 0: the training runs out of memory, and ends a minute later
"""

import gzip
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from random import Random

from msgspec.structs import replace

from tests.support.host.agents import GIB, MIB
from tests.support.host.model import CONTEXT, EPOCH, Gpu, Host, Process, Use
from tests.support.host.programs import (
    Demand,
    Held,
    Torch,
    idle,
    in_bursts,
    sawtooth,
    tensorflow,
    until,
    with_leak,
)
from vramledger.model.agent_report import Agent, AgentReport, FrameworkReport, OutOfMemory
from vramledger.model.reading import DeviceReading, HardwareValue, Owner, Reading, encode
from vramledger.sampling.replay import demo_recording, encode_header, shift_times
from vramledger_agent.protocol.frameworks import POOL_FIGURES, TORCH_FIGURES

NOTE = (
    "Simulated, not recorded: no such machine, user or job exists. "
    "A leak, a TensorFlow that took the whole card, an idle notebook, an orphan, and two programs that ran "
    "out of memory."
)
SEED = 17
MINUTES = 48
INTERVAL = 2.0
IDLE_AFTER = 180.0
BEGIN = 1_793_520_000.0
"""Unix time of the first reading: 2026-11-01 08:00 UTC."""

CARD = 143_771 * MIB
OLDER, OLDER_CARD = 2, 81_920 * MIB
"""The GPU before Hopper: an A100, which has none of GPM's counters."""
USABLE = CARD - 615 * MIB - 14 * MIB
LEFT_BY_TENSORFLOW = 700 * MIB


def processes(random: Random) -> list[Process]:
    leak = with_leak(sawtooth(random, 52 * GIB, 4 * GIB, 7.0), 2.05 * GIB / 60, 180)
    training = Torch(leak, limit=USABLE - CONTEXT - 164 * MIB)
    attempts = Torch(Attempts(2.2 * GIB, 9 * GIB), work=in_bursts(random, 4, 9), limit=3 * GIB)
    whole_card = Held(
        until(48, lambda _: CONTEXT, lambda _: USABLE - 3.7 * GIB - LEFT_BY_TENSORFLOW),
        work=in_bursts(random, 12, 20),
        report=tensorflow(lambda age: (1.4 + (age // 60) % 3) * GIB),
    )
    need = until(45, lambda age: (6 + 0.8 * min(age, 40)) * GIB, lambda _: 6 * GIB)
    notebook = Cached(Torch(need, work=until(55, lambda _: 0.9, idle)))
    rank = Torch(lambda age: min(1.0, age / 30) * 48 * GIB, work=until(296, lambda _: 0.9, idle))
    server = Held(lambda age: min(1.0, age / 20) * 58 * GIB, work=bursts(5, 14, 0.6))
    return [
        Process(
            4120, {0: training}, begin=1, end=45 * 60, user="ada", command="train_llm.py",
            owner=Owner("slurm", "48213", slurm_job="48213"), agent=True,
        ),
        Process(
            4377, {1: attempts}, begin=6, user="carol", command="infer.py",
            owner=pod("ml-research", "infer-6d5f9"), agent=True,
        ),
        Process(
            4410, {1: whole_card}, begin=8, user="bob", command="evaluate.py", framework="tensorflow",
            owner=pod("ml-research", "tf-eval-7c9f"), agent=True,
        ),
        Process(
            4502, {2: notebook}, begin=2, user="dana", command="ipykernel_launcher",
            owner=Owner("user", "dana", notebook="dana/attention.ipynb"), agent=True,
        ),
        Process(
            4533, {2: Torch(sawtooth(random, 20 * GIB, 12 * GIB, 5.0), work=bursts(4, 12))},
            begin=4, user="root", command="train_ranker.py", owner=pod("ml-prod", "ranker-0"), agent=True,
        ),
        Process(
            4619, {3: rank}, begin=4, user="erin", command="pretrain.py",
            signs=("TORCHELASTIC_RUN_ID", "LOCAL_RANK"), fates={"orphaned": 300},
        ),
        Process(
            4701, {3: server}, begin=3, user="vllm", command="vllm", framework="vllm",
            owner=Owner("unit", "vllm.service", unit="vllm.service"),
        ),
    ]  # fmt: skip


def bursts(busy: float, period: float, level: float = 0.9) -> Demand:
    """Work for some seconds of every period; the rest shows what others on the device do."""
    return lambda age: level if age % period < busy else 0.0


def pod(namespace: str, name: str) -> Owner:
    return Owner("pod", f"{namespace}/{name}", namespace=namespace, pod=name, container="main")


@dataclass(slots=True)
class Cached:
    """A torch program whose cache is in whole segments: nearly all unused memory could be freed."""

    program: Torch

    def use(self, age: float) -> Use:
        """Return what the program uses, with a tenth of its cache in pieces."""
        use = self.program.use(age)
        torch = use.pools["torch"]
        cache = torch["reserved"] - torch["allocated"]
        pieces = {"inactive_split": cache // 10, "reclaimable": cache - cache // 10}
        return use._replace(pools={"torch": {**torch, **pieces}})


@dataclass(slots=True)
class Attempts:
    """Need little, and from minute 6 on every half minute more than there is room for, for a moment."""

    usual: float
    wanted: float

    def __call__(self, age: float) -> float:
        return self.wanted if age > 354 and age % 30 < INTERVAL else self.usual


ZERO = {"corrected": 0.0, "uncorrected": 0.0}
THROTTLES = (
    *("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting"),
)
CONTEXT_WATTS, WORK_WATTS = 119.0, 330.0
"""The draw of an H200 with a context and no work, and what work all the time adds: recorded ones drew 340 to
450 W at a third to two thirds of the time."""
OLDER_SHARE = 4 / 7
"""Of an A100's power to an H200's, by their limits."""
H200_CLOCKS = {"graphics": 1.98e9, "sm": 1.98e9, "memory": 3.201e9, "video": 1.545e9}
A100_CLOCKS = {"graphics": 1.41e9, "sm": 1.41e9, "memory": 1.593e9, "video": 1.275e9}
"""From NVIDIA's data sheet, not seen."""
COLD, WARMTH = 26.0, 0.05
"""A chip's temperature without power, and by how much each watt warms it: 32 °C at 120 W, 49 at 450."""
WARMING = 30.0
"""Seconds in which a chip comes two thirds of the way to the temperature of its power."""
RARELY = 10.0
"""Seconds after which the exporter reads again what changes slowly."""


@dataclass(slots=True)
class Sensors:
    """What one GPU says of itself, as recorded H200s did; power and warmth follow the work of programs."""

    random: Random
    older: bool
    chip: float = COLD + WARMTH * CONTEXT_WATTS
    memory: float = COLD + WARMTH * CONTEXT_WATTS
    joules: float = 2_000_000.0
    told: dict[str, HardwareValue] = field(default_factory=dict)

    def of(self, device: DeviceReading, now: float) -> DeviceReading:
        busy = (device.utilization or {}).get("gpu", 0.0)
        full = CONTEXT_WATTS + WORK_WATTS * busy + self.random.uniform(-3, 3) * (1 + 4 * busy)
        watts = round(full * (OLDER_SHARE if self.older else 1))
        for name, pace in (("chip", WARMING), ("memory", 2 * WARMING)):
            before = getattr(self, name)
            setattr(self, name, before + (COLD + WARMTH * watts - before) * INTERVAL / pace)
        self.joules += watts * INTERVAL
        if now % RARELY < INTERVAL:
            self.told = self._rare()
        traffic = {"pcie_transmit": 4e5 + 6e7 * busy, "pcie_receive": 2e5 + 3e8 * busy}
        hardware: dict[str, HardwareValue] = {
            "device_temperature_celsius": float(round(self.chip)),
            "device_power_watts": float(watts),
            "device_clock_hertz": A100_CLOCKS if self.older else H200_CLOCKS,
            "device_throttle_active": dict.fromkeys(THROTTLES, 0.0),
            "device_performance_state": 0.0,
            "device_ecc_errors_total": ZERO,
            "device_pcie_throughput_bytes_per_second": {
                name.removeprefix("pcie_"): figure for name, figure in traffic.items()
            },
            **self.told,
        }
        activity = None if device.activity is None else {**device.activity, **traffic}
        return replace(device, hardware=hardware, activity=activity)

    def _rare(self) -> dict[str, HardwareValue]:
        return {
            "device_power_limit_watts": 400.0 if self.older else 700.0,
            "device_pcie_link_generation": dict.fromkeys(("current", "max"), 4.0 if self.older else 5.0),
            "device_pcie_link_width": {"current": 16.0, "max": 16.0},
            "device_remapped_rows": ZERO,
            "device_row_remap_pending": 0.0,
            "device_row_remap_failed": 0.0,
            "device_bar1_memory_bytes": {
                "used": 1_703_936.0,
                "total": (128 if self.older else 256) * float(GIB),
            },
            "device_energy_joules_total": self.joules,
            "device_memory_temperature_celsius": float(round(self.memory)),
        }


VERSIONS = {"torch": "2.13.0", "tensorflow": "2.21.0"}
POLICIES = {"torch": "caching", "tensorflow": "preallocate"}
LEAKING_PID = 4120


@dataclass(slots=True)
class Agents:
    """The reports of the node's agents: as on any simulated host, with each program's newest failure."""

    ooms: dict[int, tuple[int, OutOfMemory]] = field(default_factory=dict)  # by pid: how many, the newest

    def of(self, reading: Reading) -> tuple[Agent, ...]:
        return tuple(
            each._replace(report=each.report and self._report(each, each.report)) for each in reading.agents
        )

    def _report(self, agent: Agent, report: AgentReport) -> AgentReport:
        frameworks, newest = tuple(map(_in_mib, report.frameworks)), self._last_oom(agent, report)
        given = {"interval": INTERVAL, "python": "3.12.3", "consents": ("reclaim", "snapshot")}
        return replace(report, **given, frameworks=frameworks, last_oom=newest)

    def _last_oom(self, agent: Agent, report: AgentReport) -> OutOfMemory | None:
        devices = [device for framework in report.frameworks for device in framework.devices]
        count = max((device.figures.get("ooms", 0) for device in devices), default=0)
        known, newest = self.ooms.get(agent.pid, (0, None))
        if count > known:
            verdict = "leaking" if agent.pid == LEAKING_PID else "hoarded"
            newest = OutOfMemory(agent.received or 0.0, "torch", 0, 7 * GIB, verdict, None)
            self.ooms[agent.pid] = (count, newest)
        return newest


def _in_mib(framework: FrameworkReport) -> FrameworkReport:
    """Return a framework's report with bytes in whole MiB, which compress well."""
    name = framework.framework
    bytes_ = {*POOL_FIGURES, *TORCH_FIGURES}
    figures = [
        {key: value // MIB * MIB for key, value in device.figures.items() if key in bytes_}
        for device in framework.devices
    ]
    pairs = zip(framework.devices, figures, strict=True)
    devices = tuple(replace(device, categories={}, **given) for device, given in pairs)
    return replace(framework, version=VERSIONS[name], policy=POLICIES[name], devices=devices)


def readings() -> Iterator[Reading]:
    random = Random(SEED)  # noqa: S311 it must give the same each time
    kinds = dict.fromkeys(range(4), (CARD, "NVIDIA H200")) | {OLDER: (OLDER_CARD, "NVIDIA A100-SXM4-80GB")}
    gpus = [
        Gpu(
            index, total=total, uuids=((0.0, f"GPU-5d000000-0000-4000-8000-00000000000{index}"),),
            counters=index != OLDER, name=name,
        )
        for index, (total, name) in kinds.items()
    ]  # fmt: skip
    host = Host(gpus, processes(random), random, INTERVAL, threads=True)
    agents = Agents()
    # Of its own: what a sensor says changes nothing that happens.
    sensors = [Sensors(Random(SEED + gpu.index), older=not gpu.counters) for gpu in gpus]  # noqa: S311 as above
    for number in range(round(MINUTES * 60 / INTERVAL)):
        now = number * INTERVAL
        reading = host.reading(now)
        devices = tuple(map(Sensors.of, sensors, reading.devices, repeat(now)))
        yield shift_times(replace(reading, agents=agents.of(reading), devices=devices), BEGIN - EPOCH)


def write(path: Path) -> int:
    lines = [encode(reading) for reading in readings()]
    text = encode_header(NOTE, IDLE_AFTER, simulated=True) + b"".join(lines)
    path.write_bytes(gzip.compress(text, 9, mtime=0))
    return len(lines)


def main() -> int:
    """Write the recording to the given file, or into the package; return the exit status."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_recording()
    count = write(path)
    print(f"{count} readings, simulated, in {path.name}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
