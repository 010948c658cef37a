"""Read how busy a GPU was, and by which processes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection
from typing import Final

from vramledger.model.reading import ProcessUtilization
from vramledger.readers.nvml.process_lists import RowBuffer, Rows, find_function
from vramledger.readers.nvml.return_codes import (
    FUNCTION_NOT_FOUND,
    NONE_32,
    NOT_FOUND,
    UNKNOWN,
    Handle,
    Nvml,
)

_SAMPLE: Final = struct.Struct("@I4xQIIII")
"""pid, µs since 1970, then SM, memory, encoder and decoder in percent."""
_CLOCK_TOLERANCE: Final = 5_000_000
"""In µs; a sample further in the future than this is garbage."""
_PERCENT: Final = 100


def read_utilization(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
    """Return how busy a GPU and its memory were, as ratios; None if it reports neither.

    Raises:
        NVMLError: the query failed, or the answer is garbage.
    """
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    values = {"gpu": rates.gpu, "memory": rates.memory}
    if any(value > _PERCENT and value != NONE_32 for value in values.values()):
        raise nvml.NVMLError(UNKNOWN)
    return {name: value / 100 for name, value in values.items() if value != NONE_32} or None


class UtilizationLog:
    """The driver's log of process utilisation; each reading continues where the last one ended."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._function = find_function(nvml, "nvmlDeviceGetProcessUtilization")
        self._buffer = RowBuffer(_SAMPLE)
        self._last_seen: int | None = None

    def read(
        self, handle: Handle, wall: float, listed_pids: Collection[int] | None
    ) -> tuple[ProcessUtilization, ...]:
        """Return the newest valid sample of each pid that worked since the previous reading.

        Args:
            handle: the device.
            wall: the time now, Unix seconds.
            listed_pids: the holders of memory on the device, None when not known.

        Raises:
            NVMLError: the query failed; or all that is new, or all of a listed pid, is garbage, which is not
                evidence that the process did not work. A garbage row of any other pid is ignored, because the
                pid itself may be garbage.
        """
        if self._function is None:
            raise self._nvml.NVMLError(FUNCTION_NOT_FOUND)
        now = int(wall * 1e6)
        # Start from "now", as the log holds what ran before us; also after the clock was set back.
        if self._last_seen is None or self._last_seen > now + _CLOCK_TOLERANCE:
            self._last_seen = now
        since = ctypes.c_ulonglong(self._last_seen)
        function = self._function
        try:
            rows = self._buffer.read(
                self._nvml, lambda count, samples: function(handle, samples, count, since)
            )
        except self._nvml.NVMLError as error:
            if error.value == NOT_FOUND:
                return ()  # no process was busy
            raise
        newest, garbage, self._last_seen = _newest_samples(rows, self._last_seen, now)
        if garbage and (not newest or listed_pids is None or not garbage.isdisjoint(listed_pids)):
            raise self._nvml.NVMLError(UNKNOWN)
        return tuple(
            ProcessUtilization(pid, stamp / 1e6, sm / 100, memory / 100, encoder / 100, decoder / 100)
            for pid, stamp, sm, memory, encoder, decoder in newest
        )


def _newest_samples(rows: Rows, last_seen: int, now: int) -> tuple[list[tuple[int, ...]], set[int], int]:
    """Return the newest valid row of each pid, the pids with garbage only, and the newest time, in µs.

    Garbage with a plausible time also moves the newest time forward: the driver's log keeps such a row for a
    long time, and we must read it only once.
    """
    newest: dict[int, tuple[int, ...]] = {}
    garbage: set[int] = set()
    seen = last_seen
    for row in rows:
        pid, stamp, *percents = row
        if pid == 0 or stamp <= last_seen:
            continue  # an unused row, or a sample that we already have
        if stamp > now + _CLOCK_TOLERANCE or max(percents) > _PERCENT:
            garbage.add(pid)
            seen = max(seen, stamp) if stamp <= now else seen
            continue
        seen = max(seen, stamp)
        if pid not in newest or stamp > newest[pid][1]:
            newest[pid] = row
    return list(newest.values()), garbage - newest.keys(), seen
