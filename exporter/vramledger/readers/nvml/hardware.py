"""The hardware families: one row a metric, with its collector, its pace and how NVML is asked.

pynvml is handed in, so that driver.py stays its only importer; a function that pynvml itself does not
know counts as one that the driver does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from vramledger.model.reading import HardwareValue
from vramledger.readers.nvml.return_codes import (
    FUNCTION_NOT_FOUND,
    MAX_BYTES,
    NO_SUCH_FUNCTION,
    NONE_32,
    NONE_64,
    SUCCESS,
    UNKNOWN,
    UNSUPPORTED,
    Handle,
    Nvml,
)

SLOW_INTERVAL: Final = 10.0
"""Seconds between two readings of what is expensive or hardly changes."""

HardwareQuery = Callable[[Nvml, Handle], "HardwareValue | None"]
"""Asks for one family; raises NVMLError as the driver does."""


def _call(nvml: Nvml, name: str, *arguments: object) -> object:
    function = getattr(nvml, name, None)
    if function is None:
        raise nvml.NVMLError(FUNCTION_NOT_FOUND)
    answer: object = function(*arguments)
    return answer


def _number(  # noqa: PLR0913 - a word for each quirk
    name: str,
    *arguments: int,
    most: int,
    position: int | None = None,
    scale: float = 1.0,
    per: int = 1,
    none: int = NONE_32,
) -> HardwareQuery:
    """Ask for a number (at ``position``, where the answer is a list), in base units.

    That is times ``scale``, or divided by ``per``: 57 % is 0.57, where times 0.01 gives 0.5700000000000001.
    More than ``most``, in NVML's unit, is garbage and no answer: a counter would seem to start anew after it.
    """

    def ask(nvml: Nvml, handle: Handle) -> float | None:
        value = _call(nvml, name, handle, *arguments)
        if position is not None and isinstance(value, (list, tuple)):
            value = value[position]
        if not isinstance(value, int) or value == none:
            return None
        if not 0 <= value <= most:
            raise nvml.NVMLError(UNKNOWN)
        return value * scale / per

    return ask


def _by_label(**asks: HardwareQuery) -> HardwareQuery:
    """Ask once a label; a label without an answer is left out."""

    def ask(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
        values: dict[str, float] = {}
        for label, each in asks.items():
            try:
                value = each(nvml, handle)
            except nvml.NVMLError as error:
                if error.value not in UNSUPPORTED:
                    raise
                continue
            if isinstance(value, float):
                values[label] = value
        return values or None

    return ask


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
"""NVML's clock event reasons, by bit; further bits of a newer driver are left out."""

_REASONS_MOST: Final = 48
"""Bits that may ever be reasons."""


