"""A sampler whose GPUs go on with what they do looks at them, and samples only what is new."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.standin.library import GIB, StandIn
from tests.support.sure import sure
from vramledger.config import SamplingConfig
from vramledger.readers.hosts.host import Host
from vramledger.readers.nvml import utilization
from vramledger.readers.nvml.driver import Driver
from vramledger.sampling.sampler import Sampler

LONG = 3600.0


@pytest.fixture
def calm(standin_here: StandIn, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """Return the sampler of a GPU on which this process has memory, and which is calm without a wait."""
    for name in ("ATTENTION", "STEADY_AFTER"):
        monkeypatch.setattr(utilization, name, 1e-6)
    standin_here.device(0).set_processes([(os.getpid(), GIB)])
    sampler = Sampler(SamplingConfig(timeout=0.5), Driver.open(), Host(Path("/proc")))
    for _ in range(4):  # the first one of the counters, the facts of the holder, the list after them
        sampler.sample()
    return sampler


def test_while_nothing_changes_there_is_no_sample(calm: Sampler) -> None:
    """A calm GPU gets a look at each turn and a sample after the longest time."""
    assert [calm.sample_if_changed(LONG) for _ in range(5)] == [None] * 5
    assert calm.sample_if_changed(0.0) is not None


def test_a_change_is_in_the_sample_of_its_own_turn(standin_here: StandIn, calm: Sampler) -> None:
    """Whatever a look finds is sampled at once, with the time of the last look that found nothing."""
    calm.sample_if_changed(LONG)
    looked = time.monotonic()
    standin_here.device(0).set_processes([(os.getpid(), 2 * GIB)])
    reading = sure(calm.sample_if_changed(LONG))
    assert [entry.memory for entry in reading.devices[0].processes or ()] == [2 * GIB]
    assert sure(reading.unchanged) <= looked <= reading.monotonic


def test_a_sample_without_a_look_before_it_says_so(calm: Sampler) -> None:
    """The time of a look belongs to the sample after it, and to no other one."""
    calm.sample_if_changed(LONG)
    assert calm.sample().unchanged is not None
    assert calm.sample().unchanged is None


CHANGES: dict[str, Callable[[StandIn], object]] = {
    "XID": lambda it: it.xid(79),
    "a GPU hangs": lambda it: it.hang("nvmlDeviceGetMemoryInfo_v2"),
    "a GPU is lost": lambda it: setattr(it.device(0), "lost", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_trouble_ends_it(standin_here: StandIn, calm: Sampler, change: Callable[[StandIn], object]) -> None:
    """No error waits for the next sample that would be due."""
    assert calm.sample_if_changed(LONG) is None
    change(standin_here)
    deadline = time.monotonic() + 30.0
    while (reading := calm.sample_if_changed(LONG)) is None:
        assert time.monotonic() < deadline
    assert reading.events or reading.devices[0].error in ("timeout", "lost")
