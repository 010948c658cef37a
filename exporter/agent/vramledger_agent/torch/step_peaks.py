"""Compute the peaks within training steps from the allocator's events: pure functions over a snapshot.

The allocator counts no peak of a part of a step, and to reset its peak would change the program's figures.
But a recorded history has each allocation with its stack, and a stack tells the forward pass from the
backward pass and from the optimizer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vramledger_agent.protocol.messages import CATEGORIES
from vramledger_agent.protocol.user_code import phase_of

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = CATEGORIES

LIVE_STATES = ("active_allocated", "active_awaiting_free", "active_pending_free")
"""The states of a block in use; the third is the older name of the second."""

NEVER = float("inf")

MODULE = "module"
"""Stands for the part of a step where a module makes its parameters: in the forward part, or in no step."""


class StepMark(NamedTuple):
    """One optimizer step as its hooks saw it; times in microseconds since 1970, as in the events."""

    begun: int | None  # when the optimizer's step began; None where this PyTorch has no hook for that
    ended: int  # when it ended
    batch: int | None  # the size of the batch; None where it is not known
    peak: Mapping[int, int]  # the allocator's own highest allocated bytes up to this moment, by device
    allocated: Mapping[int, int]  # bytes at this moment, by device


class Peak(NamedTuple):
    """The highest bytes of tensors in a part of a step, before rounding, and what they were for."""

    bytes: int
    categories: dict[str, int]


class StepPeaks(NamedTuple):
    whole: bool  # the recording has the whole step
    phases: dict[str, Peak]  # by the part of the step; a part without an event is not there
    # bytes of gradients that existed when the backward pass began; None if there was no backward pass
    gradients_before_backward: int | None
    batch: int | None  # see :class:`StepMark`
    ended: int | None  # as the step's mark has it; None for a step that has not ended

    @property
    def highest(self) -> Peak | None:
        """Return the peak of the step; None if nothing is known of it."""
        return max(self.phases.values(), key=lambda peak: peak.bytes, default=None)


class _Lifetime:
    """One allocation: its bytes, the numbers of the events that began and ended it, and its purpose."""

    __slots__ = ("address", "began", "category", "ended", "phase", "size", "time")

    def __init__(self, address: int, size: int, began: int, time: int, phase: str | None) -> None:
        self.address = address
        self.size = size
        self.began = began
        self.time = time
        self.phase = phase
        self.ended: float = NEVER
        self.category = ACTIVATIONS


class AddressBook:
    """What the optimizers know of addresses: a tensor may be a part of a block."""

    def __init__(self, known: Mapping[int, str]) -> None:
        self._known = dict(known)
        self._sorted = sorted(known)

    @property
    def knows_anything(self) -> bool:
        return bool(self._sorted)

    def category(self, start: int, size: int) -> str | None:
        number = bisect_right(self._sorted, start - 1)
        if number < len(self._sorted) and self._sorted[number] < start + max(size, 1):
            return self._known[self._sorted[number]]
        return None


class _StackPhases:
    """The part of the step in which each stack runs; PyTorch has one object for all frames of one line."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], str] = {}

    def find(self, holder: Mapping[str, Any]) -> str:
        stack = holder.get("frames") or ()
        key = tuple(map(id, stack))
        phase = self._known.get(key)
        if phase is None:
            frames = [(frame["filename"], frame["name"]) for frame in stack]
            phase = phase_of(frames)
            if phase == "forward" and is_of_module(frames):
                phase = MODULE
            self._known[key] = phase
        return phase


def live_blocks(snapshot: Mapping[str, Any], device: int) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        address = segment.get("address", 0)
        for block in segment["blocks"]:
            start = block.get("address", address)
            address = start + block["size"]
            if block["state"] in LIVE_STATES:
                yield start, block["size"], block


def step_peaks(
    snapshot: Mapping[str, Any],
    device: int,
    marks: Sequence[StepMark],
    known: Mapping[int, str],
    *,
    whole: bool = False,
) -> list[StepPeaks]:
    """Return the peaks of the steps in a snapshot, the oldest first; the last one may be unfinished.

    ``marks``: the ends of steps, the oldest first. ``known``: the category of each tensor that an optimizer
    knows at the moment of the snapshot, by address. ``whole``: the events begin with a step.
    """
    traces = snapshot.get("device_traces") or []
    trace = traces[device] if device < len(traces) else []
    events = [event for event in trace if event["action"] in ("alloc", "free_completed")]
    if not events:
        return []
    starts, ends, lifetimes = _lifetimes(events, live_blocks(snapshot, device), _StackPhases())
    _categorise(events, lifetimes, marks, AddressBook(known))
    first = events[0].get("time_us", 0)
    marks = [mark for mark in marks if mark.ended > first]
    return list(_Walk(events, starts, ends, lifetimes).steps(marks, whole=whole))


def _lifetimes(
    events: Sequence[Mapping[str, Any]],
    live: Iterable[tuple[int, int, Mapping[str, Any]]],
    stacks: _StackPhases,
) -> tuple[dict[int, _Lifetime], dict[int, _Lifetime], list[_Lifetime]]:
    starts: dict[int, _Lifetime] = {}
    ends: dict[int, _Lifetime] = {}
    everything: list[_Lifetime] = []
    alive: dict[int, _Lifetime] = {}
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            phase = stacks.find(event)
            one = _Lifetime(event["addr"], event["size"], number, event.get("time_us", 0), phase)
            alive[event["addr"]] = starts[number] = one
            everything.append(one)
            continue
        ended = alive.pop(event["addr"], None)
        if ended is None:  # it is older than the events
            ended = _Lifetime(event["addr"], event["size"], -1, 0, None)
            everything.append(ended)
        ended.ended = number
        ends[number] = ended
    for address, size, block in live:
        if address not in alive:
            # An event has the bytes that were requested; so has a block, beside its rounded size.
            requested = block.get("requested_size") or size
            everything.append(
                _Lifetime(address, requested, -1, 0, stacks.find(block) if block.get("frames") else None)
            )
    return starts, ends, everything


