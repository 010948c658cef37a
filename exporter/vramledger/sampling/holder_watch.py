"""Watch the holders: who they are in each sample, what is read once of each, and when it is read again."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from msgspec.structs import replace

from vramledger.model.reading import Owner, ProcessFacts, ProcessRow
from vramledger.readers.collector import (
    MAX_STUCK,
    PATIENCE,
    STUCK_AFTER,
    BoundedReader,
    Collector,
    Context,
    Part,
)
from vramledger.readers.hosts.facts import names_framework
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.system_memory import chain_of
from vramledger.readers.owners.cgroups import unified_path


class FactsReader:
    """Read facts in a thread: one stuck in the driver comes without ``cmdline``, and later with it."""

    def __init__(self, host: Host, *, stuck_after: float = STUCK_AFTER, max_stuck: int = MAX_STUCK) -> None:
        self._host = host
        self._reads: BoundedReader[ProcessFacts | None] = BoundedReader(
            stuck_after=stuck_after, max_stuck=max_stuck
        )
        # what was raised instead of facts before the last :meth:`collect`, by pid and start time
        self.failed: Mapping[Hashable, Exception] = {}

    @property
    def stuck(self) -> int:
        return self._reads.stuck

    def request(self, row: ProcessRow) -> None:
        self._reads.submit(
            (row.pid, row.start), lambda: self._host.facts(row), lambda: self._host.basic_facts(row)
        )

    def collect(self, timeout: float) -> list[ProcessFacts]:
        """Return the facts read since; wait at most ``timeout``. A process that has ended has none."""
        found = [facts for facts in self._reads.collect(timeout) if facts is not None]
        self.failed = self._reads.take_errors()
        return found


FACTS_TIMEOUT = 0.25
"""Seconds for which a sample waits for facts of new processes; late ones come with the next sample."""

REFRESH_DELAYS = (30.0, 300.0)
"""Seconds after which a holder is read again, as it may load more; the second only without framework."""

REFRESH_BATCH, REFRESH_SPACING, REFRESH_SPREAD = 32, 1.0, 20.0
"""Groups in which holders are read again: size, pause, longest delay; 512 at once took 0.9 MiB."""

UNREAD = "unread"
"""Why a process has no row when /proc could not be read: then nothing is known of it."""

_Identity = tuple[int, int]
_Known = dict[int, tuple[int, int, int]]


class RowReader(Collector):
    """Read the row of each process that NVML lists."""

    needs = ()

    def __init__(self, host: Host) -> None:
        self._host = host

    def read(self, context: Context) -> Part:
        rows, unseen = self._host.rows(context.listed_pids)
        return {"rows": rows, "unseen": unseen}


def unread(pids: Iterable[int]) -> Part:
    """Return what stands for the rows when they could not be read."""
    return {"rows": (), "unseen": dict.fromkeys(pids, UNREAD)}


class FactsWatch(Collector):
    """Read the facts of a holder when it, its parent or program is new, and when it may have loaded more."""

    patience = PATIENCE + FACTS_TIMEOUT

    def __init__(self, host: Host, complete: Callable[[], bool]) -> None:
        """Start without holders; ``complete`` tells whether the last sample has the owners of its facts."""
        self._host = host
        self._facts = FactsReader(host)
        self._known: _Known = {}
        self._refreshes: dict[_Identity, list[float]] = {}
        self._bystanders: frozenset[_Identity] = frozenset()
        self._unsent: dict[_Identity, ProcessFacts] = {}
        self._complete = complete

    def read(self, context: Context) -> Part:
        """Return the facts as far as they arrive in time, and those that an earlier sample has missed."""
        rows = context.rows
        known = {row.pid: (row.start, row.ppid, row.program or self._program_of(row)) for row in rows}
        failed = self._facts.failed
        for row in rows:
            # The pid of a dead holder may be reused by a program that then uses a GPU too.
            again = (row.pid, row.start) in self._bystanders or (row.pid, row.start) in failed
            if again or self._known.get(row.pid) != known[row.pid]:
                self._facts.request(row)
        self._known = known
        self._request_refreshes(rows)
        found = [facts for facts in self._facts.collect(FACTS_TIMEOUT) if facts.pid in known]
        self._note_bystanders(found, known)
        self._plan_refreshes(found)
        for facts in found:
            # Until its owner was looked for: its user is not charged in place of its job.
            owner = (facts.owner or Owner("", ""))._replace(type="unknown", name="")
            self._unsent[facts.pid, facts.start] = replace(facts, owner=owner)
        return {"facts": tuple(facts for facts in self._unsent.values() if facts.pid in known)}

    def _program_of(self, row: ProcessRow) -> int:
        """Return the program that a process had: one that exits has none any more."""
        start, _, program = self._known.get(row.pid, (0, 0, 0))
        return program if start == row.start else 0

    def accept(self) -> None:
        if self._complete():
            self._unsent.clear()

    def errors(self) -> Iterator[Exception]:
        yield from self._facts.failed.values()

    def _note_bystanders(self, found: Iterable[ProcessFacts], known: _Known) -> None:
        read_again = {(facts.pid, facts.start): facts.uses_gpu is False for facts in found}
        self._bystanders = frozenset(
            identity
            for identity in {*self._bystanders, *read_again}
            if read_again.get(identity, True) and known.get(identity[0], (None,))[0] == identity[1]
        )

    def _plan_refreshes(self, found: Iterable[ProcessFacts]) -> None:
        now, today = time.monotonic(), time.time()
        for number, facts in enumerate(found):
            identity = (facts.pid, facts.start)
            begins = now + min(number // REFRESH_BATCH * REFRESH_SPACING, REFRESH_SPREAD)
            refreshes = self._refreshes.setdefault(
                identity, [begins + delay for delay in reversed(REFRESH_DELAYS)]
            )
            age = today - self._host.boot_time - facts.start / self._host.ticks
            if age >= REFRESH_DELAYS[0] and names_framework(facts.libraries):
                refreshes.clear()  # the holder has had time to load what it uses

    def _request_refreshes(self, rows: tuple[ProcessRow, ...]) -> None:
        now = time.monotonic()
        listed: dict[_Identity, list[float]] = {}
        for row in rows:
            refreshes = self._refreshes.get((row.pid, row.start))
            if refreshes is not None:
                listed[row.pid, row.start] = refreshes
                if refreshes and refreshes[-1] <= now:
                    refreshes.pop()
                    self._facts.request(row)
        self._refreshes = listed


class CpuTimes(Collector):
    """Read what CPU time holders took that may be taken for idle because of another one's work."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._before: dict[_Identity, float] = {}
        self._accepted = False

    def read(self, context: Context) -> Part:
        """Return each one's time since the last sample: a sum's digits change and cost storage."""
        lists = [each.processes for each in context.devices if each.processes and len(each.processes) > 1]
        pids = {entry.pid for entries in lists for entry in entries}
        before = self._before if self._accepted else {}  # else it is not of one sample alone
        self._accepted = False
        found = {
            (row.pid, row.start): self._host.cpu_seconds(row.pid) for row in context.rows if row.pid in pids
        }
        known = {identity: seconds for identity, seconds in found.items() if seconds is not None}
        taken = tuple(
            (each[0], round(max(seconds - before[each], 0.0), 4))
            for each, seconds in sorted(known.items())
            if each in before
        )
        self._before = known
        return {"cpu_taken": taken}

    def accept(self) -> None:
        self._accepted = True


class LimitWatch(Collector):
    """Say which cgroups' limits are to be read: those of the holders, and those above them."""

    def __init__(self, watch: Callable[[tuple[str, ...]], None]) -> None:
        self._watch = watch
        self._chains: dict[_Identity, tuple[str, ...]] = {}

    def read(self, context: Context) -> Part:
        """Return nothing: the device threads read the limits."""
        for each in context.facts:
            self._chains[each.pid, each.start] = chain_of(unified_path(each.cgroup or ()) or "")
        present = {(row.pid, row.start) for row in context.rows}
        self._chains = {identity: chain for identity, chain in self._chains.items() if identity in present}
        self._watch(tuple(dict.fromkeys(path for chain in self._chains.values() for path in chain)))
        return {}
