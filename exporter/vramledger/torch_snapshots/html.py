"""An allocation snapshot as one HTML file that needs nothing else: no script, no font, no network.

The picture is SVG in the page. Every text that comes from the snapshot is escaped, and the page's policy
forbids scripts and downloads besides, for the names in it are somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from vramledger.printable import printable
from vramledger.torch_snapshots.live_bytes import BEFORE, Course, course
from vramledger.torch_snapshots.sites import sites
from vramledger.torch_snapshots.snapshot import AllocationSnapshot
from vramledger.torch_snapshots.text import amount, heading, recording, where
from vramledger.torch_snapshots.user_lines import Frame

_WIDTH, _HEIGHT, _LEFT, _BELOW = 900, 280, 80, 24
_COLOURS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99"),
    *("#999999", "#dddddd"),
)
# Told apart also by people who see few colours; the greys are for what has no place of its own.

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
color: #222 }
table { border-collapse: collapse; width: 100% } th, td { padding: .2rem .6rem; text-align: left }
td { border-top: 1px solid #ddd; vertical-align: top } .n { text-align: right; white-space: nowrap }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere } .from { color: #666 }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif } .key { display: inline-block; width: .9em;
height: .9em; margin-right: .4em } figure { margin: 1rem 0 }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } td { border-color: #444 }
.from { color: #999 } svg text { fill: #ddd } }
"""


def page(snapshot: AllocationSnapshot, title: str, *, top: int = 50) -> str:
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
    yield f"<h1>GPU memory by place</h1><p><code>{_text(title)}</code>: {_text(recording(snapshot))}</p>\n"
    for device in snapshot.devices:
        yield f"<h2>{_text(heading(device))}</h2>\n"
        told = course(snapshot, device.number)
        if told is not None:
            yield from _picture(told)
        found = sites(block for block in snapshot.blocks if block.device == device.number)
        yield '<table><tr><th class="n">Bytes</th><th class="n">Count</th><th>Where</th></tr>\n'
        for site in found[:top]:
            callers = "".join(
                f'<br><code class="from">from {_text(where(frame))}</code>' for frame in site.callers[:5]
            )
            yield (
                f'<tr><td class="n">{amount(site.size)}</td><td class="n">{site.blocks:,}</td>'
                f"<td><code>{_text(where(site.place))}</code>{callers}</td></tr>\n"
            )
        yield "</table>\n"
        if len(found) > top:
            yield f"<p>{len(found) - top} more places, with {amount(sum(s.size for s in found[top:]))}.</p>\n"
    yield "</body></html>\n"


def _text(text: str) -> str:
    """Escape text and drop what is no text: control characters and surrogates have no place in HTML."""
    return escape(printable(text, "\N{REPLACEMENT CHARACTER}"))


def _name(band: Frame | str) -> str:
    return band if isinstance(band, str) else where(band)


def _colours(told: Course) -> list[str]:
    """Return a colour a band; the last two of the list are for the two that are no place."""
    return [
        _COLOURS[number % 8] if isinstance(name, Frame) else _COLOURS[9 if name == BEFORE else 8]
        for number, (name, _) in enumerate(told.bands)
    ]


def _picture(told: Course) -> Iterator[str]:
    top = max((sum(values) for values in zip(*(band for _, band in told.bands), strict=True)), default=0) or 1
    span = told.seconds[-1] or 1.0
    across = [_LEFT + second / span * (_WIDTH - _LEFT) for second in told.seconds]
    unit = f"{told.seconds[-1]:.2f} s" if told.timed else f"{told.seconds[-1]:.0f} events"
    colours = _colours(told)
    yield (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT + _BELOW}" role="img">'
        f"<title>Live bytes over {unit}, at most {amount(top)}</title>\n"
    )
    ground = [0] * len(across)
    # What was there before lies at the bottom: it does not change, or only shrinks.
    for number in reversed(range(len(told.bands))):
        name, values = told.bands[number]
        roof = [low + value for low, value in zip(ground, values, strict=True)]
        points = [*zip(across, roof, strict=True), *reversed([*zip(across, ground, strict=True)])]
        shape = " ".join(f"{x:.1f},{_HEIGHT * (1 - value / top):.1f}" for x, value in points)
        yield (
            f'<polygon points="{shape}" fill="{colours[number]}">'
            f"<title>{_text(_name(name))}: at most {amount(max(values))}</title></polygon>\n"
        )
        ground = roof
    for share in (0.0, 0.5, 1.0):
        yield (
            f'<text x="{_LEFT - 6}" y="{_HEIGHT * (1 - share) + (10 if share == 1 else 0):.0f}"'
            f' text-anchor="end">{amount(int(top * share))}</text>'
        )
    yield f'<text x="{_LEFT}" y="{_HEIGHT + 16}">0</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{unit}</text></svg><figcaption>\n'
    for (name, _), colour in zip(told.bands, colours, strict=True):
        yield f'<div><span class="key" style="background:{colour}"></span>'
        yield f"<code>{_text(_name(name))}</code></div>"
    yield "</figcaption></figure>\n"
