"""A simulated host on the stand-in driver, which the real driver module reads."""

from collections.abc import Mapping

from tests.support.standin.library import Device, StandIn
from vramledger.model.reading import DeviceReading, HardwareValue, Reading

CLOCKS = ("graphics", "sm", "memory", "video")


def show(reading: Reading, standin: StandIn, *, live: bool = False) -> None:
    """Give the stand-in's GPUs, none of them in MIG mode, the state of a reading of the host.

    Where it is ``live``, the work goes on until the next reading is shown, by the driver's own clock.
    """
    for number, said in enumerate(reading.devices):
        device = standin.device(number)
        device.uuid = said.uuid
        device.lost = said.error is not None
        if said.error is None:
            _show_memory(said, device, live=live)
            device.set(**_in_driver_units(said))


def _show_memory(said: DeviceReading, device: Device, *, live: bool) -> None:
    entries = said.processes or ()
    compute, graphics, mps = (
        [(each.pid, each.memory) for each in entries if kind in each.kinds] for kind in "CGM"
    )
    device.set_processes(compute, graphics=graphics, mps=mps)
    if said.memory is not None:
        held = sum(each.memory or 0 for each in entries)
        unattributed = said.memory.used - held
        device.set_memory(total=said.memory.total, reserved=said.memory.reserved, unattributed=unattributed)
    device.idle()
    for sample in said.process_utilization or ():
        if live:
            device.busy(sample.pid, sm=sample.sm)
        else:
            percent = round(sample.sm * 100)
            device.raw_sample(sample.pid, timestamp=int(sample.time * 1e6), sm=percent)


def _in_driver_units(said: DeviceReading) -> dict[str, object]:
    """Return the fields of the stand-in's device for a reading's hardware."""
    hardware = said.hardware
    fields: dict[str, object] = {}
    for name, (field, factor) in _FIELDS.items():
        value = hardware.get(name)
        if isinstance(value, float):
            fields[field] = round(value * factor)
    for name, ratio in (said.utilization or {}).items():
        fields[f"{name}_utilization"] = round(ratio * 100)
    if clocks := _labelled(hardware, "device_clock_hertz"):
        fields["clocks"] = [round(clocks[name] / 1e6) for name in CLOCKS]
    if errors := _labelled(hardware, "device_ecc_errors_total"):
        fields["ecc"] = [int(errors["corrected"]), int(errors["uncorrected"])]
    for direction, rate in _labelled(hardware, "device_pcie_throughput_bytes_per_second").items():
        fields[f"pcie_{direction}"] = round(rate / 1024)
    return fields


def _labelled(hardware: Mapping[str, HardwareValue], name: str) -> Mapping[str, float]:
    value = hardware.get(name)
    return value if isinstance(value, dict) else {}


_FIELDS = {
    "device_temperature_celsius": ("temperature", 1),
    "device_memory_temperature_celsius": ("memory_temperature", 1),
    "device_power_watts": ("power", 1000),
    "device_power_limit_watts": ("power_limit", 1000),
    "device_energy_joules_total": ("energy", 1000),
    "device_encoder_utilization_ratio": ("encoder_utilization", 100),
    "device_decoder_utilization_ratio": ("decoder_utilization", 100),
}
"""The stand-in's field for a figure, and how many of its units make one of ours."""
