"""Declare the families of a device's hardware, the context in which its memory is held."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vramledger.logs import fields, log
from vramledger.metrics import devices
from vramledger.metrics.devices import DeviceFamily
from vramledger.metrics.families import DEVICE, PREFIX, Collected, devices_shown
from vramledger.model.snapshot import DeviceSnapshot, Snapshot


def _family(  # noqa: PLR0913 - one argument a fact
    name: str,
    about: str,
    source: str,
    by: str | None = None,
    *,
    call: str = "",
    more: str = "",
    collector: str = "hardware",
    absent: str = "when unsupported",
    read: Callable[[DeviceSnapshot], devices.Value] | None = None,
) -> DeviceFamily:
    """Declare a family whose help names its source, or the ``call`` in it, and says ``more``.

    Without ``read`` its values are those of its name in ``DeviceReading.hardware``.
    """
    help_ = f"{about}, from {call or source}{more}."
    by_name = read or (lambda device: device.reading.hardware.get(name))
    labels = (*DEVICE, by) if by else DEVICE
    return DeviceFamily(PREFIX + name, labels, help_, collector, source, absent, by_name)


_RATES, _GPM = "nvmlDeviceGetUtilizationRates", "nvmlGpmMetricsGet"
_ROWS, _FIELDS = "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues"
_SLOW = ", read every 10 seconds"

UTILIZATION_FAMILIES = (
    _family(
        "device_utilization_ratio",
        "Share of the driver's last sampling period with a kernel running",
        _RATES,
        read=lambda device: (device.reading.utilization or {}).get("gpu"),
    ),
    _family(
        "device_memory_bandwidth_utilization_ratio",
        "Share of the driver's last sampling period with device memory being read or written",
        _RATES,
        more="; not how full it is",
        read=lambda device: (device.reading.utilization or {}).get("memory"),
    ),
)


HARDWARE_FAMILIES = (
    _family("device_temperature_celsius", "Temperature of the GPU chip", "nvmlDeviceGetTemperature"),
    _family(
        "device_power_watts",
        "Power draw of the board, averaged by the driver over about a second",
        "nvmlDeviceGetPowerUsage",
    ),
    _family(
        "device_power_limit_watts",
        "Power limit that is enforced now",
        "nvmlDeviceGetEnforcedPowerLimit",
        more=_SLOW,
    ),
    _family("device_clock_hertz", "Current clock by domain", "nvmlDeviceGetClockInfo", "clock"),
    _family(
        "device_throttle_active",
        "1 while the driver throttles the clocks for this reason",
        "nvmlDeviceGetCurrentClocksEventReasons; before driver 535 nvmlDeviceGetCurrentClocksThrottleReasons",
        "reason",
        call="nvmlDeviceGetCurrentClocksEventReasons",
    ),
    _family(
        "device_performance_state",
        "Performance state, 0 the fastest to 15 the slowest",
        "nvmlDeviceGetPerformanceState",
        absent="when the driver does not know it",
    ),
    _family(
        "device_fan_speed_ratio",
        "Intended fan speed as a share of its maximum",
        "nvmlDeviceGetFanSpeed",
        more=f"{_SLOW}; absent without a fan",
        absent="when the device has no fan that the driver knows of",
    ),
    _family(
        "device_ecc_errors_total",
        "ECC memory errors over the device's life",
        "nvmlDeviceGetTotalEccErrors",
        "type",
        absent="when ECC is off or the device has none",
    ),
    _family(
        "device_remapped_rows",
        "Memory rows that were replaced by spare ones over the device's life",
        _ROWS,
        "type",
        more=_SLOW,
    ),
    _family(
        "device_row_remap_pending",
        "1 when a row waits for the next GPU reset to be replaced",
        _ROWS,
        more=_SLOW,
    ),
    _family("device_row_remap_failed", "1 when a row could not be replaced", _ROWS, more=_SLOW),
    _family(
        "device_recovery_action",
        "1, with what the driver says that the device needs after an error",
        _FIELDS,
        "action",
        call="NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        more=_SLOW,
        collector="ledger",
        absent="before driver 570, and when the device does not support it",
    ),
    *(
        _family(
            f"device_{coder}_utilization_ratio",
            f"Share of time that the video {coder} was busy",
            f"nvmlDeviceGet{coder.title()}Utilization",
            absent=f"when the device has no {coder}",
        )
        for coder in ("encoder", "decoder")
    ),
    *(
        _family(
            f"device_pcie_link_{name}",
            f"{about} of the link, current and maximum",
            f"nvmlDeviceGetCurrPcieLink{name.title()} and nvmlDeviceGetMaxPcieLink{name.title()}",
            "kind",
            more=_SLOW,
        )
        for name, about in (("generation", "PCIe generation"), ("width", "PCIe lanes"))
    ),
    _family(
        "device_bar1_memory_bytes",
        "Address space through which the host and peers reach device memory",
        "nvmlDeviceGetBAR1MemoryInfo",
        "kind",
        more=f"{_SLOW}; not part of the ledger",
    ),
    _family(
        "device_energy_joules_total",
        "Energy used since the driver was loaded",
        "nvmlDeviceGetTotalEnergyConsumption",
        more=_SLOW,
        collector="energy",
    ),
    _family(
        "device_memory_temperature_celsius",
        "Temperature of the device's memory",
        _FIELDS,
        more=_SLOW,
        collector="energy",
    ),
    _family(
        "device_pcie_throughput_bytes_per_second",
        "PCIe traffic since the sample before",
        "nvmlGpmMetricsGet; before Hopper nvmlDeviceGetPcieThroughput",
        "direction",
        call=_GPM,
        more=f"; before Hopper over a window of 20 ms, from nvmlDeviceGetPcieThroughput{_SLOW}",
        collector="pcie",
        absent="when `--collector.pcie` is not given",
    ),
)


def _activity(name: str, about: str, by: str | None = None, **figures: str) -> DeviceFamily:
    """Declare a family of GPM's counters: one figure, or one for each value of the label ``by``."""

    def read(device: DeviceSnapshot) -> devices.Value:
        activity = device.reading.activity or {}
        if by is None:
            return activity.get(figures["figure"])
        return {label: activity[name] for label, name in figures.items() if name in activity} or None

    absent = "before Hopper, in the first sample, when MIG divides the GPU, and when the query failed"
    return _family(name, f"{about}, as a mean since the sample before", _GPM, by, absent=absent, read=read)


