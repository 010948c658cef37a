"""Refusals before aiohttp: the same answers, without a disadvantage for other clients."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from http.client import parse_headers
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.support.secured import (
    ALICE,
    HASH,
    USERS,
    Login,
    SecuredExporter,
    header,
    serve_secured,
    write_config,
)
from tests.support.serving import run, until
from vramledger.web import idle_connections
from vramledger.web.access import access_control, passwords, pre_auth
from vramledger.web.access.pre_auth import read_authorization

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n%s\r\n"
NOT_PLAIN = "Content-Length: 0\r\n"
"""Makes aiohttp read a request, and has no other meaning."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Name a web configuration file."""
    return tmp_path / "web.yml"


async def said(exporter: SecuredExporter, login: Login | None, more: str = "") -> bytes:
    """Send one request that asks for the end of the connection; return everything until then."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in header(login).items()) + "Connection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", exporter.port)
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{lines}{more}\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("status", [401, 429, 503])
def test_a_refusal_does_not_tell_who_wrote_it(
    file: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal is the same to the byte with and without aiohttp."""
    if status == 503:
        monkeypatch.setattr(passwords, "_WAITING_MAX", 0)
    text = {429: "rate_limit: {interval: 1h, burst: 0}"}.get(status, USERS)
    login = {503: ("alice", "x")}.get(status)

    async def test() -> None:
        headers = "http_server_config:\n  headers: {X-Frame-Options: deny}\n"
        async with serve_secured(file, f"{text}\n{headers}") as exporter:
            answers = [await said(exporter, login, more) for more in ("", NOT_PLAIN)]
        bare = [re.sub(rb"Date: .*GMT\r\n", b"Date\r\n", answer) for answer in answers]
        assert bare[0] == bare[1]
        assert bare[0].startswith(b"HTTP/1.1 %d " % status)
        for line in (b"Date", b"Connection: close", b"X-Frame-Options: deny"):
            assert b"\r\n%s\r\n" % line in bare[0]

    run(test)


