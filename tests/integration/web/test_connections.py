"""What strangers may hold before they are let in: little, and nobody else is worse off."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import zlib
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import http_parser
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import BaseRequest, StreamResponse
from msgspec.structs import replace

from tests.support.builders import Shown, crowd
from tests.support.certificates import Authority
from tests.support.requirements import require_root
from tests.support.secured import ALICE, USERS, header, serve_secured, tls, trusting
from tests.support.serving import HEALTH, LOOPBACK, Stream, client, connected
from tests.support.sure import sure
from tests.support.waiting import PATIENCE
from vramledger.config import ListenAddress
from vramledger.web import app, connections, page_stream
from vramledger.web.access import passwords
from vramledger.web.access.access_control import AccessControl, is_name_of_this_host, names_of_loopback
from vramledger.web.app import serve
from vramledger.web.cancellation import background_task

ENDLESS = 1 << 28
"""Bytes: far more than the kernel takes without us."""


async def opened(stack: AsyncExitStack, port: int, data: bytes = b"") -> Stream:
    """Connect until the stack is left, and send the beginning of something."""
    return await stack.enter_async_context(connected(port, data))


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


@pytest.mark.parametrize("expected", ["x", "100-continue"])
@pytest.mark.parametrize(
    ("text", "refused"), [(USERS, 401), ("rate_limit: {interval: 1h, burst: 0}", 429)], ids=["users", "rate"]
)
async def test_an_expectation_passes_no_gate(file: Path, text: str, refused: int, expected: str) -> None:
    """What a request expects is not answered before it is allowed, and its connection is not kept."""
    lines = ["POST /metrics HTTP/1.1", "Host: localhost", f"Expect: {expected}", "Content-Length: 9", "", ""]
    async with serve_secured(file, text) as exporter:
        async with connected(exporter.port, "\r\n".join(lines).encode()) as (reader, _):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 %d " % refused)
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("auth", [None, ALICE])
async def test_a_body_is_not_read(file: Path, auth: tuple[str, str] | None) -> None:
    """The body of a request, which none of ours has, is not read to its end, whoever sends it."""
    login = "".join(f"{name}: {value}\r\n" for name, value in header(auth).items())
    head = f"POST /metrics HTTP/1.1\r\nHost: localhost\r\n{login}Content-Length: 99999999999\r\n\r\n".encode()
    async with serve_secured(file, USERS) as exporter, connected(exporter.port, head) as (_, writer):
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < ENDLESS:
                writer.write(bytes(1 << 16))
                await writer.drain()
                sent += 1 << 16
        assert sent < ENDLESS


HEAD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * connections.MAX_REQUEST_LINES,
        HEAD + b"A: b\r\n" * connections.MAX_REQUEST_LINES + b"\r\n",
        (HEAD + b"\r\n") * connections.MAX_REQUEST_LINES,
    ],
    ids=["chunks", "headers", "requests"],
)
async def test_small_pieces_have_an_end(file: Path, data: bytes) -> None:
    """Many small pieces, each of which costs time by itself, are not read at all."""
    async with serve_secured(file, USERS) as exporter, connected(exporter.port, data) as (reader, _):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


@pytest.mark.parametrize("text", [USERS, ""], ids=["users", "nobody"])
async def test_a_head_has_an_end(file: Path, text: str) -> None:
    """A head that does not end, in however many headers, ends its connection."""
    start = b"GET / HTTP/1.1\r\n"
    async with serve_secured(file, text) as exporter, connected(exporter.port, start) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for number in range(100):
                writer.write(b"X-%d: %s\r\n" % (number, b"x" * 4000))
                await writer.drain()
            assert b" 200 " not in await reader.read()


async def test_few_strangers_are_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many connections wait for their first request and no more; whoever is let in stays."""
    monkeypatch.setattr(connections, "MAX_STRANGERS", 3)
    async with (
        serve_secured(file, USERS) as exporter,
        aiohttp.ClientSession(headers=header(ALICE), connector=aiohttp.TCPConnector(limit=1)) as kept,
        AsyncExitStack() as stack,
    ):
        url = f"http://127.0.0.1:{exporter.port}/-/healthy"
        async with kept.get(url) as answer:
            assert answer.status == 200
        ((before, *_),) = sure(kept.connector)._conns.values()  # noqa: SLF001
        strangers = [await opened(stack, exporter.port, b"GET / HT") for _ in range(7)]
        for reader, _ in strangers[:4]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for reader, writer in strangers[4:]:
            writer.write(b"TP/1.1\r\nHost: localhost\r\n\r\n")
            assert await status(reader) == 401
        async with kept.get(url) as answer:
            assert answer.status == 200
        ((after, *_),) = sure(kept.connector)._conns.values()  # noqa: SLF001
        assert after[0] is before[0], "its connection was not closed meanwhile"


