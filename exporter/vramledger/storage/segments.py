"""Write and read one segment: a gzip file of lines that is whole up to its last flush, wherever it ends.

A line is a JSON value. While the file is being written, a checksum stands before each; in one that was
written as a whole gzip's own checksum does, which saves a tenth. The first line is the header, then come
states (``s``), readings (``r``) and summaries (``n``), each as a patch of the one before it. A state is what
the accounting knows after the readings before it, so a segment needs no other one. Each flush ends at a byte
boundary: what a kill, a power cut or a full disk leaves is read up to there, and nothing is repaired.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vramledger.errors import RecordingError
from vramledger.storage.deltas import apply

FORMAT = "vramledger-storage"
VERSION = 1

STATE, READING, SUMMARY = "s", "r", "n"
"""The kinds of entries."""

ALL = STATE + READING + SUMMARY

_GZIP = 31
"""zlib's number for a gzip stream with the largest window."""

_LEVEL = 9
"""Patches of a second have 0.5 kB, which take 20 µs at this level."""

_CHUNK = 4096
TAIL = 64 * 1024
"""Bytes at the end of an unfinished segment that may be anything after a power cut."""

MAX_LINE = 64 * 2**20


class DamagedError(RecordingError):
    """The file is not what was written."""


class NewerError(RecordingError):
    """A newer version of the program has written the file."""


class Entry(NamedTuple):
    """A state, a reading or a summary of a segment.

    Attributes:
        kind: :data:`STATE`, :data:`READING` or :data:`SUMMARY`.
        time: Unix time of the reading; of a state, that of the reading before it.
        value: its JSON values.
    """

    kind: str
    time: float
    value: Any


class SegmentWriter:
    """Append lines to a new file; used by one thread."""

    def __init__(self, file: int, header: dict[str, Any], *, at_once: bool = False) -> None:
        """Begin.

        Args:
            file: the descriptor of an empty file.
            header: its first line.
            at_once: the file is not to be read before it is finished.
        """
        self._at_once = at_once
        self._file = file
        self._stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._waiting = bytearray()
        self.size = 0
        self.add(json.dumps({"format": FORMAT, "version": VERSION, **header}).encode())

    def add(self, line: bytes) -> None:
        """Add a line of JSON; :meth:`flush` writes it."""
        self._waiting += line + b"\n" if self._at_once else b"%08x %b\n" % (zlib.crc32(line), line)

    def flush(self) -> None:
        """Write what was added, so that it survives our end and that of the machine.

        Raises:
            OSError: the disk does not take it; the file ends where it ended before.
        """
        if self._waiting:
            packed = self._stream.compress(bytes(self._waiting)) + self._stream.flush(zlib.Z_SYNC_FLUSH)
            self._waiting.clear()
            self._write(packed)

    def finish(self) -> None:
        """Write the end of the file, and close it.

        Raises:
            OSError: the disk does not take it.
        """
        try:
            self.flush()
            self._write(self._stream.flush(zlib.Z_FINISH))
        finally:
            os.close(self._file)

    def abandon(self) -> None:
        """Close the file as it is."""
        os.close(self._file)

    def _write(self, packed: bytes) -> None:
        written = 0
        try:
            while written < len(packed):
                written += os.write(self._file, packed[written:])
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += written


