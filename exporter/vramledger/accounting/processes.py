"""What is remembered of each process that NVML lists: its facts, the signs of an orphan, its policy.

A process is (pid, start time). Its bytes are the matter of :mod:`vramledger.accounting.tracker`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from vramledger.accounting import policies, states
from vramledger.accounting.owner_usage import Key, owner_of
from vramledger.accounting.policies import MemoryPattern
from vramledger.accounting.states import StateVerdict
from vramledger.model.policy import NO_POLICY, UNKNOWN, Policy
from vramledger.model.reading import ProcessFacts, ProcessRow, Reading
from vramledger.model.snapshot import ProcessSnapshot

SETTLED_AFTER = 60.0
"""Seconds that a verdict on the policy must have stood, and a process must have lived to have loaded its
libraries (the sampler looks again after 30), before it becomes a label of ``vramledger_process_info``."""


@dataclass(slots=True)
class Process:
    """A process that NVML lists: its first facts (with the parent of that moment) and its newest.

    ``shapes`` are those that ``outside``, the policy without its agent's word, was judged by, and
    ``policy_since`` is the monotonic time since when the published one says the same.
    """

    first: ProcessFacts
    now: ProcessFacts
    shown: ProcessSnapshot
    owner: Key | None
    judged: tuple[int, int, int] | None = None
    orphaned: str | None = None
    shapes: tuple[MemoryPattern, ...] | None = None
    outside: Policy = NO_POLICY
    policy_since: float = 0.0


class Processes:
    """The processes by identity."""

    def __init__(self) -> None:
        """Start with nobody known."""
        self._known: dict[tuple[int, int], Process] = {}

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._known)

    def get(self, pid: int, start: int | None) -> Process | None:
        """Return what is known of a process; of one whose start is not known that is nothing."""
        return None if start is None else self._known.get((pid, start))

    def learn(self, reading: Reading) -> None:
        """Take in the facts of a sample."""
        for facts in reading.facts:
            identity = (facts.pid, facts.start)
            known = self._known.get(identity)
            if known is None:
                shown = ProcessSnapshot(facts.pid, started_at(reading, facts.start), facts, facts)
                self._known[identity] = Process(
                    facts, facts, shown, owner_of(facts), policy_since=reading.monotonic
                )
                continue
            first = known.first
            if "environ" in first.denied and "environ" not in facts.denied:
                first = replace(facts, parent=first.parent)  # a read that hung at first sight has come back
            now = _with_libraries(facts, known.now)
            shown = replace(known.shown, facts=now, first=first)
            self._known[identity] = replace(
                known, first=first, now=now, shown=shown, owner=owner_of(now), judged=None, shapes=None
            )

    def verdict(self, row: ProcessRow, reading: Reading) -> StateVerdict | None:
        """Judge what a process itself is, whatever it holds."""
        known = self.get(row.pid, row.start)
        if known is None:
            return states.classify_process(row, reading.ended.get(row.pid))
        relations = (row.ppid, row.pgrp, row.session)
        if known.judged != relations:  # the evidence changes only with these, or with new facts
            known.judged = relations
            known.orphaned = states.orphan_evidence(
                row, known.first, known.now, host_pid_namespace=reading.host_pid_namespace
            )
        return states.classify_process(row, reading.ended.get(row.pid) or known.orphaned)

    def judge_policies(
        self,
        reading: Reading,
        rows: Iterable[ProcessRow],
        shapes: Mapping[int, tuple[MemoryPattern, ...]],
        told: Callable[[int, Policy], Policy | None],
    ) -> None:
        """Judge anew those whose facts or bytes have changed, and settle what has stood long enough.

        Args:
            reading: the sample.
            rows: of the processes that /proc shows.
            shapes: the courses of the bytes, by pid.
            told: the policy by the word of a process' agent, given the one that is seen from outside.
        """
        for row in rows:
            known = self.get(row.pid, row.start)
            if known is None:
                continue
            shown = known.shown
            mine = shapes.get(row.pid, ())
            if known.shapes != mine:  # cheap while nothing changes: the very same objects
                known.shapes = mine
                known.outside = policies.classify(
                    known.now.libraries, known.now.settings, mine, environ="environ" not in known.now.denied
                )
            policy = told(row.pid, known.outside) or known.outside
            if policy[:3] != shown.policy[:3]:
                known.policy_since = reading.monotonic
            if policy != shown.policy:
                known.shown = shown = replace(shown, policy=policy)
            if not all(shown.settled):
                settled = _settled(shown, reading, reading.monotonic - known.policy_since)
                if settled != shown.settled:
                    known.shown = replace(shown, settled=settled)

    def forget(self, rows: Iterable[ProcessRow], held: Collection[int]) -> None:
        """Drop who neither lives nor has bytes that are still listed for the pid."""
        alive = {(row.pid, row.start) for row in rows}
        for identity in [each for each in self._known if each not in alive and each[0] not in held]:
            del self._known[identity]


def started_at(reading: Reading, start: int) -> float:
    """Return the Unix time of a process' start."""
    return reading.boot_time + start / reading.ticks


def _with_libraries(facts: ProcessFacts, before: ProcessFacts) -> ProcessFacts:
    """Keep what is known of libraries and settings where a later look could not see them.

    A process whose main thread has ended has no memory to read them from, and one that is stuck in the
    driver is read without.
    """
    now = replace(
        facts,
        libraries=facts.libraries or before.libraries,
        settings=facts.settings or before.settings,
    )
    return before if now == before else now  # mostly; the old one stays in any case, as the first


def _settled(shown: ProcessSnapshot, reading: Reading, reservation_status: float) -> tuple[str, str]:
    """Return framework and policy as far as they will stay; what has settled does so for good."""
    framework, policy, source, _ = shown.policy
    if (
        shown.settled[0] not in ("", "cuda")
        or reading.time - shown.start_time < SETTLED_AFTER
        or framework == UNKNOWN
    ):
        framework = shown.settled[0]
    if framework != shown.policy.framework or policy == UNKNOWN:
        return framework, ""
    return framework, policy if source != "pattern" or reservation_status >= SETTLED_AFTER else ""
