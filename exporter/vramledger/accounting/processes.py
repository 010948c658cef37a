"""Remember each process that NVML lists: its facts, the evidence of an orphan, its policy.

A process is (pid, start time). :mod:`vramledger.accounting.tracker` handles its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from vramledger.accounting import policies, states
from vramledger.accounting.owner_usage import Key, owner_of
from vramledger.accounting.policies import MemoryPattern
from vramledger.accounting.sample import Sample
from vramledger.accounting.states import StateVerdict
from vramledger.model.agent_report import ReportedRank
from vramledger.model.policy import NO_POLICY, UNKNOWN, Policy
from vramledger.model.reading import DriverWait, ProcessFacts, ProcessRow, Reading
from vramledger.model.snapshot import Grade, ProcessSnapshot

SETTLED_AFTER = 60.0
"""Seconds that a verdict on the policy must have stood, and that a process must have lived, before the
verdict becomes a label of ``vramledger_process_info``. By then the process has loaded its libraries (the
sampler looks again after 30 seconds)."""


MOST_REPORTED_RANKS = 8
"""A process may report this number of different ranks. They are labels, and a program must not be able to
make a new series with each report; what it reports beyond is not shown."""


@dataclass(slots=True)
class TrackedProcess:
    """A process that NVML lists: its first facts (with the parent of that moment) and its newest.

    ``since`` is the monotonic time at which it was first seen. ``orphaned`` is the evidence that it is an
    orphan, found with ``orphan_relations`` (parent, group, session). ``outside_policy`` is its policy without
    its agent's report, found with ``patterns``. ``policy_since`` is the monotonic time since which the
    published policy has not changed. ``ranks`` are those that its agent has reported.
    """

    first: ProcessFacts
    now: ProcessFacts
    shown: ProcessSnapshot
    owner: Key | None
    since: float
    orphan_relations: tuple[int, int, int] | None = None
    orphaned: str | None = None
    patterns: tuple[MemoryPattern, ...] | None = None
    outside_policy: Policy = NO_POLICY
    policy_since: float = 0.0
    ranks: frozenset[ReportedRank] = frozenset()


class ProcessTracker:
    """Remember processes, by identity."""

    def __init__(self) -> None:
        """Start without processes."""
        self._known: dict[tuple[int, int], TrackedProcess] = {}

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._known)

    def get(self, pid: int, start: int | None) -> TrackedProcess | None:
        """Return what is known of a process, None if its start time is not known."""
        return None if start is None else self._known.get((pid, start))

    def known_facts(self) -> tuple[ProcessFacts, ...]:
        """Return the first facts of every process, each followed by its newest where they differ."""
        return tuple(
            facts
            for known in self._known.values()
            for facts in ((known.first,) if known.first == known.now else (known.first, known.now))
        )

    def facts_of(self, pid: int, start: int | None) -> ProcessFacts | None:
        """Return the newest facts of a process."""
        known = self.get(pid, start)
        return None if known is None else known.now

    def known_since(self, pid: int, start: int | None) -> float | None:
        """Return the monotonic time at which a process was first seen, None when it is not known."""
        known = self.get(pid, start)
        return None if known is None else known.since

    def is_bystander(self, row: ProcessRow, sample: Sample) -> bool:
        """Tell whether a process certainly does not use a GPU: bytes under its pid are not its own.

        That is certain only where a user of the driver can be recognised: we ourselves or another holder.
        """
        facts = self.facts_of(row.pid, row.start)
        if facts is None or facts.uses_gpu is not False or row.state in "ZX":
            return False
        return sample.reading.device_files or any(each.now.uses_gpu for each in self._known.values())

    def owner_of(self, pid: int, start: int | None) -> Key | None:
        """Return the owner of a process."""
        known = self.get(pid, start)
        return None if known is None else known.owner

    def snapshot_of(self, row: ProcessRow, sample: Sample) -> ProcessSnapshot:
        """Return what is published of a process that /proc shows."""
        known = self.get(row.pid, row.start)
        return ProcessSnapshot(row.pid, sample.started_at(row.start), None) if known is None else known.shown

    def shift_times(self, seconds: float) -> None:
        """Move the Unix times along with a clock that was set."""
        for known in self._known.values():
            known.shown = replace(known.shown, start_time=known.shown.start_time + seconds)

    def update_facts(self, sample: Sample) -> None:
        """Record the facts that came with a sample."""
        for facts in sample.reading.facts:
            identity = (facts.pid, facts.start)
            known = self._known.get(identity)
            if known is None:
                shown = ProcessSnapshot(facts.pid, sample.started_at(facts.start), facts, facts)
                self._known[identity] = TrackedProcess(
                    facts,
                    facts,
                    shown,
                    owner_of(facts),
                    since=sample.monotonic,
                    policy_since=sample.monotonic,
                )
                continue
            first = known.first
            if "environ" in first.denied and "environ" not in facts.denied:
                # a read that did not return at first has returned
                first = replace(facts, parent=first.parent)
            now = _with_libraries(facts, known.now)
            shown = replace(known.shown, facts=now, first=first)
            self._known[identity] = replace(
                known,
                first=first,
                now=now,
                shown=shown,
                owner=owner_of(now),
                orphan_relations=None,
                patterns=None,
            )

    def classify(self, sample: Sample) -> dict[int, StateVerdict | None]:
        """Classify each process that /proc shows, whatever it holds; return the results by pid."""
        stuck = states.stuck_threads(sample.reading.waits)
        return {
            pid: self._classify_process(row, sample.reading, stuck.get((pid, row.start)))
            for pid, row in sample.rows.items()
        }

    def _classify_process(
        self, row: ProcessRow, reading: Reading, stuck: DriverWait | None
    ) -> StateVerdict | None:
        known = self.get(row.pid, row.start)
        if known is None:
            return states.classify_process(row, reading.ended.get(row.pid), stuck, orphan_grade=Grade.PROVEN)
        relations = (row.ppid, row.pgrp, row.session)
        if known.orphan_relations != relations:  # only these or new facts change the evidence
            known.orphan_relations = relations
            known.orphaned = states.orphan_evidence(
                row, known.first, known.now, host_pid_namespace=reading.host_pid_namespace
            )
        ended = reading.ended.get(row.pid)
        watched = known.first.parent is not None and known.first.parent.pid != row.ppid
        grade = Grade.PROVEN if ended or watched else Grade.INFERRED
        return states.classify_process(row, ended or known.orphaned, stuck, orphan_grade=grade)

    def update_policies(
        self,
        sample: Sample,
        patterns: Mapping[int, tuple[MemoryPattern, ...]],
        agent_policy: Callable[[int, Policy], Policy | None],
    ) -> None:
        """Classify the processes whose facts or bytes have changed, and settle each long-standing policy.

        Args:
            sample: the sample.
            patterns: the memory patterns, by pid.
            agent_policy: returns the policy that a process' agent reports, given the one seen from outside.
        """
        for row in sample.rows.values():
            known = self.get(row.pid, row.start)
            if known is None:
                continue
            shown = known.shown
            mine = patterns.get(row.pid, ())
            if known.patterns != mine:  # cheap while nothing changes: the very same objects
                known.patterns = mine
                known.outside_policy = policies.classify(
                    known.now.libraries, known.now.settings, mine, environ="environ" not in known.now.denied
                )
            policy = agent_policy(row.pid, known.outside_policy) or known.outside_policy
            if policy[:3] != shown.policy[:3]:
                known.policy_since = sample.monotonic
            if policy != shown.policy:
                known.shown = shown = replace(shown, policy=policy)
            if not all(shown.settled):
                settled = _settled(shown, sample, sample.monotonic - known.policy_since)
                if settled != shown.settled:
                    known.shown = replace(shown, settled=settled)

    def record_rank(self, pid: int, start: int, rank: ReportedRank) -> None:
        """Record the rank that a process' agent reports.

        It stays when a later report names none, and when there is no later report: a rank that is stopped
        cannot report, and a group that was destroyed was that of this rank.
        """
        known = self.get(pid, start)
        if known is None:
            return
        if rank not in known.ranks and len(known.ranks) >= MOST_REPORTED_RANKS:
            rank = rank._replace(job="")
        else:
            known.ranks |= {rank}
        if rank != known.shown.reported_rank:
            known.shown = replace(known.shown, reported_rank=rank)

    def drop_ended(self, rows: Iterable[ProcessRow], held: Collection[int]) -> None:
        """Drop the processes that do not live any more and have no bytes listed under their pid."""
        alive = {(row.pid, row.start) for row in rows}
        for identity in [each for each in self._known if each not in alive and each[0] not in held]:
            del self._known[identity]


def _with_libraries(facts: ProcessFacts, before: ProcessFacts) -> ProcessFacts:
    """Keep what is known of libraries and settings if a later read could not see them.

    A process whose main thread has ended has no memory to read them from. The libraries of a process that is
    stuck in the driver are not read.
    """
    now = replace(
        facts,
        libraries=facts.libraries or before.libraries,
        settings=facts.settings or before.settings,
    )
    return before if now == before else now  # usually equal: keep one object


def _settled(shown: ProcessSnapshot, sample: Sample, unchanged: float) -> tuple[str, str]:
    """Return framework and policy as far as they are settled; a settled one does not change any more."""
    framework, policy, source, _ = shown.policy
    if (
        shown.settled[0] not in ("", "cuda")
        or sample.time - shown.start_time < SETTLED_AFTER
        or framework == UNKNOWN
    ):
        framework = shown.settled[0]
    if framework != shown.policy.framework or policy == UNKNOWN:
        return framework, ""
    return framework, policy if source != "pattern" or unchanged >= SETTLED_AFTER else ""
