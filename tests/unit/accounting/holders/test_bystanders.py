"""A pid that a program without a GPU has now: the bytes that NVML lists under it are a dead holder's."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.host.model import GIB, Process
from tests.support.host.one_holder import PID, SHELL, OneHolder
from tests.support.host.programs import Fixed
from tests.support.sure import sure
from vramledger.model.reading import ProcessFacts
from vramledger.model.snapshot import DeviceSnapshot, State


def sample(host: OneHolder, *, uses_gpu: bool | None, **changes: Any) -> DeviceSnapshot:  # noqa: ANN401 any field
    """Take a sample in which the facts of the process with the pid say whether it uses a GPU."""
    facts: ProcessFacts = replace(host.holder.facts(host.now + 1), uses_gpu=uses_gpu)
    (device,) = host.sample(**{"facts": (facts,), "device_files": True, **changes}).devices
    return device


def test_bytes_under_the_pid_of_a_program_without_a_gpu_are_dead() -> None:
    """Also at the first sample, when nobody has seen the holder: it has ended, and nobody else is blamed."""
    host = OneHolder()
    device = sample(host, uses_gpu=False)
    (holding,) = device.holdings
    assert holding.state is State.DEAD
    assert "does not use the GPU" in holding.why
    assert holding.start is None
    assert [(each.type, each.name) for each in sure(device.owner_usage).owners] == [("unknown", "")]


def test_the_program_that_has_the_pid_is_not_shown_as_the_holder() -> None:
    """Neither its command nor its user stands beside bytes that are not its own, in any later sample."""
    host = OneHolder()
    sample(host, uses_gpu=False)
    shot = host.sample(device_files=True)
    assert shot.devices[0].holdings[0].state is State.DEAD
    assert shot.facts_of(host.holder.pid) is None


@pytest.mark.parametrize("uses_gpu", [True, None])
def test_a_program_that_may_use_a_gpu_is_the_holder(uses_gpu: bool | None) -> None:
    """Where its files cannot be read, nothing speaks against it."""
    (holding,) = sample(OneHolder(), uses_gpu=uses_gpu).holdings
    assert holding.state is State.ACTIVE


def test_a_program_that_begins_to_use_a_gpu_is_a_holder_from_then_on() -> None:
    """The next facts say that it has the device open, so it is alive and not a dead holder."""
    host = OneHolder()
    assert sample(host, uses_gpu=False).holdings[0].state is State.DEAD
    device = sample(host, uses_gpu=True)
    assert device.holdings[0].state is State.ACTIVE
    assert "ann" in [each.name for each in sure(device.owner_usage).owners if each.held]


def test_without_the_host_s_processes_nobody_is_dead() -> None:
    """Where pids are not the host's, the program with the number proves nothing."""
    host = OneHolder()
    (holding,) = sample(host, uses_gpu=False, host_pid_namespace=None).holdings
    assert holding.state is State.UNKNOWN


def test_a_zombie_is_not_taken_for_a_bystander() -> None:
    """A process that has exited has no files and no mappings, which says nothing about what it held."""
    host = OneHolder()
    host.holder.fates = {"zombie": host.now}
    (holding,) = sample(host, uses_gpu=False).holdings
    assert holding.state is State.ZOMBIE


def test_where_users_of_the_driver_cannot_be_recognised_nobody_is_a_bystander() -> None:
    """If not even we have a device file open, a program without one may well be the holder."""
    host = OneHolder()
    (holding,) = sample(host, uses_gpu=False, device_files=False).holdings
    assert holding.state is State.ACTIVE


def test_another_holder_that_is_recognised_is_enough() -> None:
    """One holder with a device file open shows that we can distinguish holders from bystanders here."""
    host = OneHolder()
    other = Process(8, {0: Fixed(GIB)}, begin=-900.0, user="ben", framework="", starter=SHELL)
    host.host.processes = [*host.host.processes, other]
    facts = (replace(other.facts(1.0), uses_gpu=True), replace(host.holder.facts(1.0), uses_gpu=False))
    (device,) = host.sample(facts=facts).devices
    assert {each.pid: each.state for each in device.holdings} == {PID: State.DEAD, 8: State.ACTIVE}
