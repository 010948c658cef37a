"""Read at a slow pace which threads of the holders have run: who has not run has launched nothing.

``/proc/PID/task/TID/schedstat`` has the CPU time of a thread and how often it ran, since its start. Every
user may read it, on every GPU, beside any neighbour. Two looks prove all the time between them. No thread of
a short life hides between them: some thread that was there at the first look had to run to start it. In a
program with CUDA that does nothing, one thread of the driver goes on: ``cuda-EvtHandlr``. Measured on an H100
with driver 580: 10 times a second, 0.6 to 1.25 ms a second. A program chooses the names of its threads, so
that name alone excuses nobody: the thread must keep this rhythm, and there is at most one of it for each GPU
of the program.

Without ``schedstat`` the context switches in ``status`` say how often a thread ran, and the clock of the
process how long.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from msgspec import Struct

from vramledger.model.reading import DeviceReading, ProcessRow, ThreadTimes
from vramledger.readers.collector import Collector, Context, Health, Part
from vramledger.readers.hosts.facts import read_program_path
from vramledger.readers.hosts.stat import count_switches, names_in, read_row, read_small

LOOK_INTERVAL = 30.0
BUDGET = 0.002
"""Seconds of a sample for looks, about 250 threads; 500 holders of 30 threads need a minute."""

THREADS_MAX = 10_000
"""Of a process with more threads nothing is known."""

DRIVER_THREAD = b"cuda-EvtHandlr\n"
DRIVER_WAKES = (5.0, 15.0)
"""How often a second the driver's thread runs: 10 times, as measured. Otherwise it counts as any other."""
DRIVER_CPU = 0.002
"""The seconds of CPU time that the driver's thread takes a second at most: 0.00125, as measured, and some."""
_WAKES_SLACK, _CPU_SLACK = 3, 0.001

USUAL_RUN = 0.0001
"""Seconds of CPU time that a helper thread takes each time it wakes up; seldom ones twice as much."""

USUAL_SHARE = 0.0002
"""The same in a second: one that wakes up more often takes less each time."""

HELPERS_CPU = 0.001
"""Seconds of CPU time a second of all helpers; a process with more is only looked at in its turn."""

HIDDEN_CPU = 0.002
"""Seconds of CPU time of a process beyond that of the threads that are there at both looks: others ran."""

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*[a-z]?")

_Figures = tuple[float | None, int]
"""CPU seconds since the thread's start, None without ``schedstat``; and how often it ran."""


class _Look(Struct):
    """One look at all threads of a process; ``threads`` is None if some could not be read."""

    begun: float
    ended: float
    taken: float | None
    threads: dict[int, _Figures] | None
    by_switches: bool


class _LookedAt(Struct):
    """A process, the newest complete look at it, and whether it may have done nothing until then."""

    row: ProcessRow
    contexts: int = 1
    look: _Look | None = None
    looked: float = float("-inf")
    sleeps: bool = False


class _Ran(Struct):
    """A thread that ran between two looks."""

    thread: int
    cpu: float | None
    runs: int


class _Sum(Struct):
    """What the threads that are neither the main nor the driver's one did."""

    cpu: float | None = 0.0
    runs: int = 0
    longest: float | None = 0.0
    beyond: float | None = 0.0


