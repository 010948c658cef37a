"""Lay out an allocator's memory as a picture, in bytes, seconds and rows; :mod:`html` draws it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from vramledger_agent.torch_snapshots.live_bytes import event_times
from vramledger_agent.torch_snapshots.snapshot import AllocationSnapshot, Block, Segment
from vramledger_agent.torch_snapshots.user_lines import UNRECORDED, Stack

ROWS = 40
"""Rows of a map: a row has at least a fortieth of the memory."""

_ROW_LEAST = 2 * 2**20

SHAPES_MAX = 5000
"""The maximum number of allocations in a picture, the largest ones: a browser draws so many at once."""


class MapRow(NamedTuple):
    """A part of a segment or of a block in one row: from byte ``begin`` to byte ``end`` of the row."""

    row: int
    begin: int
    end: int


class SegmentMap(NamedTuple):
    """The segments of a device, one after the other, in rows of ``row_bytes``."""

    row_bytes: int  # bytes of a row
    rows: int  # how many rows there are
    segments: tuple[tuple[Segment, tuple[MapRow, ...]], ...]  # each with its parts
    # each block in use with its segment and its parts; the largest ones
    blocks: tuple[tuple[Block, Segment, tuple[MapRow, ...]], ...]
    omitted: int  # how many smaller blocks are not among them


def map_segments(snapshot: AllocationSnapshot, device: int) -> SegmentMap | None:
    """Lay out a device's segments by their addresses; None if it has none."""
    segments = sorted(
        (each for each in snapshot.segments if each.device == device and each.size),
        key=lambda each: each.address,
    )
    total = sum(each.size for each in segments)
    if not total:
        return None
    row_bytes = max(_ROW_LEAST, -(-total // ROWS))
    kept = _largest([(block.size, block) for each in segments for block in each.blocks])
    offset = 0
    rows = []
    blocks = []
    for each in segments:
        rows.append((each, tuple(_parts(offset, each.size, row_bytes))))
        for block in each.blocks:
            # What a broken file puts outside of its segment is drawn at its edge.
            begin = min(max(0, block.address - each.address), each.size)
            size = min(block.size, each.size - begin)
            if size and (kept is None or id(block) in kept):
                blocks.append((block, each, tuple(_parts(offset + begin, size, row_bytes))))
        offset += each.size
    in_use = sum(len(each.blocks) for each in segments)
    return SegmentMap(row_bytes, -(-total // row_bytes), tuple(rows), tuple(blocks), in_use - len(blocks))


def _largest(sized: Sequence[tuple[float, object]]) -> set[int] | None:
    """Return the identities of the largest objects; None if all may be drawn."""
    if len(sized) <= SHAPES_MAX:
        return None
    return {id(each) for _, each in sorted(sized, key=lambda pair: -pair[0])[:SHAPES_MAX]}


def _parts(begin: int, size: int, row_bytes: int) -> Iterator[MapRow]:
    end = begin + size
    while begin < end:
        row = begin // row_bytes
        until = min(end, (row + 1) * row_bytes)
        yield MapRow(row, begin - row * row_bytes, until - row * row_bytes)
        begin = until


class DrawnAllocation(NamedTuple):
    """One allocation: where and when it lived."""

    offset: int  # bytes from the lowest address of the picture, without the gaps in which nothing ever was
    size: int
    begin: float  # seconds since the first event, or the number of the event
    end: float  # when it was freed, or the last event
    category: str  # what allocated it
    stack: Stack  # the user's frames
    freed: bool = False  # it was freed within the recording


class LifetimeMap(NamedTuple):
    """The allocations of a device over time: ``height`` in bytes, ``span`` in seconds or events."""

    allocations: tuple[DrawnAllocation, ...]
    height: int
    span: float
    timed: bool
    omitted: int


def map_lifetimes(snapshot: AllocationSnapshot, device: int) -> LifetimeMap | None:
    """Lay out a device's allocations by address and time; None if nothing was recorded."""
    events = [each for each in snapshot.events if each.device == device]
    if not events:
        return None
    times, timed = event_times(events)
    start = min(times)
    span = max(times) - start
    alive: dict[int, DrawnAllocation] = {}
    found: list[DrawnAllocation] = []
    for time, event in zip(times, events, strict=True):
        if event.action == "alloc":
            alive[event.address] = DrawnAllocation(
                event.address, event.size, time - start, span, event.category, event.stack
            )
        elif event.action == "free_completed":
            older = DrawnAllocation(event.address, event.size, 0.0, span, UNRECORDED, ())
            found.append(alive.pop(event.address, older)._replace(end=time - start, freed=True))
    sizes = {block.address: block.size for block in snapshot.blocks if block.device == device}
    # An event has the size that was requested, its block may be larger.
    found += [each._replace(size=sizes.get(address, each.size)) for address, each in alive.items()]
    found += [
        DrawnAllocation(block.address, block.size, 0.0, span, block.category, block.stack)
        for block in snapshot.blocks
        if block.device == device and block.address not in alive
    ]
    found = [each for each in found if each.size]
    if not found:
        return None
    kept = _largest([(each.size * (each.end - each.begin), each) for each in found])
    drawn = found if kept is None else [each for each in found if id(each) in kept]
    begins, offsets, height = _without_gaps(drawn)
    placed = []
    for each in drawn:
        part = bisect_right(begins, each.offset) - 1
        placed.append(each._replace(offset=offsets[part] + each.offset - begins[part]))
    return LifetimeMap(tuple(placed), height, span or 1.0, timed, len(found) - len(drawn))


def _without_gaps(found: Sequence[DrawnAllocation]) -> tuple[list[int], list[int], int]:
    """Return where used ranges of addresses begin, where each begins without the gaps, and the sum."""
    begins: list[int] = []
    ends: list[int] = []
    for each in sorted(found, key=lambda each: each.offset):
        end = each.offset + each.size
        if begins and each.offset <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(each.offset)
            ends.append(end)
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    offsets = [0, *accumulate(sizes)]
    return begins, offsets[:-1], offsets[-1]
