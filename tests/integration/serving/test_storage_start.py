"""The start of the process that stores: a hanging disk or too few descriptors delay it, and no more."""

import asyncio
import gc
import os
import resource
import socket
from asyncio.subprocess import Process
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.support.past import StoredPast, night, start_storage
from vramledger.metrics.storage import StorageHealth
from vramledger.serving.control_messages import StorageError
from vramledger.serving.storage import NOT_OPENED, Storage
from vramledger.storage.protocol import READY


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


@pytest.mark.parametrize("room", [0, 1, 2, 3])
async def test_a_start_without_descriptors_leaves_none_open(room: int) -> None:
    """However many descriptors are left when the process is requested, a failure closes what was opened."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, other:
        keeper = await asyncio.create_subprocess_exec("true")
        await keeper.wait()
        storage = Storage(keeper, ours, StorageHealth(2**29, 604800.0))
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
        past.send_to(storage)
        await asyncio.sleep(0.05)


async def start_hanging(path: Path, gate: Path) -> tuple[Storage, Process]:
    """Start a storage whose process hangs until somebody writes into a gate, and do not wait for it."""
    os.mkfifo(gate)
    storage, keeper = await start_storage(path, "sh", "-c", 'read _ < "$0"; exec "$@"', str(gate))
    with pytest.raises(asyncio.TimeoutError):
        await storage.open(0.01)
    return storage, keeper


async def test_a_disk_that_answers_late_is_used_then(tmp_path: Path) -> None:
    """A disk that hangs at the start is an error until it answers; then samples are stored."""
    gate, where = tmp_path / "gate", tmp_path / "past"
    storage, _ = await start_hanging(where, gate)
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
    storage, keeper = await start_hanging(tmp_path / "past", tmp_path / "gate")
    await storage.end()
    assert keeper.returncode == -9
