"""Compute live bytes by site over the time of a recording, from the allocator's events.

The events give the changes; the blocks that live at the end give the final state. So the curve is computed
backwards from the end, and the bytes from before the recording show as a constant base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vramledger.torch_snapshots.sites import site_frame
from vramledger.torch_snapshots.snapshot import AllocationEvent, AllocationSnapshot
from vramledger.torch_snapshots.user_lines import Frame

POINTS = 400
"""Points in time of a picture: about one for each pixel and a half."""


class LiveBytes(NamedTuple):
    """Live bytes of one device over time.

    Attributes:
        device: PyTorch's number.
        seconds: the time of each point since the first event; event numbers where no time was recorded.
        timed: whether ``seconds`` are seconds.
        bands: for each site, bytes at each point; :data:`REST` is the sum of all other sites, and
            :data:`BEFORE` the bytes from before the recording or without a stack.
    """

    device: int
    seconds: tuple[float, ...]
    timed: bool
    bands: tuple[tuple[Frame | str, tuple[int, ...]], ...]


BEFORE = "before the recording"
REST = "other places"


def live_bytes(snapshot: AllocationSnapshot, device: int, *, most: int = 8) -> LiveBytes | None:
    """Return a device's live bytes over time, with a series for each of the largest sites.

    Returns:
        None when the snapshot has no events of the device.
    """
    events = [event for event in snapshot.events if event.device == device]
    changes = _changes(events)
    if not changes:
        return None
    base = sum(block.size for block in snapshot.blocks if block.device == device) - sum(
        each.size for each in changes
    )
    names: list[Frame | str] = [*_largest_sites(changes, most), REST, BEFORE]
    timed = all(event.time is not None for event in events)
    times = [(event.time or 0.0) if timed else float(number) for number, event in enumerate(events)]
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


class _Change(NamedTuple):
    """What an event has allocated, or freed where ``size`` is negative; ``site`` is None if not known."""

    event: int
    site: Frame | None
    size: int


def _largest_sites(changes: Iterable[_Change], most: int) -> list[Frame]:
    """Return the sites with the highest peaks, the highest first."""
    peaks: dict[Frame, int] = {}
    live: dict[Frame, int] = {}
    for _, site, size in changes:
        if site is not None:
            live[site] = live.get(site, 0) + size
            peaks[site] = max(peaks.get(site, 0), live[site])
    return sorted(peaks, key=lambda site: -peaks[site])[:most]


def _points(
    changes: Sequence[_Change],
    times: Sequence[float],
    moments: Sequence[float],
    names: Sequence[Frame | str],
    base: int,
) -> Iterator[list[int]]:
    """Yield the bytes of each name: at each moment the highest total since the one before, at last the last.

    The two last names are those of all other sites, and of what is not known.
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
    slot = before if change.site is None else slots.get(change.site, rest)
    now[slot] = max(0, now[slot] + change.size)


def _changes(events: Iterable[AllocationEvent]) -> list[_Change]:
    """Return what was allocated and freed, in order.

    Only ``free_completed`` frees memory: before it, and after ``free_requested``, another stream still uses
    the memory. A recording may leave out ``free_requested``, as our agent's recordings do.
    """
    found: list[_Change] = []
    alive: dict[int, tuple[Frame | None, int]] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            alive[event.address] = site_frame(event.stack), event.size
            found.append(_Change(number, *alive[event.address]))
        elif event.action == "free_completed":
            key, size = alive.pop(event.address, (None, event.size))
            found.append(_Change(number, key, -size))
    return found
