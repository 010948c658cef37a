"""What PyTorch's counters cannot tell: the largest free block, and what private pools reserve.

It takes a snapshot of the allocator, whose cost grows with the blocks (1 ms for 401 segments on an H200) and
is paid under the interpreter's lock. So: a first one when the program has got going, and then at most every
half minute, without the traces of a history that the program records, not at all for a heap that would take
too long, and less often the longer it took.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Iterable
    from types import ModuleType

FIRST = 3
"""Readings with live blocks until the first snapshot: at the very first one a program has hardly begun."""

EVERY = 30.0
"""Seconds between two snapshots at least."""

SHARE = 10_000
"""A snapshot costs at most one part in so many of the time between two."""

BLOCKS = 20_000
"""Above so many live blocks none is taken."""

STALE = 4.0
"""For so many times the pause between two snapshots the last one is worth reporting."""


class Seen:
    """One device at the last snapshot.

    Attributes:
        expandable: it has expandable segments.
        largest_free: bytes of the largest block that a new tensor could have.
        private: bytes that private pools reserve.
    """

    __slots__ = ("expandable", "largest_free", "private")

    def __init__(self) -> None:
        self.expandable = False
        self.largest_free = 0
        self.private = 0


class Heap:
    """The allocator's blocks as they were at the last snapshot."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.readings = 0
        self.next = 0.0
        self.pause = EVERY
        self.taken = 0.0
        self.devices: dict[int, Seen] = {}
        self.failed = False

    def look(self, now: float, stats: Iterable[dict[str, object]]) -> None:
        """Take a snapshot if it is time for one and the heap is not too large."""
        if now < self.next or self.failed:
            return
        live = blocks(stats)
        self.readings += live > 0
        if self.readings < FIRST:
            return
        self.next = now + EVERY
        if live > BLOCKS:
            return
        begun = time.thread_time()
        self.devices = self.take()
        self.pause = max(EVERY, (time.thread_time() - begun) * SHARE)
        self.taken = now
        self.next = now + self.pause

    def take(self) -> dict[int, Seen]:
        """Return what a snapshot says now; empty, and for good, where none is to be had cheaply."""
        try:
            segments = snapshot(self.torch)
        except (RuntimeError, TypeError, AttributeError):  # a version that we do not know
            self.failed = True
            return {}
        return {} if segments is None else survey(segments)

    def device(self, ordinal: int) -> Seen | None:
        """Return what is known of a device's blocks, None when that is too long ago."""
        if time.monotonic() - self.taken > STALE * self.pause:
            return None
        return self.devices.get(ordinal)


def blocks(stats: Iterable[dict[str, object]]) -> int:
    """Return how many blocks are live on all devices."""
    total = 0
    for device in stats:
        for family in ("active", "inactive_split"):
            counts = device.get(family)
            if isinstance(counts, dict):
                total += counts["all"]["current"]
    return total


def snapshot(torch: ModuleType) -> list[dict[str, object]] | None:
    """Return the allocator's segments; None while the program records a history that would come along."""
    native = torch._C
    code = getattr(getattr(torch.cuda.memory, "memory_snapshot", None), "__code__", None)
    if code is not None and "include_traces" in code.co_varnames:  # torch 2.12
        taken = native._cuda_memorySnapshot((0, 0, False))
    elif native._cuda_isHistoryEnabled():
        return None
    else:
        taken = native._cuda_memorySnapshot(None)
    segments: list[dict[str, object]] = taken["segments"]
    return segments


def survey(segments: Iterable[dict[str, object]]) -> dict[int, Seen]:
    """Return by device what a snapshot's segments say."""
    found: dict[int, Seen] = {}
    for segment in segments:
        seen = found.setdefault(_whole(segment.get("device")), Seen())
        private = tuple(segment.get("segment_pool_id") or (0, 0)) != (0, 0)  # type: ignore[arg-type]
        size = _whole(segment.get("total_size"))
        expandable = bool(segment.get("is_expandable"))
        seen.expandable = seen.expandable or expandable
        if private:
            seen.private += size
            continue  # its free blocks are a CUDA graph's
        for block in segment.get("blocks") or ():  # type: ignore[attr-defined]
            if block["state"] == "inactive":
                seen.largest_free = max(seen.largest_free, block["size"])
    return found


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
