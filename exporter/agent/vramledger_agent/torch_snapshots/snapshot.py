"""Parse a PyTorch memory snapshot into values: live blocks, events in time, totals for each device.

The structure is the one that ``torch.cuda.memory._snapshot`` documents (2.1 to 2.15): ``segments`` with
``blocks``, and ``device_traces``, a list of events for each device. Nothing is trusted: a value that is not
of the documented type stops the reading, and the error names its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vramledger_agent.errors import SnapshotError
from vramledger_agent.protocol.messages import SNAPSHOT_KEY
from vramledger_agent.torch_snapshots.safe_pickle import mapping, raise_malformed, whole_number
from vramledger_agent.torch_snapshots.training import Training, parse_training
from vramledger_agent.torch_snapshots.user_lines import (
    NATIVE,
    UNRECORDED,
    Frame,
    Stack,
    category_of,
    user_frames,
    without_native,
)

ENTRIES_MAX = 5_000_000
"""The maximum number of blocks, events and frames; a small file can refer to one list a million times."""

_LIVE_STATES = ("active_allocated", "active_awaiting_free", "active_pending_free")
"""The third is the older name of the second: freed by the program, still in use by a stream."""


class Block(NamedTuple):
    """Memory in use. ``stack`` holds the user's frames; it is empty for memory older than the recording.

    It is :data:`NATIVE` alone for memory that the recording saw allocated without a frame of Python.
    ``category`` is one of :data:`vramledger_agent.torch_snapshots.user_lines.CATEGORIES`.
    """

    device: int
    address: int
    size: int
    stack: Stack
    category: str = UNRECORDED


class Segment(NamedTuple):
    """Memory that the allocator has taken from the driver in one piece, with the blocks in use."""

    device: int  # PyTorch's number
    address: int  # where it begins
    size: int
    about: str  # its pool, in a few words
    blocks: tuple[Block, ...]  # in the order of their addresses; between them it is free


class AllocationEvent(NamedTuple):
    """An event of the allocator; ``time`` in seconds of an unnamed clock, None where not recorded."""

    device: int
    action: str
    address: int
    size: int
    time: float | None
    stack: Stack
    category: str = UNRECORDED


class Device(NamedTuple):
    """Totals of one device, bytes; the number is PyTorch's own."""

    number: int
    reserved: int
    allocated: int
    largest_free: int


class AllocationSnapshot(NamedTuple):
    """One snapshot file; ``training`` is what our agent has added, None in a file that PyTorch wrote."""

    devices: tuple[Device, ...]
    blocks: tuple[Block, ...]
    events: tuple[AllocationEvent, ...]
    segments: tuple[Segment, ...] = ()
    training: Training | None = None

    @property
    def recorded(self) -> float | None:
        """Return how many seconds the events span; None if they have no times."""
        times = [event.time for event in self.events if event.time is not None]
        return max(times) - min(times) if times else None


def parse_snapshot(data: object, *, most: int = ENTRIES_MAX) -> AllocationSnapshot:
    """Read the plain data of a snapshot. Raises SnapshotError if it is not of the documented structure."""
    return _SnapshotParser(most).parse(data)


