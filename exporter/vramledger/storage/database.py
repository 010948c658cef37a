"""Open the file of the past: its tables, and what its errors mean.

The tables are in STORAGE.md. What belongs to a moment is in ``segment`` and ``piece``: each segment is one
stream of compressed lines, in pieces of 4 s. A state or reading is written as a patch of the one before it.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import stat
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from vramledger.errors import RecordingError
from vramledger.logs import fields, log
from vramledger.storage.protocol import READING, SEGMENT_SECONDS, STATE, Entry, Moment
from vramledger.storage.reduction import apply

_NEWEST_TRIED = 3
"""How many segments are looked at for the newest state, if the newest segment has none."""


class Newest(NamedTuple):
    """The newest state, the readings after it, and the header of the segment."""

    header: dict[str, Any]
    state: Entry
    readings: list[Entry]


class StoredSegment(NamedTuple):
    """A segment: its number, the Unix time of its beginning, its step in seconds (0 while it is written)."""

    id: int
    begin: float
    step: int
    header: dict[str, Any]


def read_entries(lines: Iterator[bytes]) -> Iterator[Entry]:
    """Yield the entries of a segment's lines. Raises DamagedError if they are not what was written."""
    values: dict[str, Any] = {STATE: {}, READING: {}}
    for text in lines:
        try:
            line = json.loads(text)
            kind, time = line["k"], float(line["t"])
            value = values[kind] = apply(values[kind], line["p"])
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"a line does not follow from the one before it ({error!r})") from error
        yield Entry(kind, time, value)


