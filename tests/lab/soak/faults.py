"""Millions of faults, one after the other: the real driver module over the stand-in, tracker, and page.

Each step changes figures, calls, lists, GPUs, processes or clocks. Then the page is held against the host:
what is there must be true and of now, and what is missing must have a fault that explains it.
"""

import random
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.lab.soak.table import Row
from tests.lab.soak.world import Faults, World
from tests.support.host.model import TICKS
from tests.support.standin.library import Code, StandIn, build
from vramledger.accounting.devices import UNNAMED
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import COLLECTORS
from vramledger.errors import DriverError
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.model.reading import DeviceReading, Reading, decode, encode
from vramledger.readers.nvml.calls import DRIVER_GONE, LOST, UNSUPPORTED
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver
from vramledger.readers.nvml.hardware import SLOW_INTERVAL
from vramledger.sampling.device_threads import failed_collectors

DEVICES = 4
_STATES = frozenset("dead zombie stuck orphaned stopped idle active unknown".split())
_PARTS = _STATES | {"free", "unattributed"}
_COLLECTORS = frozenset(COLLECTORS) - {"agent", "reservations", "hidden", "xid", "exporter"}

_LISTS = tuple(
    f"nvmlDeviceGet{kind}RunningProcesses{version}"
    for kind in ("Compute", "Graphics", "MPSCompute")
    for version in ("", "_v2", "_v3")
)
_MEMORY = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
_TEMPERATURE = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "device_temperature_celsius": _TEMPERATURE,
    "device_memory_temperature_celsius": ("nvmlDeviceGetFieldValues",),
    "device_power_watts": ("nvmlDeviceGetPowerUsage",),
    "device_power_limit_watts": ("nvmlDeviceGetEnforcedPowerLimit",),
    "device_energy_joules_total": ("nvmlDeviceGetTotalEnergyConsumption",),
    "device_utilization_ratio": ("nvmlDeviceGetUtilizationRates",),
    "device_memory_bandwidth_utilization_ratio": ("nvmlDeviceGetUtilizationRates",),
    "device_encoder_utilization_ratio": ("nvmlDeviceGetEncoderUtilization",),
    "device_decoder_utilization_ratio": ("nvmlDeviceGetDecoderUtilization",),
    "device_clock_hertz": ("nvmlDeviceGetClockInfo",),
    "device_ecc_errors_total": ("nvmlDeviceGetTotalEccErrors",),
    "device_pcie_throughput_bytes_per_second": ("nvmlDeviceGetPcieThroughput",),
    "device_memory_total_bytes": _MEMORY,
}
"""The query of each figure."""

_SLOW = frozenset(
    "device_memory_temperature_celsius device_power_limit_watts device_energy_joules_total"
    " device_pcie_throughput_bytes_per_second".split()
)
"""Figures that are read every 10 s: they may be as old as that."""

_SAY_WHY = frozenset({"vramledger_device_up", "vramledger_device_asleep", "vramledger_device_reset_required"})
"""The families of a device that is down: that it is, and why."""
_ZERO = re.compile(
    "vramledger_device_(temperature|memory_temperature|power|energy|utilization|clock|ecc|encoder|decoder"
    "|memory_total|memory_bandwidth|pcie_throughput)|vramledger_process_memory"
)
"""Figures that are never zero on this host."""


class ViolationError(AssertionError):
    """A page that is not true."""


class Weather(NamedTuple):
    """A kind of fault, and how often it is drawn."""

    name: str
    often: int
    fail: float = 0.0
    spoil: float = 0.0
    grow: float = 0.0
    codes: frozenset[int] = frozenset()
    lose: float = 0.0
    swap: float = 0.0
    kill: float = 0.0
    clock: float = 0.0


_EVERY = frozenset((*range(1, 30), int(Code.UNKNOWN)))
_SOFT = _EVERY & (UNSUPPORTED | {6, 7})
_PLAIN = _EVERY - DRIVER_GONE - LOST - UNSUPPORTED

WEATHERS = (
    Weather("errors", 4, fail=0.3, codes=_PLAIN),
    Weather("unsupported", 1, fail=0.3, codes=_SOFT),
    Weather("garbage", 4, spoil=0.5),
    Weather("lists that grow", 1, grow=0.5),
    Weather("all at once", 6, fail=0.3, spoil=0.4, grow=0.3, codes=_PLAIN | _SOFT, kill=0.1, clock=0.1),
    Weather("nothing answers", 1, fail=1.0, codes=_PLAIN),
    Weather("any code", 1, fail=0.02, codes=_EVERY),
    Weather("GPUs are lost", 1, lose=0.3, spoil=0.1),
    Weather("drivers are reloaded", 1, swap=0.2, fail=0.05, codes=_PLAIN),
    Weather("clocks step", 1, clock=0.5, kill=0.2),
)

