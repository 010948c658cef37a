"""Count what one program hands to its GPUs, and know since when nothing can have been missed.

A thread that does not run calls nothing. So only threads that run get counters, and the kernel shows that the
others have not run; a program whose threads all sleep gets no counter. Each look finds out which threads have
run or are new, and whether the program still maps the same libraries. Whenever a call may have been missed,
the quiet time begins again.

Know which threads certainly have not run: asleep at two looks, without a switch in between.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from vramledger.model.reading import LaunchCount
from vramledger.readers.hosts.facts import read_file
from vramledger.readers.hosts.libraries import MAPS_CAP
from vramledger.readers.hosts.stat import READ_ONLY, names_in, open_plain, read_row, read_small
from vramledger.readers.launches.counter_pool import CounterPool
from vramledger.readers.launches.elf import (
    ElfError,
    bypasses_library,
    find_functions,
    is_library,
    submits_work,
)
from vramledger.readers.launches.uprobes import (
    Mapping,
    ThreadStarts,
    disable_counter,
    explain,
    find_mappings,
    open_counter,
    read_counter,
    uprobe_type,
)
from vramledger_agent.printable import printable

_STATE = re.compile(rb"^State:\s*(\S)", re.MULTILINE)
_SWITCHES = re.compile(rb"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_SLEEPS = b"SDTtIK"
_DRIVER_THREAD = re.compile(rb"^Name:\tcuda-EvtHandlr$", re.MULTILINE)
"""libcuda's own waking thread, which calls nothing; a program that takes its name harms itself."""

_SCHEDULER_CLOCK = 2
"""``CPUCLOCK_SCHED``: with a pid it makes the number of the clock of a process' CPU time, in nanoseconds."""


def list_threads(root: str, pid: int) -> list[int]:
    """Return the threads of a process, one more than the maximum at most. Raises OSError if it has ended."""
    return [int(name) for name in islice(names_in(f"{root}/{pid}/task"), MAX_THREADS + 1)]


def sleep_mark(root: str, pid: int, thread: int) -> int | None:
    """Return a number that stays the same while a sleeping thread does not run; None if it does not sleep.

    It is the thread's count of context switches: a thread cannot run and sleep again without one. Raises
    OSError if it has ended.
    """
    status = read_small(f"{root}/{pid}/task/{thread}/status")
    if _DRIVER_THREAD.search(status):
        return 0
    state = _STATE.search(status)
    counts = _SWITCHES.findall(status)
    if state is None or state[1] not in _SLEEPS or len(counts) != 2:  # noqa: PLR2004 voluntary and not
        return None
    return sum(map(int, counts))


