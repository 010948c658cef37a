"""A random host that changes at every step.

The stand-in tells it to the exporter, and what a page says is held against it.
"""

import random
from collections.abc import Mapping
from math import inf

from tests.support.host.driver import CLOCKS, show
from tests.support.host.model import EPOCH, MIB, Fate, Fault, Gpu, Host, Process
from tests.support.host.programs import Fixed
from tests.support.standin.layout import ANY_DEVICE, FUNCTIONS, MAX_DEVICES, StateLayout
from tests.support.standin.library import StandIn
from vramledger.model.reading import HardwareValue, ProcessFacts, ProcessRow

USERS = ("root", "ada", "grace")
BEGUN = 1_790_000_000.0
"""Unix time at the beginning."""

_FATES: tuple[tuple[Fate, ...], ...] = ((), (), (), ("stopped",), ("stuck",), ("zombie",))
_FIRST = StateLayout.controls.offset  # where the controls begin
_WORDS = StateLayout.controls.size // len(FUNCTIONS) // 8
_COLUMNS = MAX_DEVICES + 1


class Faults:
    """How many calls chaos has failed and spoiled, by function and device."""

    def __init__(self, standin: StandIn) -> None:
        """Count from now on."""
        self._view = memoryview(standin.map)[_FIRST : _FIRST + len(FUNCTIONS) * _WORDS * 8].cast("Q")
        self._before = self._view.tolist()
        self._now = self._before

    def step(self) -> None:
        """Start a step: earlier counts are forgotten."""
        self._before = self._now

    def look(self) -> None:
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
        return self._count(2, functions, device)

    def on(self, device: int) -> int:
        """Return how many calls of a device were failed or spoiled."""
        every = tuple(FUNCTIONS)
        return self.failed(every, device) + self.spoiled(every, device)


