"""A GPU that answers too late: its data is old, but the work that it shows is not lost."""

import time
from pathlib import Path

from tests.support.standin.library import GIB, StandIn
from tests.support.sure import sure
from vramledger.config import SamplingConfig
from vramledger.readers.hosts.host import Host
from vramledger.readers.nvml.driver import Driver
from vramledger.sampling.sampler import Sampler

LAST_CALL = "nvmlDeviceGetTotalEccErrors"
"""A call of every sample that comes after those for the work."""


def test_work_in_an_answer_that_came_too_late_is_in_the_next_one(standin_here: StandIn) -> None:
    """Rows and counters are read only once, so a dropped answer must not take them along."""
    device = standin_here.device(0)
    device.set_processes([(10, GIB)])
    sampler = Sampler(SamplingConfig(timeout=0.2), Driver.open(), Host(Path("/proc")))
    sampler.sample()
    device.raw_sample(10, timestamp=int(time.time() * 1e6), sm=30)
    device.do(sm=50.0)
    standin_here.hang(LAST_CALL)
    (late,) = sampler.sample().devices
    assert (late.error, late.process_utilization, late.activity) == ("timeout", None, None)
    standin_here.release()
    reading = late
    deadline = time.monotonic() + 30.0
    while reading.error is not None and time.monotonic() < deadline:
        (reading,) = sampler.sample().devices
    assert [row.pid for row in reading.process_utilization or ()] == [10]
    assert sure(reading.activity)["sm"] > 0.0
