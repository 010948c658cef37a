"""Declare the hardware families: one row for each metric, with its collector, its pace and its query.

pynvml is passed in, so that driver.py alone names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from vramledger.model.reading import HardwareValue
from vramledger.readers.nvml import calls
from vramledger.readers.nvml.calls import Handle, Nvml

SLOW_INTERVAL: Final = 10.0
"""Seconds between two readings of what is expensive or hardly changes."""

HardwareQuery = Callable[[Nvml, Handle], "HardwareValue | None"]
"""Read one family; raise NVMLError as the driver does."""


def _number_reader(  # noqa: PLR0913 - a word for each quirk
    name: str,
    *arguments: int,
    maximum: int,
    position: int | None = None,
    scale: float = 1.0,
    per: int = 1,
    none: int = calls.NONE_32,
) -> HardwareQuery:
    """Read a number (at ``position``, where the answer is a list), in base units.

    That is times ``scale``, or divided by ``per``: 57 % is 0.57, where times 0.01 gives 0.5700000000000001.
    More than ``maximum``, in NVML's unit, is garbage and does not count as an answer: a counter would seem to
    restart.
    """

    def read(nvml: Nvml, handle: Handle) -> float | None:
        value = calls.call_function(nvml, name, handle, *arguments)
        if position is not None and isinstance(value, (list, tuple)):
            value = value[position]
        if not isinstance(value, int) or value == none:
            return None
        if not 0 <= value <= maximum:
            raise nvml.NVMLError(calls.UNKNOWN)
        return value * scale / per

    return read


def _labelled_reader(**readers: HardwareQuery) -> HardwareQuery:
    def read(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
        values: dict[str, float] = {}
        for label, each in readers.items():
            try:
                value = each(nvml, handle)
            except nvml.NVMLError as error:
                if error.value not in calls.UNSUPPORTED:
                    raise
                continue
            if isinstance(value, float):
                values[label] = value
        return values or None

    return read


_THROTTLE_REASONS: Final = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
"""NVML's clock event reasons, by bit; unknown bits of a newer driver are left out."""

_MAX_REASON_BITS: Final = 48
RECOVERY_ACTIONS: Final = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
"""What the driver says that a GPU needs after an error, by NVML's number. From documentation, not seen."""


