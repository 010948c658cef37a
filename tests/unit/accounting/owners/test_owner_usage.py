"""The owners' usage: what was integrated, freed and failed, and a small limit on the owners."""

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agent_client import report, torch
from tests.support.examples import examples
from tests.support.host.model import GIB, MIB, Fault, FaultKind, Host, Process
from tests.support.host.one_holder import NOW, START, OneHolder, gpu
from tests.support.host.programs import Fixed
from tests.support.sure import sure
from vramledger.accounting.owners.owner_usage import (
    GONE_MAX,
    KEPT,
    NOISE,
    OTHER,
    SETTLE,
    UNKNOWN,
    Charge,
    DeviceUsage,
)
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import OWNERS_MAX
from vramledger.model.agent_report import Agent, read_report
from vramledger.model.reading import Owner, ProcessFacts
from vramledger.model.snapshot import Ledger, OwnerOoms, OwnerUsage, OwnerUsageTotals, Snapshot, State

GAP = 5.0
ANN = ("user", "ann")
BOB = ("user", "bob")
UID = 1000
POD = Owner("pod", "team/train", pod="train", namespace="team")


def charge(
    pid: int, owner: tuple[str, str] | None = ANN, memory: int | None = GIB, state: State = State.ACTIVE
) -> Charge:
    """Make a holding of the process that started at ten times its pid."""
    return Charge(pid, pid * 10, owner, state, memory)


def ledger(unattributed: int = 0, overlap: int = 0) -> Ledger:
    """Make a balance; only these two figures matter here."""
    return Ledger(80 * GIB, 0, 0, dict.fromkeys(State, 0), unattributed, overlap)


def of(result: OwnerUsageTotals, key: tuple[str, str]) -> OwnerUsage:
    (account,) = [each for each in result.owners if (each.type, each.name) == key]
    return account


def test_memory_costs_what_was_seen_until_the_next_sample() -> None:
    """Bytes count from the sample that saw them to the next, in the state of the first, if they are known."""
    accounts = DeviceUsage(0)
    first = accounts.update([charge(1)], ledger(), 10.0, GAP)
    accounts.update([charge(1, memory=2 * GIB, state=State.IDLE)], ledger(), 11.0, GAP)
    last = accounts.update([], ledger(), 13.0, GAP)
    assert of(first, ANN).byte_seconds == {State.ACTIVE: 0.0}
    assert of(last, ANN).byte_seconds == {State.ACTIVE: 1.0 * GIB, State.IDLE: 4.0 * GIB}
    assert of(last, ANN).held == {}
    assert of(DeviceUsage(0).update([charge(1, memory=None)], ledger(), 0.0, GAP), ANN).held == {}


def test_the_dead_stay_with_their_owner() -> None:
    """Bytes of a pid that is gone are charged to the earlier owner; without one, to an unknown owner."""
    accounts = DeviceUsage(0)
    accounts.update([charge(1)], ledger(), 0.0, GAP)
    dead = [charge(1, None, state=State.DEAD), charge(2, None, state=State.DEAD)]
    result = accounts.update(dead, ledger(), 1.0, GAP)
    assert of(result, ANN).held == {State.DEAD: GIB}
    assert of(result, UNKNOWN).held == {State.DEAD: GIB}


def test_the_bytes_of_an_ended_holding_are_freed() -> None:
    """The bytes of an ended holding count as freed once the device has settled, and not earlier."""
    accounts = DeviceUsage(0)
    accounts.update([charge(1)], ledger(), 0.0, GAP)
    soon = accounts.update([], ledger(GIB), 1.0, GAP)  # the used memory was read a moment before the list
    late = accounts.update([], ledger(NOISE), 1.0 + SETTLE, GAP)
    assert (of(soon, ANN).freed, of(soon, ANN).not_freed) == (0, 0)
    assert (of(late, ANN).freed, of(late, ANN).not_freed) == (GIB, 0)


