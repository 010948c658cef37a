"""Compute live bytes by site over the time of a recording, from the allocator's events.

The events give the changes; the blocks that live at the end give the final state. So the curve is computed
backwards from the end, and the bytes from before the recording show as a constant base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from vramledger_agent.torch_snapshots.sites import site_frame
from vramledger_agent.torch_snapshots.snapshot import AllocationEvent, AllocationSnapshot
from vramledger_agent.torch_snapshots.user_lines import UNRECORDED, Frame

POINTS = 400
"""Points in time of a picture: about one for each pixel and a half."""


_LONGEST_PAUSE = 0.25
"""The share of the time that may pass without an event, if a picture is to show seconds."""


class LiveBytes(NamedTuple):
    """Live bytes of one device over time."""

    device: int  # PyTorch's number
    # the time of each point since the first event; event numbers where no time was recorded
    seconds: tuple[float, ...]
    timed: bool  # whether ``seconds`` are seconds
    # for each site or category, bytes at each point; :data:`REST` is the sum of all other sites, and
    # :data:`BEFORE` the bytes from before the recording or without a stack
    bands: tuple[tuple[Frame | str, tuple[int, ...]], ...]


BEFORE = UNRECORDED
REST = "other places"


Key = Frame | str | None
"""What bytes are counted to; None if that is not known."""


def by_site(event: AllocationEvent) -> Key:
    """Count an allocation to its line of code."""
    return site_frame(event.stack)


def by_category(event: AllocationEvent) -> Key:
    """Count an allocation to the part of the training that made it."""
    return None if event.category == UNRECORDED else event.category


def live_bytes(
    snapshot: AllocationSnapshot,
    device: int,
    *,
    key_of: Callable[[AllocationEvent], Key] = by_site,
    most: int = 8,
) -> LiveBytes | None:
    """Return live bytes over time, by the largest sites or categories; None without events."""
    events = [event for event in snapshot.events if event.device == device]
    sizes = {block.address: block.size for block in snapshot.blocks if block.device == device}
    changes = _changes(events, key_of, sizes)
    if not changes:
        return None
    base = sum(block.size for block in snapshot.blocks if block.device == device) - sum(
        change.size for change in changes
    )
    names: list[Frame | str] = [*_largest(changes, most), REST, BEFORE]
    times, timed = event_times(events)
    start, end = min(times), max(times)
    last = max(1, min(POINTS, len(events)))
    moments = [start + (end - start) * step / last for step in range(last + 1)]
    points = list(_points(changes, times, moments, names, base))
    bands = tuple((name, tuple(point[number] for point in points)) for number, name in enumerate(names))
    return LiveBytes(
        device,
        tuple(moment - start for moment in moments),
        timed,
        tuple(band for band in bands if any(band[1])),
    )


def event_times(events: Sequence[AllocationEvent]) -> tuple[list[float], bool]:
    """Return where each event lies on the axis of a picture, and whether that is in seconds.

    It is the number of the event where no times were recorded, and where a large part of the time has no
    event: a program that is starting up would squeeze its training steps into the last pixels.
    """
    seconds = [event.time for event in events if event.time is not None]
    ordered = sorted(seconds)
    longest = max((later - one for one, later in pairwise(ordered)), default=0.0)
    if len(seconds) == len(events) and longest <= _LONGEST_PAUSE * (ordered[-1] - ordered[0]):
        return seconds, True
    return [float(number) for number in range(len(events))], False


class _Change(NamedTuple):
    """What an event has allocated, or freed where ``size`` is negative; ``key`` is what it is counted to."""

    event: int
    key: Key
    size: int


def _largest(changes: Iterable[_Change], most: int) -> list[Frame | str]:
    peaks: dict[Frame | str, int] = {}
    live: dict[Frame | str, int] = {}
    for _, key, size in changes:
        if key is not None:
            live[key] = live.get(key, 0) + size
            peaks[key] = max(peaks.get(key, 0), live[key])
    return sorted(peaks, key=lambda key: -peaks[key])[:most]


def _points(
    changes: Sequence[_Change],
    times: Sequence[float],
    moments: Sequence[float],
    names: Sequence[Frame | str],
    base: int,
) -> Iterator[list[int]]:
    """Yield the bytes of each name: at each moment the highest total since the one before, at last the last.

    The two last names are those of everything else, and of what is not known.
    """
    slots = {name: number for number, name in enumerate(names)}
    rest, before = len(names) - 2, len(names) - 1
    now = [0] * len(names)
    now[before] = max(0, base)
    applied = 0
    for moment in moments[:-1]:
        # A picture must keep the highest total within a step.
        top = list(now)
        while applied < len(changes) and times[changes[applied].event] <= moment:
            _apply(changes[applied], now, slots, rest, before)
            applied += 1
            if sum(now) > sum(top):
                top = list(now)
        yield top
    for change in changes[applied:]:
        _apply(change, now, slots, rest, before)
    yield now


def _apply(change: _Change, now: list[int], slots: Mapping[Frame | str, int], rest: int, before: int) -> None:
    slot = before if change.key is None else slots.get(change.key, rest)
    now[slot] = max(0, now[slot] + change.size)


def _changes(
    events: Iterable[AllocationEvent], key_of: Callable[[AllocationEvent], Key], sizes: Mapping[int, int]
) -> list[_Change]:
    """Return what was allocated and freed, in order.

    Only ``free_completed`` frees memory: before it, and after ``free_requested``, another stream still uses
    the memory. A recording may leave out ``free_requested``, as our agent's recordings do. An event has the
    size that was requested, and a block may be larger: up to 1 MiB is not split off. What lives at the end
    counts with the ``sizes`` of its block, by address. Otherwise this rest would seem to be older than the
    recording (2 MiB of 346 in a training on an H200 that was recorded from its start).
    """
    found: list[_Change] = []
    alive: dict[int, tuple[Key, int, int]] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            key = key_of(event)
            alive[event.address] = key, event.size, len(found)
            found.append(_Change(number, key, event.size))
        elif event.action == "free_completed":
            key, size, _ = alive.pop(event.address, (None, event.size, 0))
            found.append(_Change(number, key, -size))
    for address, (_, size, place) in alive.items():
        found[place] = found[place]._replace(size=sizes.get(address, size))
    return found
