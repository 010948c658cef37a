"""Remember each process that NVML lists: its facts, the evidence of an orphan, its policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import msgspec
from msgspec import structs
from msgspec.structs import replace

from vramledger.accounting.holders import policies, states
from vramledger.accounting.holders.matching import has_other_program
from vramledger.accounting.holders.policies import MemoryPattern
from vramledger.accounting.holders.states import StateVerdict
from vramledger.accounting.owners import owner_usage
from vramledger.accounting.owners.owner_usage import Charge, Key, owner_of
from vramledger.accounting.sample import Sample, forget_ended
from vramledger.model.agent_report import ReportedRank
from vramledger.model.holder_facts import Ties
from vramledger.model.reading import DriverWait, Owner, ProcessFacts, ProcessRow, Reading
from vramledger.model.snapshot import NO_POLICY, UNKNOWN, Grade, Holding, Policy, ProcessSnapshot, State

SETTLED_AFTER = 60.0
"""Seconds that a verdict on the policy must have stood, and that a process must have lived, before the
verdict becomes a label of ``vramledger_process_info``."""


_ID = re.compile(r"[0-9a-f]{12}|")
"""The short id of a container, by which it is called while its name is not known."""

MOST_REPORTED_RANKS = 8
"""The maximum number of ranks of a process: no program may make a series with each report."""


class TrackedProcess(msgspec.Struct, omit_defaults=True):
    """A process that NVML lists.

    ``shown`` is what is published of it, with its first facts (and the parent of that moment) and its newest.
    ``since`` is the monotonic time at which it was first seen. ``outside_policy`` is its policy without its
    agent's report, found with ``patterns``. ``policy_since`` is the monotonic time since which the published
    policy has not changed. ``ranks`` are those that its agent has reported. ``program`` is the one that it
    ran when the facts were read; 0 when not known.
    """

    shown: ProcessSnapshot
    owner: Key | None
    since: float
    patterns: tuple[MemoryPattern, ...] | None = None
    outside_policy: Policy = NO_POLICY
    policy_since: float = 0.0
    ranks: frozenset[ReportedRank] = frozenset()
    program: int = 0

    @property
    def first(self) -> ProcessFacts:
        """Its first facts: a process is tracked from them on."""
        return cast("ProcessFacts", self.shown.first)

    @property
    def now(self) -> ProcessFacts:
        return cast("ProcessFacts", self.shown.facts)


class ProcessTracker:
    """Keep what is known of processes, from their first facts to their end."""

    def __init__(self, state: dict[int, dict[int, TrackedProcess]]) -> None:
        self.state = state

    def __iter__(self) -> Iterator[TrackedProcess]:
        return chain.from_iterable(map(dict.values, self.state.values()))

    def get(self, pid: int, start: int | None) -> TrackedProcess | None:
        """Return what is known of a process, None if its start time is not known."""
        return None if start is None else self.state.get(pid, _NOTHING).get(start)

    def known_facts(self) -> tuple[ProcessFacts, ...]:
        """Return the first facts of every process, each followed by its newest where they differ."""
        return tuple(
            facts
            for known in self
            for facts in ((known.first,) if known.first == known.now else (known.first, known.now))
        )

    def facts_of(self, pid: int, start: int | None) -> ProcessFacts | None:
        known = self.get(pid, start)
        return None if known is None else known.now

    def known_since(self, pid: int, start: int | None) -> float | None:
        """Return the monotonic time at which a process was first seen, None when it is not known."""
        known = self.get(pid, start)
        return None if known is None else known.since

    def is_bystander(self, row: ProcessRow, sample: Sample) -> bool:
        """Tell whether a process certainly uses no GPU: some user of the driver must be recognised."""
        facts = self.facts_of(row.pid, row.start)
        if facts is None or facts.uses_gpu is not False or row.state in "ZX":
            return False
        return sample.reading.device_files or any(each.now.uses_gpu for each in self)

    def owner_of(self, pid: int, start: int | None) -> Key | None:
        known = self.get(pid, start)
        return None if known is None else known.owner

    def owner_of_holding(self, holding: Holding, sample: Sample) -> Key | None:
        """Return a holding's owner, None if unknown; a bystander did not hold the bytes under its pid."""
        if holding.start is None and holding.pid in sample.rows:
            return owner_usage.UNKNOWN
        return self.owner_of(holding.pid, holding.start)

    def charges(self, holdings: Iterable[Holding], sample: Sample) -> list[Charge]:
        return [
            Charge(
                each.pid,
                each.start,
                self.owner_of_holding(each, sample),
                each.state,
                each.held,
                each.wasted is True,
            )
            for each in holdings
        ]

    def holders(
        self, sample: Sample, held: Iterable[tuple[int, int | None]], reused: Collection[int]
    ) -> dict[int, ProcessSnapshot]:
        """Return what is published of the holders, by pid, also of the dead.

        ``held``: pid and start of every known holding. ``reused``: the pids that programs have only got from
        a dead holder.
        """
        holders = {
            row.pid: self.snapshot_of(row, sample) for row in sample.rows.values() if row.pid not in reused
        }
        # Readers want to know to whom the bytes of the dead belonged: what was seen of them stays.
        listed = {entry.pid for device in sample.reading.devices for entry in device.processes or ()}
        unseen = listed - holders.keys()
        for pid, start in held:
            known = self.get(pid, start)
            if known is not None and pid in unseen and pid not in holders:
                holders[pid] = known.shown
        return holders

    def snapshot_of(self, row: ProcessRow, sample: Sample) -> ProcessSnapshot:
        known = self.get(row.pid, row.start)
        return ProcessSnapshot(row.pid, sample.started_at(row.start), None) if known is None else known.shown

    def update_facts(self, sample: Sample) -> None:
        for read in sample.reading.facts:
            facts = read
            known, row = self.get(facts.pid, facts.start), sample.rows.get(facts.pid)
            program = row.program if row is not None and row.start == facts.start else 0
            if known is not None and row is not None and has_other_program(known.program, row):
                # Nothing that was read of the program before is true of this one; its owner may be.
                facts, known = structs.replace(facts, owner=_better_owner(facts, known.now)), None
            if known is None:
                shown = ProcessSnapshot(facts.pid, sample.started_at(facts.start), facts, facts)
                self.state.setdefault(facts.pid, {})[facts.start] = TrackedProcess(
                    shown,
                    owner_of(facts),
                    since=sample.monotonic,
                    policy_since=sample.monotonic,
                    program=program,
                )
                continue
            known.program = known.program or program
            first = known.first
            if "environ" in first.denied and "environ" not in facts.denied:
                # a read that did not return at first has returned
                first = structs.replace(facts, parent=first.parent)
            now = _with_what_was_read(facts, known.now)
            known.shown = replace(known.shown, facts=now, first=first)
            known.owner, known.patterns = owner_of(now), None

    def classify(self, sample: Sample) -> dict[int, StateVerdict | None]:
        """Classify each process that /proc shows, whatever it holds; return the results by pid."""
        stuck = states.stuck_threads(sample.reading.waits)
        ties = {(each.pid, each.start): each for each in sample.reading.ties}
        return {
            pid: self._classify_process(
                row, sample.reading, stuck.get((pid, row.start)), ties.get((pid, row.start))
            )
            for pid, row in sample.rows.items()
        }

    def _classify_process(
        self, row: ProcessRow, reading: Reading, stuck: DriverWait | None, ties: Ties | None
    ) -> StateVerdict | None:
        known, ended = self.get(row.pid, row.start), reading.ended.get(row.pid)
        orphaned = None
        if ended is not None:
            orphaned = StateVerdict(State.ORPHANED, ended, Grade.PROVEN)
        elif known is not None:
            orphaned = states.judge_orphan(row, known.first, known.now, ties)
        return states.classify_process(row, orphaned, stuck, frozen=ties is not None and ties.frozen)

    def update_policies(
        self,
        sample: Sample,
        patterns: Mapping[int, tuple[MemoryPattern, ...]],
        agent_policy: Callable[[int, Policy], Policy | None],
    ) -> None:
        """Classify the processes whose facts or bytes have changed, and settle each long-standing policy."""
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
        """Record the rank that an agent reports; it stays: a stopped rank cannot report."""
        known = self.get(pid, start)
        if known is None:
            return
        if rank not in known.ranks and len(known.ranks) >= MOST_REPORTED_RANKS:
            rank = structs.replace(rank, job="")
        else:
            known.ranks |= {rank}
        if rank != known.shown.reported_rank:
            known.shown = replace(known.shown, reported_rank=rank)

    def drop_ended(self, rows: Iterable[ProcessRow], held: Collection[int]) -> None:
        """Drop the processes that do not live any more and have no bytes listed under their pid."""
        alive = {(row.pid, row.start) for row in rows}
        forget_ended(self.state, lambda pid, start: pid in held or (pid, start) in alive)


