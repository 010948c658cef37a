"""Read what is stored: a moment, the readings of a span, and what a restart goes on from."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

from vramledger.logs import fields, log
from vramledger.storage.database import DamagedError, read_lines
from vramledger.storage.deltas import apply
from vramledger.storage.protocol import READING, SEGMENT_SECONDS, STATE, Entry, Moment

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
