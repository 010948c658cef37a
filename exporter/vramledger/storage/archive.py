"""Keep the segments in one directory: find a moment, thin what is old, remove what is too old or too much.

A file is named by the Unix time of its beginning and by its step. ``1795234210.live.gz`` is being written.
When it is full, half an hour later, it is compressed as a whole, which takes a fifth less:
``1795234210.1s.gz`` has every reading too. After an hour ``1795234210.2m.gz`` replaces it, which keeps each
state and the reading after it, and after a day ``1795234210.10m.gz``. What is not named like this is not
ours, and stays. All files are opened within the directory, without following a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from vramledger.errors import RecordingError, StartupError
from vramledger.logs import fields, log
from vramledger.storage.deltas import difference
from vramledger.storage.segments import (
    ALL,
    READING,
    STATE,
    SUMMARY,
    DamagedError,
    Entry,
    NewerError,
    SegmentWriter,
    copy_lines,
    read_segment,
    write_entry,
)

LIVE, FULL = "live", "1s"
"""The steps of segments that have every reading: one that may end anywhere, and one that is whole."""

THINNED = ((FULL, 0.0, 0.0), ("2m", 120.0, 3600.0), ("10m", 600.0, 86400.0))
"""What replaces a segment: name, seconds, and the age from which it is enough."""

SEGMENT_SECONDS = 1800.0
"""How long a segment is: its first state takes as much as the changes of some minutes, and to find a moment
the segment is read from its beginning."""

_STEPS = {LIVE: 1.0, **{name: seconds or 1.0 for name, seconds, _ in THINNED}}

_NEWEST_TRIED = 3
"""How many segments are looked at for the newest state, if the newest segment has none."""

_NAME = re.compile(r"(\d{1,11})(?:-(\d{1,3}))?\.(live|1s|2m|10m)\.gz(\.damaged|\.other-host|\.newer)?")
_TEMPORARY = ".tmp"
_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What a write fails with where the write of another file would fail too."""

_ROOT = 0
_OTHERS_WRITE = 0o022


class SegmentName(NamedTuple):
    """The name of a file: when it begins, a number for several of that second, its step."""

    begin: int
    number: int
    step: str
    name: str

    @property
    def finished(self) -> bool:
        """Whether it was written as a whole."""
        return self.step != LIVE


class Moment(NamedTuple):
    """What is stored for a moment.

    Attributes:
        state: what the accounting knew before the first of the readings.
        readings: those from there to the moment, with their times; the last one is what was seen then.
        until: Unix time of the last thing that was stored without a gap; None where more follows it.
        next_time: Unix time of what is stored next after a gap; None where there is nothing.
        step: seconds from one stored reading to the next, there.
        header: of the segment.
    """

    state: Any
    readings: list[Entry]
    until: float | None
    next_time: float | None
    step: float
    header: dict[str, Any]


class Newest(NamedTuple):
    """The newest state, the readings after it, and the header of the segment."""

    header: dict[str, Any]
    state: Entry
    readings: list[Entry]


def open_directory(path: Path, owner: tuple[int, int] | None = None) -> int:
    """Open the directory of a storage, and make it if it is not there; return its descriptor.

    Args:
        path: where.
        owner: user and group that it must belong to; None for our own. Root gives them a directory that is
            new, empty, or was made by us.

    Raises:
        StartupError: it is another user's, is not a directory, or cannot be opened.
    """
    ours = owner or (os.geteuid(), os.getegid())
    try:
        if not path.exists() and not path.is_symlink():
            path.mkdir(mode=_DIRECTORY_MODE, parents=True)
            if owner is not None:
                os.chown(path, *owner)
        link = os.lstat(path)
        if stat.S_ISLNK(link.st_mode) and link.st_uid not in (_ROOT, ours[0]):
            _refuse(path, "it is a link of another user")
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        _refuse(path, error.strerror or str(error), error)
    try:
        found = os.fstat(directory)
        if found.st_uid == _ROOT == os.geteuid() and ours[0] != _ROOT and _is_ours(directory):
            _give(directory, ours)
            found = os.fstat(directory)
        if found.st_uid != ours[0]:
            _refuse(path, f"it belongs to user {found.st_uid}, and the exporter runs as user {ours[0]}")
        if found.st_mode & _OTHERS_WRITE:
            _refuse(path, "other users may write to it; make it mode 0700")
    except OSError as error:
        os.close(directory)
        _refuse(path, error.strerror or str(error), error)
    except StartupError:
        os.close(directory)
        raise
    return directory


