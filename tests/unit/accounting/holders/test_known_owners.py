"""What is known of a holder: its owner and its facts stay, and another program's do not count."""

from typing import Any

import msgspec
import pytest

from tests.support.builders import MIB, device, holding
from tests.support.host.model import GIB
from tests.support.host.one_holder import NOW, OneHolder
from tests.support.sure import sure
from vramledger.accounting.holders.processes import ProcessTracker, TrackedProcess
from vramledger.accounting.sample import Sample
from vramledger.accounting.tracker import join_holder_facts
from vramledger.model.holder_facts import KvCache
from vramledger.model.reading import Owner, ProcessFacts, ProcessRow, Reading
from vramledger.model.snapshot import Holding, ProcessSnapshot, State

UID = "1f3a2c64-8f0e-4c2e-9d53-0d8f4a5a7a01"
ID = "0123456789ab"
POD = Owner("pod", "team/train", "team", "train", "main")
BARE_POD = Owner("pod", UID, pod=UID, container=ID)
CONTAINER = Owner("container", "llm", container="llm")
BARE_CONTAINER = Owner("container", ID, container=ID)
JOB = Owner("slurm", "4711", slurm_job="4711")
UNNUMBERED = Owner("slurm", "s1a2b3", slurm_job="s1a2b3")
USER = Owner("user", "ann")
PLACE = ("0::/place",)
ROW = ProcessRow(101, 10100, "S", 1, 101, 101, 0, 1)
CACHE = KvCache(101, 10100, 0.25, 512 * MIB, 1000)
OLD, NEW = 11, 12


def seen(*looks: tuple[Owner | None, tuple[str, ...] | None], restart: bool = False) -> Owner | None:
    """Return the owner of a process after these looks at it: what was resolved, and its cgroup."""
    host = OneHolder()
    tracker = ProcessTracker({})
    for owner, cgroup in looks:
        if restart:
            written = msgspec.json.encode(tracker.state)
            tracker = ProcessTracker(msgspec.json.decode(written, type=dict[int, dict[int, TrackedProcess]]))
        host.now += 1
        facts = ProcessFacts(7, host.holder.start, user="ann", owner=owner, cgroup=cgroup)
        tracker.update_facts(Sample(host.reading(facts=(facts,)), {}, 1.0, after_gap=False))
    return tracker.known_facts()[-1].owner


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("known", "later"),
    [
        (POD, BARE_POD), (CONTAINER, BARE_CONTAINER), (JOB, UNNUMBERED), (POD, USER), (CONTAINER, USER),
        (JOB, None),
    ],
)  # fmt: skip
def test_worse_replaces_no_better(known: Owner, later: Owner | None, *, restart: bool) -> None:
    """A pod's, container's or job's name stays with its processes when nothing has the name any more."""
    assert seen((known, PLACE), (later, PLACE), restart=restart) == known
    assert seen((later, PLACE), (known, PLACE), restart=restart) == known


def test_what_is_lost_later_changes_no_owner() -> None:
    """A container's name, the cgroup, the place in a job or the daemon of a unit may go: the owner stays."""
    assert seen((POD, PLACE), (POD._replace(container=ID), PLACE)) == POD
    assert seen((POD, PLACE), (BARE_POD, ("0::/place (deleted)",))) == POD
    assert seen((JOB, PLACE), (USER, ("0::/",))) == JOB
    assert seen((JOB, PLACE), (UNNUMBERED, None)) == JOB
    unit = Owner("unit", "hub.service", unit="hub.service")
    assert seen((unit._replace(type="user", name="ann"), PLACE), (unit, PLACE)) == ("user", "ann", *unit[2:])


def test_another_owner_is_not_the_same_one_with_a_worse_name() -> None:
    """A process in the cgroup of another pod belongs to that one, whatever is known of it."""
    assert seen((POD, PLACE), (BARE_POD, ("0::/elsewhere",))) == BARE_POD
    assert seen((USER, PLACE), (CONTAINER, ("0::/elsewhere",))) == CONTAINER
    assert seen((Owner("unit", "a.service"), PLACE), (USER, ("0::/elsewhere",))) == USER


@pytest.mark.parametrize("known", [USER, POD, Owner("unit", "a.service", unit="a.service")])
def test_an_owner_that_nobody_has_looked_for_replaces_none(known: Owner) -> None:
    """Facts that are read again come without an owner while names are late."""
    unknown = Owner("unknown", "")
    assert seen((known, PLACE), (unknown, PLACE)) == known
    assert seen((unknown, PLACE), (known, PLACE)) == known


