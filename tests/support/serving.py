"""A real server on a port of loopback, for tests that send real requests."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy

from tests.support.builders import Shown
from vramledger.config import Config, ListenAddress
from vramledger.metrics.exposition import Exposition
from vramledger.web.app import make_app
from vramledger.web.services import PageState

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEALTH = b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n"
LOOPBACK = Config(listen=(ListenAddress("127.0.0.1", 0),), processes_max=0)


@dataclass(frozen=True)
class Answer:
    """A response, with the body as it was on the wire."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Client:
    """Sends requests to one server, with only the given headers; nothing is decompressed."""

    session: aiohttp.ClientSession
    port: int

    async def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Send one request; a header's name has underscores for its dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.session.request(method, url, headers=named, allow_redirects=False) as response:
            return Answer(response.status, response.headers, await response.read())


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    """Open a session to a port of loopback."""
    quiet = ("Accept", "Accept-Encoding", "User-Agent")
    async with aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=quiet) as session:
        yield Client(session, port)


@asynccontextmanager
async def served(  # noqa: PLR0913 one argument a setting
    shown: Shown,
    config: Config = LOOPBACK,
    exposition: Exposition | None = None,
    port: int = 0,
    kernel_keeps: int | None = None,
    *,
    state: PageState | None = None,
) -> AsyncIterator[Client]:
    """Serve ``shown`` as :func:`vramledger.web.app.serve` does, with an exposition of the test's own.

    ``kernel_keeps`` are the unread bytes of an answer that the kernel takes; ``state`` has the past.
    """
    runner = web.AppRunner(
        make_app(config, shown, exposition, state=state), access_log=None, shutdown_timeout=3
    )
    await runner.setup()
    try:
        listening = socket.create_server(("127.0.0.1", port))
        if kernel_keeps is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel_keeps)
        await web.SockSite(runner, listening).start()
        async with client(runner.addresses[0][1]) as each:
            yield each
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(port: int, data: bytes = b"", host: str = "127.0.0.1") -> AsyncIterator[Stream]:
    """Open a connection, and send the beginning of something."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def until(condition: Callable[[], object]) -> None:
    """Repeat a check, also one to await, until it is true; ``tests/conftest.py`` sets the deadline."""
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        await asyncio.sleep(0.005)


async def until_answered(ask: Callable[[], Awaitable[Answer]], right: int | Callable[[Answer], bool]) -> None:
    """Repeat a request until its answer has a status, or is right otherwise."""

    async def answered() -> bool:
        answer = await ask()
        return answer.status == right if isinstance(right, int) else right(answer)

    await until(answered)
