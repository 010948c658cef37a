"""What counted launches change: who is idle, who works, and who is counted next."""

from __future__ import annotations

import pytest

from tests.support.host.one_holder import NOW, PID, START, OneHolder
from vramledger.accounting.owners.reservations import MPS_SERVER
from vramledger.model.reading import LaunchCount
from vramledger.model.snapshot import Grade, Holding, Snapshot, State

COUNTING = {"launches": (True, 0.0)}
"""The process that counts answers."""


@pytest.fixture
def host() -> OneHolder:
    """Return a host whose driver says nothing of work: without counts its holder is never idle."""
    one = OneHolder()
    one.say_nothing_of_work()
    return one


def counted(host: OneHolder, quiet: float | None, **more: object) -> Snapshot:
    """Take a sample with the holder's launches counted."""
    count = LaunchCount(PID, START, quiet, **more)  # type: ignore[arg-type]
    return host.sample(launches=(count,), collectors=COUNTING)


def only(snapshot: Snapshot) -> Holding:
    """Return the only holding."""
    ((holding,),) = (device.holdings for device in snapshot.devices)
    return holding


def test_no_call_proves_idleness(host: OneHolder) -> None:
    """A holder without a call for half of the threshold, and without other work for all of it, is idle."""
    host.watch(5)
    for second in range(5):
        assert only(counted(host, float(second))).state is State.ACTIVE
    host.watch(1)
    holding = only(counted(host, 6.0))

    assert (holding.state, holding.grade, holding.working) == (State.IDLE, Grade.PROVEN, False)
    assert holding.why.endswith("; no launch, copy or memset was counted in the last 6 s")
    assert holding.since == NOW + 1, "the first sample"


def test_too_short_a_count_proves_nothing(host: OneHolder) -> None:
    """A count of less than half of the threshold proves nothing, however long there was no other sign."""
    host.watch(30)

    assert only(counted(host, 4.9)).state is State.ACTIVE
    assert only(counted(host, None)).state is State.ACTIVE
    assert only(counted(host, None, problem="it maps no libcuda.so")).state is State.ACTIVE


def test_missed_thread_ends_the_proof(host: OneHolder) -> None:
    """When a call may have been missed, the proof ends; it is not taken for work."""
    host.watch(10)
    assert only(counted(host, 6.0)).state is State.IDLE
    holding = only(counted(host, 0.0))

    assert (holding.state, holding.last_active) == (State.ACTIVE, None)


def test_call_is_work(host: OneHolder) -> None:
    """A counted call makes an idle holder active at once, and its idle time begins again."""
    host.watch(10)
    assert only(counted(host, 6.0)).state is State.IDLE
    snapshot = counted(host, None, calls=1)

    assert (only(snapshot).state, only(snapshot).working) == (State.ACTIVE, True)
    assert only(snapshot).last_active == snapshot.time
    assert snapshot.to_count == ()
    assert only(counted(host, 9.0)).state is State.ACTIVE, (
        "a count that is older than the work proves nothing"
    )


def test_count_of_another_process_is_left_out(host: OneHolder) -> None:
    """A count of an earlier process with the same pid says nothing of this one."""
    host.watch(10)
    snapshot = host.sample(launches=(LaunchCount(PID, START - 1, 600.0),), collectors=COUNTING)

    assert only(snapshot).state is State.ACTIVE


def test_quiet_holder_is_to_be_counted(host: OneHolder) -> None:
    """A holder is to be counted from half of the threshold on, and stays so while it is idle."""
    assert [host.sample(collectors=COUNTING).to_count for _ in range(5)] == [()] * 5
    assert host.sample(collectors=COUNTING).to_count == ((PID, START),)
    host.watch(20)
    assert counted(host, 9.0).to_count == ((PID, START),)


def test_device_that_proves_it_needs_no_count() -> None:
    """Where the GPU's own counters prove the quiet, nobody is counted."""
    host = OneHolder()

    assert {host.sample(collectors=COUNTING).to_count for _ in range(30)} == {()}


def test_change_of_bytes_ends_the_wish(host: OneHolder) -> None:
    """A holder whose bytes change is at work, and is not to be counted."""
    host.watch(8)
    host.program.memory += 1

    assert host.sample(collectors=COUNTING).to_count == ()


def test_stopped_holder_is_not_counted(host: OneHolder) -> None:
    """A stopped process runs nothing, so it is not counted."""
    host.watch(8)
    reading = host.reading()
    stopped = tuple(row._replace(state="T") for row in reading.rows)

    assert host.sample(rows=stopped, collectors=COUNTING).to_count == ()


def test_other_pid_namespace_counts_nobody(host: OneHolder) -> None:
    """Where we are not in the host's PID namespace, a pid is another process to us, and nobody is counted."""
    host.watch(8)

    assert host.sample(host_pid_namespace=False, collectors=COUNTING).to_count == ()


def test_launches_are_shown_only_where_they_are_counted(host: OneHolder) -> None:
    """The snapshot has counts when the process that counts answers, and None otherwise."""
    assert counted(host, 1.0).launches == (LaunchCount(PID, START, 1.0),)
    assert host.sample().launches is None
    assert host.sample(collectors={"launches": (False, 0.0)}).launches is None


def test_mps_server_is_not_counted(host: OneHolder) -> None:
    """A server of MPS launches nothing itself while its clients work, so its quiet is never proven."""
    host.holder.command = MPS_SERVER
    host.watch(8)

    assert host.sample(collectors=COUNTING).to_count == ()


def test_nobody_is_counted_unless_asked(host: OneHolder) -> None:
    """Without ``--collector.launches`` nobody is to be counted."""
    host.watch(8)

    assert host.sample().to_count == ()
