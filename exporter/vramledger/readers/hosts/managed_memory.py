"""Read how much managed memory each holder can have, where NVML charges bytes to nobody.

NVML charges managed memory (``cudaMallocManaged``) to no process. But its addresses are mapped from
``/dev/nvidia-uvm``, so the size of these mappings is an upper bound of what the process has of it, on all
devices and on the host together. A program maps as much as it likes and touches none of it, so a mapping
alone never proves that bytes lie on a device. Measured on an H100 with driver 580: every CUDA program maps 2
MiB of this file, and 8 GiB of managed memory map 8,192 MiB more, wherever the pages are. ``maps`` takes 0.2
to 1 ms a process, ``smaps`` 4 to 55 ms; so only ``maps`` is read, and only while a device has more uncharged
bytes than the contexts of its holders explain.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from vramledger.model.device_signs import LEAST_BYTES, MIB, beyond_contexts, uncharged_bytes
from vramledger.model.reading import DeviceReading, ManagedMappings, ProcessRow
from vramledger.readers.collector import PATIENCE, BoundedReader, Collector, Context, Part
from vramledger.readers.hosts.facts import MAPS_CAP, find_memory_directory, read_file
from vramledger.readers.hosts.stat import read_row

BASE_BYTES = 2 * MIB
"""What every CUDA program maps of ``/dev/nvidia-uvm``, with and without managed memory."""

TIMEOUT = 0.05
"""Seconds that a sample waits for mappings; a late one comes with the next sample."""

READ_INTERVAL = 10.0
CHANGED_INTERVAL = 3.0
"""The same while the uncharged bytes of one of its devices have changed by :data:`LEAST_BYTES` since then."""

READS_PER_SAMPLE = 16
_MAPPING = re.compile(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) \S+ \S+ \S+ \d+ +/(?:[^\n]*/)?nvidia-uvm(?: \(deleted\))?$",
    re.MULTILINE,
)


def managed_bound(maps: bytes) -> int:
    """Return the bytes of managed memory that a process with these mappings can have at most."""
    if b"/nvidia-uvm" not in maps:
        return 0
    sizes = (int(end, 16) - int(begin, 16) for begin, end in _MAPPING.findall(maps))
    return max(0, sum(size for size in sizes if size > 0) - BASE_BYTES)


def read_managed_bound(root: str, row: ProcessRow) -> int | None:
    """Read :func:`managed_bound` of a process, None when it is gone or we may not know. It may hang."""
    denied: list[str] = []
    maps = read_file(f"{find_memory_directory(root, row)}/maps", MAPS_CAP, denied)
    again = read_row(root, row.pid)
    if denied or not maps or len(maps) >= MAPS_CAP or again is None or again.start != row.start:
        return None
    return managed_bound(maps)


class ManagedMemoryReader(Collector):
    """Read the bounds of the holders of devices with uncharged bytes, at a slow pace, and remember them."""

    patience = PATIENCE + TIMEOUT

    def __init__(self, root: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._reads: BoundedReader[tuple[tuple[int, int], int | None]] = BoundedReader(clock=clock)
        self._known: dict[tuple[int, int], ManagedMappings] = {}
        self._requested: dict[tuple[int, int], tuple[float, int]] = {}

    def read(self, context: Context) -> Part:
        return {"managed": self.update(context.devices, context.rows, TIMEOUT)}

    def update(
        self, devices: Iterable[DeviceReading], rows: Iterable[ProcessRow], timeout: float
    ) -> tuple[ManagedMappings, ...]:
        """Request what is due, wait ``timeout`` seconds for answers at most, and return what is known.

        Empty while no device has uncharged bytes beyond those of the contexts: then nothing is read.
        """
        wanted = _wanted(devices)
        now = self._clock()
        present = {(row.pid, row.start): row for row in rows if row.pid in wanted}
        if not present and not self._requested:
            return ()
        due = [identity for identity in present if self._is_due(identity, wanted[identity[0]], now)]
        due.sort(key=lambda identity: self._requested.get(identity, (float("-inf"), 0))[0])
        for identity in due[:READS_PER_SAMPLE]:
            self._requested[identity] = now, wanted[identity[0]]
            self._request(present[identity])
        for identity, bound in self._reads.collect(timeout if due else 0.0):
            self._known[identity] = ManagedMappings(*identity, bound)
        failed = self._reads.take_errors()
        self.failures = tuple(failed.values())
        for identity in self._requested.keys() & failed.keys():
            del self._requested[identity]
            self._known.pop(identity, None)
        for remembered in (self._known, self._requested):
            for identity in [each for each in remembered if each not in present]:
                del remembered[identity]
        return tuple(self._known[identity] for identity in sorted(self._known))

    def _is_due(self, identity: tuple[int, int], uncharged: int, now: float) -> bool:
        if identity not in self._requested:
            return True
        then, before = self._requested[identity]
        changed = abs(uncharged - before) >= LEAST_BYTES
        return now - then >= (CHANGED_INTERVAL if changed else READ_INTERVAL)

    def _request(self, row: ProcessRow) -> None:
        identity = row.pid, row.start
        self._reads.submit(
            identity, lambda: (identity, read_managed_bound(self._root, row)), lambda: (identity, None)
        )


def _wanted(devices: Iterable[DeviceReading]) -> dict[int, int]:
    """Return the pids whose mappings are worth a look, each with the uncharged bytes of its devices.

    A GPU instance lists the holders of each of its compute instances separately, with the memory of all of
    them.
    """
    wanted: dict[int, int] = {}
    for device in devices:
        uncharged = None if device.divided else uncharged_bytes(device)
        entries = device.processes or ()
        if uncharged is not None and beyond_contexts(uncharged, len(entries)):
            for entry in entries:
                wanted[entry.pid] = wanted.get(entry.pid, 0) + uncharged
    return wanted
