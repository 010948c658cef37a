"""Make the scale of the page's slider: each device's bytes over a span, and marks of what happened."""

from __future__ import annotations

from typing import Any

from vramledger.model.json_values import JSON_VERSION
from vramledger.storage.archive import Archive
from vramledger.storage.summary import TimelineMark, marks_between

STEPS = 360
"""Columns of a timeline: no more than a page is wide."""

MARKS_MAX = 1500
"""The newest marks that are shown one by one. A host on which more happens has one in nearly every column."""


def make_slider(archive: Archive, begin: float, end: float) -> dict[str, Any]:
    """Return the scale for a span; null where nothing is stored."""
    names = archive.names()
    oldest = min((each.begin for each in names), default=None)
    if oldest is not None:
        begin = max(begin, oldest)
    step = max(1.0, (end - begin) / STEPS)
    devices: dict[str, dict[str, Any]] = {}
    marks: list[TimelineMark] = []
    before: dict[str, Any] | None = None
    known_until = float("-inf")
    following = list(archive.summaries(begin, end))
    for place, (time, last, summary) in enumerate(following):
        until = min(last, following[place + 1][0]) if place + 1 < len(following) else last
        if before is not None:
            if time - known_until > 2 * step and time - known_until > _LONGEST_GAP:
                marks += [TimelineMark(known_until, "stopped"), TimelineMark(time, "started")]
            marks += marks_between(time, before, summary)
        before, known_until = summary, until
        for uuid, device in summary["devices"].items():
            shown = devices.setdefault(uuid, _column(uuid, device))
            for column in range(
                max(0, int((time - begin) / step)), min(STEPS, int((until - begin) / step) + 1)
            ):
                highest = shown["used"][column]
                if highest is None or device["used"] >= highest:
                    shown["used"][column], shown["wasted"][column] = device["used"], device["wasted"]
    marks = [each for each in marks if begin <= each.time <= end]
    return {
        "version": JSON_VERSION,
        "from": begin,
        "to": end,
        "step": step,
        "oldest": oldest,
        "devices": sorted(devices.values(), key=lambda each: (each["gpu"], each["uuid"])),
        "marks": [each._asdict() for each in marks[-MARKS_MAX:]],
        "marks_dropped": max(0, len(marks) - MARKS_MAX),
    }


_LONGEST_GAP = 10.0


def _column(uuid: str, device: dict[str, Any]) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "gpu": device["gpu"],
        "total": device["total"],
        "used": [None] * STEPS,
        "wasted": [None] * STEPS,
    }
