"""A real program that does nothing beside a busy training, on a GPU without counters: the alert fires."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.alerts.test_host_kinds import MINUTES, steady
from tests.support.alerts.promtool import firing_labels
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace
from tests.support.standin.library import GIB, Code, StandIn
from tests.support.waiting import wait_until
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import SamplingConfig
from vramledger.model.snapshot import Grade, Holding, Snapshot, State
from vramledger.readers.hosts import thread_times
from vramledger.readers.hosts.host import Host
from vramledger.readers.nvml.driver import Driver
from vramledger.sampling.sampler import Sampler

NOTEBOOK = """
import select, sys, threading
for _ in range(20):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
waiting = select.epoll()
waiting.register(0, select.EPOLLIN)
print("ready", flush=True)
waiting.poll()
"""
"""Like a notebook that nobody uses: the main thread waits in epoll, and a pool of threads for work."""


def test_idle_program_beside_a_training_is_proven_idle_and_raises_the_alert(
    standin_here: StandIn, stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without GPM, and while the driver names the training in every row and gives a rate of 100 %."""
    require_host_pid_namespace()
    monkeypatch.setattr(thread_times, "LOOK_INTERVAL", 0.3)
    training = stage.start()
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as notebook:
        assert notebook.stdout is not None
        notebook.stdout.readline()
        standin_here.fail("nvmlGpmQueryDeviceSupport", Code.NOT_SUPPORTED)
        device = standin_here.device(0)
        device.set_processes([(notebook.pid, 20 * GIB), (training.pid, 30 * GIB)])
        device.set(gpu_utilization=100)
        sampler = Sampler(SamplingConfig(), Driver.open(), Host(Path("/proc")))
        tracker = HoldingTracker(idle_after=3.0)
        shown: list[Snapshot] = []

        def sampled() -> Holding | None:
            device.idle(training.pid)
            device.busy(training.pid, sm=1.0)
            time.sleep(0.1)  # the pace of the samples
            shown[:] = [tracker.update(sampler.sample())]
            sampler.search_host()
            holdings = {each.pid: each for each in shown[0].devices[0].holdings}
            assert holdings[training.pid].state is not State.IDLE
            held = holdings[notebook.pid]
            return held if (held.state, held.grade) == (State.IDLE, Grade.PROVEN) else None

        held = wait_until(sampled, "the notebook is proven to be idle")
        notebook.kill()

    assert held is not None
    assert held.wasted
    (fires,) = firing_labels(tmp_path, [*steady("old", shown[0])], [MINUTES - 5])
    assert ("GpuMemoryHoarded", str(notebook.pid)) in {
        (labels["alertname"], labels.get("pid")) for labels in fires
    }