_NOTHING: dict[int, TrackedProcess] = {}


_CAN_END = frozenset({"slurm", "pod", "container"})
"""The owners that can end before their processes do."""


def _with_what_was_read(facts: ProcessFacts, before: ProcessFacts) -> ProcessFacts:
    """Keep what was read of a process before, where a later look sees less.

    A process whose main thread has ended has no memory to read libraries and settings from; those of one that
    is stuck in the driver are not read. A program that sets its title overwrites its environment.
    """
    kept: dict[str, Any] = {"owner": _better_owner(facts, before)}
    if "environ" in facts.denied and "environ" not in before.denied:
        kept["signs"] = tuple(dict.fromkeys((*before.signs, *facts.signs)))
        kept["rank"] = facts.rank or before.rank
        kept["service_main"], kept["may_be_service_main"] = before.service_main, before.may_be_service_main
        kept["denied"] = tuple(name for name in facts.denied if name != "environ")
    parent = facts.parent
    if parent is not None and parent.signs is None and before.parent is not None:
        same = before.parent[:2] == parent[:2]
        kept["parent"] = parent._replace(signs=before.parent.signs if same else None)
    now = structs.replace(
        facts,
        libraries=facts.libraries or before.libraries,
        settings=facts.settings or before.settings,
        **kept,
    )
    return before if now == before else now  # usually equal: keep one object


