"""Write an allocation snapshot as one HTML file that needs nothing else: no script, no font, no network.

The pictures are SVG in the page. Every text that comes from the snapshot is escaped, because other people
chose the names in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from vramledger_agent.printable import printable
from vramledger_agent.torch_snapshots.address_map import (
    LifetimeMap,
    MapRow,
    SegmentMap,
    map_lifetimes,
    map_segments,
)
from vramledger_agent.torch_snapshots.live_bytes import LiveBytes, by_category, live_bytes
from vramledger_agent.torch_snapshots.sites import sum_by_site
from vramledger_agent.torch_snapshots.snapshot import AllocationSnapshot
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
)

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
"""The colours of the categories, the same in all pictures."""

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


def _colours(curves: LiveBytes) -> list[str]:
    """Return a colour for each band; the last two colours are for bytes that have no site of their own."""
    return [
        _COLOURS[number % 8] if isinstance(name, Frame) else _COLOUR_OF.get(name, _COLOURS[8])
        for number, (name, _) in enumerate(curves.bands)
    ]


def _chart(curves: LiveBytes) -> Iterator[str]:
    totals = map(sum, zip(*(band for _, band in curves.bands), strict=True))
    top = max(totals, default=0) or 1
    span = curves.seconds[-1] or 1.0
    across = [_LEFT + second / span * (_WIDTH - _LEFT) for second in curves.seconds]
    unit = f"{curves.seconds[-1]:.2f} s" if curves.timed else f"{curves.seconds[-1]:.0f} events"
    colours = _colours(curves)
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
