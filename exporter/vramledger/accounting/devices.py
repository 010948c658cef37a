"""Track the known devices: those of a reading, and those of earlier readings that are missing from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from vramledger.model.reading import ASLEEP, UNIFIED, DeviceReading, HiddenHolder, Reading, XidEvent

PEAK_WINDOW = 60.0
UNNAMED = "GPU-unknown-"
"""What the driver reader calls a GPU that has never reported its UUID."""

_LEDGER_QUESTIONS = frozenset({"memory", "processes"})


class DeviceMatch(NamedTuple):
    """The devices of a reading and the missing ones, and the UUIDs of the instances that were destroyed."""

    devices: tuple[DeviceReading, ...]
    destroyed: tuple[str, ...]


class DevicesState(msgspec.Struct):
    """What is remembered of devices, by UUID."""

    # the identity of each device that has answered and was not destroyed, as it is while missing
    known: dict[str, DeviceReading] = {}
    # monotonic times of the last minute with used bytes that fall from one to the next, so that the first are
    # the highest
    peaks: dict[str, list[tuple[float, int]]] = {}
    # how many XID errors of each number it has had since the exporter started
    xids: dict[str, dict[int, int]] = {}


def record_peak(values: list[tuple[float, int]], now: float, value: int) -> int:
    """Add a value at a monotonic time, and return the highest value of the window."""
    while values and values[-1][1] <= value:
        values.pop()
    values.append((now, value))
    while values[0][0] < now - PEAK_WINDOW:
        del values[0]
    return values[0][1]


class DeviceTracker:
    """Match the devices of a reading with the known ones."""

    def __init__(self, state: DevicesState) -> None:
        self.state = state

    @property
    def uuids(self) -> Iterable[str]:
        """The devices that have answered so far and were not destroyed."""
        return self.state.known.keys()

    def match(self, reading: Reading) -> DeviceMatch:
        """Return this reading's devices, then missing earlier ones; a destroyed instance is forgotten."""
        devices = [self._recognise(device, reading) for device in reading.devices]
        present = {device.uuid: device for device in devices}
        destroyed = []
        for uuid, device in list(self.state.known.items()):
            parent = present.get(device.parent) if device.parent else None
            if uuid not in present and parent is not None and parent.error is None:
                destroyed.append(uuid)
                self._drop(uuid)
        answered = {uuid: device for uuid, device in present.items() if device.error is None}
        self.state.known.update({uuid: each.without_data("missing") for uuid, each in answered.items()})
        missing = [device for uuid, device in self.state.known.items() if uuid not in present]
        return DeviceMatch((*devices, *missing), tuple(destroyed))

    def record_used(self, uuid: str, now: float, used: int) -> int:
        """Record a device's used bytes at a monotonic time; return the peak of the last minute."""
        return record_peak(self.state.peaks.setdefault(uuid, []), now, used)

    def count_xids(self, events: Iterable[XidEvent]) -> None:
        for event in events:
            counts = self.state.xids.setdefault(event.uuid, {})
            counts[event.xid] = counts.get(event.xid, 0) + 1

    def xids(self, uuid: str) -> Mapping[int, int]:
        """Return how many XID errors of each number a device has had."""
        return dict(self.state.xids.get(uuid, {}))

    def _recognise(self, device: DeviceReading, reading: Reading) -> DeviceReading:
        """Return a GPU without a UUID (lost before we could read it) with the UUID that its index had."""
        if not device.uuid.startswith(UNNAMED):
            return device
        present = {each.uuid for each in reading.devices}
        for known in self.state.known.values():
            if known.index == device.index and known.parent is None and known.uuid not in present:
                return known.without_data(device.error or "lost")
        return device

    def _drop(self, uuid: str) -> None:
        del self.state.known[uuid]
        self.state.peaks.pop(uuid, None)
        self.state.xids.pop(uuid, None)


def memory_sharers(devices: Iterable[DeviceReading]) -> dict[str, tuple[str, ...]]:
    """Return for each device that shares its memory the UUIDs of all that share it, itself included.

    Those are the compute instances of one GPU instance: NVML gives each of them the memory of the whole GPU
    instance, and only its own processes. And they are the devices that use the host's memory. Each tuple
    begins with the device of the lowest number.
    """
    instances: dict[tuple[str, int], list[DeviceReading]] = {}
    for device in devices:
        if device.memory_kind == UNIFIED:
            instances.setdefault((UNIFIED, 0), []).append(device)
        elif device.parent is not None and device.gpu_instance is not None:
            instances.setdefault((device.parent, device.gpu_instance), []).append(device)
    sharers = {}
    for group in instances.values():
        group.sort(key=lambda each: (each.index, each.compute_instance or 0, each.uuid))
        if len(group) > 1:
            sharers.update({each.uuid: tuple(other.uuid for other in group) for each in group})
    return sharers


def without_partial_ledger(device: DeviceReading) -> DeviceReading:
    """Return a device as read; without its data when a query that its ledger needs has failed."""
    if device.error is None and not _LEDGER_QUESTIONS.isdisjoint(device.failed):
        return device.without_data("failed")
    return device


def failure_of_all(reading: Reading) -> tuple[str, str] | None:
    """Return (reason, message) when no device answered, which leaves nothing to publish; else None."""
    errors = {device.error for device in reading.devices}
    if errors & {None, ASLEEP}:
        return None
    if not errors:
        return "no-devices", "the driver shows no GPU"
    if errors == {"timeout"}:
        return "timeout", "no GPU answered in time"
    return "driver-lost", f"no GPU answered ({', '.join(sorted(str(error) for error in errors))})"


def hidden_on(
    device: DeviceReading, hidden: tuple[HiddenHolder, ...] | None
) -> tuple[HiddenHolder, ...] | None:
    """Return the processes that have this device's file open and might themselves hold memory on it.

    A process that has only inherited the open file from a process that NVML lists holds none either. A MIG
    instance has no device file that we could search for.
    """
    if hidden is None or device.minor is None or device.parent is not None:
        return None
    return tuple(
        holder
        for holder in hidden
        if device.minor in holder.minors and holder.kind not in ("monitor", "inherited")
    )
