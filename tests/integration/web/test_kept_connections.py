"""A kept connection: each request is judged by the rules of its moment, and it stays while it is used."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from tests.support.builders import Shown, crowd
from tests.support.secured import USERS, write_config
from tests.support.serving import LOOPBACK, connected
from tests.support.sure import sure
from vramledger.config import Config
from vramledger.web import app
from vramledger.web.app import serve

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost:1\r\nUser-Agent: Prometheus/3.0.0\r\n\r\n"


class Connection(NamedTuple):
    """One connection to a server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> bytes:
        """Return the head of the next answer, which is read whole."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        await self.reader.readexactly(int(sure(re.search(rb"Content-Length: (\d+)", head))[1]))
        return head

    async def status(self) -> bytes:
        """Scrape, and return the answer's status."""
        self.send(SCRAPE)
        return (await self.answer()).split()[1]


@asynccontextmanager
async def kept(config: Config = LOOPBACK) -> AsyncIterator[Connection]:
    """Serve, and open one connection."""
    async with serve(config, Shown(crowd(1, 2))) as (address,), connected(address.port) as pair:
        yield Connection(*pair)


async def test_many_at_once_are_answered_one_by_one() -> None:
    """Requests that are sent before the answer to the first each get theirs."""
    async with kept() as connection:
        await connection.status()
        connection.send(SCRAPE * 3)
        assert all([(await connection.answer()).startswith(b"HTTP/1.1 200 OK") for _ in range(3)])


async def test_another_name_is_refused() -> None:
    """On a connection that has scraped, a request with a foreign name is refused."""
    async with kept() as connection:
        await connection.status()
        connection.send(SCRAPE.replace(b"localhost", b"evil.example"))
        assert (await connection.reader.readline()).split()[1] != b"200"


@pytest.mark.parametrize(
    ("text", "refused"),
    [(USERS, b"401"), ("rate_limit: {interval: 1h, burst: 0}", b"429")],
    ids=["users", "rate"],
)
async def test_new_rules_hold_for_the_next_request(file: Path, text: str, refused: bytes) -> None:
    """Once the file has rules, the next scrape of the same connection is refused."""
    write_config(file, "{}")
    async with kept(replace(LOOPBACK, web_config=file)) as connection:
        await connection.status()
        write_config(file, text)
        while (status := await connection.status()) == b"200":
            pass
        assert status == refused


async def test_the_rate_limit_counts_each_scrape(file: Path) -> None:
    """With a rate limit every scrape takes a token."""
    write_config(file, "rate_limit: {interval: 1h, burst: 2}")
    async with kept(replace(LOOPBACK, web_config=file)) as connection:
        assert [await connection.status() for _ in range(3)] == [b"200", b"200", b"429"]


async def test_a_connection_that_is_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that goes on scraping is not closed as unused."""
    monkeypatch.setattr(app, "_KEEP_ALIVE", 0.4)
    loop = asyncio.get_running_loop()
    async with kept() as connection:
        end = loop.time() + 1.2
        while loop.time() < end:
            assert await connection.status() == b"200"
            await asyncio.sleep(0.02)
        assert await connection.reader.read() == b""  # unused from now on
