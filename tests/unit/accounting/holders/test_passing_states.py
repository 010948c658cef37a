"""What a normal end looks like for seconds is told nowhere; what lasts is told with its own beginning."""

import pytest

from tests.support.host.model import GIB, Fate
from tests.support.host.one_holder import PID, OneHolder
from tests.support.host.scrapes import SimulatedExporter
from vramledger.accounting.tracker import TOLD_AFTER
from vramledger.model.holder_facts import Ties
from vramledger.model.reading import ProcessEntry
from vramledger.model.snapshot import Grade, State
from vramledger.storage.summary import marks_between, summarise


def watched(fate: Fate) -> OneHolder:
    """Return a host of an exporter, whose holder meets its fate at the next sample."""
    host = OneHolder()
    host.exporter = SimulatedExporter(host.host, idle_after=600.0, told_after=TOLD_AFTER)
    host.watch(3)
    host.holder.fates = {fate: host.now + 1}
    return host


@pytest.mark.parametrize("fate", ["zombie", "orphaned", "stopped", "dead", "unowned"])
def test_what_lasts_less_than_five_seconds_is_told_nowhere(fate: Fate) -> None:
    """State, waste and timeline are as before, and the evidence says what is seen so far."""
    host = watched(fate)
    before = summarise(host.sample(after=0.0), {})
    shots = [host.sample() for _ in range(5)]
    for shot in shots:
        (holding,) = shot.devices[0].holdings
        assert holding.state is State.ACTIVE
        assert "so far: " in holding.why
        assert not holding.wasted
        assert list(marks_between(shot.time or 0.0, before, summarise(shot, {}))) == []


@pytest.mark.parametrize(
    ("fate", "state"),
    [
        ("zombie", State.ZOMBIE),
        ("orphaned", State.ORPHANED),
        ("stopped", State.STOPPED),
        ("dead", State.DEAD),
        ("unowned", State.ORPHANED),
    ],
)
def test_what_lasts_is_told_with_its_own_beginning(fate: Fate, state: State) -> None:
    """After five seconds the state is told, and it has been so since it began."""
    host = watched(fate)
    first = host.sample().time
    holding = host.watch(5)
    assert holding.state is state
    assert holding.since == first
    assert "so far" not in holding.why


def test_an_end_that_goes_through_several_states_is_none_of_them() -> None:
    """Its launcher ends, it is a zombie for a moment, and then the driver lists its pid for another one."""
    host = watched("orphaned")
    now = host.now + 1
    host.holder.fates = {"orphaned": now, "zombie": now + 3, "dead": now + 5}
    assert {host.holding().state for _ in range(9)} == {State.ACTIVE}


def test_a_program_that_is_slowed_down_is_not_stopped() -> None:
    """A program under cpulimit, strace or a debugger is stopped in many samples, and works between them."""
    host = watched("stopped")
    host.sample()
    for second in range(30):
        host.driver_says(processes=(ProcessEntry(PID, GIB + second, "C"),))  # it allocates
        assert host.holding().state is State.ACTIVE, second


def test_a_main_thread_that_has_ended_makes_no_zombie_of_threads_that_work() -> None:
    """It works, and nothing is wasted; it is a zombie once none of its threads works."""
    host = watched("headless")
    host.exporter = SimulatedExporter(host.host, idle_after=10.0)
    host.program.work = 0.5
    holding = host.watch(20)
    assert (holding.state, holding.grade, holding.wasted) == (State.ACTIVE, Grade.PROVEN, False)
    assert "its main thread has exited, 3 other thread(s) still run" in holding.why
    host.program.work = 0.0
    holding = host.watch(15)
    assert (holding.state, holding.wasted) == (State.ZOMBIE, True)
    assert holding.grade is not Grade.INFERRED


def test_an_idle_program_whose_launcher_has_ended_is_idle() -> None:
    """What is proven is told before what is only inferred, and the evidence has both."""
    host = OneHolder()
    host.sample()
    host.holder.fates = {"orphaned": host.now + 1}
    ties = Ties(PID, host.holder.start, adopted=True, worker=True)
    for _ in range(15):
        shot = host.sample(ties=(ties,))
    (holding,) = shot.devices[0].holdings
    assert holding.state is State.IDLE
    assert holding.grade is not Grade.INFERRED
    assert "was seen alive and has ended" in holding.why
