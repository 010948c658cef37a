"""Show the report of a span as a table that can be mailed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from vramledger.printable import printable
from vramledger.views.table import span

_GIB_HOUR = 2**30 * 3600.0
_COLUMNS = ("OWNER", "USER", "GPUS", "HELD FOR", "HIGHEST", "GIB-HOURS", "IDLE", "WASTED")
_NO_SECONDS = 60.0


def render_report(report: Mapping[str, Any]) -> str:
    """Return the lines of a report."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"From {_clock(report['from'])} to {_clock(report['to'])}"
    whole = report["to"] - report["from"]
    if report["first"] is None:
        yield "Nothing is stored of that time."
        return
    missing = whole - report["covered_seconds"]
    if missing > max(_NO_SECONDS, 0.01 * whole):
        yield f"Nothing is known of {span(missing)} of it; the figures are of the rest."
    rows = [_COLUMNS, *(_row(each) for each in report["owners"])]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
    yield ""
    for row in rows:
        texts = [
            text.ljust(width) if place < 2 else text.rjust(width)  # noqa: PLR2004 words left, figures right
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(texts).rstrip()
    for title, name in (
        ("Leftovers", "leftovers"),
        ("Out of memory", "ooms"),
        ("Interruptions", "interruptions"),
    ):
        if report[name]:
            yield ""
            yield f"{title}:"
            yield from (f"  {_mark(each)}" for each in report[name])


def _row(owner: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"{owner['owner_type']} {owner['owner']}".strip()
    return (
        printable(name)[:60],
        printable(", ".join(owner["users"]))[:30] or "-",
        str(len(owner["gpus"])),
        span(owner["seconds"]),
        f"{owner['highest'] / 2**30:.2f} GiB",
        f"{owner['byte_seconds'] / _GIB_HOUR:.2f}",
        f"{owner['idle_byte_seconds'] / _GIB_HOUR:.2f}",
        f"{owner['wasted_byte_seconds'] / _GIB_HOUR:.2f}",
    )


def _mark(mark: Mapping[str, Any]) -> str:
    words = {
        "lost": "the GPUs gave no data any more",
        "back": "the GPUs gave data again",
        "stopped": "the exporter ended, or stored nothing any more",
        "started": "the exporter began",
        "oom": f"{printable(mark['owner'])} ran out of memory",
    }
    text = words.get(mark["kind"])
    if text is None:
        who = f"pid {mark['pid']} {printable(mark['command'])} of {printable(mark['owner'])}"
        text = f"{who} became {mark['kind']}" + (f" (it was {mark['before']})" if mark["before"] else "")
    return f"{_clock(mark['time'])}  {text}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
