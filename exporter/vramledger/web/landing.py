"""The page at ``/``: what this is, where the metrics are, and the book as a plain table.

Rendered here whole, without scripts or anything from elsewhere; every text from the host is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable
from html import escape

from vramledger import __version__
from vramledger.config import Config
from vramledger.snapshot import DeviceSnapshot, Holding, Snapshot, State

_REFRESH = 5
# Seconds between two loads of the page, by the browser.

_STYLE = """
:root { color-scheme: light dark; --line: #ccc; --faint: #666; --loud: #b00020; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --faint: #999; --loud: #ff6b81; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: left; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.faint { color: var(--faint); }
.loud { border: 3px solid var(--loud); color: var(--loud); padding: .5rem 1rem; font-weight: bold; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

_NOTHING_ELSE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; {_NOTHING_ELSE}",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def render(snapshot: Snapshot, config: Config, *, ready: bool) -> bytes:
    """Write the page for one snapshot."""
    path = escape(config.telemetry_path)
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>vramledger</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="refresh" content="{_REFRESH}"><style>{_STYLE}</style></head><body>',
        f"<h1>vramledger {escape(__version__)}</h1>",
        "<p>An account book for GPU memory: every byte has a holder, an owner and a reason.</p>",
        f'<p><a href="{path}">Metrics</a> · <a href="/-/healthy">Health</a> · ',
        '<a href="/-/ready">Readiness</a></p>',
        *_status(snapshot, ready=ready),
        *_devices(snapshot),
        *_holders(snapshot),
        "</body></html>\n",
    ]
    return "\n".join(parts).encode(errors="replace")


def _status(snapshot: Snapshot, *, ready: bool) -> Iterable[str]:
    if snapshot.source == "replay":
        name = escape(snapshot.recording or "unnamed")
        yield (
            f'<p class="loud" role="alert">This is a RECORDING ({name}) of another machine. '
            "Nothing below is about this host.</p>"
        )
    if snapshot.time is not None:
        ended = _clock(snapshot.time)
        yield f'<p class="faint">Source: {escape(snapshot.source)}. Sample of {ended}.</p>'
    if snapshot.up:
        return
    if not ready:
        yield "<p>The first sample has not finished yet.</p>"
    elif snapshot.failure is not None:
        reason, message = snapshot.failure
        yield f'<p class="loud" role="alert">No GPU data ({escape(reason)}): {escape(message)}</p>'
    else:
        yield '<p class="loud" role="alert">No GPU data.</p>'


def _devices(snapshot: Snapshot) -> Iterable[str]:
    if not snapshot.devices:
        return
    columns = ("total", "free", "reserved", *(state.value for state in State), "unattributed")
    yield "<h2>Devices</h2><table><thead><tr><th>GPU</th><th>Name</th><th>UUID</th>"
    yield "".join(f'<th class="n">{column}</th>' for column in columns) + "</tr></thead><tbody>"
    for device in snapshot.devices:
        reading = device.reading
        name = " ".join(filter(None, (reading.name, reading.mig_profile)))
        yield f"<tr><td>{reading.index}</td><td>{escape(name)}</td><td>{escape(reading.uuid)}</td>"
        yield _book(device, len(columns)) + "</tr>"
    yield "</tbody></table>"


def _book(device: DeviceSnapshot, columns: int) -> str:
    book = device.book
    if book is None:
        if not device.up:
            why = f"no answer ({device.reading.error or 'failed'})"
        else:
            why = "its MIG instances hold the memory" if device.reading.divided else "no memory figures"
        return f'<td colspan="{columns}" class="faint">{escape(why)}</td>'
    states = (book.states.get(state, 0) for state in State)
    return "".join(map(_bytes, (book.total, book.free, book.reserved, *states, book.unattributed)))


def _holders(snapshot: Snapshot) -> Iterable[str]:
    rows = [(device, holding) for device in snapshot.devices for holding in device.holdings]
    if not snapshot.up:
        return
    yield "<h2>Holders</h2>"
    if not rows:
        yield "<p>Nobody holds GPU memory.</p>"
        return
    yield (
        '<table><thead><tr><th>GPU</th><th class="n">PID</th><th>User</th><th>Command</th><th>State</th>'
        '<th>Since</th><th class="n">Bytes</th><th>Why</th></tr></thead><tbody>'
    )
    for device, holding in rows:
        yield _holder(snapshot, device, holding)
    yield "</tbody></table>"


def _holder(snapshot: Snapshot, device: DeviceSnapshot, holding: Holding) -> str:
    process = snapshot.processes.get(holding.pid)
    facts = process.facts if process is not None else None
    user = escape((facts.user or "") if facts is not None else "")
    command = escape(facts.command if facts is not None else "")
    return (
        f'<tr><td>{device.reading.index}</td><td class="n">{holding.pid}</td><td>{user}</td>'
        f"<td>{command}</td><td>{holding.state.value}</td><td>{_clock(holding.since)}</td>"
        f"{_bytes(holding.memory)}<td>{escape(holding.why)}</td></tr>"
    )


def _bytes(count: int | None) -> str:
    if count is None:
        return '<td class="n faint">not known</td>'
    if not count:
        return '<td class="n faint">0</td>'
    return f'<td class="n" title="{count} bytes">{count / 2**20:,.1f} MiB</td>'


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))
