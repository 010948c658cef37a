"""The start of the process that stores: a hanging disk or too few descriptors delay it, and no more."""

import asyncio
import gc
import json
import os
import resource
import socket
from asyncio.subprocess import Process
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.support.past import StoredPast, night
from vramledger.logs import settings
from vramledger.metrics.storage import StorageHealth
from vramledger.serving.control_messages import StorageError
from vramledger.serving.storage import NOT_OPENED, Storage
from vramledger.storage.protocol import READY, keeper_command


def open_descriptors() -> set[tuple[int, str]]:
    """Return this process's descriptors that are open, with what each of them is of."""
    gc.collect()
    return {
        (int(each.name), str(each.readlink())) for each in Path("/proc/self/fd").iterdir() if each.exists()
    }


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Let this process open so many descriptors more, and then fail with EMFILE."""
    used = {number for number, _ in open_descriptors()}
    free = [each for each in range(4096) if each not in used]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ours_and_its() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection of a storage."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, other


def storage_of(keeper: Process, ours: socket.socket) -> Storage:
    """Return a storage of which nothing is known."""
    return Storage(keeper, ours, StorageHealth(2**29, 604800.0))


@pytest.mark.parametrize("room", [0, 1, 2, 3])
async def test_a_start_without_descriptors_leaves_none_open(room: int) -> None:
    """However many descriptors are left when the process is requested, a failure closes what was opened."""
    ours, other = ours_and_its()
    with ours, other:
        keeper = await asyncio.create_subprocess_exec("true")
        await keeper.wait()
        storage = storage_of(keeper, ours)
        other.send(READY)
        before = open_descriptors()
        with room_for(room), pytest.raises(OSError, match="Too many open files"):
            await storage.open()
        assert open_descriptors() - before == set()
        other.close()
        with pytest.raises(ConnectionError):
            await storage._start()  # noqa: SLF001 the start of another one, without its seconds of waiting
        assert open_descriptors() - before == set()
        await storage.end()


async def until_up(storage: Storage, past: StoredPast) -> None:
    """Sample until readings reach the disk."""
    while not storage.health.figures().up:
        if storage.again.is_set():
            storage.again.clear()
            past.recorder.begin_again()
        reading = past.reading()
        storage.send(past.recorder.record(reading))
        past.tracker.update(reading)
        past.now += 1
        await asyncio.sleep(0.05)


async def test_a_disk_that_answers_late_is_used_then(tmp_path: Path) -> None:
    """A disk that hangs at the start is an error until it answers; then samples are stored."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    where = tmp_path / "past"
    config = {"path": str(where), "retention": 1e6, "size": 2**29, "user": None, "host": "machine-1"}
    ours, other = ours_and_its()
    hanging = ["sh", "-c", 'read _ < "$0"; exec "$@"', str(gate)]
    command = keeper_command(json.dumps(config), *settings())
    with other:
        keeper = await asyncio.create_subprocess_exec(*hanging, *command, stdin=other.fileno())
    storage = storage_of(keeper, ours)
    with pytest.raises(asyncio.TimeoutError):
        await storage.open(0.01)
    with pytest.raises(StorageError, match=NOT_OPENED):
        await storage.request({"ask": "restore"})
    running = asyncio.create_task(storage.run())
    past = StoredPast(tmp_path / "other", night(1, Random(1)))  # noqa: S311 a simulation
    await asyncio.get_running_loop().run_in_executor(None, gate.write_text, "\n")
    await asyncio.wait_for(until_up(storage, past), 60)
    assert storage.health.figures().restarts == 0
    running.cancel()
    await storage.end()
    assert list(where.iterdir())


async def test_who_never_opened_the_directory_is_ended(tmp_path: Path) -> None:
    """When the exporter ends while the disk still hangs, no process of its storage stays."""
    ours, other = ours_and_its()
    os.mkfifo(tmp_path / "gate")
    with other:
        keeper = await asyncio.create_subprocess_exec(
            "sh", "-c", 'read _ < "$0"', str(tmp_path / "gate"), stdin=other.fileno()
        )
    storage = storage_of(keeper, ours)
    with pytest.raises(asyncio.TimeoutError):
        await storage.open(0.01)
    await storage.end()
    assert keeper.returncode == -9