def test_what_an_ended_holding_left_behind() -> None:
    """Bytes that stay were not freed; what another holding still has is in neither."""
    accounts = DeviceUsage(0)
    accounts.update([charge(1), charge(2, BOB, 3 * GIB)], ledger(MIB), 0.0, GAP)
    accounts.update([charge(2, BOB, 3 * GIB)], ledger(MIB), 1.0, GAP)
    accounts.update([], ledger(MIB), 2.0, GAP)
    last = accounts.update([], ledger(MIB + 2 * GIB), 4.0, GAP)
    assert of(last, ANN)[-2:] == (GIB // 2, GIB // 2)
    assert of(last, BOB)[-2:] == (3 * GIB // 2, 3 * GIB // 2)
    accounts = DeviceUsage(0)
    accounts.update([charge(1, memory=3 * GIB), charge(2, BOB)], ledger(overlap=GIB), 0.0, GAP)
    accounts.update([charge(2, BOB)], ledger(), 1.0, GAP)
    last = accounts.update([charge(2, BOB)], ledger(), 3.0, GAP)
    assert of(last, ANN)[-2:] == (2 * GIB, 0)


def test_the_bytes_of_a_dead_holding_are_not_freed() -> None:
    """The bytes of a pid that stays gone count once; a pid that the list shows again does not count."""
    accounts = DeviceUsage(0)
    accounts.update([charge(1)], ledger(), 0.0, GAP)
    for moment in (1.0, 2.0):
        early = accounts.update([charge(1, None, state=State.DEAD)], ledger(), moment, GAP)
    assert of(early, ANN).not_freed == 0
    for moment in (3.0, 4.0, 5.0):
        late = accounts.update([charge(1, None, state=State.DEAD)], ledger(), moment, GAP)
    assert of(late, ANN).not_freed == GIB


def test_endless_ends_are_settled_all_the_same() -> None:
    """On a device where a holding ends every second, freed bytes are counted without a pause."""
    accounts = DeviceUsage(0)
    for moment in range(20):
        last = accounts.update([charge(1 + moment)], ledger(), float(moment), GAP)
    assert (of(last, ANN).freed or 0) >= 10 * GIB


def test_beyond_the_limit_owners_share_one_account() -> None:
    """The largest owners have entries; the others share one, and are counted."""
    accounts = DeviceUsage(2)
    charges = [charge(pid, ("user", str(pid)), pid * MIB) for pid in range(1, 6)]
    result = accounts.update(charges, ledger(), 0.0, GAP)
    assert result.dropped == 3
    held = {each.name: each.held[State.ACTIVE] // MIB for each in result.owners}
    assert held == {"5": 5, "4": 4, "other": 6}


def test_a_place_is_given_on_only_when_its_owner_is_long_gone() -> None:
    """An owner that holds nothing stays for a while, then until its entry is needed; no other is lost."""
    accounts = DeviceUsage(1)
    accounts.update([charge(1)], ledger(), 0.0, GAP)
    early = accounts.update([charge(2, BOB)], ledger(), 1.0, GAP)
    empty = accounts.update([], ledger(), 2 * KEPT, GAP)
    late = accounts.update([charge(2, BOB)], ledger(), 2 * KEPT + 1, GAP)
    assert [(each.type, each.name) for each in early.owners] == [OTHER, ANN]
    assert [(each.type, each.name) for each in empty.owners] == [OTHER, ANN]
    assert [(each.type, each.name) for each in late.owners] == [OTHER, BOB]


def test_only_the_last_to_go_stay() -> None:
    """On a device whose owners change, the series of the last owners stay, and no others."""
    accounts = DeviceUsage(0)
    for turn in range(20):
        accounts.update([charge(1 + turn, ("pod", str(turn)))], ledger(), float(turn), GAP)
    early = accounts.update([], ledger(), 20.0, GAP)
    late = accounts.update([], ledger(), 30.0 + KEPT, GAP)
    # What the first owners have freed is known only after their entries are gone.
    latest = {str(turn) for turn in range(20 - GONE_MAX, 20)} | {"other"}
    assert {each.name for each in early.owners} == latest
    assert {each.name for each in late.owners} == latest


# --- random readings -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One random sample: monotonic and wall seconds since the last, who holds what, what failed."""

    after: float
    wall: float
    held: dict[int, tuple[int, int]]
    failure: str


PIDS = st.dictionaries(st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=4)
STEPS = st.lists(
    st.builds(
        Step,
        after=st.sampled_from([0.0, 0.5, 1.0, 1.25, 4.75, GAP, 5.25, 60.0]),
        wall=st.sampled_from([-3600.0, 0.0, 1.0, 86400.0]),
        held=PIDS,
        failure=st.sampled_from(["", "", "", "", "", "sample", "device", "list"]),
    ),
    min_size=2,
    max_size=25,
)
_FAULTS: dict[str, FaultKind] = {"sample": "driver lost", "device": "device lost"}


def played(steps: list[Step], owners_max: int = OWNERS_MAX) -> list[Snapshot]:
    """Return the snapshots of random steps; process (pid, start) belongs to the owner of its pid's parity."""
    host = Host([gpu(0), gpu(1)], [], Random(1))  # noqa: S311 nothing here is left to chance
    tracker = HoldingTracker(idle_after=600.0, owners_max=owners_max)
    now, wall, snapshots = 1000.0, 1e9, []
    for step in steps:
        now, wall = now + step.after, wall + step.wall
        host.processes = [
            Process(pid, {0: Fixed(memory * GIB)}, begin=-start, owner=Owner("unit", f"unit-{pid % 2}"))
            for pid, (start, memory) in step.held.items()
        ]
        host.faults = [Fault(_FAULTS[step.failure])] if step.failure in _FAULTS else []
        host.gpus[0].says = {"processes": None} if step.failure == "list" else {}
        snapshots.append(tracker.update(host.reading(now, time=wall)))
    return snapshots


def owned(snapshot: Snapshot) -> OwnerUsageTotals | None:
    """Return the usage of the device that the steps are about."""
    return snapshot.devices[0].owner_usage if snapshot.up else None


@given(STEPS)
@settings(max_examples=examples(200))
def test_integration_equals_an_independent_one(steps: list[Step]) -> None:
    """With any gaps, failures, restarts and clock steps, the sum is that of the observed spans."""
    snapshots = played(steps)
    expected: dict[str, Fraction] = defaultdict(Fraction)
    uncounted = Fraction(0)
    good = [index for index, step in enumerate(steps) if not step.failure]
    for here, there in pairwise(good):
        span = sum((Fraction(step.after) for step in steps[here + 1 : there + 1]), Fraction(0))
        if there == here + 1 and span <= Fraction(GAP):
            for pid, (_, memory) in steps[here].held.items():
                expected[f"unit-{pid % 2}"] += memory * GIB * span
        else:
            uncounted += span
    if not good:
        assert all(owned(snapshot) is None for snapshot in snapshots)
        return
    last = sure(owned(snapshots[good[-1]]))
    assert last.uncounted == pytest.approx(float(uncounted))
    for account in last.owners:
        assert sum(account.byte_seconds.values()) == pytest.approx(float(expected.pop(account.name, 0)))
    assert not any(expected.values())


@given(STEPS, st.sampled_from([0, 1, 2]))
@settings(max_examples=examples(200))
def test_sums_are_exact_and_counters_never_fall(steps: list[Step], owners_max: int) -> None:
    """On every sample owners add up to the processes by state, and no series that stays ever falls."""
    before: dict[tuple[str, str, str], float] = {}
    for snapshot in played(steps, owners_max):
        result = owned(snapshot)
        if result is None:
            continue
        by_state: dict[State, int] = defaultdict(int)
        for holding in snapshot.devices[0].holdings:
            by_state[holding.state] += holding.memory or 0
        owners: dict[State, int] = defaultdict(int)
        now: dict[tuple[str, str, str], float] = {}
        for account in result.owners:
            for state, memory in account.held.items():
                owners[state] += memory
            key = (account.type, account.name)
            now.update({(*key, state.value): value for state, value in account.byte_seconds.items()})
            now[key[0], key[1], "freed"] = account.freed or 0
            now[key[0], key[1], "not freed"] = account.not_freed
        assert owners == by_state
        assert all(now[series] >= value for series, value in before.items() if series in now)
        assert {series[:2] for series in before} <= {series[:2] for series in now} or owners_max
        before = now


def agent(ooms: int | None, start: int = START, uid: int = UID, **said: Any) -> Agent:  # noqa: ANN401 a message
    """Make the agent of pid 7, whose torch has counted so many failures."""
    frameworks = [] if ooms is None else [torch(reserved=2**30, ooms=ooms)]
    return Agent(7, start, uid, NOW, problem="", report=read_report(report(frameworks=frameworks, **said)))


def failure(after: float, framework: str = "torch") -> dict[str, Any]:
    """Return a report's newest failed allocation, so many seconds after the exporter's first sample."""
    return {"time": NOW + 1 + after, "framework": framework, "verdict": "too_big"}


def sample(host: OneHolder, *agents: Agent, start: int = START) -> Snapshot:
    """Take a sample with these agents; pid 7 belongs to a pod."""
    facts = (ProcessFacts(7, start, uid=UID, user="ann", command="train", owner=POD),)
    return host.sample(facts=facts, agents=agents)


def counted(found: Snapshot) -> dict[str, int]:
    """Return the count of each framework; all are of the pod."""
    assert {(each.type, each.name) for each in found.ooms} <= {("pod", "team/train")}
    return {each.framework: each.failures for each in found.ooms}


def test_what_torch_counts_is_counted_once() -> None:
    """Each failure that torch counts is one, however many reports tell of it, and the newest has its time."""
    host = OneHolder()
    assert counted(sample(host, agent(0))) == {}
    assert counted(sample(host, agent(1, last_oom=failure(1)))) == {"torch": 1}
    assert counted(sample(host, agent(1, last_oom=failure(1)))) == {"torch": 1}
    found = sample(host, agent(3, last_oom=failure(3)))
    assert found.ooms == (OwnerOoms("pod", "team/train", "torch", 3, NOW + 4),)


def test_a_program_that_dies_of_it_still_counts() -> None:
    """The last report of an ended program counts and stays, and so does a failure on an unknown device."""
    host = OneHolder()
    sample(host, agent(0))
    host.host.processes = []
    assert counted(sample(host, agent(1, last_oom=failure(1)))) == {"torch": 1}
    assert counted(sample(host)) == {"torch": 1}
    host = OneHolder()
    sample(host, agent(0))
    elsewhere = [{**torch(reserved=2**30, ooms=1), "devices": [{"ordinal": 5, "reserved": 2**30, "ooms": 1}]}]
    told = Agent(7, START, UID, NOW, problem="", report=read_report(report(frameworks=elsewhere)))
    assert counted(sample(host, told)) == {"torch": 1}


def test_what_happened_before_the_exporter_started_is_not_counted() -> None:
    """A program that ran out of memory yesterday and lives has no failure today; its next one is."""
    host = OneHolder()
    assert counted(sample(host, agent(4, last_oom=failure(-500)))) == {}
    assert counted(sample(host, agent(5, last_oom=failure(2)))) == {"torch": 1}


def test_the_first_report_may_already_have_it() -> None:
    """A program that began while we watched, and failed before its first report, has failed once."""
    host = OneHolder()
    sample(host)
    host.reuse_pid(2**30)
    start = host.holder.start
    sample(host, start=start)
    assert counted(sample(host, agent(1, start=start, last_oom=failure(2)), start=start)) == {"torch": 1}


def test_other_frameworks_count_by_the_time_of_the_newest() -> None:
    """JAX counts nothing itself: another time is another failure, the same time is the same one."""
    host = OneHolder()
    sample(host, agent(None))
    for after in (1, 1, 3):
        found = sample(host, agent(None, last_oom=failure(after, "jax")))
    assert counted(found) == {"jax": 2}


def test_what_a_report_cannot_do() -> None:
    """Reset statistics take nothing back, another user counts for nobody, a time in the future is now."""
    host = OneHolder()
    for ooms in (0, 2, 0, 1):
        found = sample(host, agent(ooms))
    assert counted(found) == {"torch": 3}
    host = OneHolder()
    sample(host, agent(0))
    assert counted(sample(host, agent(1, uid=UID + 1, last_oom=failure(1)))) == {}
    host = OneHolder()
    sample(host, agent(0))
    (oom,) = sample(host, agent(1, last_oom=failure(10_000))).ooms
    assert oom.last == NOW + host.now
