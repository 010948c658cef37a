"""Failed allocations are counted by owner, once each, and stay when their program has gone."""

from typing import Any

from tests.support.agent_client import report, torch
from tests.support.host.one_holder import NOW, START, OneHolder
from vramledger.model.agent_report import Agent, read_report
from vramledger.model.reading import Owner, ProcessFacts
from vramledger.model.snapshot import OwnerOoms, Snapshot

UID = 1000
POD = Owner("pod", "team/train", pod="train", namespace="team")


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
    """The last report of a program that has ended before the next sample is counted, and stays."""
    host = OneHolder()
    sample(host, agent(0))
    host.host.processes = []
    assert counted(sample(host, agent(1, last_oom=failure(1)))) == {"torch": 1}
    assert counted(sample(host)) == {"torch": 1}


def test_a_device_that_is_not_known_counts_too() -> None:
    """A failure on a device that could not be assigned to a GPU is a failure of its owner."""
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


def test_a_counter_that_begins_again_goes_on() -> None:
    """A program that resets torch's statistics takes nothing back, and hides nothing."""
    host = OneHolder()
    for ooms in (0, 2, 0, 1):
        found = sample(host, agent(ooms))
    assert counted(found) == {"torch": 3}


def test_nobody_counts_for_another() -> None:
    """A report by another user than the process's own counts for nobody."""
    host = OneHolder()
    sample(host, agent(0))
    assert counted(sample(host, agent(1, uid=UID + 1, last_oom=failure(1)))) == {}


def test_a_time_in_the_future_is_now() -> None:
    """A program's clock, or its lie, cannot keep an alert alive for ever."""
    host = OneHolder()
    sample(host, agent(0))
    (found,) = sample(host, agent(1, last_oom=failure(10_000))).ooms
    assert found.last == NOW + host.now
