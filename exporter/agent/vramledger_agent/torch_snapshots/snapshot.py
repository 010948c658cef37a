"""Parse a PyTorch memory snapshot into values: live blocks, events in time, totals for each device.

The structure is the one that ``torch.cuda.memory._snapshot`` documents (2.1 to 2.15): ``segments`` with
``blocks``, and ``device_traces``, a list of events for each device. Nothing is trusted: a value that is not
of the documented type stops the reading, and the error names its place. So is what our agent has added: peaks
of steps, number types, garbage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vramledger_agent.errors import SnapshotError
from vramledger_agent.protocol.messages import CATEGORIES, SNAPSHOT_KEY
from vramledger_agent.protocol.user_code import PHASES
from vramledger_agent.torch_snapshots.safe_pickle import (
    flag,
    items,
    mapping,
    optional_number,
    raise_malformed,
    text,
    whole_number,
)
from vramledger_agent.torch_snapshots.user_lines import (
    NATIVE,
    UNRECORDED,
    Frame,
    Stack,
    category_of,
    user_frames,
    without_native,
)

MAX_STEPS = 1000


class PhasePeak(NamedTuple):
    """The most live bytes in a part of a step, and what they were for."""

    size: int
    categories: Mapping[str, int]


class TrainingStep(NamedTuple):
    whole: bool  # all of it was recorded
    finished: bool  # it had ended when the snapshot was taken
    batch: int | None  # the size of its batch, None where not known
    peaks: Mapping[str, PhasePeak]  # by the part of the step
    # bytes of gradients that existed when the backward pass began, None without one
    gradients_before: int | None


class DeviceTraining(NamedTuple):
    """The steps on one device, the oldest first, and bytes by category and type of number."""

    device: int
    steps: tuple[TrainingStep, ...]
    types: Mapping[str, Mapping[str, int]]


class FreedBlock(NamedTuple):
    """A block that the collector freed; ``frame`` is the program's line, None where it was not recorded."""

    device: int
    size: int
    frame: Frame | None


class Cycle(NamedTuple):
    """Cycles that the same code made."""

    size: int  # bytes of their tensors
    cycles: int  # how many there were
    members: int  # the objects of the first one
    objects: tuple[tuple[str, Frame], ...]  # the type and the code of some of these


class Garbage(NamedTuple):
    """What Python's cyclic collector freed."""

    blocks: tuple[FreedBlock, ...]
    cycles: tuple[Cycle, ...]


class Training(NamedTuple):
    """What the agent has added."""

    from_start: bool  # the recording began before the first allocation
    devices: tuple[DeviceTraining, ...]  # those with live bytes
    # bytes of the results of the forward operations by type of number, empty where not known
    forward_types: Mapping[str, int]
    garbage: Garbage | None  # None where the collector was not asked


def parse_training(data: object) -> Training:
    """Read the agent's part of a snapshot. Raises SnapshotError if it is not what the agent writes."""
    whole = mapping(data, "vramledger")
    devices = mapping(whole.get("devices", {}), "devices")
    garbage = whole.get("garbage")
    return Training(
        flag(whole, "from_start"),
        tuple(_device(number, entry) for number, entry in devices.items()),
        _sizes(whole.get("forward_types", {}), "forward_types"),
        None if garbage is None else _garbage(mapping(garbage, "garbage")),
    )


def _device(number: object, data: object) -> DeviceTraining:
    entry = mapping(data, "devices")
    types = mapping(entry.get("types", {}), "types")
    return DeviceTraining(
        whole_number({"device": number}, "device"),
        tuple(_step(step) for step in items(entry, "steps", MAX_STEPS)),
        {text({"types": name}, "types"): _sizes(found, "types") for name, found in types.items()},
    )


def _step(entry: Mapping[object, object]) -> TrainingStep:
    phases = mapping(entry.get("phases", {}), "phases")
    return TrainingStep(
        flag(entry, "whole"),
        flag(entry, "finished"),
        optional_number(entry, "batch"),
        {name: _peak(mapping(phases[name], name)) for name in PHASES if name in phases},
        optional_number(entry, "gradients_before_backward"),
    )


def _peak(entry: Mapping[object, object]) -> PhasePeak:
    categories = mapping(entry.get("categories", {}), "categories")
    return PhasePeak(
        whole_number(entry, "bytes"),
        {name: whole_number(categories, name) for name in CATEGORIES if name in categories},
    )


def _sizes(data: object, place: str) -> dict[str, int]:
    found = mapping(data, place)
    return {text({place: name}, place): whole_number({place: size}, place) for name, size in found.items()}


def _garbage(entry: Mapping[object, object]) -> Garbage:
    return Garbage(
        tuple(
            FreedBlock(whole_number(block, "device"), whole_number(block, "size"), _line(block))
            for block in items(entry, "blocks")
        ),
        tuple(
            Cycle(
                whole_number(cycle, "bytes"),
                whole_number(cycle, "cycles"),
                whole_number(cycle, "count"),
                tuple(
                    (text(each, "type"), _frame(each, "file", "function")) for each in items(cycle, "objects")
                ),
            )
            for cycle in items(entry, "cycles")
        ),
    )


def _line(block: Mapping[object, object]) -> Frame | None:
    frames = tuple(_frame(frame, "filename", "name") for frame in items(block, "frames"))
    return next(iter(user_frames(frames)), None)


def _frame(entry: Mapping[object, object], file: str, function: str) -> Frame:
    return Frame(text(entry, file), whole_number(entry, "line"), text(entry, function))


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
            raise SnapshotError("this is not a memory snapshot of PyTorch: it has no segments")
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
            raise SnapshotError(f"the snapshot has more than {self._most:,} entries; record a shorter time")
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
