"""Declare the families of a device's hardware, the context in which its memory is held."""

from __future__ import annotations

from collections.abc import Mapping

from vramledger.logs import fields, log
from vramledger.metrics import devices
from vramledger.metrics.devices import DeviceFamily
from vramledger.metrics.families import DEVICE, PREFIX, Collected, devices_shown
from vramledger.model.snapshot import DeviceSnapshot, Snapshot

_UNSUPPORTED = "when unsupported"


def _hardware(  # noqa: PLR0913 - one argument a fact
    collector: str, name: str, help_: str, by: str | None = None, *, source: str, absent: str = _UNSUPPORTED
) -> DeviceFamily:
    return DeviceFamily(
        PREFIX + name,
        (*DEVICE, by) if by else DEVICE,
        help_,
        collector,
        source,
        absent,
        lambda device: device.reading.hardware.get(name),
    )


UTILIZATION_FAMILIES = (
    DeviceFamily(
        PREFIX + "device_utilization_ratio",
        DEVICE,
        "Share of the driver's last sampling period with a kernel running, from "
        "nvmlDeviceGetUtilizationRates.",
        "hardware",
        "nvmlDeviceGetUtilizationRates",
        _UNSUPPORTED,
        lambda device: (device.reading.utilization or {}).get("gpu"),
    ),
    DeviceFamily(
        PREFIX + "device_memory_bandwidth_utilization_ratio",
        DEVICE,
        "Share of the driver's last sampling period with device memory being read or written, from "
        "nvmlDeviceGetUtilizationRates; not how full it is.",
        "hardware",
        "nvmlDeviceGetUtilizationRates",
        _UNSUPPORTED,
        lambda device: (device.reading.utilization or {}).get("memory"),
    ),
)


