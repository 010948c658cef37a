"""The CPU time of holders, from which work shows that the driver's rows do not name."""

import os
import time
from pathlib import Path

import pytest

from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace
from tests.support.standin.library import GIB, StandIn
from vramledger.config import SamplingConfig
from vramledger.readers.hosts.host import Host
from vramledger.readers.nvml.driver import Driver
from vramledger.sampling.sampler import Sampler


def test_a_sample_has_what_each_took_since_the_one_before(standin_here: StandIn, stage: Stage) -> None:
    """A holder that is alone, or was not there before, has none; nobody has another one's."""
    require_host_pid_namespace()
    idle, ours = stage.start(), os.getpid()
    device = standin_here.device(0)
    sampler = Sampler(SamplingConfig(), Driver.open(), Host(Path("/proc")))
    device.set_processes([(ours, GIB)])
    assert sampler.sample().cpu_taken == sampler.sample().cpu_taken == ()
    device.set_processes([(ours, GIB), (idle.pid, GIB)])
    assert sampler.sample().cpu_taken == ()
    for work in (0.2, 0.0):
        begun = time.process_time()
        while time.process_time() < begun + work:
            pass
        taken = dict(sampler.sample().cpu_taken)
        assert taken.keys() == {ours, idle.pid}
        assert work <= taken[ours] < time.process_time() - begun + 0.1
        assert taken[idle.pid] < 0.1
        assert all(seconds == pytest.approx(round(seconds, 4), abs=1e-9) for seconds in taken.values())
    device.set_processes([(ours, GIB)])
    assert sampler.sample().cpu_taken == ()
    device.set_processes([(ours, GIB), (idle.pid, GIB)])
    assert sampler.sample().cpu_taken == (), "what they took in several samples is not that of one"
