"""Write an allocation snapshot as one HTML file that needs nothing else: no script, no font, no network.

The pictures are SVG in the page. Every text that comes from the snapshot is escaped, because other people
chose the names in it.

Of live bytes over time the events give the changes; the blocks that live at the end give the final state. So
the curve is computed backwards from the end, and the bytes from before the recording show as a constant base.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise
from typing import NamedTuple

from vramledger_agent.printable import printable
from vramledger_agent.torch_snapshots.sites import site_frame, sum_by_site
from vramledger_agent.torch_snapshots.snapshot import AllocationEvent, AllocationSnapshot, Block, Segment
from vramledger_agent.torch_snapshots.text import device_text, frame_text, recording_text, size_text
from vramledger_agent.torch_snapshots.user_lines import (
    BACKWARD,
    CATEGORIES,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    UNRECORDED,
    Frame,
    Stack,
)

POINTS = 400
"""Points in time of a picture: about one for each pixel and a half."""


_LONGEST_PAUSE = 0.25
"""The share of the time that may pass without an event, if a picture is to show seconds."""


class LiveBytes(NamedTuple):
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
    names: list[Frame | str] = [*_highest_peaks(changes, most), REST, BEFORE]
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


def _highest_peaks(changes: Iterable[_Change], most: int) -> list[Frame | str]:
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


_WIDTH, _HEIGHT, _LEFT, _AXIS_HEIGHT = 900, 280, 80, 24
_COLOURS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99"),
    *("#999999", "#dddddd"),
)
"""Colours that colour-blind people can distinguish; greys are for bytes without a site of their own."""

_COLOUR_OF = dict(
    zip(
        (PARAMETERS, OPTIMIZER, BACKWARD, FORWARD, OTHER, UNRECORDED),
        ("#4477aa", "#aa3377", "#ee6677", "#228833", "#ccbb44", "#dddddd"),
        strict=True,
    )
)
_ROW_HEIGHT, _ROW_GAP = 14, 3
_LIFETIMES_HEIGHT = 420

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
color: #222 }
table { border-collapse: collapse; width: 100% } th, td { padding: .2rem .6rem; text-align: left }
td { border-top: 1px solid #ddd; vertical-align: top } .n { text-align: right; white-space: nowrap }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere } .from { color: #666 }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif } .key { display: inline-block; width: .9em;
height: .9em; margin-right: .4em } figure { margin: 1rem 0 }
.segments rect { stroke: #fff; stroke-width: .5 }
.segments .free { fill: none; stroke: #888; stroke-width: 1 }
.block:hover, polygon:hover { stroke: #000; stroke-width: 2 }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } td { border-color: #444 }
.from { color: #999 } svg text { fill: #ddd } .segments rect { stroke: #181818 }
.block:hover, polygon:hover { stroke: #fff } }
"""


def snapshot_html(snapshot: AllocationSnapshot, title: str, *, top: int = 50) -> str:
    """Write the page of a snapshot; the title is the file's name."""
    return "".join(_page(snapshot, title, top))


