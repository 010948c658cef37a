"""Questions about the past: they delay nothing that is stored, and what nobody waits for is not computed."""

import asyncio
import json
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil
import pytest

from tests.support.builders import Shown
from tests.support.host.model import EPOCH
from tests.support.past import StoredPast, night, start_storage
from tests.support.serving import connected, served, until
from tests.support.sure import sure
from vramledger.agent_server.connection import Peer
from vramledger.serving import storage as serving_storage
from vramledger.serving.control_messages import ControlError, Readings, StorageError
from vramledger.serving.control_socket import Caller
from vramledger.serving.exporter import PastDesk
from vramledger.serving.storage import WAITING_MAX, Storage
from vramledger.storage.database import PIECES
from vramledger.storage.protocol import NAME
from vramledger.web.services import PageState

SLOW: dict[str, str | float] = {"ask": "readings", "from": EPOCH, "to": EPOCH + 5000.0}
"""A question that takes a second or more."""

QUICK: dict[str, str | float] = {"ask": "since", "from": EPOCH, "to": EPOCH + 100.0}


class Serving(NamedTuple):
    """A storage as the exporter has it, and the process that started its processes."""

    storage: Storage
    keeper: psutil.Process
    past: StoredPast

    def readers(self) -> int:
        count = 0
        for each in self.keeper.children():
            with suppress(psutil.Error):  # it has ended
                count += "storage.answers" in " ".join(each.cmdline())
        return count

    async def until_readers(self, count: int) -> None:
        await until(lambda: self.readers() == count)

    async def store(self) -> float:
        """Have readings stored, one after the other, and return how long it takes until the disk has one."""
        begun, newest = time.monotonic(), self.past.now + EPOCH
        while (self.storage.health.figures().newest or 0.0) < newest:
            self.past.send_to(self.storage)
            await asyncio.sleep(0.5)
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> StoredPast:
    """Return a past of 25 holders that has its readings ten times, so that reading them takes long."""
    past = StoredPast(tmp_path_factory.mktemp("recorded"), night(25, Random(1)))  # noqa: S311 a simulation
    past.watch(150)
    past.end()
    with closing(sqlite3.connect(past.path / NAME)) as file, file:
        for segment in range(2, 11):
            file.execute("INSERT INTO segment SELECT ?, begin, step, header FROM segment LIMIT 1", [segment])
            pieces = "INSERT INTO piece SELECT id + ?, checksum, lines FROM piece WHERE id < ?"
            file.execute(pieces, [(segment - 1) * PIECES, 2 * PIECES])
    return past


@asynccontextmanager
async def serving(recorded: StoredPast, path: Path) -> AsyncIterator[Serving]:
    """Serve a copy of that past, and let its host go on."""
    path.mkdir(mode=0o700)  # noqa: ASYNC240 nothing else runs
    shutil.copy(recorded.path / NAME, path)
    past = StoredPast(path.with_name("other"), recorded.host)
    past.now = recorded.now + 5
    storage, keeper = await start_storage(path)
    await storage.open(60)
    running = asyncio.create_task(storage.run())
    try:
        yield Serving(storage, psutil.Process(keeper.pid), past)
    finally:
        running.cancel()
        await storage.end()
        await asyncio.wait_for(keeper.wait(), 30)


async def give_up(*asking: asyncio.Task[Any]) -> None:
    """Cancel questions, as when the one who asks has gone."""
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.thorough
async def test_questions_delay_nothing_that_is_stored(recorded: StoredPast, tmp_path: Path) -> None:
    """While eight visitors ask for long spans all the time, each reading is on the disk at once."""
    async with serving(recorded, tmp_path / "past") as now:
        await now.store()

        async def visit(number: int) -> None:
            while True:
                try:
                    await now.storage.request(SLOW, asker=f"visitor {number}")
                except StorageError:
                    await asyncio.sleep(0.1)

        visits = [asyncio.create_task(visit(number)) for number in range(8)]
        try:
            await now.until_readers(1)
            assert max([await now.store() for _ in range(4)]) < 10.0
            assert now.readers() == 1, "all of them together have one process"
        finally:
            await give_up(*visits)


