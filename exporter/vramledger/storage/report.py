"""Sum up a span for people: who held how much for how long, what was idle, who died, who ran out."""

from __future__ import annotations

from typing import Any

from vramledger.model.json_values import JSON_VERSION
from vramledger.storage.archive import Archive
from vramledger.storage.recorder import LONGEST_GAP
from vramledger.storage.summary import HolderSummary, TimelineMark, marks_between, periods

_LEFTOVER = ("dead", "zombie", "stuck", "orphaned")


def make_report(archive: Archive, begin: float, end: float) -> dict[str, Any]:
    """Return the report of a span as JSON values: byte-seconds, seconds and Unix times."""
    owners: dict[str, dict[str, Any]] = {}
    marks: list[TimelineMark] = []
    covered = 0.0
    first = last = None
    known = None
    for period in periods(archive.summaries(begin, end)):
        since, until = max(begin, period.begin), min(end, period.end)
        seconds = max(0.0, until - since)
        if known is not None:
            if period.begin - (last or 0.0) > LONGEST_GAP:
                marks += [TimelineMark(last or 0.0, "stopped"), TimelineMark(period.begin, "started")]
            marks += marks_between(period.begin, known, period.summary)
        first = since if first is None else first
        known, last = period.summary, until
        if period.summary["up"]:
            covered += seconds
            _charge(owners, period.summary, seconds)
    marks = [each for each in marks if begin <= each.time <= end]
    return {
        "version": JSON_VERSION,
        "from": begin,
        "to": end,
        "first": first,
        "last": last,
        "covered_seconds": covered,
        "owners": sorted(owners.values(), key=lambda each: -each["byte_seconds"]),
        "leftovers": [each._asdict() for each in marks if each.kind in _LEFTOVER],
        "ooms": [each._asdict() for each in marks if each.kind == "oom"],
        "interruptions": [
            each._asdict() for each in marks if each.kind in ("lost", "back", "stopped", "started")
        ],
    }


def _charge(owners: dict[str, dict[str, Any]], summary: dict[str, Any], seconds: float) -> None:
    held_by: dict[str, int] = {}
    for uuid, device in summary["devices"].items():
        for raw in device["holders"].values():
            holder = HolderSummary(*raw)
            key = f"{holder.owner_type}\n{holder.owner}"
            owner = owners.setdefault(
                key,
                {
                    "owner_type": holder.owner_type,
                    "owner": holder.owner,
                    "users": [],
                    "gpus": [],
                    "byte_seconds": 0.0,
                    "idle_byte_seconds": 0.0,
                    "wasted_byte_seconds": 0.0,
                    "seconds": 0.0,
                    "highest": 0,
                },
            )
            if holder.user and holder.user not in owner["users"]:
                owner["users"].append(holder.user)
            if uuid not in owner["gpus"]:
                owner["gpus"].append(uuid)
            held_by[key] = held_by.get(key, 0) + holder.held
            owner["byte_seconds"] += holder.held * seconds
            owner["idle_byte_seconds"] += holder.held * seconds if holder.state == "idle" else 0.0
            owner["wasted_byte_seconds"] += holder.held * seconds if holder.wasted else 0.0
    for key, held in held_by.items():
        owners[key]["seconds"] += seconds
        owners[key]["highest"] = max(owners[key]["highest"], held)
