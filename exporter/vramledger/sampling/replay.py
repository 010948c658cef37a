"""Read a recording, and play it as if it were a sampler, with its own clock.

A recording is a gzip file (or plain text) of JSON lines: a header with the format's name and version, then
the readings as the sampler wrote them. What is replayed is never shown as this host's own data: every
snapshot says ``replay``.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from vramledger.errors import RecordingError
from vramledger.model.reading import Reading, decode
from vramledger.model.records import mover_of

FORMAT = "vramledger-recording"
VERSION = 1

MAX_LINE_BYTES = 8 * 2**20
"""The longest line; a reading of 16 GPUs with 64 holders each has 1 MiB. A file of some kilobytes can hold a
line of gigabytes, compressed, and what JSON makes of a line takes up to twenty times its length."""

END_PAUSE = 1.0
MIN_END_PAUSE = 0.02
"""Seconds; otherwise a very short recording would repeat as fast as the processor allows."""


def demo_recording() -> Path:
    """Return the recording that comes with the package, for hosts without a driver."""
    return Path(__file__).parent / "recordings" / "demo.jsonl.gz"


def encode_header(note: str = "", idle_after: float | None = None, *, simulated: bool = False) -> bytes:
    """Write a recording's first line: its ``idle_after``, whether ``simulated``, a note for people."""
    head: dict[str, object] = {"format": FORMAT, "version": VERSION, "note": note, "idle_after": idle_after}
    if simulated:
        head["simulated"] = True
    return json.dumps(head).encode() + b"\n"


def read_recording(path: Path) -> Iterator[Reading]:
    """Yield a file's readings. Raises RecordingError if it is unreadable, cut off or none."""
    try:
        with open_recording(path) as lines:
            _read_header(path, lines.readline(MAX_LINE_BYTES))
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), start=2):
                try:
                    _check_length(line)
                    reading = decode(line)
                except RecordingError as error:
                    raise RecordingError(f"{path}, line {number}: {error}") from error
                yield reading
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecordingError(f"cannot read the recording {path}: {reason}") from error


def _check_length(line: bytes) -> None:
    if len(line) >= MAX_LINE_BYTES:
        raise RecordingError(f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB, and no reading is")


def open_recording(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file to read, compressed or not."""
    with path.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if compressed else path.open("rb")


class Header(NamedTuple):
    """The header of a recording; ``idle_after`` is None where it has none."""

    idle_after: float | None
    simulated: bool


def _read_header(path: Path, line: bytes) -> Header:
    try:
        head = json.loads(line)
        known = head["format"] == FORMAT
    except (ValueError, TypeError, KeyError, RecursionError):
        known = False
    if not known:
        raise RecordingError(f"{path} is not a recording; make one with 'vramledger capture'")
    if head.get("version") != VERSION:
        raise RecordingError(
            f"{path} has version {head.get('version')!r}, this program reads version {VERSION}"
        )
    idle_after = head.get("idle_after")
    known_threshold = isinstance(idle_after, (int, float)) and idle_after > 0
    return Header(float(idle_after) if known_threshold else None, head.get("simulated") is True)


class Replay:
    """Play a recording again and again, each time as if it happened now, for the first time."""

    pid: int | None = None
    idle_after: float | None
    """The idle threshold of the recording, None when it has none."""
    name: str
    """The name of the file, followed by "(simulated)" if the header says so."""

    def __init__(self, path: Path, speed: float, skip: float = 0.0) -> None:
        """Open a recording, its first ``skip`` seconds played at once. Raises RecordingError."""
        self.path = path
        self._speed = speed
        self._skip = skip
        if next(read_recording(path), None) is None:
            raise RecordingError(f"the recording {path} is empty")
        with open_recording(path) as lines:
            header = _read_header(path, lines.readline(MAX_LINE_BYTES))
        self.idle_after = header.idle_after
        self.name = f"{path.name} (simulated)" if header.simulated else path.name

    async def readings(self) -> AsyncIterator[Reading | None]:
        """Yield the readings at their own pace; yield None each time before the recording starts again.

        It starts again only after its end, also if a high speed has moved that end into the future: time
        never goes back. Each time it starts again, its processes get later start times. Otherwise a reader
        that identifies processes by pid and start time would mistake them for those of the run before. After
        a fault in the file there is a failed reading, then the recording starts again.
        """
        first_shift: float | None = None
        skip = self._skip
        newest = 0.0
        while True:
            # Both clocks are read at the same moment. If the wall time were read after the file was opened,
            # each reading would have a later time than the moment at which it is shown. A failed reading
            # after the last one would then have an earlier time than that one.
            wall, begun = max(time.time(), newest + END_PAUSE), time.monotonic()
            shift = offset = None
            try:
                for reading in read_recording(self.path):
                    if shift is None or offset is None:
                        shift = wall - reading.time - skip
                        offset = begun - reading.monotonic - skip
                        first_shift = shift if first_shift is None else first_shift
                    due = begun + (reading.monotonic + offset - begun) / self._speed
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    newest = reading.time + shift
                    yield shift_starts(shift_times(reading, shift), shift - (first_shift or 0.0))
            except RecordingError as error:
                newest = max(time.time(), newest)
                yield Reading(newest, time.monotonic(), failure=("recording", str(error)))
            await asyncio.sleep(max(MIN_END_PAUSE, END_PAUSE / self._speed))
            skip = 0.0
            yield None


def shift_times(reading: Reading, shift: float) -> Reading:
    """Return a reading with every wall-clock time moved by ``shift`` seconds."""
    moved: Reading = mover_of(Reading, _is_unix_time)(reading, shift)
    return moved


def shift_starts(reading: Reading, later: float) -> Reading:
    """Return a reading of a host booted ``later`` seconds earlier: each process becomes a new one."""
    if not later:
        return reading
    ticks = round(later * reading.ticks)
    moved: Reading = mover_of(Reading, _is_start)(reading, ticks)
    return replace(moved, boot_time=reading.boot_time - ticks / reading.ticks)


def _is_unix_time(name: str, _: object) -> bool:
    return name in {"time", "boot_time", "received", "released_until"}


def _is_start(name: str, _: object) -> bool:
    return name == "start"