def _page(snapshot: AllocationSnapshot, title: str, top: int) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    yield (
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
    )
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<title>{_text(title)}: GPU memory by place</title><style>{_STYLE}</style></head><body>\n"
    recorded = _text(recording_text(snapshot))
    yield f"<h1>GPU memory by place</h1><p><code>{_text(title)}</code>: {recorded}</p>\n"
    for device in snapshot.devices:
        yield f"<h2>{_text(device_text(device))}</h2>\n"
        categories = live_bytes(snapshot, device.number, key_of=by_category)
        if categories is not None:
            yield "<h3>Live bytes over time, by what allocated them</h3>\n"
            yield from _chart(categories)
        curves = live_bytes(snapshot, device.number)
        if curves is not None:
            yield "<h3>Live bytes over time, by line of code</h3>\n"
            yield from _chart(curves)
        segments = map_segments(snapshot, device.number)
        if segments is not None:
            yield from _segment_map(segments)
        lifetimes = map_lifetimes(snapshot, device.number)
        if lifetimes is not None:
            yield from _lifetime_map(lifetimes)
        yield "<h3>Live bytes at the end, by line of code</h3>\n"
        found = sum_by_site(block for block in snapshot.blocks if block.device == device.number)
        yield '<table><tr><th class="n">Bytes</th><th class="n">Count</th><th>Where</th></tr>\n'
        for site in found[:top]:
            callers = "".join(
                f'<br><code class="from">from {_text(frame_text(frame))}</code>' for frame in site.callers[:5]
            )
            yield (
                f'<tr><td class="n">{size_text(site.size)}</td><td class="n">{site.blocks:,}</td>'
                f"<td><code>{_text(frame_text(site.frame))}</code>{callers}</td></tr>\n"
            )
        yield "</table>\n"
        if len(found) > top:
            rest = size_text(sum(site.size for site in found[top:]))
            yield f"<p>{len(found) - top} more places, with {rest}.</p>\n"
    yield "</body></html>\n"


def _text(text: str) -> str:
    """Escape text and drop what is not text: control characters and surrogates have no place in HTML."""
    return escape(printable(text, "\N{REPLACEMENT CHARACTER}"))


def _name(band: Frame | str) -> str:
    return band if isinstance(band, str) else frame_text(band)


def _chart(curves: LiveBytes) -> Iterator[str]:
    totals = map(sum, zip(*(band for _, band in curves.bands), strict=True))
    top = max(totals, default=0) or 1
    span = curves.seconds[-1] or 1.0
    across = [_LEFT + second / span * (_WIDTH - _LEFT) for second in curves.seconds]
    unit = f"{curves.seconds[-1]:.2f} s" if curves.timed else f"{curves.seconds[-1]:.0f} events"
    # The last two colours are for bytes that have no site of their own.
    colours = [
        _COLOURS[number % 8] if isinstance(name, Frame) else _COLOUR_OF.get(name, _COLOURS[8])
        for number, (name, _) in enumerate(curves.bands)
    ]
    yield (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT + _AXIS_HEIGHT}" role="img">'
        f"<title>Live bytes over {unit}, at most {size_text(top)}</title>\n"
    )
    ground = [0] * len(across)
    # The bytes from before the recording lie at the bottom: they do not change, or only shrink.
    for number in reversed(range(len(curves.bands))):
        name, values = curves.bands[number]
        roof = [low + value for low, value in zip(ground, values, strict=True)]
        points = [*zip(across, roof, strict=True), *reversed([*zip(across, ground, strict=True)])]
        shape = " ".join(f"{x:.1f},{_HEIGHT * (1 - value / top):.1f}" for x, value in points)
        yield (
            f'<polygon points="{shape}" fill="{colours[number]}">'
            f"<title>{_text(_name(name))}: at most {size_text(max(values))}</title></polygon>\n"
        )
        ground = roof
    for share in (0.0, 0.5, 1.0):
        yield (
            f'<text x="{_LEFT - 6}" y="{_HEIGHT * (1 - share) + (10 if share == 1 else 0):.0f}"'
            f' text-anchor="end">{size_text(int(top * share))}</text>'
        )
    yield f'<text x="{_LEFT}" y="{_HEIGHT + 16}">0</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{unit}</text></svg><figcaption>\n'
    for (name, _), colour in zip(curves.bands, colours, strict=True):
        yield f'<div><span class="key" style="background:{colour}"></span>'
        yield f"<code>{_text(_name(name))}</code></div>"
    yield "</figcaption></figure>\n"


def _key(names: Iterable[str]) -> Iterator[str]:
    shown = set(names)
    yield "<figcaption>\n"
    for name in (each for each in CATEGORIES if each in shown):
        yield f'<div><span class="key" style="background:{_COLOUR_OF[name]}"></span>{_text(name)}</div>'
    yield "</figcaption></figure>\n"