@pytest.mark.parametrize(("address", "uid"), [("10.255.255.7", 0), ("127.0.0.2", 12345)])
async def test_a_stranger_closes_his_own(monkeypatch: pytest.MonkeyPatch, address: str, uid: int) -> None:
    """Whoever opens many connections loses his own, and not that of another address or local user."""
    monkeypatch.setattr(connections, "MAX_STRANGERS", 3)
    me = os.geteuid()
    if uid:
        require_root()
    else:  # no other address than loopback is sure to be here
        sources = {"127.0.0.2": address}
        real = passwords.connection_source
        monkeypatch.setattr(
            connections, "connection_source", lambda peer, ours: sources.get(peer[0]) or real(peer, ours)
        )
    async with serve(LOOPBACK, Shown()) as (bound,), AsyncExitStack() as stack:
        reader, writer = await opened(stack, bound.port, b"GET /-/healthy HTTP/1.1\r\n")
        for _ in range(20):
            os.seteuid(uid or me)
            try:
                many = socket.create_connection(("127.0.0.1", bound.port), source_address=("127.0.0.2", 0))
            finally:
                os.seteuid(me)
            stack.callback(many.close)
            many.send(b"G")
            await asyncio.sleep(0.01)
        writer.write(b"Host: localhost\r\n\r\n")
        assert await status(reader) == 200
        many.setblocking(False)
        with pytest.raises(BlockingIOError):
            many.recv(1)


EVENTS, LEDGER = "/api/v1/events", "/api/v1/ledger"


@pytest.mark.parametrize(
    ("taken", "asked", "connections_max"),
    [(EVENTS, EVENTS, 9), (EVENTS, "/-/healthy", 4), ("/metrics", "/metrics", 9), (LEDGER, LEDGER, 9)],
    ids=["streams", "connections", "unread scrapes", "unread ledgers"],
)
async def test_who_takes_all_places_makes_room(
    monkeypatch: pytest.MonkeyPatch, taken: str, asked: str, connections_max: int
) -> None:
    """Another address is answered at once, and its connections stay."""
    monkeypatch.setattr(page_stream, "VIEWERS_MAX", 3)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", connections_max)
    monkeypatch.setattr(connections, "connection_source", lambda peer, _: peer[0])
    loop, config = asyncio.get_running_loop(), replace(LOOPBACK, max_requests=3)
    async with serve(config, Shown(crowd(8, 64))) as (address,), AsyncExitStack() as stack:
        kept, writer = await opened(stack, address.port, HEALTH)
        await kept.readuntil(b"healthy.\n")
        for _ in range(3):
            many = stack.enter_context(socket.socket())
            many.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            many.setblocking(False)
            many.bind(("127.0.0.2", 0))
            await loop.sock_connect(many, ("127.0.0.1", address.port))
            await loop.sock_sendall(many, HEALTH.replace(b"/-/healthy", taken.encode()))
            assert b" 200 " in await loop.sock_recv(many, 20)
        new, _ = await opened(stack, address.port, HEALTH.replace(b"/-/healthy", asked.encode()))
        assert await status(new) == 200
        writer.write(HEALTH)
        assert await status(kept) == 200


def test_tls_gets_little_at_once() -> None:
    """However much a stranger sends, our loop goes on after 256 bytes; beyond a handshake he is cut off."""
    ours, theirs = socket.socketpair()
    protocol: Any = SimpleNamespace(received_in_all=100)
    with theirs, connections._TlsSocket(ours, protocol) as reading:  # noqa: SLF001
        theirs.send(bytes(20_000))
        assert len(reading.recv(65536)) == reading.recv_into(bytearray(65536)) == 256
        with pytest.raises(ConnectionAbortedError):
            assert sum(len(reading.recv(65536)) for _ in range(100)) < 20_000


