"""Write what the exporter sends, in a transaction each 4 s; thin what is old, remove what is too much.

A file that cannot be used is renamed, and a new one is begun.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from vramledger.errors import RecordingError
from vramledger.logs import fields, log
from vramledger.storage import database, protocol
from vramledger.storage.reduction import difference
from vramledger.storage.tables import SummaryTables

LIVE, WHOLE = 0, 1
"""The steps of segments that have every reading: one in pieces, and one that was packed when it was full."""

THINNED = ((120, 3600.0), (600, 86400.0))
"""What replaces a segment: a moment each so many seconds, and the age from which that is enough."""

LOG_BYTES = 2**20
"""When the log (``past.sqlite-wal``) is larger, what it has is moved into the file."""

LOG_SHARE = 8
"""The log's share of the size, 4 to 64 MiB, while somebody reads so long that it cannot be moved."""

HELD = "somebody has the past open for too long; end that: its log is full"

_LEVEL = 8
"""Patches of a second have 0.5 kB, which take 20 µs at this level."""

_SUMMARIES = ("device_minute", "holder_minute", "event")
_FORGET_HOLDERS = (
    "DELETE FROM holder WHERE id NOT IN (SELECT holder FROM holder_minute UNION SELECT holder FROM event "
    "WHERE holder IS NOT NULL)"
)
_HOLDERS_EVERY = 120
"""Looks from one removal of holders that have no row left to the next: an hour."""

_HOUSE_SECONDS = 1.0
"""Seconds for which one look removes; what is left to do has time until the next."""

_SPARE_PAGES = 1024
"""Free pages of the file that are kept for what comes next."""

_SUFFIXES = ("", "-wal", "-shm")