async def test_an_answer_that_nobody_waits_for_is_not_computed(recorded: StoredPast, tmp_path: Path) -> None:
    """When the one who asks has gone, or his time is over, the process ends; the next one is answered."""
    async with serving(recorded, tmp_path / "past") as now:
        asking = asyncio.create_task(now.storage.request(SLOW))
        await now.until_readers(1)
        await give_up(asking)
        await asyncio.wait_for(now.until_readers(0), 60)
        await until(lambda: len(now.keeper.children()) <= 1)  # nothing of one that has ended stays
        with pytest.raises(StorageError, match="in time"):
            await now.storage.request(SLOW, 0.05)
        await asyncio.wait_for(now.until_readers(0), 60)
        waiting = [asyncio.create_task(now.storage.request(SLOW)) for _ in range(5)]
        await now.until_readers(1)
        await give_up(*waiting)
        head, content = await now.storage.request(QUICK, 60)
        assert (head, json.loads(content)["covered_seconds"]) == ({}, 100.0)


async def test_who_asks_for_too_much_waits_and_others_do_not(
    recorded: StoredPast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of computing are what a visitor may have, not a number of questions; root is not limited."""
    monkeypatch.setattr(serving_storage, "SHARE_BURST", 1.2)
    monkeypatch.setattr(serving_storage, "SHARE", 0.001)
    async with serving(recorded, tmp_path / "past") as now:
        await now.storage.request(QUICK, 60, asker="eve")
        refused = ""
        while not refused:
            try:
                await now.storage.request(QUICK, 60, asker="eve")
            except StorageError as error:
                refused = str(error)
        assert "too much lately" in refused
        await now.storage.request(QUICK, 60, asker="ada")
        for _ in range(20):
            await now.storage.request(QUICK, 60)


async def test_an_administrator_waits_for_no_visitor(recorded: StoredPast, tmp_path: Path) -> None:
    """While visitors and users ask for long spans all the time, root is answered as if it were alone."""
    async with serving(recorded, tmp_path / "past") as now:
        slow: dict[str, str | float] = {"ask": "readings", "from": 0.0, "to": 1e11}
        askers = [f"uid {number}" for number in range(10)] * 20
        asking = [asyncio.create_task(now.storage.request(slow, asker=each)) for each in askers]
        try:
            await now.until_readers(1)
            await now.storage.request(QUICK)
            assert WAITING_MAX / 2 < sum(not each.done() for each in asking) <= WAITING_MAX
        finally:
            await give_up(*asking)


async def test_a_question_of_an_ended_command_is_not_computed(recorded: StoredPast, tmp_path: Path) -> None:
    """The process that asked is watched, not its connection alone."""
    async with serving(recorded, tmp_path / "past") as now:
        client = await asyncio.create_subprocess_exec("sleep", "600")
        pidfd = os.pidfd_open(client.pid)
        desk = PastDesk(expected=True)
        desk.storage = now.storage
        caller = Caller(Peer(pid=client.pid, start=0, uid=0, pidfd=pidfd), outside=True)
        asking = asyncio.create_task(desk.answer(Readings(EPOCH, EPOCH + 5000.0), caller))
        await now.until_readers(1)
        client.kill()
        with pytest.raises(ControlError, match="has ended"):
            await asking
        await asyncio.wait_for(now.until_readers(0), 60)
        os.close(pidfd)
        await client.wait()


async def test_damage_that_a_reader_meets_is_the_writers(recorded: StoredPast, tmp_path: Path) -> None:
    """A question that meets a damaged page is answered with an error, and storing goes on in a new file."""
    async with serving(recorded, tmp_path / "past") as now:
        await now.store()
        file = tmp_path / "past" / NAME
        with file.open("rb+") as page:
            for place in range(4096, file.stat().st_size, 4096):
                page.seek(place)
                page.write(b"\xff" * 4096)
        with pytest.raises(StorageError):
            await now.storage.request({"ask": "since", "from": 0.0, "to": 1e11}, 60)
        await until(lambda: list((tmp_path / "past").glob("*damaged*")))
        await now.store()
        assert "damaged" in sure(now.storage.health.figures().last_error)[1]


async def test_a_visitor_who_leaves_stops_the_answer(recorded: StoredPast) -> None:
    """When a browser closes its connection, its question to the past is cancelled."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def ask(_: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    request = b"GET /api/v1/past?at=1000000000 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with served(Shown(recorded.tracker.blank), state=PageState(past=ask)) as client:
        async with connected(client.port, request):
            await asyncio.wait_for(asked.wait(), 20)
        await asyncio.wait_for(left.wait(), 20)
