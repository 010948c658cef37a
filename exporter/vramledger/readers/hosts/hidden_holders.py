"""Find processes that have a GPU's device file open but that NVML does not list, at a bounded cost.

NVML lists a process from its first context on. Before that, only its open ``/dev/nvidiaN`` shows the process;
the same holds for a program that only reads NVML (measured: cuInit alone opens it four times). The search
reads ``/proc/*/fd`` for a few milliseconds in each sample. So its cost for each second is fixed: 4 ms, which
is 0.4 % of a core. More processes only make a round longer: 5,000 processes with 10 files each need 250 to
310 ms, so a round takes up to 77 s. Of a process with many files only its mappings are read, and a round that
is not over after some minutes counts as none: what it had not reached is not known.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Generator, Iterator
from typing import NamedTuple

from vramledger.model.reading import HiddenHolder, ProcessFacts, ProcessRow
from vramledger.readers.collector import BoundedReader, Collector, Context, Health, Part
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.stat import READ_ONLY, is_over

ROUND_INTERVAL = 30.0
BUDGET = 0.004
"""Seconds of a sample that are spent on the search: 0.4 % of a core at one sample a second."""

INIT_PID = 1
"""An init has no GPU open, and some sandboxes do not even let root read its files."""

ROUND_MAX = 300.0
_LINKS_AT_ONCE = 64
_LINKS_MAX = 1024
"""The open files of a process that are looked at; it may have a million. One with more has a context only if
it maps a device, which is looked for instead."""

_MAPS_CAP = 16 * 1024 * 1024
"""Enough bytes for 170,000 mappings; vm.max_map_count is 65,530 unless raised."""
_CHUNK = 64 * 1024
_NVML = b"/libnvidia-ml.so"
_LONGEST = 128
"""The maximum length of a name that the end of a chunk can cut in two, in bytes."""

PERSISTENCED = "nvidia-persistenced"
"""The driver's own daemon: it keeps every device open, and maps neither library nor device."""


class _Classified(NamedTuple):
    """A process with a device open, None for one that has none; ``looked``: all of its mappings were read."""

    holder: HiddenHolder | None
    looked: bool


