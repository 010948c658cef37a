"""Say from a device's figures alone what ran (GPM's counters), and what nobody holds (uncharged bytes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vramledger.model.reading import DeviceReading

COPY_RATE = 4.0 * 2**20
"""Bytes a second over PCIe or NVLink of a copy; reading the driver moves up to 0.6 MiB/s on an H200."""

MEMORY_SHARE = 1e-4
"""The share of memory bandwidth above which somebody copies in the device; 4e-6 on an idle H200."""

_LINKS = ("pcie_transmit", "pcie_receive", "nvlink_transmit", "nvlink_receive")


def mean_activity(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the means over two consecutive spans, without figures that one lacks; an empty span is none."""
    if not first or not second:
        return dict(first or second)
    seconds = first["seconds"] + second["seconds"]
    means = {
        name: (first[name] * first["seconds"] + value * second["seconds"]) / seconds
        for name, value in second.items()
        if name in first
    }
    return {**means, "seconds": seconds}


class CountedActivity(NamedTuple):
    """What GPM's counters say of the time since the last sample: whether kernels ran, and anything else."""

    kernels: bool
    other: bool


def read_counters(activity: Mapping[str, float] | None) -> CountedActivity | None:
    """Return what the counters say; None if none moves: reading the driver alone takes bytes over PCIe."""
    if activity is None or "sm" not in activity:
        return None
    if not any(value > 0 for name, value in activity.items() if name != "seconds"):
        return None
    copies = any(activity.get(link, 0.0) > COPY_RATE for link in _LINKS)
    other = copies or activity.get("dram", 0.0) > MEMORY_SHARE or activity.get("video", 0.0) > 0
    return CountedActivity(kernels=activity["sm"] > 0, other=other)


MIB = 2**20

CONTEXT_BYTES = 9 * MIB
"""Bytes of each context that NVML charges to nobody: 9 MiB on an H100, 14 for two on an H200."""

LEAST_BYTES = 32 * MIB
"""Uncharged bytes, beyond contexts, that are worth a look: readings a moment apart differ by less."""


def uncharged_bytes(device: DeviceReading) -> int | None:
    """Return the used bytes that NVML charges to no process, None when it is not known.

    A driver that does not report its own reserve separately counts it as used, so nothing can be said there.
    The same holds for memory that the operating system manages, and uses itself.
    """
    memory = device.memory
    if memory is None or memory.reserved is None or device.processes is None or device.memory_kind:
        return None
    held = sum(entry.memory or 0 for entry in device.processes)
    return max(0, memory.total - memory.free - memory.reserved - held)


def beyond_contexts(uncharged: int, holders: int) -> int:
    """Return the uncharged bytes that the contexts of this number of holders do not explain; 0 for a few."""
    rest = uncharged - holders * CONTEXT_BYTES
    return rest if rest >= LEAST_BYTES else 0
