"""Build the stand-in library, and control it while programs use it."""

import ctypes
import enum
import hashlib
import importlib.util
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.standin import layout
from tests.support.waiting import wait_until

MIB = 2**20
GIB = 2**30


class Code(enum.IntEnum):
    """NVML's return codes, for :meth:`StandIn.fail` and :attr:`StandIn.driver_error`."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


_PROCESS_LISTS = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]

OLD_DRIVER = (
    *(f"{name}_v3" for name in _PROCESS_LISTS),
    *(f"nvmlDeviceGet{name}" for name in (
        "MemoryInfo_v2", "RunningProcessDetailList", "ConfComputeMemSizeInfo", "CurrentClocksEventReasons",
        "TemperatureV", "NumaNodeId", "AddressingMode", "MemoryLimits_v1")),
    *(f"nvmlGpm{name}" for name in (
        "QueryDeviceSupport", "SampleAlloc", "SampleFree", "SampleGet", "MigSampleGet", "MetricsGet")),
)  # fmt: skip
"""For ``without``: the functions that a driver of the 470 series does not have."""

VERY_OLD_DRIVER = (*OLD_DRIVER, *(f"{name}_v2" for name in _PROCESS_LISTS))
"""For ``without``: only version 1 of the process lists is left."""

LEGACY_535_DRIVER = ("nvmlDeviceGetRunningProcessDetailList",)
"""For ``without``: a 535.43 driver, whose v3 process lists have longer entries."""

_DEVICE_US = {
    "UtilizationRates": 1, "PerformanceState": 1, "MinorNumber": 1, "Name": 1, "UUID": 1, "Temperature": 1,
    "CurrentClocksThrottleReasons": 1, "CurrentClocksEventReasons": 1, "TemperatureV": 1, "ClockInfo": 2,
    "TotalEccErrors": 2, "RemappedRows": 2, "PowerUsage": 5, "MemoryInfo": 5, "MemoryInfo_v2": 5,
    "BAR1MemoryInfo": 114, "MigMode": 114, "ProcessUtilization": 1850, "Samples": 1850, "FieldValues": 3050,
    "TotalEnergyConsumption": 3050, "PcieThroughput": 20800,
}  # fmt: skip

MEASURED_ON_H200: Mapping[str, int] = {
    **dict.fromkeys(("nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags"), 9600),
    **{f"nvmlDeviceGet{name}": microseconds for name, microseconds in _DEVICE_US.items()},
    **{f"{_PROCESS_LISTS[0]}{version}": 34 for version in ("", "_v2", "_v3")},
    **{f"{name}{version}": 12 for name in _PROCESS_LISTS[1:] for version in ("", "_v2", "_v3")},
    **dict.fromkeys(("nvmlGpmSampleGet", "nvmlGpmMigSampleGet"), 230),
    "nvmlGpmMetricsGet": 20,
}
"""Median µs of a call on one H200, driver 580.159.04; functions that are not named took about 1 µs."""


GPM_METRICS: Mapping[str, int] = {
    "graphics": 1, "sm": 2, "occupancy": 3, "integer": 4, "tensor": 5, "dram": 10, "fp64": 11, "fp32": 12,
    "fp16": 13, "pcie_transmit": 20, "pcie_receive": 21, "decoder": 30, "jpeg": 40, "optical_flow": 50,
    "nvlink_receive": 60, "nvlink_transmit": 61,
}  # fmt: skip
"""The metrics of GPM that the stand-in has, by NVML's number: percent, and MiB/s for the links."""

IDLE_GPM = dict.fromkeys(GPM_METRICS, 0.0) | {
    "graphics": 0.006, "dram": 0.0004, "pcie_transmit": 0.4, "pcie_receive": 0.2,
}  # fmt: skip
"""What an H200 says of a second in which nothing ran."""


