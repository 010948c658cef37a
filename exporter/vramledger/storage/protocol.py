"""Define what the exporter and the processes of its storage say to each other, over pairs of pipes.

A message has a kind of one byte, its length in four, and its content. The process that writes gets
:data:`BEGIN`, :data:`ADD`, :data:`SUMMARY` and :data:`CHECK`, and sends :data:`STATUS` and :data:`AGAIN`. The
one that reads gets :data:`ASK`, and sends an :data:`ANSWER` for each. A third process starts both. The
exporter sends it a packet with two pipes for each start.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any, NamedTuple

from vramledger.sampling.protocol import child_command

BEGIN, ADD, SUMMARY, CHECK = b"B", b"A", b"M", b"C"
"""Begin a segment with this header; add this line; add this summary; look whether the file is damaged."""

AGAIN, STATUS = b"G", b"S"
"""Begin a new segment; what was stored."""

ASK, ANSWER = b"Q", b"N"
"""Answer this question; an answer."""

READY = b"ready"
WRITE, READ = "write", "read"
"""The directory is open (another text says why not); start a process that writes, or one that reads."""

RESTORE, AT, SINCE, SLIDER, READINGS = "restore", "at", "since", "slider", "readings"
"""The questions."""

HIDE = "hide"
"""In a question: the key of the stand-ins for names that who asks may not see."""

PAGE, LEDGER = "page", "ledger"
"""How a moment is wanted: as rows of the page, or as a command reads it."""

NAME = "past.sqlite"
OURS = re.compile(rf"{re.escape(NAME)}(\.(damaged|other-host|newer)-\d+)?(-wal|-shm|-journal)?")
"""The file of the past, and what its directory has besides: files that were put aside, and SQLite's."""

SEGMENT_SECONDS = 1800.0
"""A segment's length: its first state takes minutes of changes, and it is read from its begin."""

LONGEST_GAP = 10.0
"""Seconds without a reading after which a new segment begins: within a segment nothing is missing."""

PACKET_BYTES = 4096

HEADER = struct.Struct(">cI")

MAX_CONTENT = 512 * 2**20

MINUTE = 60
"""Seconds from one summary to the next, unless a holder came, went, changed its state or ran out of memory:
so a report over days is exact to the second in who and why, and to the minute in bytes."""

STATE, READING = "s", "r"
"""The kinds of entries."""


class Entry(NamedTuple):
    """A state or a reading of a segment."""

    kind: str  # :data:`STATE` or :data:`READING`
    time: float  # Unix time of the reading; of a state, that of the reading before it
    value: Any  # its JSON values


class Moment(NamedTuple):
    """What is stored for a moment."""

    state: Any  # what the accounting knew before the first of the readings
    # those from there to the moment, with their times; the last one is what was seen then
    readings: list[Entry]
    # Unix time of the last thing that was stored without a gap; None where more follows it
    until: float | None
    next_time: float | None  # Unix time of what is stored next after a gap; None where there is nothing
    step: float  # seconds from one stored reading to the next, there
    header: dict[str, Any]  # of the segment


class HolderSummary(NamedTuple):
    """One holding in a summary; ``held`` and ``wasted`` are None where they are not known."""

    owner_type: str
    owner: str
    user: str
    command: str
    state: str
    grade: str
    held: int | None
    wasted: bool | None


def write_entry(kind: str, time: float, patch: Any) -> bytes:  # noqa: ANN401 JSON values
    """Return the line of an entry: how its value differs from that of the entry of its kind before it."""
    return json.dumps({"k": kind, "t": round(time, 3), "p": patch}, separators=(",", ":")).encode()


_KIND_AT = len('{"k":"')
_TIME_AT = len('{"k":"r","t":')


def read_head(line: bytes) -> tuple[str, float]:
    """Read kind and time of a line of :func:`write_entry`. Raises ValueError if it is another line."""
    return line[_KIND_AT : _KIND_AT + 1].decode("latin-1"), float(line[_TIME_AT : line.index(b",", _TIME_AT)])


def pack(kind: bytes, content: bytes) -> bytes:
    """Return a message."""
    return HEADER.pack(kind, len(content)) + content


def keeper_command(*arguments: str) -> list[str]:
    """Return the command line of the process that starts the others."""
    return child_command("storage.keeper", *arguments)


def process_command(kind: str, *arguments: str) -> list[str]:
    """Return the command line of the process that writes, or of the one that reads."""
    return child_command("storage.process" if kind == WRITE else "storage.answers", *arguments)