class ThreadTimesReader(Collector):
    """Look at the threads of the holders, some in each sample, and say what ran between two looks."""

    work_at = 0.0

    def __init__(
        self,
        procfs: str,
        cpu_seconds: Callable[[int], float | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing known; ``cpu_seconds`` gives a process' CPU time, with that of ended threads."""
        self._root = procfs
        self._cpu_seconds = cpu_seconds
        self._clock = clock
        self._holders: dict[tuple[int, int], _LookedAt] = {}
        self._work: Iterator[None] | None = None  # the look in progress
        self._finished: list[ThreadTimes] = []
        self.unreadable = 0
        self.seconds = 0.0

    def read(self, context: Context) -> Part:
        return {"threads": self.update(context.devices, context.rows)}

    def work_between(self, context: Context) -> None:  # noqa: ARG002 as all are called
        self.search()

    @property
    def health(self) -> Health:
        return not self.unreadable, self.seconds

    def update(self, devices: Iterable[DeviceReading], rows: Iterable[ProcessRow]) -> tuple[ThreadTimes, ...]:
        """Look at these holders from now on, and return what was found since the last call."""
        contexts: dict[int, int] = {}
        for device in devices:
            for entry in device.processes or ():
                contexts[entry.pid] = contexts.get(entry.pid, 0) + 1
        before, self._holders = self._holders, {}
        for row in rows:
            holder = before.get((row.pid, row.start)) or _LookedAt(row)
            holder.row, holder.contexts = row, max(1, contexts.get(row.pid, 1))
            self._holders[row.pid, row.start] = holder
        finished, self._finished = self._finished, []
        self.unreadable = sum(not each.complete for each in finished)
        return tuple(each for each in finished if (each.pid, each.start) in self._holders)

    def search(self, budget: float = BUDGET) -> None:
        """Go on with the looks for about ``budget`` seconds at most."""
        begun = self._clock()
        woken = self._find_woken(begun, budget / 2)
        while self._clock() - begun < budget:
            if self._work is None and not self._begin_look(begun, woken):
                break
            self._continue_look(begun + budget)
        self.seconds = self._clock() - begun

    def _find_woken(self, begun: float, budget: float) -> set[tuple[int, int]]:
        """Return the holders whose main thread slept, and that have run since: something happened."""
        woken = set()
        for identity, holder in tuple(self._holders.items()):
            if not holder.sleeps or holder.look is None:
                continue
            if self._has_woken(holder, holder.look):
                woken.add(identity)
            if self._clock() - begun >= budget:
                break
            # Who was looked at is the last one at the next call, if this call cannot look at all of them.
            self._holders[identity] = self._holders.pop(identity)
        return woken

    def _has_woken(self, holder: _LookedAt, look: _Look) -> bool:
        pid = holder.row.pid
        try:
            main = _read_figures(f"{self._root}/{pid}/task/{pid}", by_switches=look.by_switches)
        except (OSError, ValueError):
            return True
        taken = self._cpu_seconds(pid)
        if taken is not None and look.taken is not None:
            elapsed = self._clock() - look.begun
            if taken - look.taken > (elapsed + 1) * DRIVER_CPU * (1 + holder.contexts):
                return True
        return main != (look.threads or {}).get(pid)

    def _begin_look(self, now: float, woken: set[tuple[int, int]]) -> bool:
        due = [
            (identity not in woken, holder.looked, identity)
            for identity, holder in self._holders.items()
            if identity in woken or now - holder.looked >= LOOK_INTERVAL
        ]
        if not due:
            return False
        identity = min(due)[2]
        woken.discard(identity)
        holder = self._holders[identity]
        holder.looked = now
        self._work = self._read_threads(holder)
        return True

    def _continue_look(self, deadline: float) -> None:
        for _ in self._work or ():
            if self._clock() >= deadline:
                return
        self._work = None

    def _read_threads(self, holder: _LookedAt) -> Iterator[None]:
        pid = holder.row.pid
        begun = self._clock()
        taken = self._cpu_seconds(pid)
        directory = f"{self._root}/{pid}/task"
        found: dict[int, _Figures] | None = {}
        by_switches = False
        try:
            by_switches = not _has_schedstat(f"{directory}/{pid}")
            names = list(islice(names_in(directory), THREADS_MAX + 1))
        except OSError:
            names, found = [], None
        if not 0 < len(names) <= THREADS_MAX:
            names, found = [], None
        for name in names:
            try:
                figures = _read_figures(f"{directory}/{name}", by_switches=by_switches)
                if found is not None:
                    found[int(name)] = figures
            except (FileNotFoundError, ProcessLookupError):
                pass  # it has ended
            except (OSError, ValueError):
                found = None
                break
            yield
        again = read_row(self._root, pid)
        if again is None or again.start != holder.row.start:
            holder.look, holder.sleeps = None, False
            return  # the process has ended: nobody asks any more
        self._record(holder, _Look(begun, self._clock(), taken, found, by_switches))

    def _record(self, holder: _LookedAt, look: _Look) -> None:
        before, holder.look, holder.sleeps = holder.look, None, False
        holder.looked = look.ended
        row = holder.row
        if look.threads is None:
            at = round(look.begun, 2)
            self._finished.append(ThreadTimes(row.pid, row.start, at, at, complete=False))
            return
        holder.look = look
        if before is None or before.threads is None or before.by_switches != look.by_switches:
            # A thread may have run after this look has read it and before this look ended.
            holder.look = _Look(look.ended, look.ended, look.taken, look.threads, look.by_switches)
            return
        result = self._compare(holder, before, look)
        helpers = result.other_cpu is None or result.other_cpu <= HELPERS_CPU * (look.begun - before.begun)
        holder.sleeps = not result.main_runs and helpers
        self._finished.append(result)

    def _compare(self, holder: _LookedAt, before: _Look, look: _Look) -> ThreadTimes:
        old, new = before.threads or {}, look.threads or {}
        elapsed = look.begun - before.begun
        ran = [
            _Ran(thread, _difference(figures[0], old[thread][0]), abs(figures[1] - old[thread][1]) or 1)
            for thread, figures in new.items()
            if thread in old and figures != old[thread]
        ]
        process = _difference(look.taken, before.taken)
        driver = self._driver_threads(holder, ran, elapsed, process)
        main, others = _Ran(holder.row.pid, 0.0, 0), _Sum()
        for each in ran:
            if each.thread == holder.row.pid:
                main = each
            elif each.thread not in driver:
                _add(others, each, elapsed)
        cpu = [each.cpu for each in ran]
        if process is not None and None not in cpu:
            # All of them were read after the process' clock was, at both looks.
            spans = elapsed + (look.ended - look.begun) + (before.ended - before.begun)
            seen = sum(each or 0.0 for each in cpu)
            if process - seen > HIDDEN_CPU + DRIVER_CPU * (spans - elapsed):
                _add(others, _Ran(-1, process - seen, 1), elapsed)
        return ThreadTimes(
            holder.row.pid, holder.row.start, round(before.begun, 2), round(look.begun, 2), complete=True,
            main_runs=main.runs, main_cpu=_rounded(main.cpu), other_runs=others.runs,
            other_cpu=_rounded(others.cpu), longest=_rounded(others.longest), beyond=_rounded(others.beyond),
            changed=len(old.keys() ^ new.keys()),
            python=_is_python(f"{self._root}/{holder.row.pid}") if others.runs and not main.runs else None,
        )  # fmt: skip

    def _driver_threads(
        self, holder: _LookedAt, ran: Iterable[_Ran], elapsed: float, process: float | None
    ) -> set[int]:
        """Return threads with the driver's name and rhythm; none if there are more than it uses GPUs."""
        lowest, highest = (wakes * elapsed for wakes in DRIVER_WAKES)
        alike = set()
        for each in ran:
            cpu = process if each.cpu is None else each.cpu
            if (
                each.thread != holder.row.pid
                and cpu is not None
                and cpu <= DRIVER_CPU * elapsed + _CPU_SLACK
                and lowest - _WAKES_SLACK <= each.runs <= highest + _WAKES_SLACK
                and self._name(holder, each.thread) == DRIVER_THREAD
            ):
                alike.add(each.thread)
        return alike if len(alike) <= holder.contexts else set()

    def _name(self, holder: _LookedAt, thread: int) -> bytes:
        try:
            return read_small(f"{self._root}/{holder.row.pid}/task/{thread}/comm")
        except OSError:
            return b""


def _is_python(directory: str) -> bool | None:
    path = read_program_path(directory)
    return None if path is None else _PYTHON.fullmatch(path.rpartition("/")[2]) is not None


def _has_schedstat(directory: str) -> bool:
    """Tell whether the kernel counts here: without its scheduler's statistics it writes three zeros."""
    try:
        return read_small(f"{directory}/schedstat").split() != [b"0", b"0", b"0"]
    except FileNotFoundError:
        return False


def _read_figures(directory: str, *, by_switches: bool) -> _Figures:
    """Read how long and how often a thread ran. Raises OSError, or ValueError if the kernel does not say."""
    if not by_switches:
        cpu, _, runs = read_small(f"{directory}/schedstat").split()
        return int(cpu) / 1e9, int(runs)
    switches = count_switches(read_small(f"{directory}/status"))
    if not switches:
        raise ValueError("no thread has never been scheduled: these are not counted")
    return None, switches


def _difference(new: float | None, old: float | None) -> float | None:
    return None if new is None or old is None else max(0.0, new - old)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _add(total: _Sum, ran: _Ran, elapsed: float) -> None:
    total.runs += ran.runs
    if ran.cpu is None or total.cpu is None or elapsed <= 0:
        total.cpu = total.longest = total.beyond = None
        return
    total.cpu += ran.cpu
    total.longest = max(total.longest or 0.0, ran.cpu / ran.runs)
    usual = min(ran.runs * USUAL_RUN, elapsed * USUAL_SHARE)
    total.beyond = max(total.beyond or 0.0, (ran.cpu - usual) / elapsed)
