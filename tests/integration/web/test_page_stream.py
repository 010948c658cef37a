"""The stream of the live page: one render for all viewers, limited for each, complete when necessary."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from tests.support.builders import MIB, NOW, Shown, agent, crowd, device, failed, holding, snapshot
from tests.support.serving import served, until_answered
from vramledger.model.snapshot import Snapshot, State
from vramledger.web import page_stream
from vramledger.web.page_rows import changed_rows, page_rows


class Stream:
    """One open stream; applies events as the page does."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self.rows: dict[str, Any] = {}
        self._content = content

    async def next(self) -> Any:  # noqa: ANN401 a JSON document
        """Return the next event with content, and apply it; raises EOFError at the end."""
        while not (block := await self._content.readuntil(b"\n\n")).startswith(b"data: "):
            if not block:
                raise EOFError
        event = json.loads(block[6:])
        self.rows = {**({} if event["full"] else self.rows), **event["rows"]}
        for key in event["gone"]:
            del self.rows[key]
        return event

    async def to_the_end(self) -> None:
        while True:
            await self.next()

    async def until_changed(self) -> Any:  # noqa: ANN401 a JSON document
        """Return the next event with rows."""
        while not (event := await self.next())["rows"]:
            pass
        return event


@asynccontextmanager
async def stream(
    port: int, *, packed: bool = False, version: aiohttp.HttpVersion = aiohttp.HttpVersion11
) -> AsyncIterator[Stream]:
    """Open a stream as a browser does, or as a proxy that speaks HTTP/1.0."""
    url, coding = f"http://127.0.0.1:{port}/api/v1/events", "gzip" if packed else "identity"
    async with (
        aiohttp.ClientSession(version=version, read_bufsize=1 << 24) as session,
        session.get(url, headers={"Accept-Encoding": coding}) as answer,
    ):
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert answer.headers.get("Content-Encoding", "identity") == coding
        yield Stream(answer.content)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_stream, "PERIOD", 0.01)
    monkeypatch.setattr(page_stream, "HEARTBEAT", 0.1)


