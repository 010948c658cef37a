"""Compute what was known at a moment from what is stored: the state before it, and the readings since."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from vramledger.accounting.tracker import HoldingTracker
from vramledger.errors import RecordingError
from vramledger.model.reading_json import decode
from vramledger.model.snapshot import Snapshot
from vramledger.storage.archive import Moment
from vramledger.storage.objects import read_object
from vramledger.storage.recorder import LONGEST_GAP, settings_of
from vramledger.storage.reduction import expand_reading
from vramledger.storage.segments import Entry
from vramledger.views.timeline import Timeline


class Past(NamedTuple):
    """What was known at a moment.

    Attributes:
        snapshot: of the newest reading that is not later.
        timeline: the 15 minutes before it.
        asked: the Unix time that was asked for.
        step: seconds from one stored reading to the next.
        gap_until: the time of the next reading, where nothing was stored at the time that was asked for; 0
            where nothing newer is stored.
    """

    snapshot: Snapshot
    timeline: Timeline
    asked: float
    step: float
    gap_until: float | None


def compute(moment: Moment, asked: float) -> Past:
    """Return what was known at a moment.

    Raises:
        RecordingError: what is stored cannot be used by this version.
    """
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
    """Return accounting and timeline as they were when a state was stored.

    Raises:
        RecordingError: the state cannot be used by this version.
    """
    try:
        settings = settings_of(header)
        tracker = HoldingTracker(
            idle_after=float(header["idle_after"]),
            interval=float(header["interval"]),
            owners_max=int(header["owners_max"]),
        )
    except (LookupError, ValueError, TypeError) as error:
        message = f"not a header of a segment ({error!r})"
        raise RecordingError(message) from error
    timeline = Timeline()
    recall(tracker, timeline, state, settings)
    return tracker, timeline


def recall(tracker: HoldingTracker, timeline: Timeline, state: Any, settings: dict[str, object]) -> None:  # noqa: ANN401
    """Let accounting and timeline go on from a state.

    Raises:
        RecordingError: the state cannot be used by this version.
    """
    known = read_object(state, settings)
    if not isinstance(known, dict) or not isinstance(known.get("tracker"), dict):
        message = "not a state of the accounting"
        raise RecordingError(message)
    tracker.recall(known["tracker"])
    timeline.recall(known.get("timeline", {}))


def advance(tracker: HoldingTracker, timeline: Timeline, entry: Entry) -> Snapshot:
    """Account for a stored reading.

    Raises:
        RecordingError: it is not a reading that this version can account for.
    """
    try:
        reading = decode(json.dumps(expand_reading(entry.value, entry.time)))
        snapshot = tracker.update(reading)
    except Exception as error:
        message = f"a stored reading is invalid ({error!r})"
        raise RecordingError(message) from error
    timeline.record(snapshot)
    return snapshot