def read_segment(file: int, *, finished: bool, kinds: str = ALL) -> tuple[dict[str, Any], Iterator[Entry]]:
    """Return the header of a segment, and its entries.

    Args:
        file: its descriptor.
        finished: it was written to its end; otherwise it may end anywhere.
        kinds: of the entries that are wanted.

    Raises:
        DamagedError: it is not what was written; also raised while the entries are read.
        NewerError: a newer version of the program has written it.
        RecordingError: nothing whole is in it.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(os.fstat(file).st_mode):
        message = "it is not a plain file"
        raise DamagedError(message)
    lines = _lines(file, finished=finished)
    first = next(lines, None)
    if first is None and not finished:
        message = "nothing whole is in it"
        raise RecordingError(message)
    header = None if first is None else _parse(first)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        message = "it has no header"
        raise DamagedError(message)
    version = header.get("version")
    if not isinstance(version, int) or version > VERSION:
        message = f"it has version {version}, and this program reads version {VERSION}"
        raise NewerError(message)
    return header, _entries(lines, kinds)


def _entries(lines: Iterable[bytes], kinds: str) -> Iterator[Entry]:
    values: dict[str, Any] = {STATE: {}, READING: {}, SUMMARY: {}}
    for text in lines:
        if text[_KIND_AT : _KIND_AT + 1].decode("latin-1") not in kinds:
            continue
        line = _parse(text)
        try:
            kind, time = line["k"], float(line["t"])
            value = values[kind] = apply(values[kind], line["p"])
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            message = f"a line does not follow from the one before it ({error!r})"
            raise DamagedError(message) from error
        yield Entry(kind, time, value)


def write_entry(kind: str, time: float, patch: Any) -> bytes:  # noqa: ANN401 JSON values
    """Return the line of an entry."""
    return json.dumps({"k": kind, "t": round(time, 3), "p": patch}, separators=(",", ":")).encode()


def read_head(line: bytes) -> tuple[str, float]:
    """Return kind and time of a line that :func:`write_entry` wrote, without reading the rest.

    Raises:
        ValueError: it is another line.
    """
    return line[_KIND_AT : _KIND_AT + 1].decode("latin-1"), float(line[_TIME_AT : line.index(b",", _TIME_AT)])


def copy_lines(file: int, writer: SegmentWriter) -> None:
    """Copy all whole lines of a segment that may end anywhere.

    Raises:
        DamagedError: it is not what was written.
        OSError: it cannot be read.
    """
    lines = _lines(file, finished=False)
    next(lines, None)  # the writer has the header
    for line in lines:
        writer.add(line)


_KIND_AT = len('{"k":"')
"""Where a line that :func:`write_entry` wrote has its kind."""

_TIME_AT = len('{"k":"r","t":')


def _lines(file: int, *, finished: bool) -> Iterator[bytes]:
    """Yield the text of the lines up to the end, or to the torn tail of a file that is not finished.

    Of a finished file nothing is given before all of it is known to be whole.
    """
    if not finished:
        return _lines_so_far(file, finished=False)
    return iter(list(_lines_so_far(file, finished=True)))


def _lines_so_far(file: int, *, finished: bool) -> Iterator[bytes]:
    size = os.fstat(file).st_size
    stream = zlib.decompressobj(_GZIP)
    rest = b""
    place = 0
    while place < size and (chunk := os.pread(file, _CHUNK, place)):
        before, fault = stream.copy(), ""
        try:
            rest += stream.decompress(chunk)
        except zlib.error as error:
            rest += _whole_part(before, chunk)
            fault = str(error)
        *whole, rest = rest.split(b"\n")
        for line in whole:
            text = line if finished else _content(line)
            if text is None:
                fault = "a checksum is wrong"
                break
            yield text
        if fault and not finished and size - place <= TAIL:
            return
        if fault or len(rest) > MAX_LINE:
            message = f"it is damaged at byte {place} of {size} ({fault or 'a line without an end'})"
            raise DamagedError(message)
        place += len(chunk)
    if finished and not stream.eof:
        message = "its end is missing"
        raise DamagedError(message)


def _whole_part(stream: Any, chunk: bytes) -> bytes:  # noqa: ANN401 zlib names no type
    """Return what can be decompressed of a chunk that cannot be as a whole."""
    text = b""
    for place in range(len(chunk)):
        try:
            text += stream.decompress(chunk[place : place + 1])
        except zlib.error:
            break
    return text


def _content(line: bytes) -> bytes | None:
    """Return the text of a line, None if its checksum is wrong."""
    checksum, _, text = line.partition(b" ")
    try:
        right = int(checksum, 16) == zlib.crc32(text)
    except ValueError:
        right = False
    return text if right else None


def _parse(text: bytes) -> Any:  # noqa: ANN401 JSON values
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"a line is not JSON ({error})"
        raise DamagedError(message) from error
