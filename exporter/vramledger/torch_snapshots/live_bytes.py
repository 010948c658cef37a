"""Compute live bytes by site over the time of a recording, from the allocator's events.

The events give the changes; the blocks that live at the end give the final state. So the curve is computed
backwards from the end, and the bytes from before the recording show as a constant base.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        size for _, _, size in changes
    )
    peaks: dict[Frame | None, int] = {}
    live: dict[Frame | None, int] = {}
    for _, key, size in changes:
        live[key] = live.get(key, 0) + size
        peaks[key] = max(peaks.get(key, 0), live[key])
    largest = sorted((key for key in peaks if key is not None), key=lambda key: -peaks[key])[:most]
    names: list[Frame | str] = [*largest, REST, BEFORE]
    index = {name: number for number, name in enumerate(names)}
    timed = all(event.time is not None for event in events)
    times = [(event.time or 0.0) if timed else float(number) for number, event in enumerate(events)]
    start, end = min(times), max(times)
    now = [0] * len(names)
    now[-1] = max(0, base)
    last = max(1, min(POINTS, len(events)))
    moments = [start + (end - start) * step / last for step in range(last + 1)]
    points: list[list[int]] = []
    applied = 0
    for moment in moments:
        # A picture must keep the highest total within a step.
        top = list(now)
        while applied < len(changes) and times[changes[applied][0]] <= moment:
            _, key, size = changes[applied]
            slot = len(names) - 1 if key is None else index.get(key, len(names) - 2)
            now[slot] = max(0, now[slot] + size)
            if sum(now) > sum(top):
                top = list(now)
            applied += 1
        points.append(top)
    if points:
        points[-1] = list(now)
    bands = tuple((name, tuple(point[number] for point in points)) for number, name in enumerate(names))
    return LiveBytes(
        device,
        tuple(moment - start for moment in moments),
        timed,
        tuple(band for band in bands if any(band[1])),
    )


def _changes(events: Iterable[AllocationEvent]) -> list[tuple[int, Frame | None, int]]:
    """Return (number of the event, line, bytes) for what was allocated and freed, in order.

    Only ``free_completed`` frees memory: before it, and after ``free_requested``, another stream still uses
    the memory. A recording may leave out ``free_requested``, as our agent's recordings do.
    """
    found: list[tuple[int, Frame | None, int]] = []
    alive: dict[int, tuple[Frame | None, int]] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            alive[event.address] = site_frame(event.stack), event.size
            found.append((number, *alive[event.address]))
        elif event.action == "free_completed":
            key, size = alive.pop(event.address, (None, event.size))
            found.append((number, key, -size))
    return found
