"""Write all that the accounting and the timeline remember as JSON values, and go on from it.

It is written as it is declared in :mod:`vramledger.accounting.remembered`. A field that is added with a
default needs nothing more; any other change of what is declared needs a new :data:`VERSION`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from vramledger.accounting.remembered import Remembered
from vramledger.accounting.tracker import TOLD_AFTER, HoldingTracker
from vramledger.errors import RecordingError
from vramledger.model.reading import decode
from vramledger.model.snapshot import Snapshot
from vramledger.storage.protocol import LONGEST_GAP, Entry, Moment
from vramledger.storage.reduction import expand_reading, safe_settings
from vramledger.views.timeline import Timeline, TimelineState

VERSION = 1
"""A state of another version is not read."""


class _StoredState(msgspec.Struct):
    tracker: Remembered
    timeline: TimelineState


def write_state(tracker: HoldingTracker, timeline: Timeline) -> dict[str, Any]:
    """Return what they remember as JSON values, without values of environments that may say more."""
    known = msgspec.to_builtins(tracker.state, str_keys=True)
    for processes in known["processes"]["known"].values():
        for process in processes.values():
            for facts in (process["shown"].get("facts"), process["shown"].get("first")):
                if facts and facts.get("settings"):
                    facts["settings"] = safe_settings(facts["settings"])
    return {"version": VERSION, "tracker": known, "timeline": timeline.remembered()}


def recall(tracker: HoldingTracker, timeline: Timeline, state: Any) -> None:  # noqa: ANN401 JSON values
    """Let accounting and timeline go on from a state. Raises RecordingError if it cannot be used."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise RecordingError(
            f"the accounting's state is of version {version}, and this program reads version {VERSION}"
        )
    try:
        known = msgspec.convert(state, _StoredState, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RecordingError(f"not a state of the accounting ({error})") from error
    tracker.recall(known.tracker)
    timeline.recall(known.timeline)


class Past(NamedTuple):
    """What was known at a moment."""

    snapshot: Snapshot  # of the newest reading that is not later
    timeline: Timeline  # the 15 minutes before it
    asked: float  # the Unix time that was asked for
    step: float  # seconds from one stored reading to the next
    # the time of the next reading, where nothing was stored at the time that was asked for; 0 where nothing
    # newer is stored
    gap_until: float | None


def compute(moment: Moment, asked: float) -> Past:
    """Return what was known at a moment. Raises RecordingError if this version cannot use it."""
    tracker, timeline = start_from(moment.header, moment.state)
    snapshot = tracker.blank
    for entry in moment.readings:
        snapshot = advance(tracker, timeline, entry)
    step = max(moment.step, float(moment.header.get("interval", 1.0)))
    gap: float | None = None
    if moment.until is not None and asked - moment.until > LONGEST_GAP:
        gap = moment.next_time or 0.0
    return Past(snapshot, timeline, asked, step, gap)


def start_from(header: dict[str, Any], state: Any) -> tuple[HoldingTracker, Timeline]:  # noqa: ANN401 JSON values
    """Return accounting and timeline of a state. Raises RecordingError if it cannot be used."""
    try:
        tracker = HoldingTracker(
            idle_after=float(header["idle_after"]),
            interval=float(header["interval"]),
            owners_max=int(header["owners_max"]),
            told_after=TOLD_AFTER,
        )
    except (LookupError, ValueError, TypeError) as error:
        raise RecordingError(f"not a header of a segment ({error!r})") from error
    timeline = Timeline()
    recall(tracker, timeline, state)
    return tracker, timeline


def advance(tracker: HoldingTracker, timeline: Timeline, entry: Entry) -> Snapshot:
    """Account for a stored reading. Raises RecordingError if this version cannot."""
    try:
        reading = decode(json.dumps(expand_reading(entry.value, entry.time)))
        snapshot = tracker.update(reading)
    except Exception as error:
        raise RecordingError(f"a stored reading is invalid ({error!r})") from error
    timeline.record(snapshot)
    return snapshot
