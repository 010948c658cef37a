"""A host as it really is: GPUs, their holders and their figures, which change at every step.

The stand-in tells them to the exporter, and what a page says is held against them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.support.standin.layout import ANY_DEVICE, FUNCTIONS, MAX_DEVICES, StateLayout
from tests.support.standin.library import MIB, StandIn
from vramledger.model.reading import ProcessFacts, ProcessRow

TOTAL = 143_771 * MIB
TICKS = 100
BOOT = 1_790_000_000.0
USERS = (0, 1000, 1001)

_FIRST = StateLayout.controls.offset  # where the controls begin
_WORDS = StateLayout.controls.size // len(FUNCTIONS) // 8
_COLUMNS = MAX_DEVICES + 1


@dataclass
class Process:
    """A process of this host."""

    pid: int
    start: int
    state: str
    user: int

    @property
    def row(self) -> ProcessRow:
        """What /proc says."""
        return ProcessRow(self.pid, self.start, self.state, 1, self.pid, self.pid, 0, 1)

    @property
    def facts(self) -> ProcessFacts:
        """What /proc says of it, once."""
        return ProcessFacts(
            self.pid, self.start, uid=self.user, user=f"user-{self.user}", comm="train", command="train.py"
        )


@dataclass
class Gpu:
    """A GPU with the values that it has now, in the units of the page."""

    uuid: str
    holders: dict[int, int] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    energy: int = 5_000_000
    ecc: int = 3


class Faults:
    """How many calls chaos has failed and spoiled, by function and device."""

    def __init__(self, standin: StandIn) -> None:
        """Count from now on."""
        self._view = memoryview(standin.map)[_FIRST : _FIRST + len(FUNCTIONS) * _WORDS * 8].cast("Q")
        self._before = self._view.tolist()
        self._now = self._before

    def step(self) -> None:
        """Begin a step: what was counted before it is forgotten."""
        self._before = self._now

    def look(self) -> None:
        """Read what this step has counted so far."""
        self._now = self._view.tolist()

    def _count(self, kind: int, functions: tuple[str, ...], device: int) -> int:
        count = 0
        for name in functions:
            base = FUNCTIONS[name] * _WORDS + kind * _COLUMNS
            for column in (device, ANY_DEVICE):
                count += self._now[base + column] - self._before[base + column]
        return count

    def failed(self, functions: tuple[str, ...], device: int) -> int:
        """Return how many calls of these functions, of this device or of none, were failed in this step."""
        return self._count(1, functions, device)

    def spoiled(self, functions: tuple[str, ...], device: int) -> int:
        """Return how many had their answer spoiled."""
        return self._count(2, functions, device)

    def on(self, device: int) -> int:
        """Return how many calls of a device were failed or spoiled."""
        every = tuple(FUNCTIONS)
        return self.failed(every, device) + self.spoiled(every, device)


class World:
    """All of it, drawn from one stream of numbers."""

    def __init__(self, standin: StandIn, seed: int, devices: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a scenario, no secret
        self.standin = standin
        self.processes: dict[int, Process] = {}
        self._started = 0
        self._told: set[tuple[int, int]] = set()
        self.gpus = [Gpu(f"GPU-{index:08d}-0000-0000-0000-000000000000") for index in range(devices)]
        for index in range(devices):
            self._show(index)
        self.step(0.0)

    def step(self, wall: float) -> None:
        """Let a moment pass: every figure of every GPU changes, and some holders come and go."""
        draw = self._random
        for index, gpu in enumerate(self.gpus):
            for pid in [pid for pid in gpu.holders if draw.random() < 0.08]:
                del gpu.holders[pid]
            while len(gpu.holders) < 3 or (draw.random() < 0.2 and len(gpu.holders) < 12):
                gpu.holders[self._process().pid] = 0
            for pid in gpu.holders:
                if not gpu.holders[pid] or draw.random() < 0.3:
                    gpu.holders[pid] = draw.randrange(1, 8000) * MIB + draw.randrange(4096)
            self._show(index, wall)
        held = {pid for gpu in self.gpus for pid in gpu.holders}
        for pid in [pid for pid in self.processes if pid not in held]:
            del self.processes[pid]
        for process in self.processes.values():
            if draw.random() < 0.02:
                process.state = draw.choice("RSSSTDZ")

    def _process(self) -> Process:
        """Start a process, often with the pid of one that has ended."""
        draw = self._random
        pid = draw.randrange(100, 160)
        while pid in self.processes:
            pid = draw.randrange(100, 1000)
        self._started += draw.randrange(1, 50)
        process = self.processes[pid] = Process(pid, self._started, "S", draw.choice(USERS))
        return process

    def kill(self) -> None:
        """End a process whose memory the driver keeps."""
        living = [pid for pid, process in self.processes.items() if process.state != "X"]
        if living:
            self.processes[self._random.choice(living)].state = "X"

    def _show(self, index: int, wall: float = 0.0) -> None:
        draw, gpu, device = self._random, self.gpus[index], self.standin.device(index)
        gpu.energy += draw.randrange(1, 10_000)
        gpu.ecc += draw.random() < 0.01
        temperature, power = draw.randrange(30, 90), draw.randrange(70_000, 700_000)
        clocks = [draw.randrange(200, 2000) for _ in range(4)]
        used, memory = draw.randrange(1, 100), draw.randrange(1, 100)
        device.uuid = gpu.uuid
        device.set_processes(list(gpu.holders.items())[::2], graphics=list(gpu.holders.items())[1::2])
        device.set_memory(unattributed=draw.randrange(1, 64) * MIB)
        device.set(
            temperature=temperature,
            memory_temperature=temperature + 5,
            power=power,
            clocks=clocks,
            energy=gpu.energy,
            ecc=(gpu.ecc, gpu.ecc + 1),
            gpu_utilization=used,
            memory_utilization=memory,
            encoder_utilization=used,
            decoder_utilization=memory,
            pcie_transmit=used,
            pcie_receive=memory,
        )
        device.idle()
        for pid in list(gpu.holders)[:2]:
            device.raw_sample(pid, timestamp=int(wall * 1e6), sm=draw.randrange(1, 100))
        names = ("graphics", "sm", "memory", "video")
        gpu.values = {
            "device_temperature_celsius": temperature,
            "device_memory_temperature_celsius": temperature + 5,
            "device_power_watts": power / 1000,
            "device_power_limit_watts": 700.0,
            "device_energy_joules_total": gpu.energy / 1000,
            "device_utilization_ratio": used / 100,
            "device_memory_bandwidth_utilization_ratio": memory / 100,
            "device_encoder_utilization_ratio": used / 100,
            "device_decoder_utilization_ratio": memory / 100,
            **{f"device_clock_hertz{name}": clock * 1e6 for name, clock in zip(names, clocks, strict=True)},
            "device_ecc_errors_totalcorrected": gpu.ecc,
            "device_ecc_errors_totaluncorrected": gpu.ecc + 1,
            "device_pcie_throughput_bytes_per_secondtransmit": used * 1024,
            "device_pcie_throughput_bytes_per_secondreceive": memory * 1024,
            "device_memory_total_bytes": TOTAL,
        }

    def swap(self, first: int, second: int) -> None:
        """Have two GPUs return under each other's indices, as after a driver reload without one of them."""
        self.gpus[first], self.gpus[second] = self.gpus[second], self.gpus[first]
        self.standin.reload_driver()

    def facts(self, rows: tuple[ProcessRow, ...]) -> tuple[ProcessFacts, ...]:
        """Return the facts of those that are told for the first time."""
        fresh = [self.processes[row.pid] for row in rows if (row.pid, row.start) not in self._told]
        self._told = {(row.pid, row.start) for row in rows}
        return tuple(process.facts for process in fresh)

    def rows(self, pids: set[int]) -> tuple[tuple[ProcessRow, ...], dict[int, str]]:
        """Return what /proc says of these pids, and who is not there."""
        living = {pid for pid in pids if pid in self.processes and self.processes[pid].state != "X"}
        return tuple(self.processes[pid].row for pid in sorted(living)), dict.fromkeys(pids - living, "gone")