class World:
    """The host, drawn from one stream of numbers; ``reading`` is what a driver that never errs would say."""

    def __init__(self, standin: StandIn, seed: int, devices: int, now: float) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a scenario, no secret
        self._standin = standin
        self._told: set[tuple[int, int]] = set()
        self._counts = [{"energy": 5_000_000, "ecc": 3} for _ in range(devices)]
        self._lost: set[int] = set()
        self._ahead = BEGUN - EPOCH
        gpus = [
            Gpu(index, uuids=((-inf, f"GPU-{index:08d}-0000-0000-0000-000000000000"),))
            for index in range(devices)
        ]
        self.host = Host(gpus, [], random.Random(seed))  # noqa: S311
        self.step(now)

    def step(self, now: float) -> None:
        """Let a moment pass: every figure of every GPU changes, and some holders start and end."""
        draw, host = self._random, self.host
        host.faults = [
            Fault("clock", number=self._ahead),
            *(Fault("device lost", gpu=place) for place in sorted(self._lost)),
        ]
        host.processes = [each for each in host.processes if draw.random() >= 0.08]
        for place, gpu in enumerate(host.gpus):
            count = sum(place in each.places for each in host.processes)
            while count < 3 or (draw.random() < 0.2 and count < 12):
                host.processes.append(self._start(place, now))
                count += 1
            self._change(place, gpu)
        for process in host.processes:
            if draw.random() < 0.02 and "dead" not in process.fates:
                process.fates = dict.fromkeys(draw.choice(_FATES), now)
        self.reading = host.reading(now)
        show(self.reading, self._standin)

    def _start(self, place: int, now: float) -> Process:
        """Start a process, often with the pid of one that has ended."""
        draw = self._random
        taken = {each.pid for each in self.host.processes}
        pid = draw.randrange(100, 160)
        while pid in taken:
            pid = draw.randrange(100, 1000)
        return Process(
            pid, {place: Fixed(0)}, begin=now, user=draw.choice(USERS), kinds=draw.choice(("C", "G"))
        )

    def _change(self, place: int, gpu: Gpu) -> None:
        """Give a device new figures, its holders new bytes and two of them new work."""
        draw, counts = self._random, self._counts[place]
        programs = [each.places[place] for each in self.host.processes if place in each.places]
        for number, program in enumerate(programs):
            if isinstance(program, Fixed):
                program.work = draw.randrange(1, 100) / 100 if number < 2 else 0.0
                if not program.memory or draw.random() < 0.3:
                    program.memory = draw.randrange(1, 8000) * MIB + draw.randrange(4096)
        unattributed = draw.randrange(1, 64) * MIB
        gpu.unowned = lambda _: unattributed
        counts["energy"] += draw.randrange(1, 10_000)
        counts["ecc"] += draw.random() < 0.01
        temperature = draw.randrange(30, 90)
        used, memory = draw.randrange(1, 100), draw.randrange(1, 100)
        hardware: Mapping[str, HardwareValue] = {
            "device_temperature_celsius": float(temperature),
            "device_memory_temperature_celsius": float(temperature + 5),
            "device_power_watts": draw.randrange(70_000, 700_000) / 1000,
            "device_power_limit_watts": 700.0,
            "device_energy_joules_total": counts["energy"] / 1000,
            "device_encoder_utilization_ratio": used / 100,
            "device_decoder_utilization_ratio": memory / 100,
            "device_clock_hertz": {name: draw.randrange(200, 2000) * 1e6 for name in CLOCKS},
            "device_ecc_errors_total": {"corrected": counts["ecc"], "uncorrected": counts["ecc"] + 1},
            "device_pcie_throughput_bytes_per_second": {
                "transmit": used * 1024.0,
                "receive": memory * 1024.0,
            },
        }
        gpu.sensors = lambda _: hardware
        gpu.says["utilization"] = {"gpu": used / 100, "memory": memory / 100}

    def values(self, place: int) -> dict[str, float]:
        """Return the figures of a device in the units of the page, by family and label."""
        device = self.reading.devices[place]
        found: dict[str, float] = {}
        for name, value in device.hardware.items():
            labelled = value if isinstance(value, dict) else {"": value}
            found |= {name + label: each for label, each in labelled.items()}
        if device.utilization is not None and device.memory is not None:
            found["device_utilization_ratio"] = device.utilization["gpu"]
            found["device_memory_bandwidth_utilization_ratio"] = device.utilization["memory"]
            found["device_memory_total_bytes"] = device.memory.total
        return found

    def kill(self, now: float) -> None:
        """End a process whose memory the driver keeps."""
        self._random.choice(list(self.host.processes)).fates["dead"] = now

    def lose(self, place: int) -> None:
        """Let a device fall off the bus, or return."""
        self._lost ^= {place}

    def find_all(self) -> None:
        self._lost.clear()

    def step_clock(self, seconds: float) -> None:
        self._ahead += seconds

    def swap(self, first: int, second: int) -> None:
        """Swap the indices of two GPUs, as after a driver reload without one of them."""
        other = {first: second, second: first}
        gpus = list(self.host.gpus)
        gpus[first], gpus[second] = gpus[second], gpus[first]
        self._counts[first], self._counts[second] = self._counts[second], self._counts[first]
        gpus[first].index, gpus[second].index = first, second
        self.host.gpus = gpus
        for process in self.host.processes:
            process.places = {other.get(place, place): each for place, each in process.places.items()}
        self._standin.reload_driver()

    def facts(self, rows: tuple[ProcessRow, ...]) -> tuple[ProcessFacts, ...]:
        """Return the facts of new processes, and of those that are listed again."""
        processes = {(each.pid, each.start): each for each in self.host.processes}
        listed = {(row.pid, row.start) for row in rows}
        fresh, self._told = listed - self._told, listed
        return tuple(processes[each].facts(self.reading.monotonic) for each in sorted(fresh))

    def rows(self, pids: set[int]) -> tuple[tuple[ProcessRow, ...], dict[int, str]]:
        """Return what /proc shows of these pids, and which do not exist."""
        rows = tuple(row for row in self.reading.rows if row.pid in pids)
        return rows, dict.fromkeys(pids - {row.pid for row in rows}, "gone")