async def test_who_shakes_no_hands(file: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that never shakes hands makes room for one that does."""
    monkeypatch.setattr(connections, "MAX_STRANGERS", 3)
    async with serve_secured(file, tls(), trusting(authority.pair)) as exporter, AsyncExitStack() as stack:
        silent = [await opened(stack, exporter.port) for _ in range(3)]
        assert (await exporter.ask()).status == 200
        assert await silent[0][0].read() == b""


async def test_all_places_taken_by_idle_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all connections are taken, the one that has been idle for longest goes; a stream stays."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    async with serve(LOOPBACK, Shown()) as (address,), AsyncExitStack() as stack:
        stream, _ = await opened(stack, address.port, HEALTH.replace(b"/-/healthy", b"/api/v1/events"))
        assert await status(stream) == 200
        idle = []
        for _ in range(3):
            idle.append(await opened(stack, address.port, HEALTH))
            assert await status(idle[-1][0]) == 200
        async with client(address.port) as asking:
            assert (await asking.ask("/metrics")).status == 200
        assert (await idle[0][0].read()).endswith(b"healthy.\n")
        idle[1][1].write(HEALTH)
        await idle[1][0].readuntil(b"healthy.\n")
        assert await status(idle[1][0]) == 200
        assert not stream.at_eof()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:10839", 200), ("127.0.0.1:1", 200), ("[::1]:10839", 200),
        ("a.localhost", 200), ("localhost.", 200), ("192.0.2.7", 200), ("rebound.example.org", 421),
        ("localhost.example.org", 421), ("127.0.0.1.nip.io", 421), ("[::1", 421), ("xlocalhost", 421),
    ],
)  # fmt: skip
async def test_no_foreign_name_leads_to_loopback(host: str, status: int) -> None:
    """Where only this host can reach us, a web page cannot read us by a name that its owner leads here."""
    async with serve(LOOPBACK, Shown()) as (address,), client(address.port) as asking:
        assert (await asking.ask("/api/v1/ledger", Host=host)).status == status


async def test_a_password_protects_from_foreign_names(file: Path) -> None:
    """Where a password is needed, any name will do: a web page has none."""
    async with serve_secured(file, USERS) as exporter, client(exporter.port) as asking:
        assert (await asking.ask("/metrics", Host="proxy.example.org")).status == 401
        assert (await asking.ask("/metrics", Host="proxy.example.org", **header(ALICE))).status == 200


def test_who_listens_to_all_has_any_name() -> None:
    """Where others can reach us, names are theirs to choose; a name that was configured is ours."""
    loopback = ListenAddress("127.0.0.1", 1)
    assert names_of_loopback([loopback, ListenAddress("0.0.0.0", 1)], []) is None  # noqa: S104
    assert names_of_loopback([ListenAddress("/run/socket", 0)], []) is None
    names = sure(names_of_loopback([loopback, ListenAddress("::1", 1)], [ListenAddress("GPU-host", 1)]))
    for name, ours in (("gpu-host:10839", True), ("", True), ("other", False)):
        assert is_name_of_this_host(name, names) is ours


ACTIVATED = """
import os, socket, sys
from vramledger.web import listening
listening._SO_PASSRIGHTS = int(sys.argv[3]) or listening._SO_PASSRIGHTS
made = socket.socket(socket.AF_UNIX)
made.bind(sys.argv[1])
os.chmod(sys.argv[1], int(sys.argv[2], 8))
made.listen()
os.dup2(made.detach(), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
listening.systemd_sockets()
"""
"""Listens at a path with a mode, on a kernel that knows an option, as systemd starts us."""


@pytest.mark.parametrize(
    ("mode", "option", "why"), [("0660", 0, ""), ("0660", 9999, ""), ("0666", 9999, "every user may connect")]
)
def test_a_unix_socket_is_for_the_trusted(tmp_path: Path, mode: str, option: int, why: str) -> None:
    """A socket on which any user may pass descriptors to us is refused, with what to do."""
    done = subprocess.run(
        [sys.executable, "-c", ACTIVATED, str(tmp_path / "s"), mode, str(option)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode == 0) == (why == "")
    assert why in done.stderr


async def test_who_sends_no_requests_within_tls_is_cut_off(file: Path, authority: Authority) -> None:
    """A client that only has TLS change its keys, again and again, is cut off; others are answered."""
    async with serve_secured(file, tls(), trusting(authority.pair)) as exporter:
        client = await asyncio.create_subprocess_exec(
            *("openssl", "s_client", "-tls1_3", "-connect", f"127.0.0.1:{exporter.port}"),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        with contextlib.suppress(ConnectionError):
            while client.returncode is None:
                sure(client.stdin).write(b"K\n")
                await asyncio.wait_for(sure(client.stdin).drain(), PATIENCE)
        assert (await exporter.ask("/-/healthy")).status == 200
        await asyncio.wait_for(client.wait(), PATIENCE)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
async def test_no_body_is_unpacked(file: Path, monkeypatch: pytest.MonkeyPatch, coding: str) -> None:
    """A packed body that would become a thousand times as large is not unpacked, whoever sends it."""
    unpacked: list[object] = []
    monkeypatch.setattr(http_parser.DeflateBuffer, "__init__", lambda *args, **_: unpacked.append(args))
    packed = zlib.compress(bytes(6 << 20), 9)
    lines = ["POST /metrics HTTP/1.1", "Host: localhost", f"Content-Encoding: {coding}"]
    head = "\r\n".join([*lines, f"Content-Length: {len(packed)}", "", ""]).encode()
    async with serve_secured(file, USERS) as exporter, connected(exporter.port, head + packed) as (reader, _):
        assert await status(reader) == 401
    assert not unpacked


async def test_a_stranger_may_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has made no allowed request is disconnected in time, however little is sent; others stay."""
    monkeypatch.setattr(connections, "STRANGER_SECONDS", 0.4)
    async with serve(LOOPBACK, Shown()) as (address,), AsyncExitStack() as stack:
        known, asking = await opened(stack, address.port, HEALTH)
        assert await status(known) == 200
        silent, _ = await opened(stack, address.port)
        slow, writer = await opened(stack, address.port, b"GET / HTTP/1.1\r\nX: ")

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.05)

        async with background_task(trickle()):
            for reader in (silent, slow):
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 10) == b""
        asking.write(HEALTH)
        await known.readuntil(b"healthy.\n")
        assert await status(known) == 200


