"""Answer what the exporter asks of the past: a moment, a span, its readings, and what a restart needs.

This runs in a process of its own, which reads beside the one that writes and answers one question after the
other. The exporter starts it for a question, and closes its pipe when the answer takes too long or nobody
waits for it any more: then it ends at once, whatever it does. An answer is a line of JSON that describes the
content, and then the content.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

import msgspec

from vramledger.errors import RecordingError, VramledgerError
from vramledger.logs import configure
from vramledger.model.records import JSON_VERSION
from vramledger.sampling.privileges import drop_privileges
from vramledger.storage.database import DamagedError, connect_reader, translated
from vramledger.storage.protocol import (
    ANSWER,
    AT,
    HEADER,
    HIDE,
    NAME,
    PAGE,
    READINGS,
    RESTORE,
    SINCE,
    SLIDER,
    pack,
)
from vramledger.storage.reading import PastReader
from vramledger.storage.reduction import expand_reading, facts_plain
from vramledger.storage.report import make_report, make_slider
from vramledger.storage.state import Past, advance, compute, start_from
from vramledger.views.hidden_names import HiddenNames, public_view
from vramledger.views.ledger_json import write_answer
from vramledger.web.page_rows import page_rows

DAMAGED = "damaged"
"""Is true in the first line of an answer if the file, or a part of it, is not what was written."""


@contextmanager
def open_past(directory: Path, host: str = "") -> Iterator[PastReader]:
    """Open a directory's past to read. Raises RecordingError if unusable, OSError if the disk hangs."""
    try:
        connection = connect_reader(directory / NAME, host)
    except FileNotFoundError as error:
        message = "nothing is stored yet"
        raise RecordingError(message) from error
    with closing(connection), translated():
        yield PastReader(connection)


def answer(directory: Path, request: dict[str, Any], host: str = "") -> bytes:
    """Return the answer. Raises RecordingError without one, LookupError if incomplete, or OSError."""
    if request["ask"] == RESTORE and not (directory / NAME).exists():
        return json.dumps({"found": False}).encode() + b"\n"  # the first start
    with open_past(directory, host) as past:
        head, content = _answer(past, request)
    if past.damaged:
        head = {**head, DAMAGED: True}
    return json.dumps(head).encode() + b"\n" + content


def _answer(past: PastReader, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    ask = request["ask"]
    if ask == RESTORE:
        return _restore(past)
    if ask == AT:
        return _moment(past, request)
    begin, end = float(request["from"]), float(request["to"])
    hidden = _hidden(request)
    if ask == SINCE:
        report = make_report(past.connection, begin, end)
        return {}, json.dumps(report if hidden is None else hidden.report(report)).encode()
    if ask == SLIDER:
        slider = make_slider(past.connection, begin, end, past.oldest())
        if hidden is not None:
            slider["marks"] = hidden.marks(slider["marks"])
        return {}, json.dumps(slider).encode()
    if ask == READINGS:
        return _readings(past, begin, end)
    message = f"{ask!r} is not a question to the storage"
    raise RecordingError(message)


def _readings(past: PastReader, begin: float, end: float) -> tuple[dict[str, Any], bytes]:
    """Return the readings of a span; the first has the facts of all processes, which a sampler sends once."""
    found = past.readings(begin, end)
    first = next(found, None)
    if first is None:
        return {"readings": 0}, b""
    facts = []
    if (moment := past.find(first.time)) is not None:
        tracker, timeline = start_from(moment.header, moment.state)
        for entry in moment.readings:
            advance(tracker, timeline, entry)
        facts = [facts_plain(each) for each in tracker.known_facts()]
    expanded = (expand_reading(entry.value, entry.time) for entry in chain([first], found))
    values = ({**value, "facts": facts} if not number else value for number, value in enumerate(expanded))
    lines = [json.dumps(each, separators=(",", ":")) for each in values]
    return {"readings": len(lines)}, "\n".join(lines).encode()


def _restore(past: PastReader) -> tuple[dict[str, Any], bytes]:
    found = past.newest()
    if found is None:
        return {"found": False}, b""
    content = {"state": found.state.value, "readings": [(each.time, each.value) for each in found.readings]}
    return {"found": True, "header": found.header}, json.dumps(content).encode()


def _hidden(request: dict[str, Any]) -> HiddenNames | None:
    return HiddenNames(bytes.fromhex(request[HIDE])) if HIDE in request else None


def _moment(past: PastReader, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    at = float(request["at"])
    moment = past.find(at)
    if moment is None:
        message = "nothing is stored yet" if past.oldest() is None else "nothing is stored of that time"
        raise RecordingError(message)
    then: Past = compute(moment, at)
    snapshot = then.snapshot
    uid = None if request.get("uid") is None else int(request["uid"])
    if (hidden := _hidden(request)) is not None:
        snapshot = hidden.snapshot(snapshot, uid)
    if uid is not None:
        snapshot = public_view(snapshot, uid)
    growth = then.timeline.growth(snapshot)
    head = {
        "version": JSON_VERSION,
        "asked": then.asked,
        "time": snapshot.time,
        "step": then.step,
        "gap_until": then.gap_until,
    }
    if request.get("view") == PAGE:
        rows = page_rows(snapshot, growth, ready=True)
        content = {**head, "rows": rows, "history": then.timeline.history()}
        return head, msgspec.json.encode(content)
    return head, write_answer(snapshot, growth)


def answer_or_problem(directory: Path, content: bytes, host: str) -> bytes:
    """Return the answer to a request as the exporter sends it, or why there is none."""
    try:
        return answer(directory, json.loads(content), host)
    except (VramledgerError, OSError, ValueError, LookupError, TypeError) as error:
        problem = {"error": str(error), DAMAGED: isinstance(error, DamagedError)}
        return json.dumps(problem).encode() + b"\n"


def _receive(questions: SimpleQueue[bytes], source: BinaryIO) -> None:
    """Receive questions; end this process as soon as nobody waits for an answer."""
    while len(head := source.read(HEADER.size)) == HEADER.size:
        questions.put(source.read(HEADER.unpack(head)[1]))
    os._exit(0)


def main() -> None:
    """Answer until the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the exporter's end is ours
    config = json.loads(sys.argv[1])
    configure(*sys.argv[2:4])
    drop_privileges()
    questions: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(questions, sys.stdin.buffer), daemon=True).start()
    with suppress(BrokenPipeError):
        while True:
            found = answer_or_problem(Path(config["path"]), questions.get(), config["host"])
            sys.stdout.buffer.write(pack(ANSWER, found))
            sys.stdout.buffer.flush()
