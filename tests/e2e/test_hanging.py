"""Calls that hang, samplers that stop or die, exporters that pause: old data is never new; all recover."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.support.exporter import QUICK, Exporter, Page, alive, serving
from tests.support.players.stage import Stage
from tests.support.standin.library import GIB, StandIn
from tests.support.waiting import wait_until
from vramledger.sampling.supervisor import SILENCE_GRACE

OLD = 0.1 + 0.3 + SILENCE_GRACE + 1
"""Seconds after which nothing of before is now: interval, timeout, what the supervisor adds, and some."""

HANGS = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetTemperature"]


def started(exporter: Exporter) -> Page:
    return exporter.until(lambda page: page.device_up(0) == page.device_up(1) == 1, "both GPUs")


@pytest.mark.repeats(kept=2)
@pytest.mark.parametrize("function", HANGS)
def test_a_hanging_call_costs_its_gpu(standin: StandIn, stage: Stage, function: str) -> None:
    """While a call hangs on one GPU the other is still sampled; afterwards the first has new data again."""
    here, there = stage.start().pid, stage.start().pid
    standin.device(0).set_processes([(here, GIB)])
    standin.device(1).set_processes([(there, GIB)])
    with serving(*QUICK, driver=standin.env()) as exporter:
        started(exporter)
        sampler = exporter.sampler
        before = standin.calls(function, 1)
        standin.hang(function, 1)
        standin.hang("nvmlDeviceGetTemperatureV", 1)
        page = exporter.until(lambda page: page.device_up(1) == 0, "the hanging GPU to be given up")
        calls = standin.calls(function, 1)
        assert calls > before

        standin.device(1).set_processes([(there, 2 * GIB)])
        for size in range(2, 7):
            standin.device(0).set_processes([(here, size * GIB)])
            later = exporter.next_sample()
            assert later.time > page.time
            assert (later.up, later.device_up(0), later.device_up(1)) == (True, 1, 0)
            assert later.ledger(0)["active"] == size * GIB
            assert later.state(there) is None
            page = later
        assert standin.calls(function, 1) == calls, "one thread hangs, and no others are sent after it"

        standin.release()
        page = exporter.until(lambda page: page.device_up(1) == 1, "its return")
        assert page.ledger(1)["active"] == 2 * GIB, "what it answers now, not what it was asked then"
        assert exporter.sampler == sampler


def test_all_gpus_hanging_is_no_data(standin: StandIn) -> None:
    """When no GPU answers there is no data, scrapes still work, the data returns; SIGTERM leaves nothing."""
    with serving(*QUICK, driver=standin.env()) as exporter:
        started(exporter)
        standin.hang("nvmlDeviceGetMemoryInfo_v2")
        page = exporter.until(lambda page: not page.up, "up 0")
        later = exporter.next_sample()
        assert later.failures("timeout") > page.failures("timeout") >= 1
        assert exporter.get("/-/healthy")[0] == exporter.get("/")[0] == exporter.get("/-/ready")[0] == 200
        standin.release()
        started(exporter)
        sampler = exporter.sampler
        standin.hang("nvmlDeviceGetMemoryInfo_v2")
        exporter.until(lambda page: not page.up, "up 0")
        sampler.suspend()
        assert exporter.stop().code == 0
        assert not alive(sampler)


def test_a_hanging_start_is_alive_and_ends_on_request(standin: StandIn) -> None:
    """While nvmlInit hangs, the exporter is healthy, not ready, without data, and can be stopped."""
    standin.hang("nvmlInitWithFlags")
    standin.hang("nvmlInit_v2")
    with serving(*QUICK, driver=standin.env()) as exporter:
        sampler = exporter.sampler
        wait_until(lambda: standin.calls("nvmlInit_v2") + standin.calls("nvmlInitWithFlags"), "nvmlInit")
        page = exporter.scrape()
        assert not page.up
        assert page.value("sample_timestamp_seconds") is None
        assert exporter.get("/-/healthy")[0] == 200
        assert exporter.get("/-/ready") == (503, "vramledger has not finished its first sample yet.\n")
        assert exporter.stop().code == 0
        assert not alive(sampler)


@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo_v2"])
def test_a_gpu_that_hangs_at_the_start_costs_itself(standin: StandIn, function: str) -> None:
    """A GPU that hangs when the sampler starts does not prevent the data of the others."""
    standin.hang(function, 1)
    with serving(*QUICK, driver=standin.env()) as exporter:
        page = exporter.until(lambda page: page.up, "the data of the other GPU")
        assert (page.device_up(0), page.device_up(1)) == (1, 0)
        standin.release()
        page = started(exporter)
        assert page.labels("device_up", "uuid") == {standin.device(index).uuid for index in (0, 1)}


def test_a_stopped_sampler_is_replaced(standin: StandIn) -> None:
    """A sampler that sends nothing is killed, counted as a timeout, and replaced by a new one."""
    with serving(*QUICK, driver=standin.env()) as exporter:
        started(exporter)
        old = exporter.sampler
        old.suspend()
        page = exporter.until(lambda page: page.failures("timeout") == 1, "the silence to be noticed")
        assert not page.up
        wait_until(lambda: not alive(old), "the old sampler's end")
        page = started(exporter)
        assert exporter.sampler != old
        assert page.failures("timeout") == 1
        assert page.failures("sampler-exit") == 0


def test_an_exporter_that_dies_takes_its_sampler_along(standin: StandIn) -> None:
    """A killed exporter leaves no sampler behind, not even one that hangs in the driver."""
    with serving(*QUICK, driver=standin.env()) as exporter:
        started(exporter)
        sampler = exporter.sampler
        standin.hang("nvmlDeviceGetMemoryInfo_v2")
        standin.hang("nvmlDeviceGetCount_v2")
        sampler.suspend()  # it could not notice that the pipe is closed
        exporter.process.kill()
        wait_until(lambda: not alive(sampler), "the sampler's end")


def test_an_exporter_that_slept_serves_no_old_sample(standin: StandIn, stage: Stage) -> None:
    """After a pause of the exporter no older sample is served as current, and no XID or name is lost."""
    old, new = stage.start().pid, stage.start().pid
    standin.device(0).set_processes([(old, GIB)])
    with serving(*QUICK, driver=standin.env()) as exporter:
        before = started(exporter)
        exporter.process.suspend()
        standin.device(0).set_processes([(new, 2 * GIB)])
        standin.xid(79)
        asleep = time.monotonic()
        wait_until(lambda: time.monotonic() - asleep > OLD, "what was sampled to get old")
        exporter.process.resume()

        page = exporter.scrape()
        assert page.state(old) is None, "what was true before the pause"
        page = exporter.until(lambda page: page.up, "fresh data")
        assert page.time > before.time
        assert page.state(new) == "active"
        assert page.labels("process_info", "command", pid=new) == {"player.py"}
        assert page.value("device_xid_errors_total", gpu=0, xid=79) == 1


def test_an_interpreter_that_is_replaced_under_us(standin: StandIn, tmp_path: Path) -> None:
    """While no sampler can be started (Python is being upgraded) there is no data; starts are tried again."""
    python = tmp_path / "python"
    python.symlink_to(Path(sys.executable).resolve())
    driver = {**standin.env(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with serving(*QUICK, driver=driver, python=str(python)) as exporter:
        started(exporter)
        target = python.readlink()
        python.unlink()
        exporter.sampler.kill()
        exporter.until(lambda page: page.failures("internal"), "the failed start to be counted")
        python.symlink_to(target)
        started(exporter)