HARDWARE_FAMILIES = (
    _hardware(
        "hardware",
        "device_temperature_celsius",
        "Temperature of the GPU chip, from nvmlDeviceGetTemperature.",
        source="nvmlDeviceGetTemperature",
    ),
    _hardware(
        "hardware",
        "device_power_watts",
        "Power draw of the board, averaged by the driver over about a second, from nvmlDeviceGetPowerUsage.",
        source="nvmlDeviceGetPowerUsage",
    ),
    _hardware(
        "hardware",
        "device_power_limit_watts",
        "Power limit that is enforced now, from nvmlDeviceGetEnforcedPowerLimit, read every 10 seconds.",
        source="nvmlDeviceGetEnforcedPowerLimit",
    ),
    _hardware(
        "hardware",
        "device_clock_hertz",
        "Current clock by domain, from nvmlDeviceGetClockInfo.",
        "clock",
        source="nvmlDeviceGetClockInfo",
    ),
    _hardware(
        "hardware",
        "device_throttle_active",
        "1 while the driver throttles the clocks for this reason, from "
        "nvmlDeviceGetCurrentClocksEventReasons.",
        "reason",
        source="nvmlDeviceGetCurrentClocksEventReasons; "
        "before driver 535 nvmlDeviceGetCurrentClocksThrottleReasons",
    ),
    _hardware(
        "hardware",
        "device_performance_state",
        "Performance state, 0 the fastest to 15 the slowest, from nvmlDeviceGetPerformanceState.",
        source="nvmlDeviceGetPerformanceState",
        absent="when the driver does not know it",
    ),
    _hardware(
        "hardware",
        "device_fan_speed_ratio",
        "Intended fan speed as a share of its maximum, from nvmlDeviceGetFanSpeed, read every 10 "
        "seconds; absent without a fan.",
        source="nvmlDeviceGetFanSpeed",
        absent="when the driver knows of no fan",
    ),
    _hardware(
        "hardware",
        "device_ecc_errors_total",
        "ECC memory errors over the device's life, from nvmlDeviceGetTotalEccErrors.",
        "type",
        source="nvmlDeviceGetTotalEccErrors",
        absent="when ECC is off or the device has none",
    ),
    _hardware(
        "hardware",
        "device_remapped_rows",
        "Memory rows that were replaced by spare ones over the device's life, from "
        "nvmlDeviceGetRemappedRows, read every 10 seconds.",
        "type",
        source="nvmlDeviceGetRemappedRows",
    ),
    _hardware(
        "hardware",
        "device_row_remap_pending",
        "1 when a row waits for the next GPU reset to be replaced, from nvmlDeviceGetRemappedRows, read "
        "every 10 seconds.",
        source="nvmlDeviceGetRemappedRows",
    ),
    _hardware(
        "hardware",
        "device_row_remap_failed",
        "1 when a row could not be replaced, from nvmlDeviceGetRemappedRows, read every 10 seconds.",
        source="nvmlDeviceGetRemappedRows",
    ),
    _hardware(
        "ledger",
        "device_recovery_action",
        "1, with what the driver says that the device needs after an error, from "
        "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, read every 10 seconds.",
        "action",
        source="nvmlDeviceGetFieldValues",
        absent="before driver 570, and when unsupported",
    ),
    _hardware(
        "hardware",
        "device_encoder_utilization_ratio",
        "Share of time that the video encoder was busy, from nvmlDeviceGetEncoderUtilization.",
        source="nvmlDeviceGetEncoderUtilization",
        absent="when the device has no encoder",
    ),
    _hardware(
        "hardware",
        "device_decoder_utilization_ratio",
        "Share of time that the video decoder was busy, from nvmlDeviceGetDecoderUtilization.",
        source="nvmlDeviceGetDecoderUtilization",
        absent="when the device has no decoder",
    ),
    _hardware(
        "hardware",
        "device_pcie_link_generation",
        "PCIe generation of the link, current and maximum, from nvmlDeviceGetCurrPcieLinkGeneration and "
        "nvmlDeviceGetMaxPcieLinkGeneration, read every 10 seconds.",
        "kind",
        source="nvmlDeviceGetCurrPcieLinkGeneration and nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    _hardware(
        "hardware",
        "device_pcie_link_width",
        "PCIe lanes of the link, current and maximum, from nvmlDeviceGetCurrPcieLinkWidth and "
        "nvmlDeviceGetMaxPcieLinkWidth, read every 10 seconds.",
        "kind",
        source="nvmlDeviceGetCurrPcieLinkWidth and nvmlDeviceGetMaxPcieLinkWidth",
    ),
    _hardware(
        "hardware",
        "device_bar1_memory_bytes",
        "Address space through which the host and peers reach device memory, from "
        "nvmlDeviceGetBAR1MemoryInfo, read every 10 seconds; not part of the ledger.",
        "kind",
        source="nvmlDeviceGetBAR1MemoryInfo",
    ),
    _hardware(
        "energy",
        "device_energy_joules_total",
        "Energy used since the driver was loaded, from nvmlDeviceGetTotalEnergyConsumption, read every 10 "
        "seconds.",
        source="nvmlDeviceGetTotalEnergyConsumption",
    ),
    _hardware(
        "energy",
        "device_memory_temperature_celsius",
        "Temperature of the device's memory, from nvmlDeviceGetFieldValues, read every 10 seconds.",
        source="nvmlDeviceGetFieldValues",
    ),
    _hardware(
        "pcie",
        "device_pcie_throughput_bytes_per_second",
        "PCIe traffic since the sample before, from nvmlGpmMetricsGet; before Hopper over a window of 20 ms, "
        "from nvmlDeviceGetPcieThroughput, read every 10 seconds.",
        "direction",
        source="nvmlGpmMetricsGet",
        absent="when `--collector.pcie` is not given",
    ),
)


def _activity(name: str, help_: str, by: str | None = None, **figures: str) -> DeviceFamily:
    """Declare a family of GPM's counters: one figure, or one for each value of the label ``by``."""

    def read(device: DeviceSnapshot) -> devices.Value:
        activity = device.reading.activity or {}
        if by is None:
            return activity.get(figures["figure"])
        return {label: activity[name] for label, name in figures.items() if name in activity} or None

    return DeviceFamily(
        PREFIX + name,
        (*DEVICE, by) if by else DEVICE,
        f"{help_}, as a mean since the sample before, from nvmlGpmMetricsGet.",
        "hardware",
        "nvmlGpmMetricsGet",
        "when GPM gives nothing",
        read,
    )


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
    """Return the collector's samples."""
    if collector == "hardware":  # only one of the collectors logs it, so that a scrape logs it once
        _log_unknown_readings(snapshot)
    return devices.collect(snapshot, collector, FAMILIES)


def _log_unknown_readings(snapshot: Snapshot) -> None:
    """Write to the debug log the keys that the contract does not know."""
    for _, device in devices_shown(snapshot):
        if unknown := device.reading.hardware.keys() - HARDWARE.keys():
            about = fields(uuid=device.reading.uuid, keys=",".join(sorted(unknown)))
            log.debug("Ignored hardware readings", extra=about)