@pytest.mark.parametrize(
    ("path", "name", "value", "shown"),
    [
        ("/metrics", "Accept", "application/openmetrics-text", b"/openmetrics-text"),
        *(("/metrics", "Accept-Encoding", "gzip", b": gzip"), ("/", "If-None-Match", "", b" 304 ")),
    ],
)
async def test_a_list_has_an_end(path: str, name: str, value: str, shown: bytes) -> None:
    """A header of 57 kB of alternatives, each of which takes time, is not read, and one of them is."""
    async with serve(LOOPBACK, Shown()) as (address,), client(address.port) as asking:
        value = value or (await asking.ask("/")).headers["ETag"]
        for more, is_read in (("", True), (f"{name}: {',' * 8000}\r\n" * 7, False)):
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}{name}: {value}\r\n"
            async with connected(address.port, f"{head}Connection: close\r\n\r\n".encode()) as (reader, _):
                answer = await reader.read()
            assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 304 "))
            assert (shown in answer.partition(b"\r\n\r\n")[0]) is is_read


async def test_who_reads_nothing_leaves_little_in_the_kernel() -> None:
    """A client that asks for much and reads nothing: what waits for it counts against our memory limit."""
    async with serve(LOOPBACK, Shown()) as (address,), client(address.port) as other:
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", address.port))
            reader.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 170)
            for _ in range(100):  # by then it would have all of the answers, a megabyte
                assert (await other.ask("/-/healthy")).status == 200
            reader.setblocking(False)
            waiting = 0
            with contextlib.suppress(BlockingIOError):  # the loop, also the exporter's, is stopped
                while data := reader.recv(1 << 16):
                    waiting += len(data)
    assert 0 < waiting < 1 << 18


async def test_a_burst_of_requests_is_no_single_turn() -> None:
    """Anything else has its turn before each request, also where its task begins at once (Python 3.12)."""
    turns: list[str] = []

    async def answer(_: BaseRequest) -> StreamResponse:
        turns.append("request")
        return StreamResponse()

    unlimited: Any = SimpleNamespace(request_begins=lambda _: None, allowed=contextlib.nullcontext)
    for _ in range(2):
        asyncio.get_running_loop().call_soon(turns.append, "other")
        await app._guarded(answer, AccessControl(None), unlimited, make_mocked_request("GET", "/"))  # noqa: SLF001
    assert turns == ["other", "request"] * 2
