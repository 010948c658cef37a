"""Find what PyTorch's counters cannot tell: the largest free block, and what private pools reserve.

A survey takes a snapshot of the allocator, whose cost grows with the blocks (1 ms for 401 segments on an
H200), while it holds the interpreter's lock. So the first survey is made once the program is under way, and
then at most one every half minute, less often the longer it took. It leaves out the traces of a history that
the program records, and there is none for a heap that would take too long.
"""

from __future__ import annotations

import time

from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.torch.recording import recording
from vramledger_agent.torch.snapshots import WouldImportError, take_without_import

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Iterable
    from types import ModuleType

FIRST_READING = 3
"""The first survey is at the third reading with live blocks: before that a program has hardly begun."""

MIN_PAUSE_SECONDS = 30.0
"""The shortest pause between two surveys."""

MIN_PAUSE_TO_COST = 10_000
"""The pause is at least this number of times the CPU time that the survey took."""

MAX_BLOCKS = 20_000
"""When there are more live blocks than this, there is no survey."""

MAX_AGE_PAUSES = 4.0
"""A survey is reported for this number of times the pause after it."""


class DeviceBlocks:
    """The blocks of one device at the last survey."""

    __slots__ = ("has_expandable", "largest_free", "private")

    def __init__(self) -> None:
        self.has_expandable = False  # it has expandable segments
        self.largest_free = 0  # bytes of the largest block that a new tensor could have
        self.private = 0  # bytes that private pools reserve


class BlockSurvey:
    """The allocator's blocks as they were at the last survey."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._live_readings = 0
        self._next_survey = 0.0
        self._pause_seconds = MIN_PAUSE_SECONDS
        self._surveyed_at = 0.0
        self._devices: dict[int, DeviceBlocks] = {}
        self._unsupported = False

    def survey_if_due(self, now: float, stats: Iterable[dict[str, object]]) -> None:
        """Take a snapshot if it is time for one and the heap is not too large."""
        if now < self._next_survey or self._unsupported:
            return
        live = count_blocks(stats)
        self._live_readings += live > 0
        if self._live_readings < FIRST_READING:
            return
        self._next_survey = now + MIN_PAUSE_SECONDS
        if live > MAX_BLOCKS:
            return
        begun = time.thread_time()
        self._devices = self.survey_now()
        self._pause_seconds = max(MIN_PAUSE_SECONDS, (time.thread_time() - begun) * MIN_PAUSE_TO_COST)
        self._surveyed_at = now
        self._next_survey = now + self._pause_seconds

    def survey_now(self) -> dict[int, DeviceBlocks]:
        """Return each device's blocks now; empty, from now on, where they cannot be read cheaply."""
        try:
            segments = take_snapshot(self._torch)
        except (RuntimeError, TypeError, AttributeError) as error:  # a version that we do not know
            if belongs_to_program(error):
                raise
            self._unsupported = True
            return {}
        if segments is None:
            return {}
        recording.compare({"segments": segments})  # before a failure needs it
        return sum_segments(segments)

    def device_blocks(self, ordinal: int) -> DeviceBlocks | None:
        """Return what is known of a device's blocks, None when that is too old."""
        if time.monotonic() - self._surveyed_at > MAX_AGE_PAUSES * self._pause_seconds:
            return None
        return self._devices.get(ordinal)


def count_blocks(stats: Iterable[dict[str, object]]) -> int:
    total = 0
    for device in stats:
        for family in ("active", "inactive_split"):
            counts = device.get(family)
            if isinstance(counts, dict):
                total += counts["all"]["current"]
    return total


def take_snapshot(torch: ModuleType) -> list[dict[str, object]] | None:
    """Return the allocator's segments; None where a recorded history makes that too expensive or unsafe.

    Before torch 2.12 they would contain the whole history.
    """
    native = torch._C
    code = getattr(getattr(torch.cuda.memory, "memory_snapshot", None), "__code__", None)
    if code is not None and "include_traces" in code.co_varnames:  # torch 2.12
        argument: object = (0, 0, False)
    elif native._cuda_isHistoryEnabled():
        return None
    else:
        argument = None
    try:  # blocks keep their stacks, also once nothing is recorded
        snapshot = take_without_import(torch, lambda: native._cuda_memorySnapshot(argument))
    except WouldImportError:
        return None
    segments: list[dict[str, object]] = snapshot["segments"]
    return segments


def sum_segments(segments: Iterable[dict[str, object]]) -> dict[int, DeviceBlocks]:
    found: dict[int, DeviceBlocks] = {}
    for segment in segments:
        blocks = found.setdefault(_int_or_zero(segment.get("device")), DeviceBlocks())
        private = tuple(segment.get("segment_pool_id") or (0, 0)) != (0, 0)  # type: ignore[arg-type]
        size = _int_or_zero(segment.get("total_size"))
        blocks.has_expandable = blocks.has_expandable or bool(segment.get("is_expandable"))
        if private:
            blocks.private += size
            continue  # its free blocks belong to a CUDA graph
        for block in segment.get("blocks") or ():  # type: ignore[attr-defined]
            if block["state"] == "inactive":
                blocks.largest_free = max(blocks.largest_free, block["size"])
    return found


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0