def _throttle(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
    try:
        bits = _call(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    except nvml.NVMLError as error:
        if error.value not in NO_SUCH_FUNCTION:
            raise
        bits = _call(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)  # its name before 535
    if not isinstance(bits, int) or bits == NONE_64:
        return None
    if bits >> _REASONS_MOST:
        raise nvml.NVMLError(UNKNOWN)
    return {reason: float(bits >> bit & 1) for bit, reason in enumerate(_THROTTLE_REASONS)}


_LAST_PERFORMANCE_STATE: Final = 15
_UNKNOWN_PERFORMANCE_STATE: Final = 32


def _performance_state(nvml: Nvml, handle: Handle) -> float | None:
    state = _call(nvml, "nvmlDeviceGetPerformanceState", handle)
    if not isinstance(state, int) or state == _UNKNOWN_PERFORMANCE_STATE:
        return None
    if not 0 <= state <= _LAST_PERFORMANCE_STATE:
        raise nvml.NVMLError(UNKNOWN)
    return float(state)


def _bar1(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
    memory = nvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    if NONE_64 in (memory.bar1Used, memory.bar1Total):
        return None
    if not memory.bar1Used <= memory.bar1Total <= MAX_BYTES:
        raise nvml.NVMLError(UNKNOWN)
    return {"used": float(memory.bar1Used), "total": float(memory.bar1Total)}


_CELSIUS: Final = 200
_MILLIWATTS: Final = 10**8
_MEGAHERTZ: Final = 10**5
_PERCENT: Final = 100
_MILLIJOULES: Final = 10**17  # 1 kW for 3,000 years
_ERRORS: Final = 2**50
_ROWS: Final = 2**24
_LANES: Final = 1024
_KILOBYTES: Final = 10**9
"""The most that each can be, so generously that no GPU of the next decades comes near."""

_FIELD_TYPES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of a field's union that holds its value, by ``valueType``."""


def _memory_temperature(nvml: Nvml, handle: Handle) -> float | None:
    answer = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_MEMORY_TEMP])[0]
    if answer.nvmlReturn != SUCCESS:
        raise nvml.NVMLError(answer.nvmlReturn)
    if answer.valueType >= len(_FIELD_TYPES):
        raise nvml.NVMLError(UNKNOWN)
    value = getattr(answer.value, _FIELD_TYPES[answer.valueType], None)
    if value in {None, NONE_32, NONE_64}:
        return None
    if not -_CELSIUS <= value <= _CELSIUS:
        raise nvml.NVMLError(UNKNOWN)
    return float(value)


def _clock(domain: int) -> HardwareQuery:
    return _number("nvmlDeviceGetClockInfo", domain, scale=1e6, most=_MEGAHERTZ)


_AGGREGATE_ECC: Final = 1  # since the board was made; the other kind counts since the driver was loaded


def _ecc(kind: int) -> HardwareQuery:
    return _number("nvmlDeviceGetTotalEccErrors", kind, _AGGREGATE_ECC, none=NONE_64, most=_ERRORS)


def _remapped(position: int) -> HardwareQuery:
    return _number("nvmlDeviceGetRemappedRows", position=position, most=_ROWS)


def _throughput(direction: int) -> HardwareQuery:
    # NVML says "KB/s"; the peers (nvitop, nvtop) read that as units of 1024, and so do we.
    return _number("nvmlDeviceGetPcieThroughput", direction, scale=1024.0, most=_KILOBYTES)


class HardwareMetric(NamedTuple):
    """How one family is read: ``key`` is its name without ``vramledger_``, ``pace`` SLOW or EACH."""

    key: str
    collector: str
    pace: str
    ask: HardwareQuery


EACH_SAMPLE: Final = "each sample"
SLOW: Final = f"every {SLOW_INTERVAL:g} s"

# Whatever took an H200 (driver 580) more than 100 µs is SLOW (its refusal to tell a fan speed takes 237 µs),
# and so is what hardly ever changes.
HARDWARE_METRICS: Final = (
    HardwareMetric(
        "device_temperature_celsius",
        "hardware",
        EACH_SAMPLE,
        _number("nvmlDeviceGetTemperature", 0, most=_CELSIUS),
    ),
    HardwareMetric(
        "device_power_watts",
        "hardware",
        EACH_SAMPLE,
        _number("nvmlDeviceGetPowerUsage", per=1000, most=_MILLIWATTS),
    ),
    HardwareMetric(
        "device_clock_hertz",
        "hardware",
        EACH_SAMPLE,
        _by_label(graphics=_clock(0), sm=_clock(1), memory=_clock(2), video=_clock(3)),
    ),
    HardwareMetric("device_throttle_active", "hardware", EACH_SAMPLE, _throttle),
    HardwareMetric("device_performance_state", "hardware", EACH_SAMPLE, _performance_state),
    HardwareMetric(
        "device_fan_speed_ratio",
        "hardware",
        SLOW,
        _number("nvmlDeviceGetFanSpeed", per=100, most=10 * _PERCENT),
    ),
    HardwareMetric(
        "device_ecc_errors_total", "hardware", EACH_SAMPLE, _by_label(corrected=_ecc(0), uncorrected=_ecc(1))
    ),
    HardwareMetric(
        "device_encoder_utilization_ratio",
        "hardware",
        EACH_SAMPLE,
        _number("nvmlDeviceGetEncoderUtilization", position=0, per=100, most=_PERCENT),
    ),
    HardwareMetric(
        "device_decoder_utilization_ratio",
        "hardware",
        EACH_SAMPLE,
        _number("nvmlDeviceGetDecoderUtilization", position=0, per=100, most=_PERCENT),
    ),
    HardwareMetric(
        "device_power_limit_watts",
        "hardware",
        SLOW,
        _number("nvmlDeviceGetEnforcedPowerLimit", per=1000, most=_MILLIWATTS),
    ),
    HardwareMetric(
        "device_pcie_link_generation",
        "hardware",
        SLOW,
        _by_label(
            current=_number("nvmlDeviceGetCurrPcieLinkGeneration", most=_LANES),
            max=_number("nvmlDeviceGetMaxPcieLinkGeneration", most=_LANES),
        ),
    ),
    HardwareMetric(
        "device_pcie_link_width",
        "hardware",
        SLOW,
        _by_label(
            current=_number("nvmlDeviceGetCurrPcieLinkWidth", most=_LANES),
            max=_number("nvmlDeviceGetMaxPcieLinkWidth", most=_LANES),
        ),
    ),
    # Rows are remapped at a reset, pending once in months: four calls a second would be four too many.
    HardwareMetric(
        "device_remapped_rows", "hardware", SLOW, _by_label(corrected=_remapped(0), uncorrected=_remapped(1))
    ),
    HardwareMetric("device_row_remap_pending", "hardware", SLOW, _remapped(2)),
    HardwareMetric("device_row_remap_failed", "hardware", SLOW, _remapped(3)),
    HardwareMetric("device_bar1_memory_bytes", "hardware", SLOW, _bar1),  # 114 µs
    HardwareMetric(
        "device_energy_joules_total",  # 3,050 µs
        "energy",
        SLOW,
        _number("nvmlDeviceGetTotalEnergyConsumption", per=1000, none=NONE_64, most=_MILLIJOULES),
    ),
    HardwareMetric("device_memory_temperature_celsius", "energy", SLOW, _memory_temperature),  # 3,050 µs
    HardwareMetric(
        "device_pcie_throughput_bytes_per_second",  # 20,800 µs a direction
        "pcie",
        SLOW,
        _by_label(transmit=_throughput(0), receive=_throughput(1)),
    ),
)
