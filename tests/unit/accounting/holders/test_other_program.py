"""A process that executes another program: what begins then, and what is still charged to the old one."""

from typing import Any

import pytest

from tests.support.host.model import GIB
from tests.support.host.one_holder import NOW, OneHolder
from tests.support.sure import sure
from vramledger.model.reading import Owner, ProcessFacts
from vramledger.model.snapshot import Holding, ProcessSnapshot, State

OLD, NEW = 11, 12


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
    pod = Owner("pod", "team/train", "team", "train", "main")
    old = host.executed(
        OLD, command="a.py", libraries=("torch",), settings=(("A", "1"),), signs=("LOCAL_RANK",), owner=pod
    )
    assert sure(old.facts).libraries == ("torch",)
    bare = Owner("pod", "1f3a2c64-8f0e-4c2e-9d53-0d8f4a5a7a01", pod="1f3a2c64-8f0e-4c2e-9d53-0d8f4a5a7a01")
    new = host.executed(NEW, command="b.py", libraries=(), denied=("environ",), owner=bare)
    assert new.facts == new.first
    assert new.facts is not None
    for known in (new.facts.libraries, new.facts.settings, new.facts.signs):
        assert known == ()
    assert new.facts.command == "b.py"
    assert new.facts.owner == pod


def test_a_program_that_takes_memory_late_is_active_since_then() -> None:
    """A process that ran for 15 minutes before its first byte was not active on the GPU in them."""
    host = Executing()
    host.driver_says(processes=())
    assert host.look(2) == ()
    del host.gpu.says["processes"]
    assert host.look()[0].since == NOW + host.now
