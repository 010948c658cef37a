"""Read the lists of holders that NVML writes into our buffer.

pynvml's own list functions first request the size, which is a second driver call, and build an object for
each row, attribute by attribute. For 8 devices with 64 processes in three lists they take 2.7 ms of CPU. One
call into a kept buffer that struct reads takes 1.1 ms, merging included (Python 3.11, stand-in).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from vramledger.model.reading import ProcessEntry
from vramledger.readers.nvml import calls
from vramledger.readers.nvml.calls import Failures, Handle, Nvml

Rows = Iterable[tuple[int, ...]]

_SHORT_ROW: Final = struct.Struct("@I4xQ")
"""Version 1: pid and bytes."""
_ROW: Final = struct.Struct("@I4xQ8x")
"""Versions 2 and 3: also two MIG ids."""
_LONG_ROW: Final = struct.Struct("@I4xQ16x")
"""Version 3 in the 535.43 drivers: also the protected bytes."""

_ATTEMPTS: Final = 4
_MAX_ROWS: Final = 8192
"""A list that claims more rows is garbage, and we allocate no room for it."""
_LAST_PID: Final = 2**22
"""The kernel's ``PID_MAX_LIMIT``."""


class RowBuffer:
    """The buffer for the rows of a list, kept between readings, enlarged when the list has grown."""

    def __init__(self, row: struct.Struct) -> None:
        self._row = row
        self._count = ctypes.c_uint()
        self._allocate(64)

    def _allocate(self, rows: int) -> None:
        self._capacity = rows
        self._words = (ctypes.c_uint64 * (rows * self._row.size // 8))()

    def read(self, nvml: Nvml, call: Callable[..., int]) -> Rows:
        """Return rows, valid until the next reading. Raises NVMLError if it failed, or outgrew our buffer."""
        status = calls.INSUFFICIENT_SIZE
        for _ in range(_ATTEMPTS):
            self._count.value = self._capacity
            status = call(ctypes.byref(self._count), self._words)
            if status != calls.INSUFFICIENT_SIZE or self._count.value > _MAX_ROWS:
                break
            self._allocate(min(max(self._capacity, self._count.value), _MAX_ROWS) * 2)
        if status != calls.SUCCESS:
            raise nvml.NVMLError(status)
        if self._count.value > self._capacity:  # the rest of the buffer holds rows of an earlier reading
            raise nvml.NVMLError(calls.UNKNOWN)
        words = self._count.value * self._row.size // 8
        return self._row.iter_unpack(memoryview(self._words)[:words])


def find_function(nvml: Nvml, name: str) -> Callable[..., int] | None:
    """Return a function of the library, None when the library is too old to have it."""
    if nvml.nvmlLib is None:
        raise nvml.NVMLError(calls.UNINITIALIZED)
    return getattr(nvml.nvmlLib, name, None)


class ProcessList:
    """One of NVML's three process lists, by the newest version of the query that works."""

    def __init__(self, nvml: Nvml, name: str) -> None:
        self._nvml = nvml
        self.worked = False  # whether the driver has ever answered
        newest = _ROW
        if find_function(nvml, "nvmlDeviceGetRunningProcessDetailList") is None and find_function(
            nvml, "nvmlDeviceGetConfComputeMemSizeInfo"
        ):
            newest = _LONG_ROW  # newer drivers use the short row again; nvitop has the same rule
        self._versions: list[tuple[Callable[..., int], RowBuffer]] = []
        for suffix, row in (("_v3", newest), ("_v2", _ROW), ("", _SHORT_ROW)):
            function = find_function(nvml, name + suffix)
            if function is not None:
                self._versions.append((function, RowBuffer(row)))

    def read(self, handle: Handle) -> Rows:
        """Return (pid, bytes) rows, valid until the next reading.

        If a version worked before and does not now, the query has failed, even if the driver says that it is
        unsupported.
        """
        while self._versions:
            function, buffer = self._versions[0]
            try:
                rows = buffer.read(self._nvml, partial(function, handle))
            except self._nvml.NVMLError as error:
                if self.worked and error.value in calls.UNSUPPORTED:
                    raise self._nvml.NVMLError(calls.UNKNOWN) from error
                if error.value not in calls.NO_SUCH_FUNCTION or len(self._versions) == 1:
                    raise
                del self._versions[0]  # the library has it, the kernel module does not
                continue
            self.worked = True
            return rows
        raise self._nvml.NVMLError(calls.FUNCTION_NOT_FOUND)


class Unchanged:
    """Tells whether the lists of graphics processes and of MPS clients must still be empty, if they were.

    A process of either kind takes memory of the device. So while the same compute processes are listed, and
    what is used beyond theirs is the same to the byte, none has come.
    """

    def __init__(self) -> None:
        # bytes used on the device in this reading, None where they are not known
        self.used: int | None = None
        self._before: tuple[frozenset[int], int] | None = None

    def forget(self) -> None:
        """Have every list read the next time."""
        self._before = None

    def only_compute(self, compute: Rows) -> bool:
        """Tell whether a list of compute processes is all that can have changed since all were read."""
        return self._before is not None and self.used is not None and self._before == self._state(compute)

    def remember(self, lists: list[tuple[str, tuple[tuple[int, ...], ...]]]) -> None:
        """Remember the lists of a reading, those that were not read being empty."""
        empty = all(kind == "C" or not rows for kind, rows in lists)
        self._before = self._state(lists[0][1]) if empty else None

    def _state(self, compute: Rows) -> tuple[frozenset[int], int] | None:
        """Return the pids, and the bytes that belong to none of them; None where these are not known."""
        sizes = {row[0]: row[1] for row in compute}
        if self.used is None or calls.NONE_64 in sizes.values():
            return None
        return frozenset(sizes), self.used - sum(sizes.values())


def merge_lists(lists: Iterable[tuple[str, Rows]], failed: Failures) -> tuple[ProcessEntry, ...]:
    """Merge (kind, rows) by pid: an MPS client is in two lists with the same bytes, so maximum, not sum.

    Bytes that cannot be are not known, and a pid that cannot be has no entry; both are named in ``failed``.
    Raises ValueError: most rows cannot be; then none is reliable.
    """
    merged: dict[int, ProcessEntry] = {}
    impossible = 0
    for kind, rows in lists:
        for pid, size in rows:
            memory = None if size == calls.NONE_64 or size > calls.MAX_BYTES else size
            if pid > _LAST_PID or calls.MAX_BYTES < size != calls.NONE_64:
                failed[calls.IMPOSSIBLE_ROW] = f"pid {pid} with {size} bytes"
                impossible += 1
            if pid > _LAST_PID:
                continue
            before = merged.get(pid)
            if before is None:
                merged[pid] = ProcessEntry(pid, memory, kind)
            else:
                known = [each for each in (before.memory, memory) if each is not None]
                kinds = before.kinds if kind in before.kinds else before.kinds + kind
                merged[pid] = ProcessEntry(pid, max(known, default=None), kinds)
    if impossible > len(merged) // 2:
        raise ValueError(failed[calls.IMPOSSIBLE_ROW])
    merged.pop(0, None)  # an unused row: no process has this pid
    return tuple(merged.values())
