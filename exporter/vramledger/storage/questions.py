"""Answer what the exporter asks of the past: a moment, a span, its readings, and what a restart needs.

An answer is a line of JSON that describes the content, and then the content.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

from vramledger.errors import RecordingError
from vramledger.model.json_values import JSON_VERSION
from vramledger.storage.archive import Archive
from vramledger.storage.moments import Past, advance, compute, start_from
from vramledger.storage.protocol import AT, PAGE, READINGS, RESTORE, SINCE, SLIDER
from vramledger.storage.reduction import expand_reading, facts_plain
from vramledger.storage.report import make_report
from vramledger.storage.slider import make_slider
from vramledger.views.ledger_answer import write_answer
from vramledger.views.public_view import public_view
from vramledger.web.page_rows import page_rows


def answer(archive: Archive, request: dict[str, Any]) -> bytes:
    """Return the answer to a request.

    Raises:
        RecordingError: there is nothing stored that answers it, or it cannot be used.
        OSError: the disk does not answer.
        LookupError: the request is not complete.
    """
    ask = request["ask"]
    if ask == RESTORE:
        return _restore(archive)
    if ask == AT:
        return _moment(archive, request)
    begin, end = float(request["from"]), float(request["to"])
    if ask == SINCE:
        return _with_head({}, json.dumps(make_report(archive, begin, end)).encode())
    if ask == SLIDER:
        return _with_head({}, json.dumps(make_slider(archive, begin, end)).encode())
    if ask == READINGS:
        return _readings(archive, begin, end)
    message = f"{ask!r} is not a question to the storage"
    raise RecordingError(message)


def _with_head(head: dict[str, Any], content: bytes) -> bytes:
    return json.dumps(head).encode() + b"\n" + content


def _readings(archive: Archive, begin: float, end: float) -> bytes:
    """Return the readings of a span; the first has the facts of all processes, which a sampler sends once."""
    found = archive.readings(begin, end)
    first = next(found, None)
    if first is None:
        return _with_head({"readings": 0}, b"")
    facts = []
    if (moment := archive.find(first.time)) is not None:
        tracker, timeline = start_from(moment.header, moment.state)
        for entry in moment.readings:
            advance(tracker, timeline, entry)
        facts = [facts_plain(each) for each in tracker.known_facts()]
    expanded = (expand_reading(entry.value, entry.time) for entry in chain([first], found))
    values = ({**value, "facts": facts} if not number else value for number, value in enumerate(expanded))
    lines = [json.dumps(each, separators=(",", ":")) for each in values]
    return _with_head({"readings": len(lines)}, "\n".join(lines).encode())


def _restore(archive: Archive) -> bytes:
    found = archive.newest()
    if found is None:
        return _with_head({"found": False}, b"")
    content = {"state": found.state.value, "readings": [(each.time, each.value) for each in found.readings]}
    return _with_head({"found": True, "header": found.header}, json.dumps(content).encode())


def find_moment(archive: Archive, at: float) -> Past:
    """Return what was known at a moment.

    Raises:
        RecordingError: nothing is stored that is so old, or it cannot be used.
    """
    moment = archive.find(at)
    if moment is None:
        names = archive.names()
        message = "nothing is stored yet"
        if names:
            message = "nothing is stored of that time"
        raise RecordingError(message)
    return compute(moment, at)


def _moment(archive: Archive, request: dict[str, Any]) -> bytes:
    past = find_moment(archive, float(request["at"]))
    snapshot = past.snapshot
    if request.get("uid") is not None:
        snapshot = public_view(snapshot, int(request["uid"]))
    growth = past.timeline.growth(snapshot)
    head = {
        "version": JSON_VERSION,
        "asked": past.asked,
        "time": snapshot.time,
        "step": past.step,
        "gap_until": past.gap_until,
    }
    if request.get("view") == PAGE:
        rows = page_rows(snapshot, growth, ready=True)
        content = {**head, "rows": rows, "history": past.timeline.as_json()}
        return _with_head(head, json.dumps(content, separators=(",", ":")).encode())
    return _with_head(head, write_answer(snapshot, growth))