def compiler() -> list[str]:
    """Return the command of a C compiler. Raises RuntimeError, which says what to install."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise RuntimeError("no C compiler for the stand-in NVML: install gcc or clang, or 'pip install ziglang'")


_compiled: dict[str, bytes] = {}
"""The libraries that this process has compiled: half a second each."""


def build(directory: Path, *, without: Iterable[str] = ()) -> Path:
    """Put ``libnvidia-ml.so.1``, without some functions, below ``directory``; return its path."""
    absent = sorted(set(without))
    flags = []
    # nvitop's rule, which our driver module shares: these two symbols show a 535.43 driver.
    if (
        "nvmlDeviceGetRunningProcessDetailList" in absent
        and "nvmlDeviceGetConfComputeMemSizeInfo" not in absent
    ):
        flags.append("-DLEGACY_PROCESS_LAYOUT")
    source = b"".join((layout.SOURCES / name).read_bytes() for name in ("state.h", "nvml.c"))
    key = hashlib.sha256(source + " ".join(absent).encode()).hexdigest()[:16]
    library = directory / f"standin-{key}" / "libnvidia-ml.so.1"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    fresh = library.with_name(f"building-{os.getpid()}.so")
    if key not in _compiled:
        _compile(fresh, absent, flags)
        _compiled[key] = fresh.read_bytes()
    fresh.write_bytes(_compiled[key])
    fresh.rename(library)
    return library


def _compile(fresh: Path, absent: list[str], flags: list[str]) -> None:
    if absent:
        symbols = fresh.with_name("symbols")
        symbols.write_text(f"{{ global: *; local: {'; '.join(absent)}; }};\n")
        flags.append(f"-Wl,--version-script={symbols}")
    command = [*compiler(), "-std=gnu11", "-O2", "-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1"]
    command += [*flags, "-o", str(fresh), str(layout.SOURCES / "nvml.c")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the stand-in NVML does not compile with {command[0]}:\n{result.stderr}")


class _Field:
    """A field of the state file as a number, or as text, of the structure that the owner calls ``place``."""

    def __init__(self, name: str, place: str) -> None:
        self._name, self._place = name, place

    def __get__(self, owner: object, kind: type) -> Any:  # noqa: ANN401  # ctypes fields have no static types
        value = getattr(getattr(owner, self._place), self._name)
        return value.decode() if isinstance(value, bytes) else value

    def __set__(self, owner: object, value: str | int) -> None:
        told = value.encode() if isinstance(value, str) else value
        setattr(getattr(owner, self._place), self._name, told)


class Unit:
    """A device with memory and holders: a whole GPU, or a MIG instance of it."""

    uuid, name = _Field("uuid", "_unit"), _Field("name", "_unit")
    numa_node = _Field("numa_node", "_unit")  # NOT_SUPPORTED_32 without such a node

    def __init__(self, raw: Any) -> None:  # noqa: ANN401  # ctypes fields have no static types
        self._unit = raw

    def set_memory(
        self,
        *,
        total: int | None = None,
        reserved: int | None = None,
        used: int = layout.DERIVED,
        unattributed: int = 0,
    ) -> None:
        """Set the bytes; ``used`` is the processes' sum plus ``unattributed`` unless it is given."""
        if total is not None:
            self._unit.total = total
        if reserved is not None:
            self._unit.reserved = reserved
        self._unit.used = used
        self._unit.unattributed = unattributed

    def place(self, start: int, size: int) -> None:
        """Say in which of the GPU's memory slices the instance begins, and how many it has."""
        self._unit.placement_start, self._unit.placement_size = start, size

    def set_processes(
        self,
        compute: Iterable[tuple[int, int | None]] = (),
        *,
        graphics: Iterable[tuple[int, int | None]] = (),
        mps: Iterable[tuple[int, int | None]] = (),
    ) -> None:
        """List these (pid, bytes), and no others; None is NVML's "not available"."""
        for name, processes in zip(layout.LISTS, (compute, graphics, mps), strict=True):
            self._fill(name, list(processes))

    def grow_processes(self, kind: str, processes: Iterable[tuple[int, int | None]]) -> None:
        """Also list these, from the moment on at which a call had too little room for the old ones."""
        raw = self._unit.lists[layout.LISTS.index(kind)]
        before = raw.count
        old = [(entry.pid, entry.bytes) for entry in raw.entries[:before]]
        self._fill(kind, [*old, *processes])
        raw.count_after_size_question = raw.count
        raw.count = before

    def set_activity(self, **levels: float | None) -> None:
        """Say from now on that the engines do this, in GPM's units; None is "not supported"."""
        for name, level in levels.items():
            self._unit.gpm_level[GPM_METRICS[name]] = -1.0 if level is None else level

    def do(self, **amounts: float) -> None:
        """Let the engines do something once: the next pair of samples has so much more."""
        for name, amount in amounts.items():
            self._unit.gpm_total[GPM_METRICS[name]] += amount

    def be_idle(self) -> None:
        """Let the engines do nothing from now on."""
        self._unit.gpm_level[:] = [-1.0] * layout.MAX_GPM_METRICS
        self.set_activity(**IDLE_GPM)

    def _fill(self, kind: str, processes: list[tuple[int, int | None]]) -> None:
        raw = self._unit.lists[layout.LISTS.index(kind)]
        raw.count_after_size_question = 0
        for entry, (pid, size) in zip(raw.entries, processes, strict=False):
            entry.pid, entry.bytes = pid, layout.NOT_AVAILABLE if size is None else size
        raw.count = len(processes)


