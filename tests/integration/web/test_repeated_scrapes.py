"""A scrape that comes again, byte for byte, is answered without being parsed, as the first one was."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from aiohttp import web

from tests.support.builders import Shown, crowd
from tests.support.certificates import Authority
from tests.support.secured import USERS, trusting, write_config
from tests.support.serving import LOOPBACK, run
from vramledger.config import Config
from vramledger.web import app, render_cache
from vramledger.web.access import access_control
from vramledger.web.app import serve
from vramledger.web.scrape import Scrape

HEAD = b"GET /metrics HTTP/1.1\r\nHost: localhost:1\r\nUser-Agent: Prometheus/3.0.0\r\n"
SCRAPE = HEAD + b"\r\n"
PACKED = HEAD + b"Accept-Encoding: gzip\r\n\r\n"


@dataclass
class Connection:
    """One connection to a server, and how many of its scrapes were parsed and routed."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    routed: list[web.Request]

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    async def answer(self) -> tuple[bytes, bytes]:
        """Return the head and the body of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        return head, await self.reader.readexactly(int(length[1]))

    async def ask(self, data: bytes) -> tuple[bytes, bytes]:
        """Send bytes, and return the next answer."""
        self.send(data)
        return await self.answer()


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[web.Request]:
    """Collect the scrapes that go through the routes."""
    requests: list[web.Request] = []
    whole = Scrape.serve

    async def counted(self: Scrape, request: web.Request) -> web.StreamResponse:
        requests.append(request)
        return await whole(self, request)

    monkeypatch.setattr(Scrape, "serve", counted)
    monkeypatch.setattr(render_cache, "_QUICK", 60.0)  # a page that takes long is rendered in a thread
    return requests


@asynccontextmanager
async def connected(
    routed: list[web.Request],
    shown: Shown | None = None,
    config: Config = LOOPBACK,
    authority: Authority | None = None,
) -> AsyncIterator[Connection]:
    """Serve, and open one connection."""
    shown = shown or Shown(crowd(1, 2))
    secure = None if authority is None else trusting(authority.pair)
    async with serve(config, shown) as (address,):
        reader, writer = await asyncio.open_connection("127.0.0.1", address.port, ssl=secure)
        try:
            yield Connection(reader, writer, routed)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def without_numbers(head: bytes) -> bytes:
    """Return a head without what may differ between two answers."""
    return re.sub(rb"(Content-Length|Date): [^\r]+", rb"\1", head)


@pytest.mark.parametrize("scrape", [SCRAPE, PACKED, HEAD + b"Accept: application/openmetrics-text\r\n\r\n"])
def test_the_answer_is_the_same(routed: list[web.Request], scrape: bytes) -> None:
    """The same headers in the same order come with the page, and only the first scrape was routed."""

    async def test() -> None:
        async with connected(routed) as connection:
            answers = [await connection.ask(scrape) for _ in range(3)]
            assert len({without_numbers(head) for head, _ in answers}) == 1
            assert answers[0][0].startswith(b"HTTP/1.1 200 OK\r\n")
            assert all(body[:2] == answers[0][1][:2] for _, body in answers)
            assert len(routed) == 1

    run(test)


def test_each_answer_is_new(routed: list[web.Request]) -> None:
    """A repeated scrape shows the newest snapshot."""
    shown = Shown(crowd(1, 2))

    async def test() -> None:
        async with connected(routed, shown) as connection:
            _, before = await connection.ask(SCRAPE)
            shown.snapshot = replace(crowd(1, 3), serial=7)
            _, after = await connection.ask(SCRAPE)
            assert (before.count(b"vramledger_process_info{"), after.count(b"vramledger_process_info{")) == (
                2,
                3,
            )
            assert len(routed) == 1

    run(test)


def test_tls(routed: list[web.Request], tmp_path: Path) -> None:
    """A scrape within TLS is repeated as well."""
    authority = Authority(tmp_path)
    server = authority.sign("server")
    file = tmp_path / "web.yml"
    text = f"tls_server_config: {{cert_file: {server.certificate}, key_file: {server.key}}}"
    write_config(file, text)

    async def test() -> None:
        config = replace(LOOPBACK, web_config=file)
        async with connected(routed, None, config, authority) as connection:
            first, second = await connection.ask(SCRAPE), await connection.ask(SCRAPE)
            assert without_numbers(first[0]) == without_numbers(second[0])
            assert len(routed) == 1

    run(test)


@pytest.mark.parametrize(
    "before", [b"GET /metrics HTTP/1.1\r\nX-Rest: ", b"GET /-/ready HTTP/1.1\r\nX-Rest: "]
)
def test_the_rest_of_another_request_is_no_scrape(routed: list[web.Request], before: bytes) -> None:
    """After the beginning of a request, the same bytes are its rest: both together get one answer."""

    async def test() -> None:
        async with connected(routed) as connection:
            await connection.ask(SCRAPE)
            connection.send(before)
            for _ in range(20):  # turns of the loop, which is the server's too: it has read them
                await asyncio.sleep(0)
            connection.send(SCRAPE)
            head, _ = await connection.answer()
            assert head.startswith(b"HTTP/1.1 200")
            connection.send(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")
            _, body = await connection.answer()
            assert body == b"vramledger is healthy.\n"

    run(test)


def test_a_body_is_no_scrape(routed: list[web.Request]) -> None:
    """The body of a request that is the same bytes gets no answer."""

    async def test() -> None:
        async with connected(routed) as connection:
            await connection.ask(SCRAPE)
            head = b"POST /-/ready HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(SCRAPE)
            answer, _ = await connection.ask(head)
            assert answer.startswith(b"HTTP/1.1 405")
            connection.send(SCRAPE)
            _, body = await connection.ask(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert body == b"vramledger is healthy.\n"

    run(test)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + b"Expect: 100-continue\r\n\r\n", b"HTTP/1.1 100 Continue"),
        (
            SCRAPE.replace(b"1.1", b"1.0").replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"),
            b"HTTP/1.0",
        ),
        (SCRAPE.replace(b"GET", b"HEAD"), b"HTTP/1.1 200 OK"),
    ],
    ids=["expects", "1.0", "head"],
)
def test_what_is_unusual_is_never_repeated(routed: list[web.Request], head: bytes, status: bytes) -> None:
    """A request whose answer has more or less than a page is routed each time."""

    async def test() -> None:
        async with connected(routed) as connection:
            for number in range(1, 4):
                connection.send(head)
                answer = await connection.reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(status)
                if b"100" in status:
                    await connection.answer()
                elif not head.startswith(b"HEAD"):
                    length = re.search(rb"Content-Length: (\d+)", answer)
                    assert length is not None
                    await connection.reader.readexactly(int(length[1]))
                assert len(routed) == number

    run(test)


def test_many_at_once_are_answered_one_by_one(routed: list[web.Request]) -> None:
    """Requests that are sent before the answer to the first each get theirs."""

    async def test() -> None:
        async with connected(routed) as connection:
            await connection.ask(SCRAPE)
            connection.send(SCRAPE * 3)
            heads = [(await connection.answer())[0] for _ in range(3)]
            assert len({without_numbers(head) for head in heads}) == 1

    run(test)


def test_another_name_is_refused(routed: list[web.Request]) -> None:
    """On a connection that has scraped, a request with a foreign name is refused."""

    async def test() -> None:
        async with connected(routed) as connection:
            await connection.ask(SCRAPE)
            connection.send(SCRAPE.replace(b"localhost", b"evil.example"))
            assert (await connection.reader.readline()).split()[1] != b"200"

    run(test)


@pytest.mark.parametrize(
    ("text", "refused"),
    [(USERS, b"401"), ("rate_limit: {interval: 1h, burst: 0}", b"429")],
    ids=["users", "rate"],
)
def test_new_rules_hold_for_a_repeated_scrape(
    routed: list[web.Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, refused: bytes
) -> None:
    """Once the file has rules, the next scrape of the same connection is refused."""
    monkeypatch.setattr(access_control, "_POLL_INTERVAL", 0.01)
    file = tmp_path / "web.yml"
    write_config(file, "{}")

    async def test() -> None:
        async with connected(routed, config=replace(LOOPBACK, web_config=file)) as connection:
            await connection.ask(SCRAPE)
            write_config(file, text)
            status = b"200"
            while status == b"200":
                connection.send(SCRAPE)
                status = (await connection.reader.readline()).split()[1]
                if status == b"200":
                    length = re.search(
                        rb"Content-Length: (\d+)", await connection.reader.readuntil(b"\r\n\r\n")
                    )
                    assert length is not None
                    await connection.reader.readexactly(int(length[1]))
            assert status == refused
            assert len(routed) == 1

    run(test)


def test_the_rate_limit_counts_each_scrape(routed: list[web.Request], tmp_path: Path) -> None:
    """With a rate limit every scrape takes a token, also one that repeats."""
    file = tmp_path / "web.yml"
    write_config(file, "rate_limit: {interval: 1h, burst: 2}")

    async def test() -> None:
        async with connected(routed, config=replace(LOOPBACK, web_config=file)) as connection:
            heads = [(await connection.ask(SCRAPE))[0] for _ in range(3)]
            assert [head.split()[1] for head in heads] == [b"200", b"200", b"429"]

    run(test)


def test_headers_of_the_file_are_on_a_repeated_answer(routed: list[web.Request], tmp_path: Path) -> None:
    """What ``http_server_config`` adds is on every answer."""
    file = tmp_path / "web.yml"
    write_config(file, "http_server_config: {headers: {X-Frame-Options: deny}}")

    async def test() -> None:
        async with connected(routed, config=replace(LOOPBACK, web_config=file)) as connection:
            heads = [(await connection.ask(SCRAPE))[0] for _ in range(2)]
            assert all(b"X-Frame-Options: deny\r\n" in head for head in heads)

    run(test)


def test_a_client_that_does_not_read_is_bounded(routed: list[web.Request]) -> None:
    """Answers that a client does not read are made by the routes, which bound them, once 64 KiB wait."""

    async def test() -> None:
        async with connected(routed, Shown(crowd(4, 64))) as connection:
            await connection.ask(SCRAPE)
            await connection.ask(SCRAPE)
            before = len(routed)
            connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
            while len(routed) == before:
                connection.send(SCRAPE)
                await asyncio.sleep(0)

    run(test)


def test_a_repeated_scrape_keeps_its_connection(
    routed: list[web.Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that goes on scraping is not closed as unused."""
    monkeypatch.setattr(app, "_KEEP_ALIVE", 0.4)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with connected(routed) as connection:
            end = loop.time() + 1.2
            while loop.time() < end:
                head, _ = await connection.ask(SCRAPE)
                assert head.startswith(b"HTTP/1.1 200 OK")
                await asyncio.sleep(0.02)
            assert len(routed) == 1
            assert await connection.reader.read() == b""  # unused from now on

    run(test)