def _refuse(path: Path, why: str, cause: OSError | None = None) -> Any:  # noqa: ANN401 never returns
    message = f"--storage.path={path} cannot be used: {why}"
    raise StartupError(message) from cause


def _is_ours(directory: int) -> bool:
    """Tell whether a directory is empty, or has nothing but segments."""
    return all(_NAME.fullmatch(name) or name.endswith(_TEMPORARY) for name in _list(directory))


def _list(directory: int) -> list[str]:
    return os.listdir(directory)


def _give(directory: int, owner: tuple[int, int]) -> None:
    for name in _list(directory):
        os.chown(name, *owner, dir_fd=directory, follow_symlinks=False)
    os.fchmod(directory, _DIRECTORY_MODE)
    os.fchown(directory, *owner)


def lock_directory(directory: int) -> bool:
    """Make us the only one who writes there; tell whether nobody else does."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class Archive:
    """The segments of a directory; one process writes, others may read at the same time."""

    def __init__(  # noqa: PLR0913 one argument a setting
        self,
        directory: int,
        host: str = "",
        *,
        retention: float = float("inf"),
        size: float = float("inf"),
        clock: Callable[[], float] = time.time,
        read_only: bool = False,
    ) -> None:
        """Use an open directory.

        Args:
            directory: its descriptor.
            host: the identity of this host; segments of another one are put aside. Empty if not known.
            retention: seconds after which a segment is removed.
            size: bytes that all segments may have.
            clock: Unix time.
            read_only: rename nothing.
        """
        self._read_only = read_only
        self._directory = directory
        self._host = host
        self._retention = retention
        self._size = size
        self._clock = clock
        self._writer: SegmentWriter | None = None
        self._writing = ""
        self._written = 0

    # Writing

    def begin(self, header: dict[str, Any]) -> None:
        """Begin a new segment; the one before is finished.

        Raises:
            OSError: the disk does not take it.
        """
        self.end()
        for number in range(1000):
            name = f"{int(header['time'])}{f'-{number}' if number else ''}.{LIVE}.gz"
            with suppress(FileExistsError):
                file = self._create(name)
                break
        else:
            message = "no free name for a segment"
            raise OSError(message)
        self._writer, self._writing = SegmentWriter(file, {"host": self._host, **header}), name

    def add(self, line: bytes) -> None:
        """Add a line to the segment, if there is one."""
        if self._writer is not None:
            self._writer.add(line)

    def flush(self) -> None:
        """Write what was added.

        Raises:
            OSError: the disk does not take it: the segment has ended, with what it had before.
        """
        if self._writer is None:
            return
        try:
            self._writer.flush()
        except OSError:
            self._drop_writer()
            raise

    def end(self) -> None:
        """Finish the segment.

        Raises:
            OSError: the disk does not take its end.
        """
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.finish()
            finally:
                self._written += writer.size

    def _drop_writer(self) -> None:
        """End the segment where the disk failed; a file in which nothing is whole is removed."""
        if self._writer is not None:
            empty = not self._writer.size
            self._written += self._writer.size
            self._writer.abandon()
            self._writer = None
            if empty:
                with suppress(OSError):
                    os.unlink(self._writing, dir_fd=self._directory)

    def _create(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, _FILE_MODE, dir_fd=self._directory)

    # Keeping house

    def names(self, *, aside: bool = False) -> list[SegmentName]:
        """Return the segments, the oldest first; with ``aside`` also those that are not loaded."""
        found = []
        for name in _list(self._directory):
            match = _NAME.fullmatch(name)
            if match is not None and (aside or match[4] is None):
                found.append(SegmentName(int(match[1]), int(match[2] or 0), match[3], name))
        return sorted(found)

    def keep_house(self) -> None:
        """Thin one segment, and remove what is too old or too much; what fails stops nothing else.

        Raises:
            OSError: the first failure: the disk does not answer or is full, or a file cannot be removed.
        """
        failures: list[OSError] = []
        for step in (self._remove_temporary, self._remove_old, self._thin_one):
            try:
                step(failures)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def usage(self) -> tuple[int, float | None]:
        """Return the bytes of all files, and the time of the oldest moment that can be shown.

        Raises:
            OSError: the disk does not answer.
        """
        return sum(self._sizes().values()), min((each.begin for each in self.names()), default=None)

    @property
    def written(self) -> int:
        """The bytes that were written so far, with those of thinning."""
        return self._written + (0 if self._writer is None else self._writer.size)

    def _sizes(self) -> dict[SegmentName, int]:
        sizes = {}
        for each in self.names(aside=True):
            with suppress(FileNotFoundError):
                found = os.stat(each.name, dir_fd=self._directory, follow_symlinks=False)
                sizes[each] = found.st_blocks * 512
        return sizes

    def _remove_temporary(self, failures: list[OSError]) -> None:
        for name in _list(self._directory):
            if name.endswith(_TEMPORARY) and _NAME.fullmatch(name.removesuffix(_TEMPORARY)):
                self._remove(name, failures)

    def _remove_old(self, failures: list[OSError]) -> None:
        sizes = self._sizes()
        total = sum(sizes.values())
        oldest = self._clock() - self._retention
        for each, size in sizes.items():
            expired = each.begin + SEGMENT_SECONDS < oldest
            removable = (expired or total > self._size) and each.name != self._writing
            if removable and self._remove(each.name, failures):
                total -= size

    def _remove(self, name: str, failures: list[OSError]) -> bool:
        """Remove a file, and tell whether it is gone."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._directory)
        except OSError as error:
            failures.append(error)
            return False
        return True

    def _thin_one(self, failures: list[OSError]) -> None:
        """Replace the oldest segment that is stored more finely than its age needs.

        One that cannot be read, or is put aside, does not stop the others.
        """
        now = self._clock()
        steps = [LIVE, *(name for name, _, _ in THINNED)]
        for each in self.names():
            enough = [
                (name, seconds)
                for name, seconds, age in THINNED
                if (not age or now - each.begin - SEGMENT_SECONDS > age)
                and steps.index(name) > steps.index(each.step)
            ]
            if enough and (each.name != self._writing or self._writer is None):
                try:
                    self._thin(each, *enough[-1])
                except RecordingError:
                    continue
                except OSError as error:
                    failures.append(error)
                    if error.errno in _NO_ROOM:
                        return
                else:
                    return

    def _thin(self, old: SegmentName, step: str, seconds: float) -> None:
        new = old.name.replace(f".{old.step}.", f".{step}.")
        temporary = new + _TEMPORARY
        with self._opened(old) as (header, entries):
            writer = SegmentWriter(self._create(temporary), header, at_once=True)
            try:
                if seconds:
                    for entry in _thinned(entries, seconds):
                        writer.add(entry)
                else:
                    self._copy(old, writer)
            except BaseException:
                writer.abandon()
                raise
        try:
            writer.finish()
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._directory)
            raise
        finally:
            self._written += writer.size
        os.rename(temporary, new, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        os.unlink(old.name, dir_fd=self._directory)

    def _copy(self, old: SegmentName, writer: SegmentWriter) -> None:
        file = os.open(old.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
        try:
            copy_lines(file, writer)
        finally:
            os.close(file)

    # Reading

    @contextmanager
    def _opened(
        self, segment: SegmentName, kinds: str = ALL
    ) -> Iterator[tuple[dict[str, Any], Iterator[Entry]]]:
        """Open a segment; one that is damaged, of another host or of a newer version is put aside.

        Raises:
            RecordingError: it was put aside.
            OSError: it cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(segment.name, flags, dir_fd=self._directory)
        try:
            header, entries = read_segment(file, finished=segment.finished, kinds=kinds)
            theirs = header.get("host")
            if self._host and theirs and theirs != self._host:
                self._put_aside(segment, ".other-host", "it is of another host")
                message = "another host"
                raise RecordingError(message)
            yield header, entries
        except NewerError as error:
            self._put_aside(segment, ".newer", str(error))
            raise
        except DamagedError as error:
            if segment.name != self._writing and os.fstat(file).st_size:
                self._put_aside(segment, ".damaged", str(error))
            raise
        finally:
            os.close(file)

    def _put_aside(self, segment: SegmentName, suffix: str, why: str) -> None:
        if self._read_only:
            return
        log.warning(
            "A file of the storage is not loaded, and was renamed",
            extra=fields(file=segment.name + suffix, err=why),
        )
        with suppress(OSError):
            os.rename(
                segment.name,
                segment.name + suffix,
                src_dir_fd=self._directory,
                dst_dir_fd=self._directory,
            )

    def entries(
        self, segment: SegmentName, kinds: str = ALL
    ) -> Generator[tuple[dict[str, Any], Entry], None, None]:
        """Yield the entries of a segment that are of these kinds, with its header.

        Raises:
            RecordingError: the segment was put aside; what it gave before is not to be used.
            OSError: it cannot be read.
        """
        with self._opened(segment, kinds) as (header, found):
            for entry in found:
                yield header, entry

    def find(self, at: float) -> Moment | None:
        """Return what is stored for a moment: the newest reading that is not later; None if there is none."""
        names = self.names()
        for place in reversed([place for place, each in enumerate(names) if each.begin <= at]):
            with suppress(RecordingError, OSError):
                moment = self._find_in(names[place], at)
                if moment is not None and moment.until is not None:
                    return moment._replace(next_time=self._first_time(names[place + 1 :]))
                if moment is not None:
                    return moment
        return None

    def _find_in(self, segment: SegmentName, at: float) -> Moment | None:
        state: Entry | None = None
        newer: Entry | None = None
        readings: list[Entry] = []
        until: float | None = None
        head: dict[str, Any] = {}
        with closing(self.entries(segment)) as entries:
            for header, entry in entries:
                if entry.kind != STATE and entry.time > at:
                    until = None
                    break
                head, until = header, entry.time
                if entry.kind == STATE:
                    newer = entry
                elif entry.kind == READING:
                    if newer is not None:
                        state, newer, readings = newer, None, []
                    readings.append(entry)
        if state is None or not readings:
            return None
        return Moment(state.value, readings, until, None, _STEPS[segment.step], head)

    def _first_time(self, segments: Iterable[SegmentName]) -> float | None:
        """Return the time of the first reading of these segments."""
        for segment in segments:
            with suppress(RecordingError, OSError), closing(self.entries(segment, READING)) as entries:
                for _, entry in entries:
                    return entry.time
        return None

    def readings(self, begin: float, end: float) -> Iterator[Entry]:
        """Yield the readings of a span."""
        for segment in self._overlapping(begin, end):
            with suppress(RecordingError, OSError):
                for _, entry in self.entries(segment, READING):
                    if begin <= entry.time <= end:
                        yield entry

    def summaries(self, begin: float, end: float) -> Iterator[tuple[float, float, dict[str, Any]]]:
        """Yield the summaries of a span; the first is the one that was true at its beginning.

        With each comes its time, and the time of the last reading of its segment: until then it was true,
        unless another one follows.
        """
        for segment in self._overlapping(begin, end):
            found: list[Entry] = []
            with suppress(RecordingError, OSError):
                found = [entry for _, entry in self.entries(segment, SUMMARY)]
                last = self._last_time(segment, found)
                times = [*(each.time for each in found[1:]), last]
                for entry, following in zip(found, times, strict=True):
                    if following > begin and entry.time <= end:
                        yield entry.time, last, entry.value

    def _last_time(self, segment: SegmentName, summaries: list[Entry]) -> float:
        """Return when the last reading of a segment was; a thinned one ends with a summary of that time."""
        last = summaries[-1].time if summaries else 0.0
        if segment.step in (LIVE, FULL):
            with suppress(RecordingError, OSError):
                last = max([last, *(entry.time for _, entry in self.entries(segment, READING))])
        return last

    def _overlapping(self, begin: float, end: float) -> list[SegmentName]:
        """Return the segments that may have something of a span."""
        names = self.names()
        longest = SEGMENT_SECONDS + 60.0
        return [each for each in names if each.begin <= end and each.begin + longest >= begin]

    def newest(self) -> Newest | None:
        """Return the newest state, with the readings after it; None if there is none."""
        for segment in reversed(self.names()[-_NEWEST_TRIED:]):
            state: Entry | None = None
            readings: list[Entry] = []
            head: dict[str, Any] = {}
            with suppress(RecordingError, OSError):
                for header, entry in self.entries(segment):
                    head = header
                    if entry.kind == STATE:
                        state, readings = entry, []
                    elif entry.kind == READING:
                        readings.append(entry)
                if state is not None:
                    return Newest(head, state, readings)
        return None


def _thinned(entries: Iterator[Entry], seconds: float) -> Iterator[bytes]:
    """Yield the lines of a segment with a state and the reading after it, and all summaries."""
    before: dict[str, Any] = {STATE: {}, READING: {}, SUMMARY: {}}

    def line(entry: Entry) -> bytes:
        patch = difference(before[entry.kind], entry.value)
        before[entry.kind] = entry.value
        return write_entry(entry.kind, entry.time, patch)

    state: Entry | None = None
    summary: Entry | None = None
    newest = last = float("-inf")
    for entry in entries:
        last = max(last, entry.time)
        if entry.kind == STATE:
            state = entry
        elif entry.kind == SUMMARY:
            summary = entry
            yield line(entry)
        elif state is not None and not newest <= entry.time < newest + seconds * 0.9:
            newest = entry.time
            yield line(state)
            yield line(entry)
            state = None
    if summary is not None and last > summary.time:  # until when the segment went on
        yield line(summary._replace(time=last))
