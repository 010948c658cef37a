"""Say how many used bytes NVML charges to no process, and how many of them are worth a look."""

from __future__ import annotations

from vramledger.model.reading import DeviceReading

MIB = 2**20

CONTEXT_BYTES = 9 * MIB
"""Bytes of each context that NVML charges to no process: 9 MiB for every program alone on an H100, 14 MiB for
two on an H200."""

LEAST_BYTES = 32 * MIB
"""The uncharged bytes, beyond those of the contexts, that are worth a look: readings a moment apart differ by
less."""


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
