"""Which holders are stuck in the driver, and which only wait there for a moment."""

from tests.support.host.one_holder import PID, START, OneHolder
from vramledger.model.reading import DriverWait, XidEvent
from vramledger.model.snapshot import State


def stuck_since_now() -> OneHolder:
    """Return a host whose holder sleeps in the driver from its next sample on."""
    host = OneHolder()
    host.sample()
    host.holder.fates = {"stuck": host.now + 1}
    return host


def test_a_thread_that_sleeps_in_the_driver_for_more_than_a_minute_makes_its_process_stuck() -> None:
    """For a minute the holder is what it was; after that it is stuck, and the evidence names the function."""
    host = stuck_since_now()
    assert host.watch(61).state is not State.STUCK
    holding = host.watch(1)
    assert holding.state is State.STUCK
    assert holding.why.startswith(f"thread {PID + 1} has slept in the driver (os_acquire_mutex)")
    assert holding.wasted


def test_the_longest_wait_of_a_process_counts() -> None:
    """Of several threads the one that has slept longest is the evidence, in whatever order they are read."""
    waits = tuple(
        DriverWait(PID, START, thread, "os_acquire_mutex", seconds)
        for thread, seconds in ((1, 61.0), (2, 90.0), (3, 70.0))
    )
    (device,) = OneHolder().sample(waits=waits).devices
    assert device.holdings[0].why.startswith("thread 2 has slept in the driver (os_acquire_mutex)")


def test_a_stuck_process_that_wakes_is_no_longer_stuck() -> None:
    """When the driver lets the thread go on, the state ends at once."""
    host = stuck_since_now()
    assert host.watch(70).state is State.STUCK
    host.holder.fates = {}
    assert host.watch(1).state is not State.STUCK


def test_the_wait_of_another_process_with_the_pid_says_nothing() -> None:
    """A wait belongs to a process by its start time, and not to whoever has the pid now."""
    host = OneHolder()
    for _ in range(100):
        host.sample(waits=(DriverWait(PID, START - 1, PID, "os_acquire_mutex", 100.0),))
    assert host.sample().devices[0].holdings[0].state is not State.STUCK


def test_the_xid_errors_of_the_gpu_are_part_of_the_evidence() -> None:
    """A GPU that has reported errors says so beside the wait: the usual cause of both is one fault."""
    host = stuck_since_now()
    event = XidEvent(host.gpu.uuid(host.now), 79, 0.0)
    host.sample(events=(event,))
    assert host.watch(70).why.endswith("this GPU has had XID 79")


def test_a_zombie_whose_thread_sleeps_in_the_driver_says_so() -> None:
    """The process has exited, so it is a zombie; the thread that holds its memory is in the evidence."""
    host = OneHolder()
    host.sample()
    host.holder.fates = {"headless": host.now + 1, "stuck": host.now + 1}
    holding = host.watch(70)
    assert holding.state is State.ZOMBIE
    assert "has slept in the driver (os_acquire_mutex)" in holding.why