_SERIES = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@cache
def _parse(series: str) -> tuple[str, dict[str, str]]:
    name, _, labels = series.partition("{")
    return name, dict(_SERIES.findall(labels))


@dataclass
class Tally:
    steps: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)  # calls failed or spoiled, and all else, by weather
    dark: int = 0
    restarts: int = 0

    @property
    def injected(self) -> int:
        return self.faults.total()

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the table; a violation would have ended the run."""
        yield Row("faults injected", f"{self.injected:,}", good=None)
        for name, count in self.faults.most_common():
            yield Row(f"of these: {name}", f"{count:,}", good=None)
        rate = self.steps / max(self.seconds, 1e-9)
        yield Row("samples", f"{self.steps:,} of {DEVICES} GPUs ({rate:.0f} a second)", good=None)
        yield Row("samples without any data", f"{self.dark:,}", good=None)
        yield Row("samplers that ended", f"{self.restarts:,}", good=None)
        yield Row("invariants violated", "0", good=True)


class Run:
    """One seeded run over an open stand-in that this process uses."""

    def __init__(self, standin: StandIn, seed: int) -> None:
        self._standin = standin
        self._random = random.Random(seed)  # noqa: S311 - a scenario, no secret
        self._faults = Faults(standin)
        self._tracker = HoldingTracker(idle_after=30, interval=10.0)
        self._want = ScrapeRequest(_COLLECTORS)
        self._exposition = Exposition(100, lambda: None)
        self._driver: Driver | None = None
        self._readers: list[DeviceReader] = []
        self._monotonic = 1000.0
        self._world = World(standin, seed, DEVICES, self._monotonic)
        self._pace = 1.0
        self._counters: dict[str, float] = {}
        self._old: deque[dict[str, dict[str, float]]] = deque(maxlen=12)
        self._failures: Counter[str] = Counter()
        self._page: dict[str, float] = {}
        self._hard = False
        self._soft = float("-inf")
        self.tally = Tally()
        for index in range(DEVICES):  # what the world draws comes from the calls for GPUs before Hopper
            standin.device(index).set(gpm_supported=0)
        standin.chaos(seed=seed)

    def go(self, faults: int) -> Tally:
        """Run until this number of faults was injected. Raises ViolationError at a page that is not true."""
        began = time.monotonic()
        while self.tally.injected < faults:
            (weather,) = self._random.choices(WEATHERS, [each.often for each in WEATHERS])
            self._pace = self._random.choice((1.0, 10.0))
            self._blow(weather)
            self._hard = weather.codes <= _PLAIN and not weather.spoil and self._monotonic >= self._soft
            for _ in range(self._random.randrange(3, 25)):
                self._happen(weather)
                self._step(weather)
            if weather.spoil or not weather.codes.isdisjoint(UNSUPPORTED):
                self._soft = self._monotonic + SLOW_INTERVAL
            self._standin.chaos()
            self._world.find_all()
            self._step(None)  # one sampling period after the end of all faults, everything is right
            self._step(None)
        self.tally.seconds = time.monotonic() - began
        return self.tally

    def _blow(self, weather: Weather) -> None:
        self._standin.chaos(codes=weather.codes, fail=weather.fail, spoil=weather.spoil, grow=weather.grow)

    def _happen(self, weather: Weather) -> None:
        """Inject faults that are not answers of calls."""
        draw = self._random
        if draw.random() < weather.lose:
            self._world.lose(draw.randrange(DEVICES))
            self.tally.faults[weather.name] += 1
        if draw.random() < weather.swap:
            self._world.swap(*draw.sample(range(DEVICES), 2))
            self.tally.faults[weather.name] += 1
        if draw.random() < weather.kill:
            self._world.kill(self._monotonic)
            self.tally.faults[weather.name] += 1
        if draw.random() < weather.clock:
            self._world.step_clock(draw.choice((-86400.0, -3600.0, -1.0, 1.0, 3600.0, 86400.0)))
            self.tally.faults[weather.name] += 1

    def _step(self, weather: Weather | None) -> None:
        self._monotonic += self._pace
        self._world.step(self._monotonic)
        wall = self._world.reading.time
        injected = self._standin.injected
        self._faults.step()
        reading = decode(encode(self._read(wall)))
        self._faults.look()
        if weather is not None:
            self.tally.faults[weather.name] += self._standin.injected - injected
        self.tally.steps += 1
        snapshot = self._tracker.update(reading)
        text = self._exposition.render(snapshot, self._want).decode()
        page: dict[str, float] = {}
        for line in text.splitlines():
            if line[0] != "#":
                series, _, value = line.rpartition(" ")
                if series in page:
                    self._violated(f"{series} is there twice")
                page[series] = float(value)
        self._page = page
        devices = enumerate(self._world.reading.devices)
        self._old.append({each.uuid: self._world.values(place) for place, each in devices})
        self._check(reading, clean=weather is None)

    # --- what a sampler does -------------------------------------------------------------------------

    def _read(self, wall: float) -> Reading:
        """Take a sample as the sampler does, without its threads; one that ends is started again."""
        try:
            if self._driver is None:
                self._driver = Driver.open()
                self._readers = self._driver.readers(_COLLECTORS)
                for reader in self._readers:
                    reader.open()
            devices: list[DeviceReading] = []
            for reader in self._readers:
                devices.extend(reader.read(wall, self._monotonic))
        except DriverError as error:
            if self._driver is not None:
                self._driver.close()
            self._driver = None
            self.tally.restarts += 1
            return Reading(wall, self._monotonic, failure=(error.reason, str(error)))
        pids = {entry.pid for device in devices for entry in device.processes or ()}
        rows, unseen = self._world.rows(pids)
        failed = set(failed_collectors(devices))
        return Reading(
            wall, self._monotonic, boot_time=self._world.reading.boot_time, ticks=TICKS,
            host_pid_namespace=True, devices=tuple(devices), rows=rows, unseen=unseen,
            facts=self._world.facts(rows),
            collectors={name: (name not in failed, 0.0) for name in _COLLECTORS},
        )  # fmt: skip

    # --- the promises of a page ----------------------------------------------------------------------

    def _violated(self, what: str) -> None:
        message = f"step {self.tally.steps}: {what}"
        raise ViolationError(message)

    def _check(self, reading: Reading, *, clean: bool) -> None:
        page = self._page
        up = page.get("vramledger_up")
        reason = self._history_failure(reading)
        if up != (reason is None):
            self._violated(f"up is {up}, the sample's failure {reason}")
        if reason is not None:
            self._failures[reason] += 1
            self.tally.dark += 1
        for name, count in self._failures.items():
            if page[f'vramledger_sample_failures_total{{reason="{name}"}}'] != count:
                self._violated(f"failures by {name}: not {count}")
        if page["vramledger_sample_timestamp_seconds"] != reading.time:
            self._violated("the time is not that of the sample")
        self._check_series()
        self._check_counters()
        if clean and reason is not None:
            self._violated(f"no data one sample after all faults have ended: {reading.failure}")
        for index, device in enumerate(self._world.reading.devices):
            self._check_gpu(index, device.uuid, up=bool(up), clean=clean)
        if clean and any(value != 1 for series, value in page.items() if "collector_success" in series):
            self._violated("a collector fails without a fault")

    def _history_failure(self, reading: Reading) -> str | None:
        """Return why there must be no data at all: the sample's failure, or no GPU that answered."""
        if reading.failure is not None:
            return reading.failure[0]
        if all(device.error is not None for device in reading.devices):
            return "driver-lost"
        return None

    def _check_series(self) -> None:
        up = {
            _parse(series)[1]["uuid"]: value
            for series, value in self._page.items()
            if series.startswith("vramledger_device_up{")
        }
        known = {each.uuid for each in self._world.reading.devices}
        unnamed = {uuid for uuid, value in up.items() if uuid.startswith(UNNAMED) and not value}
        if up.keys() - known - unnamed:
            self._violated(f"devices that do not exist: {up.keys() - known}")
        for series, value in self._page.items():
            if value < 0 or value - value:
                self._violated(f"{series} is {value}")
            if not value and _ZERO.match(series):
                self._violated(f"{series} is zero, which it never was")
            name, labels = _parse(series)
            uuid = labels.get("uuid")
            if uuid is not None and name not in _SAY_WHY and not up.get(uuid):
                self._violated(f"{series} of a device that is down")

    def _check_counters(self) -> None:
        for series, value in self._page.items():
            if series.partition("{")[0].endswith("_total"):
                if value < self._counters.get(series, 0.0):
                    self._violated(f"{series} went back from {self._counters[series]} to {value}")
                self._counters[series] = value

    def _check_gpu(self, index: int, uuid: str, *, up: bool, clean: bool) -> None:  # noqa: C901 - a promise each
        place = f'gpu="{index}",uuid="{uuid}"'
        alive = self._page.get(f"vramledger_device_up{{{place}}}")
        if clean and alive != 1:
            self._violated(f"GPU {index} is {alive} one sample after all faults have ended")
        if not alive:
            if up and alive is None and not self._faults.on(index):
                self._violated(f"GPU {index} is missing from the page")
            if up and not self._standin.device(index).lost and not self._faults.on(index):
                self._violated(f"GPU {index} is down without a fault")
            return
        truth = self._world.values(index)
        for family, functions in _FUNCTIONS.items():
            spoiled = self._faults.spoiled(functions, index)
            for key, true in truth.items():
                if not key.startswith(family):
                    continue
                label = key.removeprefix(family)
                series = _series(family, label, index, uuid)
                value = self._page.get(series)
                if value is None:
                    # What a GPU says not to have is asked for again at its pace only.
                    if clean and not (family in _SLOW and self._monotonic < self._soft):
                        self._violated(f"{series} is missing one sample after all faults have ended")
                elif (
                    value != true
                    and not spoiled
                    and not (family in _SLOW and value in {old.get(uuid, {}).get(key) for old in self._old})
                ):
                    self._violated(f"{series} is {value}, not {true}, and nobody spoiled it")
                elif spoiled and value != true and family not in _SLOW:
                    self._violated(f"{series} is {value}, which is garbage; it is {true}")
        self._check_book(index, uuid, truth, clean=clean)
        if self._hard:
            self._check_health(index, uuid, truth)

    def _check_health(self, index: int, uuid: str, truth: Mapping[str, float]) -> None:
        """Compare the collectors' health with the missing figures, unless something is only unsupported."""
        for family in _FUNCTIONS:
            labels = [key.removeprefix(family) for key in truth if key.startswith(family)]
            there = [_series(family, label, index, uuid) in self._page for label in labels]
            name = "energy" if "energy" in family or "memory_temp" in family else "hardware"
            name = "pcie" if "pcie" in family else name
            if not all(there) and self._page[f'vramledger_collector_success{{collector="{name}"}}']:
                self._violated(f"{family} of GPU {index} is missing and {name} says that all is well")

    def _check_book(self, index: int, uuid: str, truth: Mapping[str, float], *, clean: bool) -> None:
        parts = {
            labels["state"]: value
            for series, value in self._page.items()
            if series.startswith("vramledger_device_memory_bytes{")
            for labels in (_parse(series)[1],)
            if labels["uuid"] == uuid
        }
        total = self._page.get(_series("device_memory_total_bytes", "", index, uuid))
        if total is None:  # a missing list of processes is not a failure on a device that never had one
            asked = (*_LISTS, *_MEMORY)
            if clean or not (self._faults.failed(asked, index) or self._faults.spoiled(_MEMORY, index)):
                self._violated(f"GPU {index} is up and has no book")
            return
        balanced = sum(map(int, parts.values())) == total == truth["device_memory_total_bytes"]
        if parts.keys() - {"driver_reserved"} != _PARTS or not balanced:
            self._violated(f"the book of GPU {index} does not balance: {parts} of {total}")
        processes = self._world.reading.devices[index].processes
        holders = {entry.pid: entry.memory for entry in processes or ()}
        shown = {
            int(labels["pid"]): value
            for series, value in self._page.items()
            if series.startswith("vramledger_process_memory_bytes{")
            for labels in (_parse(series)[1],)
            if labels["uuid"] == uuid
        }
        if shown != holders:
            wrong = {pid: size for pid, size in shown.items() if holders.get(pid) != size}
            if wrong:
                self._violated(f"GPU {index} lists {wrong}, which nobody holds")
            if clean or not self._faults.on(index):
                self._violated(f"GPU {index} lists {shown.keys()}, not {holders.keys()}")


def _series(family: str, label: str, index: int, uuid: str) -> str:
    labels = {"gpu": str(index), "uuid": uuid}
    if label:
        name = {"device_clock_hertz": "clock", "device_ecc_errors_total": "type"}.get(family, "direction")
        labels[name] = label
    pairs = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"vramledger_{family}{{{pairs}}}"


def inject(directory: Path, *, faults: int, seed: int) -> Tally:
    """Inject this number of faults. Raises ViolationError where an invariant was violated."""
    with StandIn(directory, build(directory), devices=DEVICES) as standin, standin.in_this_process():
        return Run(standin, seed).go(faults)