def test_who_is_let_in_stays_in(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection with the right password stays open, whatever other clients send."""
    monkeypatch.setattr(access_control, "_POLL_INTERVAL", 0.01)

    async def test() -> None:
        async with (
            serve_secured(file, USERS) as exporter,
            aiohttp.ClientSession(headers=header(ALICE)) as kept,
        ):
            url = f"http://127.0.0.1:{exporter.port}/-/healthy"
            for number in range(30):
                assert b" 200 " not in await said(exporter, ("alice", f"{number}"))
                async with kept.get(url) as answer:
                    assert answer.status == 200
                    assert answer.headers.get("Connection") != "close"
            write_config(file, f"basic_auth_users:\n  bob: {HASH}\n")

            async def out() -> bool:
                async with kept.get(url) as answer:
                    return answer.headers.get("Connection") == "close" and answer.status in (401, 429)

            await until(out)

    run(test)


def test_few_of_the_refused_may_stay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number of connections stays open after a refusal; a closed one makes room."""
    monkeypatch.setattr(pre_auth, "_REFUSED_MAX", 2)

    async def test() -> None:
        async with serve_secured(file, USERS) as exporter, AsyncExitStack() as stack:

            async def guesser() -> aiohttp.ClientSession:
                only = aiohttp.TCPConnector(limit=1)
                return await stack.enter_async_context(aiohttp.ClientSession(connector=only))

            async def kept(session: aiohttp.ClientSession, login: Login | None, status: int) -> bool:
                url = f"http://127.0.0.1:{exporter.port}/-/healthy"
                async with session.get(url, headers=header(login)) as answer:
                    assert answer.status == status
                    return answer.headers.get("Connection") != "close"

            first, second, third = [await guesser() for _ in range(3)]
            for _ in range(3):
                assert await kept(first, None, 401)
                assert await kept(second, None, 401)
                assert not await kept(third, None, 401)
            assert await kept(first, ALICE, 200)
            assert await kept(third, None, 401)
            await second.close()

            async def room() -> bool:
                async with aiohttp.ClientSession() as other:
                    return await kept(other, None, 401)

            await until(room)

    run(test)


def test_who_reads_no_answer_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that guesses all the time and never reads does not make us keep its answers."""
    monkeypatch.setattr(pre_auth, "_UNREAD", 0)
    written: list[bytes] = []

    class Full(asyncio.Transport):
        """A transport whose client reads nothing."""

        def get_extra_info(self, name: str, default: object = None) -> object:
            return ("127.0.0.1", 1) if name == "peername" else default

        def is_closing(self) -> bool:
            return b"last" in written

        def get_write_buffer_size(self) -> int:
            return sum(map(len, written))

        def write(self, data: object) -> None:
            assert isinstance(data, bytes)
            written.append(data)

        def close(self) -> None:
            assert written[-1] == b"last"

    class RefusesAll:
        """An access control that refuses every request."""

        restricted = True

        def refusal_at_once(self, authorization: str, address: str, *, last: bool) -> bytes:
            assert (authorization, address) == ("", "127.0.0.1")
            return b"last" if last else b"refused"

    async def nobody(_: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError

    async def connected() -> asyncio.BaseProtocol:
        return pre_auth.PreAuthFactory(web.Server(nobody), RefusesAll())()

    protocol = asyncio.run(connected())
    assert isinstance(protocol, asyncio.Protocol)
    protocol.connection_made(Full())
    for _ in range(5):
        protocol.data_received(REQUEST % b"")
    assert written == [b"refused", b"last"]


@pytest.mark.parametrize("pieces", [
    [b"GET /-/healthy HT", b"TP/1.1\r\nHost: x\r\n%s\r\n"], [b"G", b"ET /-/healthy HTTP/1.0\r\n%s\r\n"],
    [b"POST /-/healthy HTTP/1.1\r\nHost: x\r\n%sContent-Length: 4\r\n\r\n", b"body"],
    [b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n%s\r\nGET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"],
    [b"NONSENSE\r\n\r\n"],
])  # fmt: skip
def test_what_is_not_plain_is_answered_all_the_same(file: Path, pieces: Sequence[bytes]) -> None:
    """A request in pieces, with a body, with another one after it, or invalid, is answered."""
    login = f"Authorization: {header(ALICE)['Authorization']}\r\n".encode()

    async def test() -> None:
        async with serve_secured(file, USERS) as exporter:
            for given_in, wanted in ((login, {200, 405, 400}), (b"", {401, 400})):
                reader, writer = await asyncio.open_connection("127.0.0.1", exporter.port)
                for piece in pieces:
                    writer.write(piece.replace(b"%s", given_in))
                    await writer.drain()
                assert int((await reader.readline()).split()[1]) in wanted
                writer.close()
                await writer.wait_closed()

    run(test)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTT"])
def test_who_asks_nothing_does_not_stay(file: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With passwords too, a connection without a whole request is closed."""
    monkeypatch.setattr(idle_connections, "_CHECK_INTERVAL", 0.01)

    async def test() -> None:
        async with serve_secured(file, USERS) as exporter:
            reader, writer = await asyncio.open_connection("127.0.0.1", exporter.port)
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    run(test)


def test_the_end_is_not_waited_for(file: Path) -> None:
    """When the exporter stops, connections without a request are closed."""

    async def test() -> None:
        async with serve_secured(file, USERS) as exporter:
            reader, writer = await asyncio.open_connection("127.0.0.1", exporter.port)
            assert (await exporter.ask(auth=ALICE)).status == 200  # accepted after it
        assert await reader.read() == b""
        writer.close()

    run(test)


@pytest.mark.parametrize(("lines", "found"), [
    (b"", ""), (b"Authorization: Basic eA==\r\n", "Basic eA=="), (b"AUTHORIZATION:\t b \r\n", "b"),
    (b"authorization:\r\n", ""), (b"X: authorization: b\r\n", None), (b"Authorization: a\r\n b\r\n", None),
    (b"Authorization: a\r\nAuthorization: b\r\n", None), (b"X: y\nAuthorization: b\r\n", None),
    (b"content-length: 1\r\n", None), (b"Transfer-Encoding: chunked\r\n", None), (b"Upgrade: h2c\r\n", None),
    (b"Expect: 100-continue\r\n", None), (b"Authorization: \xff\r\n", "\udcff"),
])  # fmt: skip
def test_the_login_of_a_plain_request(lines: bytes, found: str | None) -> None:
    """One Authorization header of a plain GET is found in every notation; unusual ones go to aiohttp."""
    assert read_authorization(REQUEST % lines) == found


@pytest.mark.parametrize("data", [
    b"", b"GET", b"\r\n\r\n", b"GET / HTTP/1.1", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n\r\n",
    b"HEAD / HTTP/1.1\r\n\r\n", REQUEST % b"" + b"x", REQUEST % b"" * 2, b"GET /\r\nX: a HTTP/1.1\r\n\r\n",
])  # fmt: skip
def test_what_is_not_plain_is_left_alone(data: bytes) -> None:
    """Only a whole GET of HTTP/1.1 with nothing after it is read here."""
    assert read_authorization(data) is None


@given(st.lists(st.tuples(
    st.sampled_from(("Authorization", "authorization", "X-Authorization", "Host", "Proxy-Authorization")),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12),
), max_size=4))  # fmt: skip
def test_no_login_is_overlooked(headers: list[tuple[str, str]]) -> None:
    """A client that sent one login is never treated as another user, as http.client reads it."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode()
    found = read_authorization(REQUEST % lines)
    seen = parse_headers(io.BytesIO(lines + b"\r\n")).get_all("Authorization") or []
    if found is not None:
        assert [found] == [each.strip() for each in seen] or (found, seen) == ("", [])