class PastWriter:
    """The file of the past, as the process that writes it uses it."""

    def __init__(
        self,
        directory: Path,
        host: str = "",
        *,
        retention: float = float("inf"),
        size: float = float("inf"),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Use a directory; the file is opened with the first segment, one of another ``host`` put aside."""
        self._directory = directory
        self._path = directory / protocol.NAME
        self._host = host
        self._retention = retention
        self._size = size
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._tables: SummaryTables | None = None
        self._segment: database.StoredSegment | None = None
        self._stream: Any = None
        self._pieces = 0
        self._waiting = bytearray()
        self._newest = float("-inf")
        self._boot = ""
        self._log = self._looks = 0
        self.written = 0  # the bytes of the log that were written so far
        # the name that the last file was renamed to which could not be used, and why; None without one
        self.aside: str | None = None

    # Writing

    def begin(self, header: dict[str, Any]) -> None:
        """Begin a new segment; the one before is finished. Raises OSError if the disk does not take it."""
        self.flush()
        with self._failing():
            connection = self._open()
            if self._tables is None:
                self._tables = SummaryTables(connection)
            if (
                not 0 <= header["time"] - self._newest <= protocol.LONGEST_GAP
                or header.get("boot") != self._boot
            ):
                self._tables.interrupt()
            self._boot = header.get("boot", "")
        self._segment = database.StoredSegment(0, header["time"], LIVE, header)
        self._stream, self._pieces = zlib.compressobj(_LEVEL), 0

    def add(self, line: bytes) -> None:
        """Add a line to the segment, if there is one."""
        if self._segment is not None:
            kind, time_of = protocol.read_head(line)
            if kind == protocol.READING:
                self._newest = time_of
            self._waiting += line + b"\n"

    def summarise(self, summary: dict[str, Any]) -> None:
        """Add a summary, if there is a segment."""
        if self._segment is not None and self._tables is not None:
            self._tables.add(summary)

    def flush(self) -> None:
        """Write what was added, durably. Raises OSError if the disk does not take it; the segment ends."""
        if self._segment is None or self._tables is None or not self._waiting:
            return
        with self._failing():
            self._move_log()
            if self._log > self._log_max:
                raise OSError(errno.EBUSY, HELD)
            with self._transaction() as connection:
                self._write_piece(connection, self._segment)
                self._tables.write(self._newest)
            self._waiting.clear()
        self._measure_log()

    def _write_piece(self, connection: sqlite3.Connection, segment: database.StoredSegment) -> None:
        if not self._pieces:
            made = connection.execute(
                "INSERT INTO segment (begin, step, header) VALUES (?, ?, ?)",
                (segment.begin, LIVE, json.dumps(segment.header)),
            )
            self._segment = segment = segment._replace(id=made.lastrowid or 0)
        packed = self._stream.compress(bytes(self._waiting)) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        self._insert_piece(connection, segment.id * database.PIECES + self._pieces, packed)
        self._pieces += 1

    @staticmethod
    def _insert_piece(connection: sqlite3.Connection, number: int, packed: bytes) -> None:
        connection.execute("INSERT INTO piece VALUES (?, ?, ?)", (number, zlib.crc32(packed), packed))

    def end(self) -> None:
        """Write what was added, and close the file and its log. Raises OSError if the disk fails."""
        self.flush()
        self._close()

    def _open(self) -> sqlite3.Connection:
        """Return the open file; one that cannot be used is put aside. Raises OSError if the disk hangs."""
        if self._connection is None:
            try:
                self._connection = database.connect_writer(self._path, self._host)
            except (database.DamagedError, database.UnfitError) as error:
                self._put_aside(error)
                try:
                    self._connection = database.connect_writer(self._path, self._host)
                except RecordingError as again:
                    raise OSError(errno.EIO, str(again)) from again
        return self._connection

    def _close(self) -> None:
        connection, self._connection, self._tables, self._segment = self._connection, None, None, None
        self._waiting.clear()
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _damaging(self) -> Iterator[None]:
        """Put the file aside where it is damaged. Raises OSError if it was, or the disk does not answer."""
        try:
            with database.translated():
                yield
        except database.DamagedError as error:
            self._close()
            self._put_aside(error)
            raise OSError(errno.EUCLEAN, f"the past was damaged, and put aside: {error}") from error

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Close the file where the disk fails, put it aside where damaged; raise OSError in both cases."""
        try:
            with self._damaging():
                yield
        except OSError:
            self._close()
            raise

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def _put_aside(self, why: RecordingError) -> None:
        suffix = why.suffix if isinstance(why, database.UnfitError) else "damaged"
        number = int(self._clock())
        while os.path.lexists(self._directory / (name := f"{protocol.NAME}.{suffix}-{number}")):
            number += 1
        for each in _SUFFIXES:
            with suppress(FileNotFoundError):
                (self._directory / (protocol.NAME + each)).rename(self._directory / (name + each))
        self.aside = f"{name}: {why}"
        log.warning(
            "The file of the past is not used, and was renamed; a new one is begun",
            extra=fields(file=name, err=str(why)),
        )

    def check(self) -> None:
        """Put the file aside, or drop a segment, that a reader found damaged. Raises OSError."""
        with self._failing():
            connection = self._open()
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise database.DamagedError(str(found).splitlines()[-1])
            for segment in list(database.PastReader(connection).segments()):
                try:
                    for _ in database.read_lines(connection, segment.id):
                        pass
                except database.DamagedError as error:
                    self._drop(segment, error)

    def _drop(self, segment: database.StoredSegment, why: database.DamagedError) -> None:
        log.warning("A part of the past is damaged, and was removed", extra=fields(err=str(why)))
        self.aside = str(why)
        if self._segment is not None and segment.id == self._segment.id:
            raise why  # what follows in it could not be read
        with self._transaction() as connection:
            self._delete(connection, segment.id)

    # The log

    @property
    def _log_max(self) -> float:
        return min(64 * LOG_BYTES, max(4 * LOG_BYTES, self._size / LOG_SHARE))

    def _measure_log(self) -> None:
        before = self._log
        try:
            self._log = (self._directory / f"{protocol.NAME}-wal").stat().st_size
        except FileNotFoundError:
            self._log = 0
        self.written += max(0, self._log - before)

    def _move_log(self) -> None:
        """Move the log into the file if it is large, as far as no reader needs it."""
        if self._log > LOG_BYTES:
            self._open().execute("PRAGMA busy_timeout = 0")
            self._open().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._open().execute("PRAGMA busy_timeout = 1000")
            self._measure_log()

    # Keeping house

    def keep_house(self) -> None:
        """Remove what is too old or too much, and thin a segment. Raises OSError if the disk fails."""
        failures: list[OSError] = []
        self._looks += 1
        files = self._files()
        for name in [each for each in files if self._is_aside(each)]:
            too_old = files[name][1] < self._clock() - self._retention
            if too_old or self._used(files) > self._size_wanted:
                try:
                    (self._directory / name).unlink(missing_ok=True)
                    del files[name]
                except OSError as error:
                    failures.append(error)
        if self._connection is not None and self._log <= max(LOG_BYTES, self._log_max / 2):
            try:
                with self._damaging():
                    self._remove_old(self._connection, files)
                    self._thin_one(self._connection)
            finally:
                self._measure_log()
        if failures:
            raise failures[0]

    def _files(self) -> dict[str, tuple[int, float]]:
        found = {}
        for each in self._directory.iterdir():
            if protocol.OURS.fullmatch(each.name):
                with suppress(FileNotFoundError):
                    known = each.lstat()
                    found[each.name] = known.st_blocks * 512, known.st_mtime
        return dict(sorted(found.items(), key=lambda each: each[1][1]))

    @staticmethod
    def _is_aside(name: str) -> bool:
        return name.removeprefix(protocol.NAME).startswith(".")

    @property
    def _size_wanted(self) -> float:
        """What all files but the log may have."""
        return self._size - self._log_max

    def _used(self, files: dict[str, tuple[int, float]]) -> float:
        """Return the bytes of all files but the log, with what is free in the file counted as gone."""
        total = sum(size for name, (size, _) in files.items() if name != f"{protocol.NAME}-wal")
        return total - self._number("freelist_count") * self._number("page_size")

    def _number(self, pragma: str) -> int:
        if self._connection is None:
            return 0
        with database.translated():
            return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _remove_old(self, connection: sqlite3.Connection, files: dict[str, tuple[int, float]]) -> None:
        end = time.monotonic() + _HOUSE_SECONDS
        cutoff = self._clock() - self._retention
        reader = database.PastReader(connection)
        others = sum(size for name, (size, _) in files.items() if self._is_aside(name))
        while time.monotonic() < end:
            oldest = next(reader.segments("ORDER BY begin, id LIMIT 1"), None)
            pages = self._number("page_count") - self._number("freelist_count")
            used = pages * self._number("page_size") + others
            if (
                oldest is None
                or (self._segment is not None and oldest.id == self._segment.id)
                or (oldest.begin + protocol.SEGMENT_SECONDS >= cutoff and used <= self._size_wanted)
            ):
                break
            with self._transaction():
                self._delete(connection, oldest.id)
                begin = reader.oldest()
                before = cutoff if begin is None else max(cutoff, begin)
                for table in _SUMMARIES:
                    connection.execute(f"DELETE FROM {table} WHERE time < ?", (before,))  # noqa: S608 ours
                connection.execute("DELETE FROM watch WHERE until < ?", (before,))
        if self._looks % _HOLDERS_EVERY == 0:
            connection.execute(_FORGET_HOLDERS)
            if self._tables is not None:
                self._tables.forget_numbers()
        spare = self._number("freelist_count")
        over = self._number("page_count") * self._number("page_size") + others > self._size_wanted
        if spare > _SPARE_PAGES or (over and spare):
            connection.execute(f"PRAGMA incremental_vacuum({_SPARE_PAGES})").fetchall()

    @staticmethod
    def _delete(connection: sqlite3.Connection, segment: int) -> None:
        connection.execute(
            "DELETE FROM piece WHERE id BETWEEN ? AND ?",
            (segment * database.PIECES, segment * database.PIECES + database.PIECES - 1),
        )
        connection.execute("DELETE FROM segment WHERE id = ?", (segment,))

    def _thin_one(self, connection: sqlite3.Connection) -> None:
        """Replace the oldest segment that is stored more finely than its age needs."""
        now = self._clock() - protocol.SEGMENT_SECONDS
        writing = 0 if self._segment is None else self._segment.id
        (first, age), (second, older) = THINNED
        found = database.PastReader(connection).segments(
            "WHERE id != ? AND (step < ? OR (step < ? AND begin < ?) OR (step < ? AND begin < ?)) "
            "ORDER BY begin LIMIT 1",
            *(writing, WHOLE, first, now - age, second, now - older),
        )
        for segment in found:
            enough = [step for step, age in THINNED if segment.begin < now - age]
            try:
                lines = database.read_lines(connection, segment.id)
                kept = _thinned(database.read_entries(lines), enough[-1]) if enough else lines
                packed = zlib.compress(b"".join(each + b"\n" for each in kept), _LEVEL)
            except database.DamagedError as error:
                self._drop(segment, error)
                continue
            with self._transaction():
                self._delete(connection, segment.id)
                connection.execute(
                    "INSERT INTO segment VALUES (?, ?, ?, ?)",
                    (segment.id, segment.begin, enough[-1] if enough else WHOLE, json.dumps(segment.header)),
                )
                self._insert_piece(connection, segment.id * database.PIECES, packed)

    def usage(self) -> tuple[int, float | None]:
        """Return the bytes of all files, and the oldest moment. Raises OSError if the disk hangs."""
        size = sum(each for each, _ in self._files().values())
        if self._connection is None:
            return size, None
        with database.translated():
            return size, database.PastReader(self._connection).oldest()


def _thinned(entries: Iterator[protocol.Entry], seconds: float) -> Iterator[bytes]:
    """Yield the lines of a segment with a state and the reading after it."""
    before: dict[str, Any] = {protocol.STATE: {}, protocol.READING: {}}

    def line(entry: protocol.Entry) -> bytes:
        patch = difference(before[entry.kind], entry.value)
        before[entry.kind] = entry.value
        return protocol.write_entry(entry.kind, entry.time, patch)

    state: protocol.Entry | None = None
    newest = float("-inf")
    with closing(entries) as found:  # type: ignore[type-var]
        for entry in found:
            if entry.kind == protocol.STATE:
                state = entry
            elif state is not None and not newest <= entry.time < newest + seconds * 0.9:
                newest = entry.time
                yield line(state)
                yield line(entry)
                state = None