class PastReader:
    """What is stored, read through one connection; a segment that is damaged is left out.

    All methods raise ``sqlite3.Error`` or :class:`DamagedError` where the file is damaged, and the former
    where the disk does not answer.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.damaged = False  # whether such a segment was met

    def segments(self, rest: str = "ORDER BY begin, id", *values: float) -> Iterator[StoredSegment]:
        """Yield segments, the oldest first or as the rest of the statement wants."""
        found = self.connection.execute(f"SELECT id, begin, step, header FROM segment {rest}", values)  # noqa: S608 ours
        for number, begin, step, header in found.fetchall():
            try:
                yield StoredSegment(number, begin, step, json.loads(header))
            except ValueError as error:
                raise DamagedError(f"the header of segment {number} is not JSON") from error

    def oldest(self) -> float | None:
        """Return the Unix time of the oldest moment that can be shown, None where there is none."""
        (begin,) = self.connection.execute("SELECT min(begin) FROM segment").fetchone()
        return None if begin is None else float(begin)

    def entries(self, segment: StoredSegment) -> Iterator[Entry]:
        """Yield the entries of a segment, as far as they are whole."""
        try:
            with closing(read_lines(self.connection, segment.id)) as lines:  # type: ignore[type-var]
                yield from read_entries(lines)
        except DamagedError as error:
            self.damaged = True
            log.warning("A part of the past is damaged and not shown", extra=fields(err=str(error)))

    def find(self, at: float) -> Moment | None:
        """Return what is stored for a moment: the newest reading that is not later; None if there is none."""
        for segment in self.segments("WHERE begin <= ? ORDER BY begin DESC, id DESC", at):
            moment = self._find_in(segment, at)
            if moment is not None and moment.until is not None:
                (following,) = self.connection.execute(
                    "SELECT min(begin) FROM segment WHERE begin > ?", (segment.begin,)
                ).fetchone()
                return moment._replace(next_time=following)
            if moment is not None:
                return moment
        return None

    def _find_in(self, segment: StoredSegment, at: float) -> Moment | None:
        state: Entry | None = None
        newer: Entry | None = None
        readings: list[Entry] = []
        until: float | None = None
        with closing(self.entries(segment)) as entries:  # type: ignore[type-var]
            for entry in entries:
                if entry.kind != STATE and entry.time > at:
                    until = None
                    break
                until = entry.time
                if entry.kind == STATE:
                    newer = entry
                else:
                    if newer is not None:
                        state, newer, readings = newer, None, []
                    readings.append(entry)
        if state is None or not readings:
            return None
        return Moment(state.value, readings, until, None, max(1.0, segment.step), segment.header)

    def readings(self, begin: float, end: float) -> Iterator[Entry]:
        """Yield the readings of a span."""
        first = begin - SEGMENT_SECONDS - 60.0
        for segment in self.segments("WHERE begin BETWEEN ? AND ? ORDER BY begin, id", first, end):
            for entry in self.entries(segment):
                if entry.kind == READING and begin <= entry.time <= end:
                    yield entry

    def newest(self) -> Newest | None:
        """Return the state that was written last, with the readings after it; None if there is none."""
        for segment in self.segments(f"ORDER BY id DESC LIMIT {_NEWEST_TRIED}"):
            state: Entry | None = None
            readings: list[Entry] = []
            for entry in self.entries(segment):
                if entry.kind == STATE:
                    state, readings = entry, []
                else:
                    readings.append(entry)
            if state is not None:
                return Newest(segment.header, state, readings)
        return None


VERSION = 1
_APPLICATION = 0x76726C67
"""``vrlg``: what ``file`` and we know such a file by."""

PIECES = 2**16
"""A piece's number is its segment's times this, and its place in it: so they lie in the order of reading."""

_SEGMENT_MAX = 256 * 2**20
"""The bytes of lines that a segment may have. No exporter writes as many, a hostile file can."""

# A change of this text, by one space, needs a new VERSION: a file with another one is not read.
_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE segment (id INTEGER PRIMARY KEY AUTOINCREMENT, begin REAL NOT NULL, step INTEGER NOT NULL,
    header TEXT NOT NULL);
CREATE INDEX segment_begin ON segment (begin);
CREATE TABLE piece (id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, lines BLOB NOT NULL);
CREATE TABLE watch (id INTEGER PRIMARY KEY AUTOINCREMENT, begin REAL NOT NULL, until REAL NOT NULL,
    up INTEGER NOT NULL);
CREATE TABLE device (id INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE, gpu INTEGER);
CREATE TABLE holder (id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, start INTEGER, owner_type TEXT,
    owner TEXT, user TEXT, command TEXT);
CREATE INDEX holder_pid ON holder (pid);
CREATE TABLE device_minute (time INTEGER, device INTEGER, watch INTEGER, seconds INTEGER NOT NULL,
    total INTEGER, used INTEGER, peak INTEGER, wasted INTEGER, unattributed INTEGER,
    PRIMARY KEY (time, device, watch)) WITHOUT ROWID;
CREATE TABLE holder_minute (time INTEGER, device INTEGER, holder INTEGER, watch INTEGER,
    seconds INTEGER NOT NULL, state TEXT NOT NULL, grade TEXT NOT NULL, held INTEGER, wasted INTEGER,
    PRIMARY KEY (time, device, holder, watch)) WITHOUT ROWID;
CREATE TABLE event (time REAL NOT NULL, kind TEXT NOT NULL, device INTEGER, holder INTEGER, before TEXT,
    owner TEXT);
CREATE INDEX event_time ON event (time);
CREATE VIEW devices AS
    SELECT m.time, m.seconds, d.gpu, d.uuid, m.total, m.used, m.peak, m.wasted, m.unattributed
    FROM device_minute m JOIN device d ON d.id = m.device;
CREATE VIEW holders AS
    SELECT m.time, m.seconds, d.gpu, d.uuid, h.pid, h.owner_type, h.owner, h.user, h.command, m.state,
        m.grade, m.held, m.wasted
    FROM holder_minute m JOIN device d ON d.id = m.device JOIN holder h ON h.id = m.holder;
CREATE VIEW events AS
    SELECT e.time, e.kind, d.gpu, d.uuid, h.pid, coalesce(e.owner, h.owner_type || ' ' || h.owner) AS owner,
        h.command, e.before
    FROM event e LEFT JOIN device d ON d.id = e.device LEFT JOIN holder h ON h.id = e.holder;
CREATE VIEW owner_days AS
    SELECT date(time, 'unixepoch') AS day, owner_type, owner,
        sum(held * seconds) / 3865470566400.0 AS gib_hours,
        sum(CASE WHEN state = 'idle' THEN held * seconds ELSE 0 END) / 3865470566400.0 AS idle_gib_hours,
        sum(CASE WHEN wasted THEN held * seconds ELSE 0 END) / 3865470566400.0 AS wasted_gib_hours,
        sum(CASE WHEN wasted IS NULL THEN held * seconds ELSE 0 END) / 3865470566400.0
            AS perhaps_wasted_gib_hours
    FROM holders GROUP BY day, owner_type, owner;
"""


class DamagedError(RecordingError):
    """The file is not what was written."""


class UnfitError(RecordingError):
    """The file is whole, and not for us: ``suffix`` is what it is renamed with."""

    def __init__(self, why: str, suffix: str) -> None:
        super().__init__(why)
        self.suffix = suffix


