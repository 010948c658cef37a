"""When a new sampler is started: immediately, later, or when the driver's files change."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace, require_root
from tests.support.serving import until
from tests.support.standin.library import GIB, Code, StandIn
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.config import SamplingConfig
from vramledger.model.reading import Reading
from vramledger.readers.hosts.driver_watch import DriverWatch
from vramledger.readers.hosts.host import Host
from vramledger.readers.nvml import utilization
from vramledger.readers.nvml.driver import Driver
from vramledger.sampling import supervisor
from vramledger.sampling.protocol import starter_command
from vramledger.sampling.sampler import Sampler
from vramledger.sampling.supervisor import Supervisor

NEVER = 10_000.0
"""Seconds, longer than any test: only a change of the files can end this wait."""


class Watched:
    """A running supervisor and its newest reading."""

    def __init__(self, config: SamplingConfig) -> None:
        self.supervisor = Supervisor(config)
        self.readings: list[Reading] = []

    async def listen(self) -> None:
        async for reading in self.supervisor.readings():
            if reading is not None:
                self.readings.append(reading)

    @property
    def well(self) -> bool:
        return bool(self.readings) and self.readings[-1].failure is None

    async def data(self) -> int:
        """Wait for data of the sampler that runs now, and return its pid."""
        seen = len(self.readings)
        await until(lambda: self.supervisor.pid is not None and self.well and len(self.readings) > seen)
        return sure(self.supervisor.pid)

    async def failed(self, reason: str) -> None:
        """Wait until there is only a failure, and no sampler runs."""
        await until(lambda: bool(self.readings) and self.readings[-1].failure is not None)
        await until(lambda: self.supervisor.pid is None)
        assert sure(self.readings[-1].failure)[0] == reason


@asynccontextmanager
async def watched(root: Path) -> AsyncIterator[Watched]:
    """Run a supervisor that samples ten times a second."""
    each = Watched(SamplingConfig(interval=0.1, timeout=10.0, rootfs=root))
    listening = asyncio.create_task(each.listen())
    try:
        yield each
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await each.supervisor.stop()


@pytest.fixture
def driver(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Make samplers use the stand-in, and their supervisor wait for ever after the first restart.

    However slow the machine is, no sampler of a test runs for so long that it counts as working.
    """
    for name, value in standin.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(supervisor, "BACKOFF", (0.0, NEVER))
    monkeypatch.setattr(supervisor, "STABLE_AFTER", NEVER)
    return standin


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a host's file system with a directory of devices."""
    (tmp_path / "root" / "dev").mkdir(parents=True)
    return tmp_path / "root"


async def test_a_driver_that_comes_back_is_met_at_once(driver: StandIn, root: Path) -> None:
    """A device file that appears ends the wait, however long it would be."""
    driver.driver_error = Code.DRIVER_NOT_LOADED
    async with watched(root) as each:
        await until(lambda: len(each.readings) == 2)
        await each.failed("no-driver")
        driver.driver_error = Code.SUCCESS
        (root / "dev" / "nvidiactl").touch()
        await each.data()


async def test_a_new_driver_is_met(driver: StandIn, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that appears where the loader looks for it ends the wait as well."""
    place = root.with_name("lib")
    place.mkdir()
    (place / "libnvidia-ml.so.1").touch()  # no library: the host's own is not found either
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place))
    async with watched(root) as each:
        await until(lambda: len(each.readings) == 2)
        await each.failed("no-library")
        (place / "new").symlink_to(driver.library)
        (place / "new").rename(place / "libnvidia-ml.so.1")
        await each.data()


async def test_the_first_that_is_killed_young_is_replaced_at_once(driver: StandIn, root: Path) -> None:
    """A sampler that had data is replaced; if the next one ends as soon, there is a wait."""
    async with watched(root) as each:
        pids = []
        for _ in range(3):
            pids.append(await each.data())
            os.kill(pids[-1], signal.SIGKILL)
            await until(lambda: each.supervisor.pid != pids[-1])
        assert len(set(pids)) == 3
        await each.failed("sampler-exit")
        (root / "dev" / "nvidia0").touch()  # it waits, because this ends the wait
        assert await each.data() not in pids
    assert driver.calls("nvmlInit_v2") + driver.calls("nvmlInitWithFlags") == 4


async def test_no_endless_restarts(driver: StandIn, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes all the time soon no longer ends the wait."""
    driver.driver_error = Code.DRIVER_NOT_LOADED
    monkeypatch.setattr(supervisor, "MAX_EARLY_RESTARTS", 2)
    looks = itertools.count()
    monkeypatch.setattr(DriverWatch, "read_state", lambda _: next(looks))
    async with watched(root) as each:
        # The first start, its second try, and two restarts for each change.
        await until(lambda: len(each.readings) == 6)
        await each.failed("no-driver")
        asked = next(looks)
        await asyncio.sleep(1.0)  # ten sampling intervals
        assert next(looks) == asked + 1, "nobody has looked, and nobody was started"
        assert len(each.readings) == 6


def test_what_is_a_sign(tmp_path: Path) -> None:
    """A module, a GPU, a device file and its rights change the state; time does not."""
    devices, module = tmp_path / "dev", tmp_path / "proc" / "driver" / "nvidia"
    devices.mkdir()
    signs = DriverWatch(tmp_path / "proc", tmp_path)
    seen = [signs.read_state()]

    def changed() -> bool:
        seen.append(signs.read_state())
        return seen[-1] not in seen[:-1] and signs.read_state() == seen[-1]

    for change in (
        lambda: (module / "gpus" / "0000:01:00.0").mkdir(parents=True),
        lambda: (module / "version").write_text("NVRM version: 580\n", encoding="ascii"),
        lambda: (module / "version").write_text("NVRM version: 590\n", encoding="ascii"),
        (module / "gpus" / "0000:02:00.0").mkdir,
        (devices / "nvidia0").touch,
        lambda: (devices / "nvidia0").chmod(0o600),
    ):
        change()
        assert changed()
    (devices / "null").touch()
    assert not changed()
    (devices / "nvidia0").unlink()
    assert signs.read_state() == seen[4]


NO_AMBIENT = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(28, 1 << 6, 0, 0, 0) != 0:  # PR_SET_SECUREBITS, SECBIT_NO_CAP_AMBIENT_RAISE
    sys.exit("the bit cannot be set")
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_it_says_what_it_could_not_give_up_or_pass_on() -> None:
    """Where the kernel refuses a step, the starter says so in its exporter's format, and goes on."""
    require_root()
    exporter, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with exporter, other:
        starter = subprocess.Popen(
            [sys.executable, "-c", NO_AMBIENT, *starter_command("{}", "info", "json")],
            stdin=other.fileno(), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        other.close()
        exporter.send(b"kill")  # there is no sampler to kill, so nothing happens
        exporter.close()  # it ends with the exporter
        _, errors = starter.communicate(timeout=30)
    assert starter.returncode == 0
    assert '"level": "warn"' in errors
    refused = errors.count("prctl: Operation not permitted")
    assert errors.count("Could not give up all privileges") == refused > 0


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
    reading = sure(wait_until(lambda: calm.sample_if_changed(LONG), "the trouble"))
    assert reading.events or reading.devices[0].error in ("timeout", "lost")


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
