"""Answer what the exporter asks of the past: a moment, a span, its readings, and what a restart needs.

This runs in a process of its own, which reads beside the one that writes and answers one question after the
other. The exporter starts it for a question, and closes its pipe when the answer takes too long or nobody
waits for it any more: then it ends at once, whatever it does. An answer is a line of JSON that describes the
content, and then the content.

Sum up a span: who held how much for how long, who died; and make the scale of the page's slider.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from heapq import heappop, heappush
from itertools import chain, pairwise
from math import inf
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

import msgspec

from vramledger.errors import RecordingError, StartupError, VramledgerError
from vramledger.logs import configure
from vramledger.model.records import JSON_VERSION
from vramledger.sampling.privileges import DEFAULT_UID, User, drop_privileges
from vramledger.storage import protocol
from vramledger.storage.database import DamagedError, PastReader, connect_reader, translated
from vramledger.storage.keeper import OTHERS_WRITE
from vramledger.storage.reduction import expand_reading, facts_plain
from vramledger.storage.state import Past, advance, compute, start_from
from vramledger.views.hidden_names import HiddenNames, public_view
from vramledger.views.ledger_json import write_answer
from vramledger.web.page_rows import page_rows

STEPS = 360
"""Columns of a timeline: no more than a page is wide."""

MARKS_MAX = 1500
"""The newest marks that are shown one by one. A host on which more happens has one in nearly every column."""

READINGS_MAX = 64 * 2**20
"""Bytes of readings in an answer, which the exporter has in its memory, too."""

MEMORY_MAX = 2**31
"""Bytes of memory of a process that reads, whatever its file has."""

ENDED, BEGAN = "exporter-ended", "exporter-began"
"""The marks of the exporter itself: a holder that is stopped has a mark of that name."""

_LEFTOVER = ("dead", "zombie", "stuck", "orphaned")
_OOM, _LINKS = "oom", ("lost", "back")
_ROOT = 0
_ROW_MAX = 3600.0
"""Seconds for which a row is true at most: a minute, or the interval of samples where that is longer."""


def make_report(connection: sqlite3.Connection, begin: float, end: float) -> dict[str, Any]:
    """Return the report of a span as JSON values: byte-seconds, seconds and Unix times."""
    watched = _watched(connection, begin, end)
    marks, count = _marks(connection, begin, end, protocol.LONGEST_GAP, kinds=(*_LEFTOVER, _OOM, *_LINKS))
    found = connection.execute(
        "SELECT owner_type, coalesce(owner, ''), user, uuid, state, wasted, held, max(time, ?), "
        "min(time + seconds, ?) FROM holders WHERE time BETWEEN ? AND ? AND time + seconds >= ? "
        "ORDER BY time",
        (begin, end, begin - _ROW_MAX, end, begin),
    )
    owners: dict[tuple[str, str], dict[str, Any]] = {}
    extents: dict[tuple[str, str], _Extent] = {}
    for kind, name, user, uuid, state, wasted, known, since, until in found:
        owner = owners.setdefault(
            (kind, name),
            {
                "owner_type": kind,
                "owner": name,
                "users": [],
                "gpus": [],
                **{f"{what}byte_seconds": 0.0 for what in ("", "idle_", "wasted_", "perhaps_wasted_")},
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
        extents.setdefault((kind, name), _Extent()).add(since, until, held)
    for key, owner in owners.items():
        owner["seconds"], owner["highest"] = extents[key].end()
    return {
        "version": JSON_VERSION,
        "from": begin,
        "to": end,
        "first": max(begin, watched[0][0]) if watched else None,
        "last": min(end, max(until for _, until, _ in watched)) if watched else None,
        "covered_seconds": sum(min(end, until) - max(begin, since) for since, until, up in watched if up),
        "owners": sorted(owners.values(), key=lambda each: -each["byte_seconds"]),
        "leftovers": [each for each in marks if each["kind"] in _LEFTOVER],
        "ooms": [each for each in marks if each["kind"] == _OOM],
        "interruptions": [each for each in marks if each["kind"] in (*_LINKS, ENDED, BEGAN)],
        "marks_dropped": count - len(marks),
    }


_ENDS, _BEGINS, _WAS_SHORT = range(3)


class _Extent:
    """For how long an owner held anything, and the most at once; only open rows are kept."""

    def __init__(self) -> None:
        self._seconds, self._highest, self._held, self._reached = 0.0, 0, 0, 0.0
        self._open: list[tuple[float, int, int]] = []

    def add(self, since: float, until: float, held: int) -> None:
        """Add a span that begins no earlier than those before."""
        self._close(since, _BEGINS)
        if self._open:
            self._seconds += since - self._reached
        self._reached = since
        heappush(self._open, (until, _ENDS if until > since else _WAS_SHORT, held))
        self._held += held
        self._highest = max(self._highest, self._held)

    def end(self) -> tuple[float, int]:
        """Return the seconds and the most."""
        self._close(inf, _BEGINS)
        return self._seconds, self._highest

    def _close(self, time: float, what: int) -> None:
        while self._open and self._open[0][:2] < (time, what):
            until, _, held = heappop(self._open)
            self._seconds += until - self._reached
            self._held -= held
            self._reached = until


def _watched(connection: sqlite3.Connection, begin: float, end: float) -> list[tuple[float, float, int]]:
    """Return the spans in which readings followed on one another, and whether the GPUs gave data then."""
    return connection.execute(
        "SELECT begin, until, up FROM watch WHERE until >= ? AND begin <= ? ORDER BY begin, id", (begin, end)
    ).fetchall()


def _marks(
    connection: sqlite3.Connection, begin: float, end: float, gap: float, *, kinds: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], int]:
    """Return the newest marks of a span, and how many there are.

    They are what happened, of certain kinds or of all, and when nobody watched for longer than a gap.
    """
    chosen = f"time BETWEEN ? AND ? AND ({'kind IN (' + ', '.join('?' * len(kinds)) + ')' if kinds else '1'})"
    values = (begin, end, *kinds)
    (count,) = connection.execute(f"SELECT count(*) FROM event WHERE {chosen}", values).fetchone()  # noqa: S608 ours
    found = connection.execute(
        "SELECT time, kind, coalesce(uuid, ''), coalesce(pid, 0), coalesce(trim(owner), ''), "  # noqa: S608 ours
        f"coalesce(command, ''), coalesce(before, '') FROM events WHERE {chosen} ORDER BY time DESC LIMIT ?",
        (*values, MARKS_MAX),
    )
    names = "time", "kind", "uuid", "pid", "owner", "command", "before"
    marks = [dict(zip(names, each, strict=True)) for each in found]
    for (_, stopped, _), (started, _, _) in pairwise(_watched(connection, begin, end)):
        if started - stopped > gap:
            for time, kind in ((stopped, ENDED), (started, BEGAN)):
                if begin <= time <= end:
                    marks.append(dict(zip(names, (time, kind, "", 0, "", "", ""), strict=True)))
                    count += 1
    return sorted(marks, key=lambda each: each["time"])[-MARKS_MAX:], count


def make_slider(
    connection: sqlite3.Connection, begin: float, end: float, oldest: float | None
) -> dict[str, Any]:
    """Return the scale for a span; null where nothing is stored."""
    if oldest is not None:
        begin = max(begin, oldest)
    step = max(1.0, (end - begin) / STEPS)
    marks, count = _marks(connection, begin, end, max(protocol.LONGEST_GAP, 2 * step))
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
        "marks": marks,
        "marks_dropped": count - len(marks),
    }


DAMAGED = "damaged"
"""Is true in the first line of an answer if the file, or a part of it, is not what was written."""


@contextmanager
def open_past(directory: Path, host: str = "") -> Iterator[PastReader]:
    """Open a directory's past to read. Raises RecordingError if unusable, OSError if the disk hangs."""
    try:
        connection = connect_reader(directory / protocol.NAME, host)
    except FileNotFoundError as error:
        raise RecordingError("nothing is stored yet") from error
    with closing(connection), translated():
        yield PastReader(connection)