def join(
    *told: KvCache, row: ProcessRow = ROW, sizes: tuple[int | None, ...] = (512 * MIB,), reused: bool = False
) -> dict[int, KvCache]:
    """Join with one holder, who has these bytes on its devices."""
    devices = [device(index, [holding(101, size)]) for index, size in enumerate(sizes)]
    reading = Reading(1.0, 1.0, kv_caches=told)
    joined = join_holder_facts(reading, {101: row}, devices, {101} if reused else ())
    caches: dict[int, KvCache] = joined.get("kv_caches", {})
    return caches


def test_a_holder_has_the_cache_that_is_told_of_it() -> None:
    """A cache is of the process that was asked, and a size above its largest holding is not known."""
    assert join(CACHE) == {101: CACHE}
    assert join(CACHE, row=ROW._replace(start=10101)) == {}
    assert join(CACHE, reused=True) == {}
    assert join(CACHE._replace(pid=102)) == {}
    assert join(CACHE, sizes=()) == {}
    assert join() == {}
    unsized = CACHE._replace(memory=None)
    assert join(CACHE, sizes=(512 * MIB - 1,)) == {101: unsized}
    assert join(CACHE, sizes=(None,)) == {101: unsized}
    assert join(CACHE, sizes=(1, 512 * MIB)) == {101: CACHE}
    assert join(KvCache(101, 10100, None, 512 * MIB, None), sizes=(1,)) == {}


class Executing(OneHolder):
    """A holder whose row has the number of its program."""

    number = OLD

    def look(self, seconds: int = 1, **changes: Any) -> tuple[Holding, ...]:  # noqa: ANN401 any field
        """Sample once a second, and return the last holdings."""
        for _ in range(seconds):
            rows = tuple(row._replace(program=self.number) for row in self.host.reading(self.now + 1).rows)
            (device,) = self.sample(rows=rows, **changes).devices
        return device.holdings

    def executed(self, number: int, **facts: Any) -> ProcessSnapshot:  # noqa: ANN401 any field
        """Execute another program, whose facts come with the sample; return what is published of it."""
        self.number = number
        rows = tuple(row._replace(program=number) for row in self.host.reading(self.now + 1).rows)
        read = ProcessFacts(7, self.holder.start, user="ann", **facts)
        return self.sample(rows=rows, facts=(read,)).processes[7]


@pytest.mark.parametrize("listed", [True, False])
def test_a_new_programs_holding_begins_with_it(*, listed: bool) -> None:
    """What was idle or active before does not count, whether or not a sample was without the old holding."""
    host = Executing()
    assert host.look(30)[0].state is State.IDLE
    if not listed:
        host.driver_says(processes=())
        assert host.look() == ()
        del host.gpu.says["processes"]
    host.number = NEW
    host.program.memory = 3 * GIB
    (holding,) = host.look()
    assert (holding.state, holding.since, holding.peak) == (State.ACTIVE, NOW + host.now, 3 * GIB)
    assert host.look(5)[0].since == holding.since


def test_what_is_still_charged_to_the_old_program_is_as_old_as_it() -> None:
    """Bytes that do not change when another program is executed are not its own."""
    host = Executing()
    (before,) = host.look(30)
    host.number = NEW
    (after,) = host.look()
    assert (after.state, after.since, after.peak) == (before.state, before.since, before.peak)
    host.program.memory = GIB
    assert host.look()[0].since == NOW + host.now


@pytest.mark.parametrize("number", [0, OLD])
def test_a_program_that_is_the_same_or_not_readable_changes_nothing(number: int) -> None:
    """To see less does not show another program."""
    host = Executing()
    host.look(3)
    host.number = number
    host.program.memory = 4 * GIB
    assert host.look()[0].peak == 10 * GIB
    host.number = OLD
    host.program.memory = 3 * GIB
    assert host.look()[0].peak == 10 * GIB


def test_facts_of_the_old_program_are_none_of_the_new_one() -> None:
    """Libraries, settings and signs belong to a program; the owner to the process."""
    host = Executing()
    host.look(2)
    told = {"settings": (("A", "1"),), "signs": ("LOCAL_RANK",), "owner": POD}
    old = host.executed(OLD, command="a.py", libraries=("torch",), **told)
    assert sure(old.facts).libraries == ("torch",)
    bare = Owner("pod", UID, pod=UID)
    new = host.executed(NEW, command="b.py", libraries=(), denied=("environ",), owner=bare)
    assert new.facts == new.first
    known = sure(new.facts)
    assert (known.libraries, known.settings, known.signs) == ((), (), ())
    assert (known.command, known.owner) == ("b.py", POD)


def test_a_program_that_takes_memory_late_is_active_since_then() -> None:
    """A process that ran for 15 minutes before its first byte was not active on the GPU in them."""
    host = Executing()
    host.driver_says(processes=())
    assert host.look(2) == ()
    del host.gpu.says["processes"]
    assert host.look()[0].since == NOW + host.now