def without_growth(found: dict[str, Any]) -> Any:  # noqa: ANN401 a JSON document
    """Return rows without the columns that depend on earlier samples."""
    return json.loads(json.dumps({key: {**row, "growth": None} for key, row in found.items()}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("version", [aiohttp.HttpVersion10, aiohttp.HttpVersion11], ids=["1.0", "1.1"])
async def test_a_viewer_gets_all_and_then_what_changes(version: aiohttp.HttpVersion, *, packed: bool) -> None:
    """The first event has every row, the next ones only changed rows, and they add up; also compressed."""
    shown = Shown(crowd(2, 8))
    async with served(shown) as client, stream(client.port, packed=packed, version=version) as viewer:
        first = await viewer.next()
        assert first["full"]
        assert len(first["rows"]) == 1 + 2 + 16
        for serial, turn, seconds in ((2, 0, 61), (3, 1, 62)):  # the second of two samples: growth is known
            shown.snapshot = replace(crowd(2, 8, turn=turn, serial=serial), time=NOW + seconds)
            event = await viewer.until_changed()
            assert not event["full"]
        assert 0 < len(event["rows"]) < len(first["rows"])
        assert without_growth(viewer.rows) == without_growth(page_rows(shown.snapshot, {}, ready=True))


def test_what_counts_seconds_does_not_change_rows() -> None:
    """A second in which nothing happened changes no holding's row: times are sent, and no spans."""
    rows = []
    for second in (0, 1):
        held = holding(7, state=State.IDLE, why=f"no sign of GPU work for {69 + second} s")
        shot = replace(snapshot(device(0, [held]), serial=1 + second), time=NOW + second)
        rows.append(page_rows(shot, {}, ready=True))
    changed, gone = changed_rows(*rows)
    assert (set(changed), gone) == ({""}, [])


def test_an_agent_at_work_does_not_change_rows() -> None:
    """Reports whose differences the page does not display are not sent."""
    held = holding(7, 40 * 1024 * MIB, sm=0.5, last_active=NOW)
    shot = snapshot(device(0, [held]))
    uuid = shot.devices[0].reading.uuid
    told = agent(uuid)
    before = replace(shot, agents={7: told})
    pools = tuple(
        pool._replace(figures={name: value + 1000 for name, value in pool.figures.items()})
        for pool in told.pools[uuid]
    )
    after = replace(
        snapshot(device(0, [replace(held, last_active=NOW + 1, quiet_since=NOW + 1)]), serial=2),
        time=NOW + 1,
        agents={7: replace(told, received=NOW + 1, pools={uuid: pools}, collections=4)},
    )

    shown = page_rows(before, {}, ready=True)
    changed, gone = changed_rows(shown, page_rows(after, {}, ready=True))
    assert (set(changed), gone) == ({""}, [])
    assert shown[f"{uuid}/7"]["working_now"] is True


async def test_one_render_serves_all_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of viewers each sample is rendered once, and each viewer gets the same."""
    rendered: list[int] = []

    def counted(shot: Snapshot, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 passed on
        rendered.append(shot.serial)
        return page_rows(shot, *arguments, **named)

    monkeypatch.setattr(page_stream, "page_rows", counted)
    shown = Shown(crowd(1, 4))
    async with served(shown) as client, AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(stream(client.port)) for _ in range(20)]
        assert all([(await each.next())["full"] for each in opened])
        for serial in (2, 3):
            shown.snapshot = crowd(1, 4, turn=serial, serial=serial)
            for one in opened:
                await one.until_changed()
        assert all(one.rows == opened[0].rows for one in opened)
    assert rendered == [1, 2, 3]


async def test_a_viewer_that_reads_nothing_costs_the_others_nothing() -> None:
    """A viewer that does not read does not delay others, and does not delay the exporter's stop."""
    shown = Shown(crowd(8, 64))
    async with served(shown) as client, stream(client.port) as viewer:
        await viewer.next()
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(("127.0.0.1", client.port))
            silent.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for serial in range(2, 30):
                shown.snapshot = crowd(8, 64, turn=serial, serial=serial)
                assert not (await viewer.until_changed())["full"]


class Full(asyncio.Transport):
    """A connection whose other end reads nothing."""

    left = 1
    aborted = False

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait."""
        return self.left

    def abort(self) -> None:
        """Record the end."""
        self.aborted = True


def test_a_viewer_that_stalls_is_skipped_and_then_dropped() -> None:
    """A viewer with an unsent event gets no other; after 20 s it is dropped, unless it has caught up."""
    connection = Full()
    viewer = page_stream.Viewer(connection, "", chunked=True, packed=False)

    assert [viewer.lags(moment) for moment in (100.0, 119.0)] == [True, True]
    connection.left = 0
    assert not viewer.lags(121.0)
    connection.left = 1
    assert [viewer.lags(moment) for moment in (122.0, 141.0)] == [True, True]
    before = connection.aborted
    assert viewer.lags(143.0)
    assert (before, connection.aborted, viewer.ended.is_set()) == (False, True, True)


async def test_a_failure_takes_the_devices_away() -> None:
    """After a failed sample there is no row of a device or holder, and the host's row says why."""
    shown = Shown(crowd(1, 2))
    async with served(shown) as client, stream(client.port) as viewer:
        await viewer.next()
        shown.snapshot = replace(failed(), serial=2)
        while viewer.rows.keys() != {""}:
            await viewer.next()
        host = viewer.rows[""]
        assert (host["up"], host["failure"]["reason"]) == (False, "no-library")


async def test_silence_is_filled() -> None:
    """Without a new sample an empty event is sent, so that a viewer knows that the exporter runs."""
    async with served(Shown(crowd(1, 1))) as client, stream(client.port) as viewer:
        await viewer.next()
        assert await viewer.next() == {"full": False, "rows": {}, "gone": []}


async def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit a stream is refused; when a viewer leaves there is room again."""
    monkeypatch.setattr(page_stream, "VIEWERS_MAX", 1)
    async with served(Shown(crowd(1, 1))) as client:
        async with stream(client.port) as viewer:
            await viewer.next()
            assert (await client.ask("/api/v1/events")).status == 503

        await until_answered(lambda: client.ask("/api/v1/events", "HEAD"), 200)


async def test_streams_end_when_the_exporter_stops() -> None:
    """An open stream does not prevent the exporter's stop, and ends in order."""
    async with AsyncExitStack() as stack:
        async with served(Shown(snapshot(device(0, [holding(1, MIB)])))) as client:
            viewer = await stack.enter_async_context(stream(client.port))
            await viewer.next()
        with pytest.raises((EOFError, aiohttp.ClientError)):
            await viewer.to_the_end()