def answer(directory: Path, request: dict[str, Any], host: str = "") -> bytes:
    """Return the answer. Raises RecordingError without one, LookupError if incomplete, or OSError."""
    if request["ask"] == protocol.RESTORE and not (directory / protocol.NAME).exists():
        return json.dumps({"found": False}).encode() + b"\n"  # the first start
    with open_past(directory, host) as past:
        head, content = _answer(past, request)
    if past.damaged:
        head = {**head, DAMAGED: True}
    return json.dumps(head).encode() + b"\n" + content


def _answer(past: PastReader, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    ask = request["ask"]
    if ask == protocol.RESTORE:
        newest = past.newest()
        if newest is None:
            return {"found": False}, b""
        readings = [(each.time, each.value) for each in newest.readings]
        content = json.dumps({"state": newest.state.value, "readings": readings}).encode()
        return {"found": True, "header": newest.header}, content
    if ask == protocol.AT:
        return _moment(past, request)
    begin, end = float(request["from"]), float(request["to"])
    if end < begin:
        raise RecordingError("the span ends before it begins")
    hidden = _hidden(request)
    if ask == protocol.SINCE:
        report = make_report(past.connection, begin, end)
        return {}, json.dumps(report if hidden is None else hidden.report(report)).encode()
    if ask == protocol.SLIDER:
        slider = make_slider(past.connection, begin, end, past.oldest())
        if hidden is not None:
            slider["marks"] = hidden.marks(slider["marks"])
        return {}, json.dumps(slider).encode()
    if ask == protocol.READINGS:
        with closing(past.readings(begin, end)) as found:  # type: ignore[type-var]
            return _readings(past, found)
    raise RecordingError(f"{ask!r} is not a question to the storage")


def _readings(past: PastReader, found: Iterator[protocol.Entry]) -> tuple[dict[str, Any], bytes]:
    """Return the readings of a span; the first has the facts of all processes, which a sampler sends once."""
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
    content, count = bytearray(), 0
    for count, each in enumerate(values, start=1):  # noqa: B007 how many there were
        content += json.dumps(each, separators=(",", ":")).encode() + b"\n"
        if len(content) > READINGS_MAX:
            raise RecordingError(
                f"its readings have more than {READINGS_MAX >> 20} MiB; ask for a shorter span"
            )
    return {"readings": count}, bytes(content[:-1])


def _hidden(request: dict[str, Any]) -> HiddenNames | None:
    return HiddenNames(bytes.fromhex(request[protocol.HIDE])) if protocol.HIDE in request else None


def _moment(past: PastReader, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    at = float(request["at"])
    moment = past.find(at)
    if moment is None:
        raise RecordingError(
            "nothing is stored yet" if past.oldest() is None else "nothing is stored of that time"
        )
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
    if request.get("view") == protocol.PAGE:
        rows = page_rows(snapshot, growth, ready=True)
        content = {**head, "rows": rows, "history": then.timeline.history()}
        return head, msgspec.json.encode(content)
    return head, write_answer(snapshot, growth)


def answer_or_problem(directory: Path | StartupError, content: bytes, host: str) -> bytes:
    """Return the answer to a request as the exporter sends it, or why there is none."""
    try:
        if isinstance(directory, StartupError):
            raise directory
        return answer(directory, json.loads(content), host)
    except (VramledgerError, OSError, ValueError, LookupError, TypeError, MemoryError) as error:
        text = str(error) or f"it takes more than {MEMORY_MAX >> 30} GiB of memory; ask for a shorter span"
        problem = {"error": text, DAMAGED: isinstance(error, DamagedError)}
        return json.dumps(problem).encode() + b"\n"


def _enter(path: Path) -> Path:
    """Give up all rights; return the path of the directory then. Raises StartupError.

    Its user may have put links to files of others there, to which SQLite, as root, would write.
    """
    path = path.absolute()
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(directory)
        if root := os.geteuid() == _ROOT:
            os.fchdir(directory)
            with suppress(PermissionError):  # a container may have no right to do so
                os.chroot(".")  # its user may not be able to come here (DynamicUser), nor we leave
                path = Path("/")
                sys.meta_path.clear()  # whatever is imported from now on would be its user's
        os.close(directory)
    except OSError as error:
        raise StartupError(
            f"it cannot be read ({error.strerror}); name the storage with --storage.path"
        ) from error
    # Root's own directory may have copies that are others'. A group may be one that its user is not in.
    owner = User(found.st_uid, DEFAULT_UID) if found.st_uid != _ROOT else None
    drop_privileges(frozenset({"dac_read_search"} if root and owner is None else ()), owner if root else None)
    if root and found.st_mode & OTHERS_WRITE:
        raise StartupError("other users may write to it; make it mode 0700")
    if root and os.geteuid() != found.st_uid:
        raise StartupError(f"it belongs to user {found.st_uid}; run this as that user")
    return path


def _receive(questions: SimpleQueue[bytes], source: BinaryIO) -> None:
    """Receive questions; end this process as soon as nobody waits for an answer."""
    while len(head := source.read(protocol.HEADER.size)) == protocol.HEADER.size:
        questions.put(source.read(protocol.HEADER.unpack(head)[1]))
    os._exit(0)


def main() -> None:
    """Answer until the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the exporter's end is ours
    config = json.loads(sys.argv[1])
    configure(*sys.argv[2:4])
    with suppress(ValueError):  # it is lower already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    directory: Path | StartupError
    try:
        directory = _enter(Path(config["path"]))
    except StartupError as error:
        directory = error
    questions: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(questions, sys.stdin.buffer), daemon=True).start()
    with suppress(BrokenPipeError):
        while True:
            found = answer_or_problem(directory, questions.get(), config["host"])
            sys.stdout.buffer.write(protocol.pack(protocol.ANSWER, found))
            sys.stdout.buffer.flush()
    os._exit(0)  # the thread has the lock of stdin, for which an interpreter's end waits, and then aborts