ACTIVITY_FAMILIES = (
    _activity(
        "device_sm_active_ratio",
        "Share of the SMs' time in which a kernel ran on them; exactly 0 if no kernel ran at all",
        figure="sm",
    ),
    _activity(
        "device_sm_occupancy_ratio", "Warps on the SMs as a share of their maximum", figure="occupancy"
    ),
    _activity(
        "device_pipe_active_ratio",
        "Share of the SMs' time in which this pipe computed",
        "pipe",
        tensor="tensor",
        fp16="fp16",
        fp32="fp32",
        fp64="fp64",
    ),
    _activity(
        "device_memory_bandwidth_used_ratio",
        "Traffic of the device's memory as a share of its maximum",
        figure="dram",
    ),
    _activity(
        "device_nvlink_throughput_bytes_per_second",
        "Traffic over all NVLinks of the device",
        "direction",
        transmit="nvlink_transmit",
        receive="nvlink_receive",
    ),
)

HARDWARE: Mapping[str, DeviceFamily] = {
    family.name.removeprefix(PREFIX): family for family in HARDWARE_FAMILIES
}
"""The keys of ``DeviceReading.hardware`` and the families that they become."""

FAMILIES = (*UTILIZATION_FAMILIES, *ACTIVITY_FAMILIES, *HARDWARE_FAMILIES)


def collect(snapshot: Snapshot, collector: str) -> Collected:
    """Return the collector's samples; keys that the contract does not know are in the debug log."""
    for _, device in devices_shown(snapshot) if collector == "hardware" else ():  # once a scrape
        if unknown := device.reading.hardware.keys() - HARDWARE.keys():
            about = fields(uuid=device.reading.uuid, keys=",".join(sorted(unknown)))
            log.debug("Ignored hardware readings", extra=about)
    return devices.collect(snapshot, collector, FAMILIES)
