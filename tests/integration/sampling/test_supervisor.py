"""When a new sampler is started: immediately, later, or when the driver's files change."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.requirements import require_root
from tests.support.standin.library import Code, StandIn
from tests.support.sure import sure
from vramledger.config import SamplingConfig
from vramledger.model.reading import Reading
from vramledger.readers.hosts.driver_watch import DriverWatch
from vramledger.sampling import supervisor
from vramledger.sampling.protocol import starter_command
from vramledger.sampling.supervisor import Supervisor

NEVER = 10_000.0
"""Seconds, longer than any test: only a change of the files can end this wait."""


class Watched:
    """A running supervisor and its newest reading."""

    def __init__(self, config: SamplingConfig) -> None:
        self.supervisor = Supervisor(config)
        self.readings: list[Reading] = []

    async def listen(self) -> None:
        """Store the supervisor's readings."""
        async for reading in self.supervisor.readings():
            if reading is not None:
                self.readings.append(reading)

    @property
    def well(self) -> bool:
        """Whether there is data now."""
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
        failure = sure(self.readings[-1].failure)
        assert failure[0] == reason


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the action of another process."""
    while not condition():  # noqa: ASYNC110 it has no event of ours to set
        await asyncio.sleep(0.01)


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


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test to its end."""

    async def bounded() -> None:
        await asyncio.wait_for(test(), 100)

    asyncio.run(bounded())


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


def test_a_driver_that_comes_back_is_met_at_once(driver: StandIn, root: Path) -> None:
    """A device file that appears ends the wait, however long it would be."""
    driver.driver_error = Code.DRIVER_NOT_LOADED

    async def test() -> None:
        async with watched(root) as each:
            await until(lambda: len(each.readings) == 2)
            await each.failed("no-driver")
            driver.driver_error = Code.SUCCESS
            (root / "dev" / "nvidiactl").touch()
            await each.data()

    run(test)


def test_a_driver_that_is_installed_is_met_at_once(
    driver: StandIn, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that appears where the loader looks for it ends the wait as well."""
    place = tmp_path / "lib"
    place.mkdir()
    (place / "libnvidia-ml.so.1").touch()  # no library: the host's own is not found either
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place))

    async def test() -> None:
        async with watched(root) as each:
            await until(lambda: len(each.readings) == 2)
            await each.failed("no-library")
            (place / "new").symlink_to(driver.library)
            (place / "new").rename(place / "libnvidia-ml.so.1")
            await each.data()

    run(test)


def test_the_first_that_is_killed_young_is_replaced_at_once(driver: StandIn, root: Path) -> None:
    """A sampler that had data is replaced; if the next one ends as soon, there is a wait."""

    async def test() -> None:
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

    run(test)
    assert driver.calls("nvmlInit_v2") + driver.calls("nvmlInitWithFlags") == 4


def test_endless_changes_of_the_driver_cause_no_restart_loop(
    driver: StandIn, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes all the time soon no longer ends the wait."""
    driver.driver_error = Code.DRIVER_NOT_LOADED
    monkeypatch.setattr(supervisor, "MAX_EARLY_RESTARTS", 2)
    looks = itertools.count()
    monkeypatch.setattr(DriverWatch, "read_state", lambda _: next(looks))

    async def test() -> None:
        async with watched(root) as each:
            # The first start, its second try, and two restarts for each change.
            await until(lambda: len(each.readings) == 6)
            await each.failed("no-driver")
            asked = next(looks)
            await asyncio.sleep(1.0)  # ten sampling intervals
            assert next(looks) == asked + 1, "nobody has looked, and nobody was started"
            assert len(each.readings) == 6

    run(test)


def test_what_is_a_sign(tmp_path: Path) -> None:
    """A module, a GPU, a device file and its rights change the state; time does not."""
    devices, module = tmp_path / "dev", tmp_path / "proc" / "driver" / "nvidia"
    devices.mkdir()
    signs = DriverWatch(tmp_path / "proc", tmp_path)
    seen = [signs.read_state()]

    def changed() -> bool:
        seen.append(signs.read_state())
        return seen[-1] not in seen[:-1] and signs.read_state() == seen[-1]

    (module / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert changed()
    (module / "version").write_text("NVRM version: 580\n", encoding="ascii")
    assert changed()
    (module / "version").write_text("NVRM version: 590\n", encoding="ascii")
    assert changed()
    (module / "gpus" / "0000:02:00.0").mkdir()
    assert changed()
    (devices / "nvidia0").touch()
    assert changed()
    (devices / "nvidia0").chmod(0o600)
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
    assert errors.count("Could not give up all privileges") == errors.count("prctl: Operation not permitted")
    assert "prctl: Operation not permitted" in errors