class _SnapshotParser:
    """The parsing of one snapshot: the number of entries so far, and the stacks and frames already seen."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen = 0
        self._stacks: dict[Stack, tuple[Stack, str]] = {}
        self._frames: dict[Frame, Frame] = {}

    def parse(self, data: object) -> AllocationSnapshot:
        whole = mapping(data, "the snapshot")
        if "segments" not in whole:
            message = "this is not a memory snapshot of PyTorch: it has no segments"
            raise SnapshotError(message)
        events = _name_native(tuple(self._events(whole)))
        training = parse_training(whole[SNAPSHOT_KEY]) if SNAPSHOT_KEY in whole else None
        native = _addresses_of_native(events)
        blocks: list[Block] = []
        segments: list[Segment] = []
        totals: dict[int, list[int]] = {}
        for segment in self._items(whole, "segments"):
            number = whole_number(segment, "device", 0)  # absent before 2.1, which had one device in a file
            total = totals.setdefault(number, [0, 0, 0])
            total_size = whole_number(segment, "total_size")
            total[0] += total_size
            begin = address = whole_number(segment, "address", 0)
            first = len(blocks)
            for block in self._items(segment, "blocks"):
                size = whole_number(block, "size")
                start = whole_number(block, "address", address)
                address = start + size
                if block.get("state") in _LIVE_STATES:
                    total[1] += size
                    stack, category = self._stack(block)
                    if not stack and ((number, start) in native or (training and training.from_start)):
                        stack, category = (NATIVE,), category_of((NATIVE,))
                    blocks.append(Block(number, start, size, stack, category))
                else:
                    total[2] = max(total[2], size)
            inside = tuple(sorted(blocks[first:], key=lambda block: block.address))
            segments.append(Segment(number, begin, total_size, _about(segment), inside))
        devices = tuple(Device(number, *total) for number, total in sorted(totals.items()))
        return AllocationSnapshot(devices, tuple(blocks), events, tuple(segments), training)

    def _events(self, whole: Mapping[object, object]) -> Iterator[AllocationEvent]:
        traces = whole.get("device_traces", [])
        if not isinstance(traces, list | tuple):
            raise_malformed("device_traces", "a list")
        for number, trace in enumerate(traces):
            for entry in self._items({"device_traces": trace}, "device_traces"):
                action = entry.get("action")
                if not isinstance(action, str):
                    raise_malformed("action", "a string")
                time = whole_number(entry, "time_us", -1)
                stack, category = self._stack(entry) if action == "alloc" else ((), UNRECORDED)
                yield AllocationEvent(
                    number, action, whole_number(entry, "addr", 0), whole_number(entry, "size", 0),
                    None if time < 0 else time / 1e6, stack, category,
                )  # fmt: skip

    def _stack(self, holder: Mapping[object, object]) -> tuple[Stack, str]:
        if holder.get("frames") is None:
            return (), UNRECORDED
        frames = []
        for frame in self._items(holder, "frames"):
            filename, name = frame.get("filename"), frame.get("name")
            if not isinstance(filename, str) or not isinstance(name, str):
                raise_malformed("frames", "file names and functions")
            key = Frame(filename, whole_number(frame, "line", 0), name)
            frames.append(self._frames.setdefault(key, key))
        whole = tuple(frames)
        if whole not in self._stacks:
            python = without_native(whole)
            own = user_frames(python) if python or not whole else (NATIVE,)
            self._stacks[whole] = own, category_of(whole)
        return self._stacks[whole]

    def _items(self, holder: Mapping[object, object], key: str) -> Iterator[Mapping[object, object]]:
        items = holder.get(key, [])
        if not isinstance(items, list | tuple):
            raise_malformed(key, "a list")
        self._seen += len(items)
        if self._seen > self._most:
            message = f"the snapshot has more than {self._most:,} entries; record a shorter time"
            raise SnapshotError(message)
        for item in items:
            yield mapping(item, key)


def _name_native(events: tuple[AllocationEvent, ...]) -> tuple[AllocationEvent, ...]:
    """Return the events; where some have frames, an allocation without any gets :data:`NATIVE`."""
    if not any(event.stack for event in events):
        return events  # the recording kept no frames at all
    return tuple(
        event._replace(stack=(NATIVE,), category=category_of((NATIVE,)))
        if event.action == "alloc" and not event.stack
        else event
        for event in events
    )


def _addresses_of_native(events: tuple[AllocationEvent, ...]) -> set[tuple[int, int]]:
    """Return device and address of all memory that is kept to the end and was allocated without a line."""
    found: set[tuple[int, int]] = set()
    for event in events:
        if event.action == "alloc" and event.stack == (NATIVE,):
            found.add((event.device, event.address))
        elif event.action in ("alloc", "free_completed"):
            found.discard((event.device, event.address))
    return found


def _about(segment: Mapping[object, object]) -> str:
    words = [
        "expandable" if segment.get("is_expandable") is True else "",
        "private" if segment.get("segment_pool_id") not in (None, (0, 0), [0, 0]) else "",
        "small allocations" if segment.get("segment_type") == "small" else "large allocations",
    ]
    return " ".join(word for word in words if word)
