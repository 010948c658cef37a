"""Sum up a span: who held how much for how long, who died; and make the scale of the page's slider."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from vramledger.model.records import JSON_VERSION
from vramledger.storage.protocol import LONGEST_GAP

STEPS = 360
"""Columns of a timeline: no more than a page is wide."""

MARKS_MAX = 1500
"""The newest marks that are shown one by one. A host on which more happens has one in nearly every column."""

ENDED, BEGAN = "exporter-ended", "exporter-began"
"""The marks of the exporter itself: a holder that is stopped has a mark of that name."""

_LEFTOVER = ("dead", "zombie", "stuck", "orphaned")
_ROW_MAX = 3600.0
"""Seconds for which a row is true at most: a minute, or the interval of samples where that is longer."""


def make_report(connection: sqlite3.Connection, begin: float, end: float) -> dict[str, Any]:
    """Return the report of a span as JSON values: byte-seconds, seconds and Unix times."""
    watched = _watched(connection, begin, end)
    marks = _marks(connection, begin, end, LONGEST_GAP)
    found = connection.execute(
        "SELECT owner_type, coalesce(owner, ''), user, uuid, state, wasted, held, max(time, ?), "
        "min(time + seconds, ?) FROM holders WHERE time BETWEEN ? AND ? AND time + seconds >= ? "
        "ORDER BY time",
        (begin, end, begin - _ROW_MAX, end, begin),
    )
    owners: dict[tuple[str, str], dict[str, Any]] = {}
    spans: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for kind, name, user, uuid, state, wasted, known, since, until in found:
        owner = owners.setdefault(
            (kind, name),
            {
                "owner_type": kind,
                "owner": name,
                "users": [],
                "gpus": [],
                "byte_seconds": 0.0,
                "idle_byte_seconds": 0.0,
                "wasted_byte_seconds": 0.0,
                "perhaps_wasted_byte_seconds": 0.0,
                "seconds": 0.0,
                "highest": 0,
            },
        )
        for names, each in (("users", user), ("gpus", uuid)):
            if each and each not in owner[names]:
                owner[names].append(each)
        held, seconds = known or 0, until - since
        owner["byte_seconds"] += held * seconds
        owner["idle_byte_seconds"] += held * seconds if state == "idle" else 0.0
        owner["wasted_byte_seconds"] += held * seconds if wasted else 0.0
        owner["perhaps_wasted_byte_seconds"] += held * seconds if wasted is None else 0.0
        spans.setdefault((kind, name), []).append((since, until, held))
    for key, owner in owners.items():
        owner["seconds"], owner["highest"] = _extent(spans[key])
    return {
        "version": JSON_VERSION,
        "from": begin,
        "to": end,
        "first": max(begin, watched[0][0]) if watched else None,
        "last": min(end, max(until for _, until, _ in watched)) if watched else None,
        "covered_seconds": sum(min(end, until) - max(begin, since) for since, until, up in watched if up),
        "owners": sorted(owners.values(), key=lambda each: -each["byte_seconds"]),
        "leftovers": [each for each in marks if each["kind"] in _LEFTOVER],
        "ooms": [each for each in marks if each["kind"] == "oom"],
        "interruptions": [each for each in marks if each["kind"] in ("lost", "back", ENDED, BEGAN)],
    }


_ENDS, _BEGINS, _WAS_SHORT = range(3)


def _extent(spans: Iterable[tuple[float, float, int]]) -> tuple[float, int]:
    """Return for how long an owner held anything, and the most at the same time."""
    changes = sorted(
        change
        for since, until, held in spans
        for change in ((since, _BEGINS, held), (until, _ENDS if until > since else _WAS_SHORT, held))
    )
    seconds, highest, count, now, before = 0.0, 0, 0, 0, 0.0
    for time, what, held in changes:
        seconds += time - before if count else 0.0
        before = time
        sign = 1 if what == _BEGINS else -1
        count, now = count + sign, now + sign * held
        highest = max(highest, now)
    return seconds, highest


def _watched(connection: sqlite3.Connection, begin: float, end: float) -> list[tuple[float, float, int]]:
    """Return the spans in which readings followed on one another, and whether the GPUs gave data then."""
    return connection.execute(
        "SELECT begin, until, up FROM watch WHERE until >= ? AND begin <= ? ORDER BY begin, id", (begin, end)
    ).fetchall()


def _marks(connection: sqlite3.Connection, begin: float, end: float, gap: float) -> list[dict[str, Any]]:
    """Return what happened in a span, with the times at which nobody watched for longer than a gap."""
    found = connection.execute(
        "SELECT time, kind, coalesce(uuid, ''), coalesce(pid, 0), coalesce(trim(owner), ''), "
        "coalesce(command, ''), coalesce(before, '') FROM events WHERE time BETWEEN ? AND ? ORDER BY time",
        (begin, end),
    )
    names = "time", "kind", "uuid", "pid", "owner", "command", "before"
    marks = [dict(zip(names, each, strict=True)) for each in found]
    for (_, stopped, _), (started, _, _) in pairwise(_watched(connection, begin, end)):
        if started - stopped > gap:
            for time, kind in ((stopped, ENDED), (started, BEGAN)):
                marks.append(dict(zip(names, (time, kind, "", 0, "", "", ""), strict=True)))
    return sorted((each for each in marks if begin <= each["time"] <= end), key=lambda each: each["time"])


def make_slider(
    connection: sqlite3.Connection, begin: float, end: float, oldest: float | None
) -> dict[str, Any]:
    """Return the scale for a span; null where nothing is stored."""
    if oldest is not None:
        begin = max(begin, oldest)
    step = max(1.0, (end - begin) / STEPS)
    marks = _marks(connection, begin, end, max(LONGEST_GAP, 2 * step))
    devices: dict[str, dict[str, Any]] = {}
    found = connection.execute(
        "SELECT uuid, gpu, total, peak, wasted, time, time + seconds FROM devices "
        "WHERE time BETWEEN ? AND ? AND time + seconds >= ? ORDER BY time",
        (begin - _ROW_MAX, end, begin),
    )
    for uuid, gpu, total, used, wasted, since, until in found:
        shown = devices.setdefault(
            uuid, {"uuid": uuid, "gpu": gpu, "total": total, "used": [None] * STEPS, "wasted": [None] * STEPS}
        )
        first, last = int((since - begin) / step), int((until - begin) / step)
        for column in range(max(0, first), min(STEPS, last + 1)):
            highest = shown["used"][column]
            if highest is None or used >= highest:
                shown["used"][column], shown["wasted"][column] = used, wasted
    return {
        "version": JSON_VERSION,
        "from": begin,
        "to": end,
        "step": step,
        "oldest": oldest,
        "devices": sorted(devices.values(), key=lambda each: (each["gpu"], each["uuid"])),
        "marks": marks[-MARKS_MAX:],
        "marks_dropped": max(0, len(marks) - MARKS_MAX),
    }