_ERRORS = {"database or disk is full": errno.ENOSPC, "attempt to write a readonly database": errno.EROFS}

_NO_LOG = ("unable to open database file", "attempt to write a readonly database")
"""What SQLite says where the log that belongs to the file cannot be made."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise SQLite's errors as DamagedError, or as OSError if the disk or the lock is at fault."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if text.startswith(("no such", "Could not decode")):
            raise DamagedError(text) from error
        code = _ERRORS.get(text, errno.EIO)
        raise OSError(code, os.strerror(code) if text in _ERRORS else text) from error
    except sqlite3.Error as error:
        raise DamagedError(str(error)) from error


def connect_writer(path: Path, host: str) -> sqlite3.Connection:
    """Open the file to write, with its tables. Raises DamagedError, UnfitError (other host) or OSError."""
    with suppress(FileNotFoundError):
        _require_plain(path)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    with translated():
        connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        try:
            for setting in ("auto_vacuum = INCREMENTAL", "temp_store = MEMORY", "trusted_schema = OFF",
                            "cell_size_check = ON", "wal_autocheckpoint = 0"):  # fmt: skip
                connection.execute(f"PRAGMA {setting}")
            if not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(
                    f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {_APPLICATION}; "
                    f"PRAGMA user_version = {VERSION}; COMMIT;"
                )
            _check(connection, host)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            if host:
                connection.execute("INSERT OR REPLACE INTO meta VALUES ('host', ?)", (host,))
        except BaseException:
            with suppress(sqlite3.Error):
                connection.close()
            raise
    return connection


def connect_reader(path: Path, host: str = "") -> sqlite3.Connection:
    """Open the file to read, without its log if read-only. Raises as :func:`connect_writer`."""
    _require_plain(path)
    with translated():
        for how in ("mode=ro", "mode=ro&immutable=1"):
            connection = _opened(path, how)
            try:
                _check(connection, host)
                _require_our_tables(connection)
            except BaseException as error:
                connection.close()
                if how == "mode=ro" and str(error) in _NO_LOG:
                    continue
                raise
            break
    return connection


def _opened(path: Path, how: str) -> sqlite3.Connection:
    # as_uri() would import something, from Python 3.13 on, and our root may be the directory by now.
    name = quote(os.fsencode(path.absolute()))
    connection = sqlite3.connect(f"file:{name}?{how}", uri=True, timeout=1.0, isolation_level=None)
    for setting in ("temp_store = MEMORY", "trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
        connection.execute(f"PRAGMA {setting}")
    return connection


def _require_plain(path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise DamagedError("it is not a plain file")


def _check(connection: sqlite3.Connection, host: str) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION:
        raise DamagedError("it is not a past of vramledger")
    if version > VERSION:
        raise UnfitError(f"it has version {version}, and this program reads version {VERSION}", "newer")
    theirs = connection.execute("SELECT value FROM meta WHERE name = 'host'").fetchone()
    if host and theirs and theirs[0] != host:
        raise UnfitError("it is of another host", "other-host")


def _require_our_tables(connection: sqlite3.Connection) -> None:
    """Refuse what only looks like our tables and views: a view may have rows without end."""
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(_TABLES)
        schema = "SELECT name, type, sql FROM sqlite_schema"
        missing = {*made.execute(schema)} - {*connection.execute(schema)}
    if missing:
        raise DamagedError(f"its {min(missing)[0]} is not as this version makes it")


def read_lines(connection: sqlite3.Connection, segment: int) -> Iterator[bytes]:
    """Yield the lines of a segment. Raises DamagedError if they are not what was written."""
    stream, rest, size = zlib.decompressobj(), b"", 0
    found = connection.execute(
        "SELECT checksum, lines FROM piece WHERE id BETWEEN ? AND ? ORDER BY id",
        (segment * PIECES, segment * PIECES + PIECES - 1),
    )
    with closing(found):
        for checksum, packed in found:
            try:
                if zlib.crc32(packed) != checksum:
                    raise zlib.error  # noqa: TRY301 the same as what follows
                text = stream.decompress(packed, _SEGMENT_MAX)
            except (zlib.error, TypeError) as error:
                raise DamagedError(f"a piece of segment {segment} is damaged") from error
            size += len(text)
            if size > _SEGMENT_MAX or stream.unconsumed_tail:
                raise DamagedError(f"segment {segment} is larger than any that was written")
            *whole, rest = (rest + text).split(b"\n")
            yield from whole
