"""An owner whose name was known stays known: after it is gone, and after a restart of the exporter."""

import msgspec
import pytest

from tests.support.host.one_holder import OneHolder
from vramledger.accounting.holders.processes import ProcessesState, ProcessTracker
from vramledger.accounting.sample import Sample
from vramledger.model.reading import Owner, ProcessFacts

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


def seen(*looks: tuple[Owner | None, tuple[str, ...] | None], restart: bool = False) -> Owner | None:
    """Return the owner of a process after these looks at it: what was resolved, and its cgroup."""
    host = OneHolder()
    tracker = ProcessTracker(ProcessesState())
    for owner, cgroup in looks:
        if restart:
            written = msgspec.json.encode(tracker.state)
            tracker = ProcessTracker(msgspec.json.decode(written, type=ProcessesState))
        host.now += 1
        facts = ProcessFacts(7, host.holder.start, user="ann", owner=owner, cgroup=cgroup)
        tracker.update_facts(Sample(host.reading(facts=(facts,)), {}, 1.0, after_gap=False))
    return tracker.known_facts()[-1].owner


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("known", "later"),
    [
        (POD, BARE_POD),
        (CONTAINER, BARE_CONTAINER),
        (JOB, UNNUMBERED),
        (POD, USER),
        (CONTAINER, USER),
        (JOB, None),
    ],
)
def test_worse_replaces_no_better(known: Owner, later: Owner | None, *, restart: bool) -> None:
    """A pod's, container's or job's name stays with its processes when nothing has the name any more."""
    assert seen((known, PLACE), (later, PLACE), restart=restart) == known
    assert seen((later, PLACE), (known, PLACE), restart=restart) == known


def test_a_container_without_a_name_in_a_known_pod_changes_nothing() -> None:
    """The name of the container is lost with the pod's."""
    assert seen((POD, PLACE), (POD._replace(container=ID), PLACE)) == POD


def test_another_owner_is_not_the_same_one_with_a_worse_name() -> None:
    """A process in the cgroup of another pod belongs to that one, whatever is known of it."""
    assert seen((POD, PLACE), (BARE_POD, ("0::/elsewhere",))) == BARE_POD
    assert seen((USER, PLACE), (CONTAINER, ("0::/elsewhere",))) == CONTAINER
    assert seen((Owner("unit", "a.service"), PLACE), (USER, ("0::/elsewhere",))) == USER


def test_a_user_in_a_unit_of_several_users_stays_the_owner() -> None:
    """When the daemon has ended, who is left in its unit is not the unit."""
    unit = Owner("unit", "hub.service", unit="hub.service")
    assert seen((unit._replace(type="user", name="ann"), PLACE), (unit, PLACE)) == ("user", "ann", *unit[2:])


@pytest.mark.parametrize("known", [USER, POD, Owner("unit", "a.service", unit="a.service")])
def test_an_owner_that_nobody_has_looked_for_replaces_none(known: Owner) -> None:
    """Facts that are read again come without an owner while names are late."""
    unknown = Owner("unknown", "")
    assert seen((known, PLACE), (unknown, PLACE)) == known
    assert seen((unknown, PLACE), (known, PLACE)) == known


def test_what_has_left_a_job_still_belongs_to_it() -> None:
    """Who moves itself out of its job, or whose cgroup is not known any more, is charged to the job."""
    assert seen((JOB, PLACE), (USER, ("0::/",))) == JOB
    assert seen((JOB, PLACE), (UNNUMBERED, None)) == JOB


def test_a_removed_cgroup_is_the_same_place() -> None:
    """The kernel marks a cgroup that was removed under a process."""
    assert seen((POD, PLACE), (BARE_POD, ("0::/place (deleted)",))) == POD