def _omitted(count: int) -> str:
    return f" The {count:,} smallest allocations are not drawn." if count else ""


def _segment_map(found: SegmentMap) -> Iterator[str]:
    """Draw what each segment holds; what is not coloured is free, but belongs to the allocator."""
    height = found.rows * (_ROW_HEIGHT + _ROW_GAP)
    yield (
        f"<h3>The allocator's segments at the end</h3>\n<p>A row has {size_text(found.row_bytes)}; a frame "
        "is a segment. Only a whole one can go back to the driver; of an expandable one, free pages can. "
        f"What is not coloured is free.{_omitted(found.omitted)}</p>\n"
        f'<figure class="segments"><svg viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>{len(found.segments)} segments</title>\n"
    )
    for segment, parts in found.segments:
        used = sum(block.size for block in segment.blocks)
        title = f"segment of {size_text(segment.size)} ({segment.about}), {size_text(used)} in use"
        yield from (_map_rect(part, found.row_bytes, 'class="free"', title) for part in parts)
    for block, segment, parts in found.blocks:
        line = _text(frame_text(block.stack[0] if block.stack else None))
        title = (
            f"{size_text(block.size)}, {block.category}; {line}; in a segment of {size_text(segment.size)}"
        )
        style = f'class="block" fill="{_COLOUR_OF[block.category]}"'
        yield from (_map_rect(part, found.row_bytes, style, title) for part in parts)
    yield "</svg>"
    yield from _key(block.category for block, _, _ in found.blocks)


def _map_rect(part: MapRow, row_bytes: int, style: str, title: str) -> str:
    left, right = part.begin / row_bytes * _WIDTH, part.end / row_bytes * _WIDTH
    return (
        f'<rect {style} pointer-events="all" x="{left:.2f}" y="{part.row * (_ROW_HEIGHT + _ROW_GAP)}"'
        f' width="{max(right - left, 0.3):.2f}" height="{_ROW_HEIGHT}"><title>{title}</title></rect>\n'
    )


def _lifetime_map(found: LifetimeMap) -> Iterator[str]:
    """Draw each allocation as a box: from left to right its time, from top to bottom its addresses."""
    unit = f"{found.span:.2f} s" if found.timed else f"{found.span:.0f} events"
    yield (
        "<h3>Each allocation, by its time and its address</h3>\n<p>From left to right: the recording. From "
        "top to bottom: addresses, without those where nothing was. A long box among short ones keeps its "
        f"segment from going back to the driver.{_omitted(found.omitted)}</p>\n"
        f'<figure class="lifetimes"><svg viewBox="0 0 {_WIDTH} {_LIFETIMES_HEIGHT}" role="img">'
        f"<title>{len(found.allocations)} allocations over {unit}</title>\n"
    )
    for each in found.allocations:
        left, right = each.begin / found.span * _WIDTH, each.end / found.span * _WIDTH
        top, high = (value / found.height * _LIFETIMES_HEIGHT for value in (each.offset, each.size))
        line = _text(frame_text(each.stack[0] if each.stack else None))
        until = f"to {_moment(each.end, found)}" if each.freed else "to the end"
        title = f"{size_text(each.size)}, {each.category}; {line}; from {_moment(each.begin, found)} {until}"
        yield (
            f'<rect class="block" fill="{_COLOUR_OF[each.category]}" x="{left:.2f}" y="{top:.2f}"'
            f' width="{max(right - left, 0.3):.2f}" height="{max(high, 0.3):.2f}">'
            f"<title>{title}</title></rect>\n"
        )
    yield "</svg>"
    yield from _key(each.category for each in found.allocations)


def _moment(value: float, found: LifetimeMap) -> str:
    return f"{value:.3f} s" if found.timed else f"event {value:.0f}"