def _better_owner(facts: ProcessFacts, before: ProcessFacts) -> Owner | None:
    """Return the owner of a process: what is known of it now, or what was known where that says more.

    Once a pod or a container is removed, no file has its name any more, and its orphans would belong to a
    bare id in no namespace. A process that was moved out of a job, a pod or a container still belongs to it.
    """
    owner, known = facts.owner, before.owner
    if owner is None or known is None:
        return owner or known
    if not owner.name:  # nobody has looked for it yet
        return known
    if known.type in _CAN_END and (owner.type not in _CAN_END or facts.cgroup is None):
        return known
    if _place(facts) == _place(before) and (
        (owner.type == known.type and _is_named(known) > _is_named(owner))
        or (owner.type, known.type) == ("unit", "user")  # the others of the unit have ended
    ):
        return known
    if known.notebook and not owner.notebook:
        return owner._replace(notebook=known.notebook)
    return owner


def _place(facts: ProcessFacts) -> tuple[str, ...]:
    return tuple(line.removesuffix(" (deleted)") for line in facts.cgroup or ())


def _is_named(owner: Owner) -> tuple[bool, bool]:
    """Tell whether an owner's name and its container are names, and not the bare ids of a cgroup's path."""
    bare = {"slurm": not owner.name.isdigit(), "pod": not owner.namespace}
    return not bare.get(owner.type, _ID.fullmatch(owner.name)), not _ID.fullmatch(owner.container)


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