class Device(Unit):
    lost = _Field("lost", "raw")  # it has fallen off the bus

    def __init__(self, raw: Any, index: int) -> None:  # noqa: ANN401
        super().__init__(raw.whole)
        self.raw = raw
        self.index = index

    def set(self, **values: Any) -> None:  # noqa: ANN401
        """Set fields of ``struct device`` (state.h), in NVML's own units: mW, MHz, percent, mJ, KiB/s."""
        for name, value in values.items():
            if name not in {field[0] for field in self.raw._fields_}:
                raise AttributeError(f"the stand-in's device has no field {name}")
            if isinstance(value, str):
                setattr(self.raw, name, value.encode())
            elif isinstance(value, (tuple, list)):
                getattr(self.raw, name)[:] = value
            else:
                setattr(self.raw, name, value)

    def limit(self, cgroup: str, *, soft: int = 0, hard: int = layout.NOT_AVAILABLE, used: int = 0) -> None:
        """Say what a cgroup, by its whole path, may take of the device, and what it has."""
        limits = self.raw.limits
        position = next(
            (n for n in range(self.raw.limit_count) if limits[n].cgroup.decode() == cgroup),
            self.raw.limit_count,
        )
        limits[position].cgroup = cgroup.encode()
        limits[position].soft, limits[position].hard, limits[position].used = soft, hard, used
        self.raw.limit_count = max(self.raw.limit_count, position + 1)

    def be_unified(self, standin: "StandIn") -> None:
        """Have no memory of its own, as GB10 and Jetson: no figures of memory, and no window to it."""
        for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetBAR1MemoryInfo"):
            standin.fail(name, Code.NOT_SUPPORTED, self.index)
        self.name = "NVIDIA GB10"

    def be_coherent(self, node: int) -> None:
        """Have memory that the operating system manages as a NUMA node, as GH200."""
        self.name, self.numa_node = "NVIDIA GH200 480GB", node
        self.set(addressing_mode=2)

    def busy(self, pid: int, sm: float = 0.4, memory: float = 0.1) -> None:
        """Report GPU work (ratios) for a pid at every call from now on."""
        self.idle(pid)
        self._add_sample(pid, 0, round(sm * 100), round(memory * 100))

    def idle(self, pid: int | None = None) -> None:
        """Report no more work for a pid, or for any."""
        samples = self.raw.samples
        kept = [bytes(sample) for sample in samples[: self.raw.sample_count] if pid not in (None, sample.pid)]
        self.raw.sample_count = len(kept)
        for position, content in enumerate(kept):
            ctypes.memmove(ctypes.byref(samples[position]), content, len(content))

    def raw_sample(self, pid: int, *, timestamp: int, sm: int) -> None:
        """Report this sample at every call exactly as given: µs since 1970 and percent."""
        self._add_sample(pid, timestamp, sm, 0)

    def _add_sample(self, pid: int, timestamp: int, sm: int, memory: int) -> None:
        sample = self.raw.samples[self.raw.sample_count]
        sample.pid, sample.timestamp, sample.sm, sample.memory = pid, timestamp, sm, memory
        sample.encoder = sample.decoder = 0
        self.raw.sample_count += 1

    def divide(self, *profiles: str) -> list[Unit]:
        """Turn MIG mode on with instances of these profiles (``1g.18gb``), GPU instance ids from 1.

        A compute instance (``1c.3g.71gb``) is in the GPU instance of the one before it.
        """
        self.undivide()
        instances = []
        number, compute, place = 0, 0, 0
        for position, profile in enumerate(profiles):
            slices, size = profile.rpartition("c.")[2].split("g.")
            raw = self.raw.instances[position]
            shared = "c." in profile and position > 0
            number, compute = (number, compute + 1) if shared else (number + 1, 0)
            raw.uuid = f"MIG-{self.index:08d}-0000-0000-0000-{position:012d}".encode()
            raw.name = f"{self.name} MIG {profile}".encode()
            raw.total, raw.reserved = int(size.removesuffix("gb")) * GIB, 16 * MIB
            raw.used, raw.unattributed = layout.DERIVED, 0
            raw.gpu_instance, raw.compute_instance = number, compute
            raw.gpu_slices = raw.compute_slices = int(slices)
            raw.present = 1
            raw.numa_node, raw.placement_size = layout.NOT_SUPPORTED_32, int(slices)
            if not shared:
                raw.placement_start = place
                place += int(slices)
            else:
                raw.placement_start = self.raw.instances[position - 1].placement_start
            unit = Unit(raw)
            unit.be_idle()
            unit.set_processes()
            instances.append(unit)
        self.raw.mig_mode = 1
        return instances

    def undivide(self) -> None:
        """Turn MIG mode off: no instances any more."""
        self.raw.mig_mode = 0
        for raw in self.raw.instances:
            raw.present = 0