def _read_throttle_reasons(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
    try:
        bits = calls.call_function(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    except nvml.NVMLError as error:
        if error.value not in calls.NO_SUCH_FUNCTION:
            raise
        bits = calls.call_function(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle
        )  # its name before 535
    if not isinstance(bits, int) or bits == calls.NONE_64:
        return None
    if bits >> _MAX_REASON_BITS:
        raise nvml.NVMLError(calls.UNKNOWN)
    return {reason: float(bits >> bit & 1) for bit, reason in enumerate(_THROTTLE_REASONS)}


_UNKNOWN_PERFORMANCE_STATE: Final = 32


def _read_bar1(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
    memory = nvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    if calls.NONE_64 in (memory.bar1Used, memory.bar1Total):
        return None
    if not memory.bar1Used <= memory.bar1Total <= calls.MAX_BYTES:
        raise nvml.NVMLError(calls.UNKNOWN)
    return {"used": float(memory.bar1Used), "total": float(memory.bar1Total)}


_CELSIUS: Final = 200
_MILLIWATTS: Final = 10**8
_MEGAHERTZ: Final = 10**5
_PERCENT: Final = 100
_MILLIJOULES: Final = 10**17
"""The energy of 1 kW for 3,000 years; a higher figure is garbage."""
_ERRORS: Final = 2**50
_ROWS: Final = 2**24
_LANES: Final = 1024
_KILOBYTES: Final = 10**9
"""The limit above which a figure is garbage; no GPU of the next decades comes near it."""

_FIELD_TYPES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The names of the members of a field's union; ``valueType`` is the index of the one that is set."""


def _read_field(nvml: Nvml, handle: Handle, name: str) -> float | None:
    if (field := getattr(nvml, name, None)) is None:
        raise nvml.NVMLError(calls.FUNCTION_NOT_FOUND)
    answer = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    if (
        answer.nvmlReturn != calls.SUCCESS
    ):  # a driver that does not know the field calls it an invalid argument
        known = answer.nvmlReturn != calls.INVALID_ARGUMENT
        raise nvml.NVMLError(answer.nvmlReturn if known else calls.NOT_SUPPORTED)
    if answer.valueType >= len(_FIELD_TYPES):
        raise nvml.NVMLError(calls.UNKNOWN)
    value = getattr(answer.value, _FIELD_TYPES[answer.valueType], None)
    return None if value in {None, calls.NONE_32, calls.NONE_64} else float(value)


def _read_memory_temperature(nvml: Nvml, handle: Handle) -> float | None:
    value = _read_field(nvml, handle, "NVML_FI_DEV_MEMORY_TEMP")
    if value is not None and not -_CELSIUS <= value <= _CELSIUS:
        raise nvml.NVMLError(calls.UNKNOWN)
    return value


def _read_recovery_action(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
    value = _read_field(nvml, handle, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    if value is None:
        return None
    if not 0 <= value < _MAX_REASON_BITS:
        raise nvml.NVMLError(calls.UNKNOWN)
    # A newer driver may want what this list does not have yet.
    return {RECOVERY_ACTIONS[int(value)] if value < len(RECOVERY_ACTIONS) else "other": 1.0}


def _clock_reader(domain: int) -> HardwareQuery:
    return _number_reader("nvmlDeviceGetClockInfo", domain, scale=1e6, maximum=_MEGAHERTZ)


_AGGREGATE_ECC: Final = 1
"""The count since the board was made; the other kind counts since the driver was loaded."""


def _ecc_reader(kind: int) -> HardwareQuery:
    return _number_reader(
        "nvmlDeviceGetTotalEccErrors", kind, _AGGREGATE_ECC, none=calls.NONE_64, maximum=_ERRORS
    )


def _remapped_rows_reader(position: int) -> HardwareQuery:
    return _number_reader("nvmlDeviceGetRemappedRows", position=position, maximum=_ROWS)


def _share_reader(name: str, *, maximum: int = _PERCENT, position: int | None = None) -> HardwareQuery:
    return _number_reader(name, position=position, per=100, maximum=maximum)


def _throughput_reader(direction: int) -> HardwareQuery:
    # NVML says "KB/s"; the peers (nvitop, nvtop) read that as units of 1024, and so do we.
    return _number_reader("nvmlDeviceGetPcieThroughput", direction, scale=1024.0, maximum=_KILOBYTES)


PCIE_THROUGHPUT: Final = "device_pcie_throughput_bytes_per_second"
"""The metric that GPM's counters also give."""


class HardwareMetric(NamedTuple):
    """How one family is read: ``key`` is its name without ``vramledger_``, ``pace`` SLOW or EACH."""

    key: str
    collector: str
    pace: str
    read: HardwareQuery


EACH_SAMPLE: Final = "each sample"
SLOW: Final = f"every {SLOW_INTERVAL:g} s"

_QUICK: Final[Mapping[str, HardwareQuery]] = {
    "device_temperature_celsius": _number_reader("nvmlDeviceGetTemperature", 0, maximum=_CELSIUS),
    "device_power_watts": _number_reader("nvmlDeviceGetPowerUsage", per=1000, maximum=_MILLIWATTS),
    "device_clock_hertz": _labelled_reader(
        graphics=_clock_reader(0), sm=_clock_reader(1), memory=_clock_reader(2), video=_clock_reader(3)
    ),
    "device_throttle_active": _read_throttle_reasons,
    "device_performance_state": _number_reader(
        "nvmlDeviceGetPerformanceState", maximum=15, none=_UNKNOWN_PERFORMANCE_STATE
    ),
    "device_ecc_errors_total": _labelled_reader(corrected=_ecc_reader(0), uncorrected=_ecc_reader(1)),
    "device_encoder_utilization_ratio": _share_reader("nvmlDeviceGetEncoderUtilization", position=0),
    "device_decoder_utilization_ratio": _share_reader("nvmlDeviceGetDecoderUtilization", position=0),
}
_SLOW: Final[Mapping[str, HardwareQuery]] = {
    "device_fan_speed_ratio": _share_reader("nvmlDeviceGetFanSpeed", maximum=10 * _PERCENT),
    "device_power_limit_watts": _number_reader(
        "nvmlDeviceGetEnforcedPowerLimit", per=1000, maximum=_MILLIWATTS
    ),
    "device_pcie_link_generation": _labelled_reader(
        current=_number_reader("nvmlDeviceGetCurrPcieLinkGeneration", maximum=_LANES),
        max=_number_reader("nvmlDeviceGetMaxPcieLinkGeneration", maximum=_LANES),
    ),
    "device_pcie_link_width": _labelled_reader(
        current=_number_reader("nvmlDeviceGetCurrPcieLinkWidth", maximum=_LANES),
        max=_number_reader("nvmlDeviceGetMaxPcieLinkWidth", maximum=_LANES),
    ),
    # Rows are remapped at a reset, and a remap is pending once in months: a call every second is too much.
    "device_remapped_rows": _labelled_reader(
        corrected=_remapped_rows_reader(0), uncorrected=_remapped_rows_reader(1)
    ),
    "device_row_remap_pending": _remapped_rows_reader(2),
    "device_row_remap_failed": _remapped_rows_reader(3),
    "device_recovery_action": _read_recovery_action,
    "device_bar1_memory_bytes": _read_bar1,  # 114 µs
    "device_energy_joules_total": _number_reader(  # 3,050 µs
        "nvmlDeviceGetTotalEnergyConsumption", per=1000, none=calls.NONE_64, maximum=_MILLIJOULES
    ),
    "device_memory_temperature_celsius": _read_memory_temperature,  # 3,050 µs
    PCIE_THROUGHPUT: _labelled_reader(  # 20,800 µs a direction
        transmit=_throughput_reader(0), receive=_throughput_reader(1)
    ),
}
"""What took an H200 (driver 580) more than 100 µs, and what hardly ever changes."""

_OF_OTHERS: Final[Mapping[str, str]] = {
    "device_recovery_action": "ledger",
    "device_energy_joules_total": "energy",
    "device_memory_temperature_celsius": "energy",
    PCIE_THROUGHPUT: "pcie",
}
"""The collectors of what is not the collector ``hardware``'s."""

HARDWARE_METRICS: Final = tuple(
    HardwareMetric(key, _OF_OTHERS.get(key, "hardware"), pace, read)
    for pace, readers in ((EACH_SAMPLE, _QUICK), (SLOW, _SLOW))
    for key, read in readers.items()
)