def cpu_time(pid: int) -> int | None:
    """Return a process' CPU time in ns, ended threads too, None if unreadable; equal: nothing ran."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _SCHEDULER_CLOCK)
    except OSError:
        return None


MAX_THREADS = 4096
"""The maximum number of threads of a program that is counted: one look at 1,000 takes 15 ms."""

ROUNDS = 4
"""How often a look lists the threads again while new ones appear; after that the next look goes on."""

ENDED = "it has ended"
DELETED = " (deleted)"

_CODE_BYTES = 4
"""As many bytes of a function are compared as the longest breakpoint has (arm64); on x86 it has one."""


class CannotCountError(Exception):
    """The calls of this program cannot be counted; the message says why."""


class _EndedError(Exception):
    """The program has ended."""


class _Function(NamedTuple):
    """A function in a file, where the program has it in its memory, and its first bytes."""

    path: str
    offset: int
    address: int
    original: bytes


@dataclass(slots=True)
class _WatchedThread:
    """The counters of one thread, by function."""

    starts: ThreadStarts
    counters: dict[_Function, int]


class HolderCounter:
    """Count the calls of one program, look by look; nothing is attached before the first look."""

    def __init__(
        self,
        root: str,
        holder: tuple[int, int],
        pool: CounterPool,
        submits: Callable[[str], bool] = submits_work,
    ) -> None:
        """Prepare; ``root``'s pids must be ours, ``submits`` tells which functions hand work to a GPU."""
        self._root, (self._pid, self._start) = root, holder
        self._pool = pool
        self._submits = submits
        self._libraries: tuple[Mapping, ...] | None = None
        self._functions: tuple[_Function, ...] | None = None
        self._threads: dict[int, _WatchedThread] = {}
        self._marks: dict[int, int | None] = {}
        self._cpu_time: int | None = None
        self._since: float | None = None
        self._calls = 0
        self._problem = ""
        self._checked = False
        self._ended = False

    @property
    def counters(self) -> int:
        """How many counters are open."""
        return sum(len(each.counters) for each in self._threads.values())

    def update(self) -> LaunchCount:
        """Return what is known now; after the first calls, or a problem, nothing is attached any more."""
        looked = time.monotonic()
        if not self._calls and not self._problem and not self._ended:
            try:
                self._update()
            except _EndedError:
                self._stop(ENDED)
            except CannotCountError as error:
                self._stop(str(error))
            except OSError as error:
                self._stop(explain(error))
        quiet = None if self._since is None else max(0.0, looked - self._since)
        return LaunchCount(self._pid, self._start, quiet, self._calls, self._problem)

    def end(self) -> None:
        """Detach for ever, also while a look still hangs in another thread."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """Detach, first from the functions that were called: only these cost the program anything."""
        called: set[_Function] = set()
        counters: list[tuple[_Function, int]] = []
        for thread in self._threads.values():
            thread.starts.close()
            for function, descriptor in thread.counters.items():
                disable_counter(descriptor)
                if read_counter(descriptor):
                    called.add(function)
                counters.append((function, descriptor))
        counters.sort()  # a function is free when its last counter is closed
        self._pool.close([descriptor for function, descriptor in counters if function in called], first=True)
        self._pool.close([descriptor for function, descriptor in counters if function not in called])
        self._threads, self._marks, self._cpu_time, self._since = {}, {}, None, None
        self._checked = False

    def _stop(self, problem: str) -> None:
        self._problem = problem
        self.close()

    def _update(self) -> None:
        row = read_row(self._root, self._pid)
        if row is None or row.start != self._start:
            raise _EndedError
        now = cpu_time(self._pid)
        if self._since is not None and now is not None and now == self._cpu_time:
            return  # no thread has run since the last look
        self._cpu_time = now
        threads = self._threads.values()
        self._calls = sum(read_counter(each) for thread in threads for each in thread.counters.values())
        if self._calls:
            self.close()
            return
        self._check_libraries()
        for _ in range(ROUNDS):
            if not self._find_changes():
                if self._since is None:
                    self._since = time.monotonic()
                return
            self._since = None

    def _check_libraries(self) -> None:
        """Begin again if libraries have changed (by exec, too). Raises CannotCountError without libcuda."""
        denied: list[str] = []
        maps = read_file(f"{self._root}/{self._pid}/maps", MAPS_CAP, denied)
        if denied:
            message = "we may not read its memory mappings"
            raise CannotCountError(message)
        if not maps:
            raise _EndedError
        if len(maps) >= MAPS_CAP:
            message = "it has too many memory mappings"
            raise CannotCountError(message)
        libraries = _find_libraries(maps)
        if libraries != self._libraries:
            self.close()
            self._libraries, self._functions = libraries, None

    def _find_changes(self) -> bool:
        """Tell whether a call may have been missed since the last look; attach to what has run since then.

        Every thread that is new or has run without a counter leaves a trace: it is in the list, or its mark
        has changed, or the thread that started it has run without a counter or says so.
        """
        changed = False
        for watched in self._threads.values():
            changed = watched.starts.any_since_last() or changed  # each must be asked
        try:
            listed = list_threads(self._root, self._pid)
        except OSError as error:
            raise _EndedError from error
        if len(listed) > MAX_THREADS:
            message = f"it has more than {MAX_THREADS} threads"
            raise CannotCountError(message)
        self._close_ended(set(listed))
        marks: dict[int, int | None] = {}
        for thread in listed:
            if thread in self._threads:
                continue
            mark = sleep_mark(self._root, self._pid, thread)
            known = self._marks.get(thread)
            if mark is None or mark != known:
                changed = True
                if known is not None or (mark is None and thread in self._marks):
                    self._attach(thread)
                    continue
                # It is new, and most threads of a pool sleep from now on, so it gets no counter yet.
            marks[thread] = mark
        changed = changed or not self._marks.keys() <= marks.keys()  # one has run, and has ended
        self._marks = marks
        return changed

    def _close_ended(self, listed: set[int]) -> None:
        """Close the counters of threads that have ended; what they counted has been read."""
        for thread in self._threads.keys() - listed:
            ended = self._threads.pop(thread)
            ended.starts.close()
            self._calls += sum(map(read_counter, ended.counters.values()))
            self._pool.close(list(ended.counters.values()))

    def _attach(self, thread: int) -> None:
        """Count a thread's calls, unless it has ended. Raises CannotCountError at the limit, or unmapped."""
        if self._functions is None:
            self._functions = self._read_functions()
        if self._ended:
            raise _EndedError
        if not self._pool.reserve(len(self._functions)):
            count = len(self._threads) + 1
            message = (
                f"{count} of its threads run, with {len(self._functions)} functions each, and all holders"
                f" together may have {self._pool.limit} counters"
            )
            raise CannotCountError(message)
        opened: dict[_Function, int] = {}
        try:
            pmu = uprobe_type()
            starts = ThreadStarts(thread)
            self._threads[thread] = _WatchedThread(starts, opened)
            with self._pool.opening():
                for function in self._functions:
                    opened[function] = open_counter(pmu, function.path, function.offset, thread)
        except ProcessLookupError:
            return
        finally:
            self._pool.release(len(self._functions) - len(opened))
        if not self._checked:
            self._check_breakpoints(self._functions)
            self._checked = True

    def _read_functions(self) -> tuple[_Function, ...]:
        """Find the functions in files and memory, one an address. Raises CannotCountError if they differ."""
        found: dict[tuple[str, int], _Function] = {}
        for path in {each.path for each in self._libraries or ()}:
            mappings = [each for each in self._libraries or () if each.path == path]
            file = f"{self._root}/{self._pid}/root{path}"
            if path.endswith(DELETED):
                message = f"{printable(path.removesuffix(DELETED))} was replaced after it was started"
                raise CannotCountError(message)
            try:
                offsets, code = _read_library(file, self._submits)
            except (OSError, ElfError) as error:
                message = f"the functions of {printable(path)} cannot be found: {_reason(error)}"
                raise CannotCountError(message) from error
            for offset in offsets:
                addresses = [each.start + offset - each.offset for each in mappings if each.holds(offset)]
                for address in addresses:
                    found[file, address] = _Function(file, offset, address, code[offset])
            if not offsets:
                message = f"{printable(path)} has none of the functions that launch work"
                raise CannotCountError(message)
        return tuple(found.values())

    def _check_breakpoints(self, functions: Iterable[_Function]) -> None:
        """Make sure that the program itself runs into the breakpoints.

        A file can be another one than the program has mapped, although it has the same path. Then nothing
        would be counted, and that must never look like quiet. Raises CannotCountError if it does not.
        """
        try:
            descriptor = os.open(f"{self._root}/{self._pid}/mem", READ_ONLY)
        except OSError as error:
            message = f"its memory cannot be read: {_reason(error)}"
            raise CannotCountError(message) from error
        try:
            for function in functions:
                code = os.pread(descriptor, _CODE_BYTES, function.address)
                if len(code) < _CODE_BYTES or code == function.original:
                    message = f"the breakpoints in {printable(function.path)} did not reach its memory"
                    raise CannotCountError(message)
        finally:
            os.close(descriptor)


def _reason(error: Exception) -> str:
    """Return the reason of a failed read, without the path, which a program has chosen."""
    return (error.strerror or "it failed") if isinstance(error, OSError) else str(error)


def _find_libraries(maps: bytes) -> tuple[Mapping, ...]:
    """Return where the code of libcuda is mapped. Raises CannotCountError if it is not, or not needed."""
    libraries = []
    for mapping in find_mappings(maps):
        name = mapping.path.rpartition("/")[2].removesuffix(DELETED)
        if bypasses_library(name):
            message = f"it has loaded {printable(name)}, which works without the functions that are counted"
            raise CannotCountError(message)
        if is_library(name):
            libraries.append(mapping)
    if not libraries:
        message = "it maps no libcuda.so"
        raise CannotCountError(message)
    return tuple(libraries)


def _read_library(path: str, submits: Callable[[str], bool]) -> tuple[set[int], dict[int, bytes]]:
    """Return the submitting functions' offsets and first bytes. Raises ElfError if no library, or OSError."""
    descriptor = open_plain(path)
    try:
        offsets = set(find_functions(descriptor, submits).values())
        return offsets, {offset: os.pread(descriptor, _CODE_BYTES, offset) for offset in offsets}
    finally:
        os.close(descriptor)