def _categorise(
    events: Sequence[Mapping[str, Any]],
    lifetimes: Iterable[_Lifetime],
    marks: Sequence[StepMark],
    book: AddressBook,
) -> None:
    """Give each allocation its category; what nothing else explains are activations.

    What lives at the end is known by its address. A gradient of an earlier step was made in the backward pass
    and still lived when the optimizer began. An optimizer's state outlives the step that made it. A parameter
    was made by a module, before any step. Where the optimizers' gradients are known, what lives at the end
    and is none of them does not count: cuBLAS takes a workspace in the first backward pass and keeps it (32
    MiB on an H200).
    """
    ended = [mark.ended for mark in marks]
    begun = [mark.begun for mark in marks if mark.begun is not None]
    for one in lifetimes:
        known = book.category(one.address, one.size) if one.ended == NEVER else None
        if known is not None:
            one.category = known
            continue
        end = NEVER if one.ended == NEVER else events[int(one.ended)].get("time_us", 0)
        if one.phase == "backward":
            kept = one.ended == NEVER and book.knows_anything
            if one.began >= 0 and not kept and _lives_at_next(begun, one.time, end):
                one.category = GRADIENTS
        elif one.phase == "optimizer":
            if one.began < 0 or end == NEVER or _lives_at_next(ended, one.time, end):
                one.category = OPTIMIZER
        elif one.phase == MODULE:
            one.category = PARAMETERS


def _lives_at_next(moments: Sequence[int], start: int, end: float) -> bool:
    """Return whether an allocation still lives at the first of the moments after its start."""
    number = bisect_right(moments, start)
    return number < len(moments) and end >= moments[number]


def is_of_module(frames: Sequence[tuple[str, str]]) -> bool:
    """Return whether a module makes or moves its own parameters and buffers in a stack."""
    for file, function in frames:
        if "/torch/nn/modules/" in file and function in ("__init__", "_apply", "reset_parameters"):
            return True
    return False


class _Walk:
    """The way through the events of one device, with the bytes by category at each of them."""

    def __init__(
        self,
        events: Sequence[Mapping[str, Any]],
        starts: Mapping[int, _Lifetime],
        ends: Mapping[int, _Lifetime],
        lifetimes: Iterable[_Lifetime],
    ) -> None:
        self._events = events
        self._starts = starts
        self._ends = ends
        self._bytes = dict.fromkeys(CATEGORIES, 0)
        for one in lifetimes:
            if one.began < 0:
                self._bytes[one.category] += one.size
        self._phase = "forward"
        self._phases: dict[str, Peak] = {}
        self._before_backward: int | None = None

    def steps(self, marks: Sequence[StepMark], *, whole: bool) -> Iterator[StepPeaks]:
        moments = sorted(
            [(mark.begun, "begun", mark) for mark in marks if mark.begun is not None]
            + [(mark.ended, "ended", mark) for mark in marks],
            key=lambda moment: moment[0],
        )
        position = 0
        for number, event in enumerate(self._events):
            while position < len(moments) and moments[position][0] < event.get("time_us", 0):
                if (step := self._pass(moments[position], whole=whole)) is not None:
                    yield step
                    whole = True
                position += 1
            self._apply(number)
        for moment in moments[position:]:
            if (step := self._pass(moment, whole=whole)) is not None:
                yield step
                whole = True
        if self._phases:
            yield StepPeaks(
                whole=False,
                phases=self._phases,
                gradients_before_backward=self._before_backward,
                batch=None,
                ended=None,
            )

    def _pass(self, moment: tuple[int, str, StepMark], *, whole: bool) -> StepPeaks | None:
        _, what, mark = moment
        if what == "begun":
            self._enter("optimizer")
            return None
        step = StepPeaks(whole, self._phases, self._before_backward, mark.batch, mark.ended)
        self._phases, self._before_backward, self._phase = {}, None, "forward"
        return step

    def _apply(self, number: int) -> None:
        """Apply an event; only an allocation can make a peak, or show that another part has begun."""
        ended = self._ends.get(number)
        if ended is not None:
            self._bytes[ended.category] -= ended.size
            return
        one = self._starts[number]
        phase = "forward" if one.phase in (MODULE, None) else str(one.phase)
        if not (self._phase == "optimizer" and phase == "forward"):  # a closure, or a step without frames
            self._enter(phase)
        self._bytes[one.category] += one.size
        self._note_peak()

    def _enter(self, phase: str) -> None:
        if phase != self._phase or phase not in self._phases:
            if phase == "backward" and self._before_backward is None:
                self._before_backward = self._bytes[GRADIENTS]
            self._phase = phase
            self._note_peak()

    def _note_peak(self) -> None:
        total = sum(self._bytes.values())
        if self._phase not in self._phases or total > self._phases[self._phase].bytes:
            self._phases[self._phase] = Peak(total, dict(self._bytes))