class HiddenSearch(Collector):
    """Search in rounds, one step in each sample."""

    needs = ()

    def __init__(
        self,
        host: Host,
        own_pids: Collection[int],
        *,
        devices: str = "/dev/nvidia",
        round_interval: float = ROUND_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing known; ``own_pids``, ours, have the devices open to read NVML."""
        self._host = host
        self._own = frozenset(own_pids)
        self._prefix = devices
        self._device = re.compile(re.escape(devices) + r"(\d+)(?: \(deleted\))?")
        self._mapped = re.compile(re.escape(devices.encode()) + rb"(\d+)(?: \(deleted\))?\n")
        self._round_interval = round_interval
        self._clock = clock
        self._classifications: BoundedReader[_Classified | None] = BoundedReader(clock=clock)
        self._round: Iterator[bool] | None = None
        self._next_round = self.work_at = self._begun = clock()
        self._overdue = False
        self._listed: frozenset[int] = frozenset()
        self._ended: dict[
            int, bool
        ] = {}  # listed pids whose process has ended; True if a round began because of it
        self._found: tuple[HiddenHolder, ...] | None = None
        self._unreadable = 0
        self._seconds = 0.0

    def read(self, context: Context) -> Part:
        """Return what the last complete round found, and begin one where a holder has ended."""
        self._look_for_heirs(context)
        return {"hidden": self.result, "hidden_unreadable": self.unreadable if self.complete else None}

    @property
    def health(self) -> Health:
        """Whether it could look into all processes in time, and the seconds of its last step."""
        return not self.unreadable and not self._overdue, self._seconds

    def work_between(self, context: Context) -> None:
        """Continue the search, among what NVML does not list in this sample."""
        begun = self._clock()
        try:
            self.search(context.listed_pids, BUDGET)
        except Exception:
            self._give_up_round()
            raise
        finally:
            self._seconds = self._clock() - begun
            self.work_at = 0.0 if self._round is not None or self._found else self._next_round

    def _look_for_heirs(self, context: Context) -> None:
        """Begin a round if NVML lists a process that has ended in a second sample: a child may keep it."""
        running = {row.pid for row in context.rows if not is_over(row)}
        ended = frozenset(context.listed_pids) - running
        due = (
            {pid for pid in ended if self._ended.get(pid) is False}
            if self._round is None
            else frozenset[int]()
        )
        self._ended = {pid: self._ended.get(pid, False) or pid in due for pid in ended}
        if due:
            self._next_round = self.work_at = self._clock()

    def _give_up_round(self) -> None:
        self._round, self._found, self._unreadable = None, None, 0
        self._next_round = self._clock()

    @property
    def result(self) -> tuple[HiddenHolder, ...] | None:
        """The hidden holders that the last complete round found and that still run; None when not known.

        It is not known before the end of the first round, or after one that has taken too long. It is not
        known either when nothing was found and there are processes that we may not look into: each of them
        may be a hidden holder.
        """
        return self._found or (None if self._unreadable else self._found)

    @property
    def complete(self) -> bool:
        return self._found is not None

    @property
    def unreadable(self) -> int:
        """How many processes the last complete round could not look into, or not into all of their mappings.

        A proc with hidepid hides processes completely; all of them together count as one.
        """
        return self._unreadable

    def search(self, listed_pids: Collection[int], budget_seconds: float) -> None:
        """Continue the search for at most about ``budget_seconds``; ``listed_pids`` are in NVML's lists now.

        The list of all pids (6 ms for 5,000 processes) is not divided further.
        """
        begun = self._clock()
        self._listed = frozenset(listed_pids)
        if self._found:
            self._found = tuple(filter(self._is_still_hidden, self._found))
            inherited = (each.pid for each in self._found if each.kind == "inherited")
            if not all(map(self._has_listed_parent, inherited)):
                self._next_round = begun  # a parent has ended, and its child may keep the bytes
        if self._round is None:
            if begun < self._next_round:
                return
            self._begun, self._next_round = begun, begun + self._round_interval
            self._round = self._search_round()
        elif begun - self._begun > ROUND_MAX:
            self._give_up_round()
            self._overdue = True
            return
        for more in self._round:
            if not more or self._clock() - begun >= budget_seconds:
                return
        self._round = None

    def _search_round(self) -> Iterator[bool]:
        """Do one round; yields True between two pieces of work, False when it must wait."""
        pids = self._host.pids()
        # Every PID namespace has an init: if /proc does not show the init, it hides other processes too.
        unreadable = int(INIT_PID not in pids)
        for pid in pids:
            if pid in self._own or pid in self._listed:
                continue
            minors: set[int] = set()
            more = False
            try:
                more = yield from self._read_open_devices(pid, minors)
            except PermissionError:
                unreadable += pid != INIT_PID
            except OSError:
                continue  # the process has ended
            if (minors or more) and (row := self._host.row(pid)) is not None:
                self._submit_classification(row, minors, more=more)
            yield True
        found: list[_Classified] = []
        while True:
            found += filter(None, self._classifications.collect(0))
            if errors := self._classifications.take_errors():
                self.failures = (*self.failures, *errors.values())
                self._give_up_round()
                return
            if not self._classifications.busy:
                break
            yield False
        hidden = [
            (each.holder, each.looked)
            for each in found
            if each.holder is not None and self._is_still_hidden(each.holder)
        ]
        self._found = tuple(holder for holder, _ in sorted(hidden, key=lambda each: each[0].pid))
        unseen = [each for each in found if each.holder is None]
        self._unreadable = unreadable + len(unseen) + sum(not looked for _, looked in hidden)
        self._overdue = False

    def _read_open_devices(self, pid: int, minors: set[int]) -> Generator[bool, None, bool]:
        """Add the device numbers that a process has open; return whether not all of its files were looked at.

        It calls readlink and not stat: readlink does not touch the file, while stat asks the file system,
        which may be on a network and hang. It lists the files piece by piece: there may be millions.
        """
        directory = f"{self._host.root}/{pid}/fd"
        with os.scandir(directory) as entries:
            for count, entry in enumerate(entries, start=1):
                try:
                    target = os.readlink(f"{directory}/{entry.name}")  # noqa: PTH115 pathlib is 3 x slower
                except FileNotFoundError:
                    continue  # closed meanwhile
                if target.startswith(self._prefix) and (match := self._device.fullmatch(target)):
                    minors.add(int(match[1]))
                if count >= _LINKS_MAX:
                    return True
                if count % _LINKS_AT_ONCE == 0:
                    yield True
        return False

    def _submit_classification(self, row: ProcessRow, minors: set[int], *, more: bool) -> None:
        """Queue a process for the reader's thread, as ``maps`` may hang; ``more``: it has more files."""

        def classified(
            facts: ProcessFacts | None, kind: str | None, mapped: Collection[int] = ()
        ) -> _Classified | None:
            found = tuple(sorted({*minors, *mapped}))
            if facts is None or (not found and kind is not None):
                return None
            if not found:
                return _Classified(None, looked=False)
            holder = HiddenHolder(row.pid, row.start, kind or "unknown", facts.command, facts.user, found)
            return _Classified(holder, kind is not None)

        def classify() -> _Classified | None:
            facts = self._host.facts(row)
            mapped: set[int] = set()
            kind = None if facts is None else self._classify(row, facts, mapped, more=more)
            return classified(facts, kind, mapped if more else ())

        def skip_classification() -> _Classified | None:
            return classified(self._host.basic_facts(row), None)

        self._classifications.submit((row.pid, row.start), classify, skip_classification)

    def _is_persistenced(self, row: ProcessRow, facts: ProcessFacts) -> bool:
        """Tell whether a process is the driver's own daemon, by what the kernel attests.

        Any program can take its name. The daemon's user is root or has its name, it is outside of every
        container's PID namespace, and the file that it runs has its name.
        """
        program = (self._host.program_path(row.pid) or "").rpartition("/")[2]
        trusted = facts.uid == 0 or facts.user == PERSISTENCED
        return program == PERSISTENCED and trusted and len(facts.nspid) <= 1

    def _is_still_hidden(self, holder: HiddenHolder) -> bool:
        if holder.pid in self._listed:
            return False
        row = self._host.row(holder.pid)
        return row is not None and row.start == holder.start and row.state not in "ZX"

    def _has_listed_parent(self, pid: int) -> bool:
        """Tell whether NVML lists the parent of a process, which has not ended, not even as a zombie."""
        row = self._host.row(pid)
        parent = self._host.row(row.ppid) if row is not None and row.ppid in self._listed else None
        return parent is not None and not is_over(parent)

    def _classify(self, row: ProcessRow, facts: ProcessFacts, mapped: set[int], *, more: bool) -> str | None:
        """Say what a process with a device open is; None when not all of its mappings can be read.

        Measured on an H200 with driver 580: nvmlInit maps libcuda as well, so the library proves nothing. But
        cuInit maps the device file itself (/dev/nvidia0, twice), and a program that only reads NVML never
        does. A forked child of a CUDA program, such as a DataLoader's worker, inherits the files and the
        mappings; while its parent lives and is listed, the bytes belong to the parent. The numbers of the
        devices that it maps are added to ``mapped``, all of them if it has ``more`` files.
        """
        if self._has_listed_parent(row.pid):
            return "inherited"
        if self._is_persistenced(row, facts):
            return "monitor"
        return _classify_by_mappings(f"{self._host.root}/{row.pid}/maps", self._mapped, mapped, whole=more)


def find_hidden_holders(
    host: Host,
    own_pids: Collection[int],
    listed_pids: Collection[int],
    *,
    devices: str = "/dev/nvidia",
    patience: float = ROUND_INTERVAL,
) -> tuple[tuple[HiddenHolder, ...], int] | None:
    """Search a whole round; return hidden holders and how many were unreadable, None after ``patience``."""
    search = HiddenSearch(host, own_pids, devices=devices)
    deadline = time.monotonic() + patience
    while not search.complete and time.monotonic() < deadline:
        search.search(listed_pids, 0.1)
        time.sleep(0.001)  # for the thread that reads ``maps``; the end of the round waits for it
    return (search.result or (), search.unreadable) if search.complete else None


def _classify_by_mappings(
    maps: str, device: re.Pattern[bytes], mapped: set[int], *, whole: bool
) -> str | None:
    seen, tail = "unknown", b""
    try:
        descriptor = os.open(maps, READ_ONLY)
    except OSError:
        return None
    try:
        for _ in range(_MAPS_CAP // _CHUNK):
            chunk = os.read(descriptor, _CHUNK)
            if not chunk:
                return seen
            mapped.update(int(each[1]) for each in device.finditer(tail + chunk))
            if mapped:
                seen = "cuda"
            elif _NVML in tail + chunk:
                seen = "monitor"
            if mapped and not whole:
                return seen
            tail = chunk[-_LONGEST:]
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None