class StandIn:
    """A state file and the library that answers from it; a context manager that ends every hang."""

    device_count = _Field("device_count", "state")
    driver_error = _Field("driver_error", "state")  # every function's answer while it is not 0 (a Code)

    def __init__(self, directory: Path, library: Path, *, devices: int = 1) -> None:
        self.library = library
        self.path = directory / "standin.state"
        with self.path.open("wb") as file:
            file.truncate(layout.STATE_SIZE)
        with self.path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), layout.STATE_SIZE)
        self.state: Any = layout.StateLayout.from_buffer(self.map)
        self.state.driver_version = b"580.159.04"
        self.state.cuda_version = 13000
        for index in range(layout.MAX_DEVICES):
            self._prepare(index)
        self.device_count = devices
        self.fail("nvmlDeviceGetFanSpeed", Code.NOT_SUPPORTED)  # an H200 has no fan of its own
        self.state.size = layout.STATE_SIZE
        self.state.version = layout.STATE_VERSION
        self.state.magic = layout.STATE_MAGIC

    def _prepare(self, index: int) -> None:
        """Make a device an idle H200, with measured figures."""
        device = self.device(index)
        device.uuid = f"GPU-{index:08d}-0000-0000-0000-000000000000"
        device.name = "NVIDIA H200"
        device.set_memory(total=143_771 * MIB, reserved=644_939_776)
        device.be_idle()
        device.numa_node = layout.NOT_SUPPORTED_32
        device.raw.whole.gpu_instance = device.raw.whole.compute_instance = 2**32 - 1
        device.set(
            bus_id=f"00000000:{index + 11:02X}:00.0", serial=f"165000000000{index:02d}", minor=index,
            throttle_reasons=1, energy=5_000_000, bar1_total=256 * GIB, bar1_used=2 * MIB, event_types=0xFF9F,
            temperature=31, memory_temperature=35, power=76_000, power_limit=700_000,
            clocks=(345, 345, 3201, 765), max_clocks=(1980, 1980, 3201, 1980),
            pcie_generation=5, pcie_max_generation=5, pcie_width=16, pcie_max_width=16, capability_major=9,
            persistence=1, gpm_supported=1, addressing_mode=0, virtualization_mode=0,
            gpm_last_metric=layout.MAX_GPM_METRICS - 1,
        )  # fmt: skip

    def __enter__(self) -> "StandIn":  # noqa: PYI034  # typing has Self from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def env(self) -> dict[str, str]:
        """Return the environment variables that give a child process this driver."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "VRAMLEDGER_STANDIN": str(self.path)}

    @contextmanager
    def in_this_process(self) -> Iterator[None]:
        """Give this process this driver, through pynvml, for the time of the context.

        pynvml keeps the first library that it loaded; so its own record of it is replaced.
        """
        import pynvml  # noqa: PLC0415  # not before a test wants it in its own process

        before = os.environ.get("VRAMLEDGER_STANDIN")
        os.environ["VRAMLEDGER_STANDIN"] = str(self.path)
        pynvml.nvmlLib = ctypes.CDLL(str(self.library))
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001  # or it calls the old library
        try:
            yield
        finally:
            self.release()
            pynvml.nvmlLib = None
            pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001  # or it calls the old library
            del os.environ["VRAMLEDGER_STANDIN"]
            if before is not None:
                os.environ["VRAMLEDGER_STANDIN"] = before

    def device(self, index: int) -> Device:
        """Return the GPU at an NVML index; one beyond :attr:`device_count` is prepared, not listed."""
        return Device(self.state.devices[index], index)

    def reload_driver(self) -> None:
        """Make every process that has initialised NVML uninitialised, as a driver reload does."""
        self.state.driver_epoch += 1

    def fail(self, function: str, code: int, device: int | None = None) -> None:
        """Make a function answer ``code``, for one device or for all; 0 repairs it."""
        self._control(function).error[layout.ANY_DEVICE if device is None else device] = code

    def hang(self, function: str, device: int | None = None) -> None:
        """Make calls of a function not return until :meth:`release`."""
        self._control(function).hang[layout.ANY_DEVICE if device is None else device] = 1

    def release(self, function: str | None = None) -> None:
        """Let hanging calls return, of one function or of all."""
        for name in layout.FUNCTIONS if function is None else [function]:
            self._control(name).hang[:] = [0] * (layout.ANY_DEVICE + 1)

    def latency(self, function: str, microseconds: int) -> None:
        """Make every call of a function take this long (below 50 µs on the CPU, above asleep)."""
        self._control(function).latency_us = microseconds

    def latencies(self) -> None:
        """Make all calls take as long as measured on a real card."""
        for name in layout.FUNCTIONS:
            self.latency(name, 0)
        for name, microseconds in MEASURED_ON_H200.items():
            self.latency(name, microseconds)

    def calls(self, function: str, device: int | None = None) -> int:
        """Return how often a function was called, on one device or altogether, hanging calls included."""
        counts = self._control(function).calls
        return int(sum(counts) if device is None else counts[device])

    def wait_for_call(self, function: str) -> None:
        wait_until(lambda: self.calls(function), f"a call of {function}")

    def chaos(  # noqa: PLR0913 - a share for each thing that goes wrong
        self,
        *,
        codes: Iterable[int] = (),
        fail: float = 0.0,  # share of the calls that fail
        spoil: float = 0.0,  # share of the calls that succeed with garbage, which is never zero
        grow: float = 0.0,  # share of the questions for a list that say it has grown
        slow: float = 0.0,  # share of the calls that take ``slow_us`` microseconds
        slow_us: int = 0,
        seed: int | None = None,  # of the random numbers; None continues with the last ones
    ) -> None:
        """Let calls fail by chance from now on, each code as likely as another; without arguments none do."""
        chaos = self.state.chaos
        if seed is not None:
            chaos.random = seed
        chaos.codes = sum(1 << (63 if code == Code.UNKNOWN else code) for code in set(codes))
        for name, share in (("fail", fail), ("spoil", spoil), ("grow", grow), ("slow", slow)):
            setattr(chaos, name, round(share * 65536))
        chaos.slow_us = slow_us

    @property
    def injected(self) -> int:
        """How many faults :meth:`chaos` has injected so far."""
        return int(self.state.chaos.injected)

    def xid(self, number: int, device: int = 0, *, event_type: int = 8) -> None:
        """Queue an XID error event of a device."""
        position = self.state.event_count
        event = self.state.events[position % layout.MAX_EVENTS]
        event.type, event.data, event.device = event_type, number, device
        event.gpu_instance = event.compute_instance = 2**32 - 1
        self.state.event_count = position + 1

    def _control(self, function: str) -> Any:  # noqa: ANN401
        return self.state.controls[layout.FUNCTIONS[function]]
