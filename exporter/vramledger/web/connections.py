"""Accept connections, and bound what each of them and all of them may hold.

Before a request is allowed, anybody can cost us memory: a connection, the head of a request, within TLS a
buffer of 256 KiB. So there are few such connections, each may send little and stay a minute. A new connection
is always accepted: for it, the oldest of the address that has the most is closed, first one that waits.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.web import BaseRequest

from vramledger.agent_server.disposal import call_next_second
from vramledger.logs import fields, log
from vramledger.web.access.passwords import connection_source
from vramledger.web.response_headers import BareResponse

MAX_CONNECTIONS = 640
"""The maximum number of connections: 500 viewers of the page, 40 scrapes, and enough for all others."""

MAX_STRANGERS = 128
"""The maximum number of connections without an allowed request so far. Within TLS they take 40 MiB."""

_DESCRIPTORS_SHARE = 2
"""Connections take at most one of this number of descriptors."""

MAX_REQUEST_BYTES = 1 << 16
"""The largest head and body of a request: ours have no body, clients no longer heads."""

MAX_REQUEST_LINES = 512
"""The maximum number of lines in them. Each chunk of a body, each header and each request of many costs time
by itself: scrapes took 200 ms instead of 3 beside four clients that sent 9,000 chunks of a byte."""

_HANDSHAKE = 10.0
"""Seconds for a TLS handshake; asyncio's default would let a silent client hold a descriptor for a minute."""

_RECEIVE_BUFFER = 4096
"""Bytes of what a client sends that the kernel keeps, or twice as many."""

_TLS_BYTES = 256
"""Bytes that TLS gets in one turn of our loop: 8 KiB of KeyUpdates took 16 ms, of each of six strangers."""

_SEND_BUFFER = 1 << 16
"""Bytes of answers that the kernel keeps for a client, or twice as many. By itself it keeps up to 4 MiB, and
they count against our memory limit: 128 clients that read nothing took 398 MiB, and take 24 MiB."""

_OTHER_BYTES, _OVERHEAD = 1 << 14, 4
"""Bytes that a client may send besides its requests, and in all for each byte of them: for the handshake, in
which a chain of certificates has 8 KiB, and what TLS adds. As many KeyUpdates take 33 ms."""

STRANGER_SECONDS = 60.0
"""Seconds for which a connection may stay without an allowed request."""

_LINGER = 1.0
"""Seconds for which the rest of a request is read after its answer. If we closed before, the kernel would
report a reset connection to the client instead of our answer."""

_NO_DESCRIPTORS_PAUSE = 0.1

_ACCEPTED_AT_ONCE = 16
"""With one in each turn of our loop, behind a flood of requests a connection waited for a second."""


def raise_descriptor_limit() -> None:
    """Allow ourselves as many open files as the system does: 1024 by default, and each client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the kernel's fs.nr_open was set below it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit() -> int:
    """Return how many connections there may be, so that descriptors are left for everything else."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, descriptors // _DESCRIPTORS_SHARE)


def _limit_buffers(connection: socket.socket) -> None:
    """Limit what the kernel keeps for a connection, or for those that a listening socket accepts."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)


def most_of_all(places: Iterable[str], mine: str) -> str | None:
    """Return the address that has the most places, by two or more of them than mine; None if none has."""
    counts = Counter(places)
    found = max(counts, key=lambda each: counts[each], default=mine)
    return found if counts[found] > counts[mine] + 1 else None


class _Protocol(web.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """A connection that reads no more than a request may have; its errors do not name our software."""

    __slots__ = ("_connections", "lines", "received", "received_in_all", "source")
    source: str  # as it was when it was accepted: later its client may hide

    def __init__(self, server: web.Server, connections: Connections, **options: Any) -> None:  # noqa: ANN401 aiohttp's
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            lingering_time=_LINGER,
            auto_decompress=False,  # no request of ours has a body, and 63 kB would unpack to 64 MB
            **options,
        )
        self._connections = connections
        self.received = self.received_in_all = self.lines = 0  # bytes that count towards a request's maximum

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self.received_in_all += len(data)
        self.lines += data.count(b"\n")
        if self.received > MAX_REQUEST_BYTES or self.lines > MAX_REQUEST_LINES:
            self.force_close()
            return
        super().data_received(data)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(
            request, status, exc, message
        )  # this call logs, and raises when a response has begun
        return BareResponse(status)


class _TlsSocket(socket.socket):
    """A socket that gives TLS little at once, and in all little more than the requests within it have."""

    __slots__ = ("protocol", "received")

    def __init__(self, accepted: socket.socket, protocol: _Protocol) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self.setblocking(False)  # noqa: FBT003 the socket module's own
        self.protocol, self.received = protocol, 0

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        data = super().recv(min(bufsize, _TLS_BYTES), flags)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:  # noqa: ANN401 as in exchange.py
        count = super().recv_into(buffer, min(nbytes or len(buffer), _TLS_BYTES), flags)
        self._count(count)
        return count

    def _count(self, received: int) -> None:
        self.received += received
        if self.received > _OTHER_BYTES + _OVERHEAD * self.protocol.received_in_all:
            raise ConnectionAbortedError("it sends much besides requests")


class _Connection:
    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.socket = accepted
        self.address = address
        self.since = time.monotonic()
        self.transport: asyncio.Transport | None = None

    def close(self) -> None:
        """End it now, also in its handshake."""
        if self.transport is not None:
            self.transport.abort()
        with suppress(OSError):  # it has been closed already
            self.socket.shutdown(socket.SHUT_RDWR)


class Connections:
    """All connections of the web server; used from the event loop only."""

    def __init__(
        self,
        server: web.Server,
        context: Callable[[], ssl.SSLContext | None],
        **options: Any,  # noqa: ANN401 aiohttp's
    ) -> None:
        self._make_protocol = partial(_Protocol, server, self, **options)
        self._context = context
        self._strangers: dict[_Protocol, _Connection] = {}
        self._idle: dict[_Protocol, _Connection] = {}
        self._busy: dict[_Protocol, _Connection] = {}
        self._all = (self._strangers, self._idle, self._busy)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections for ever."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)  # noqa: FBT003 the socket module's own
        _limit_buffers(listening)
        for number in itertools.count(1):
            try:
                accepted, address = await loop.sock_accept(listening)
            except ConnectionError:  # it has gone already
                continue
            except OSError as error:
                loop.call_exception_handler({"message": "Cannot accept a connection", "exception": error})
                self._close_oldest(*self._all)
                await asyncio.sleep(_NO_DESCRIPTORS_PAUSE)
                continue
            _limit_buffers(accepted)  # it may have waited since before we began
            if self._make_room():
                source = connection_source(address, accepted.getsockname())
                task = asyncio.create_task(self._connect(_Connection(accepted, source)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                accepted.close()
            if not number % _ACCEPTED_AT_ONCE:
                await asyncio.sleep(0)  # sock_accept does not yield while others wait to be accepted

    def close(self) -> None:
        """End all connections that wait, and handshakes."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for task in self._tasks:
            task.cancel()
        for connections in (self._strangers, self._idle):
            for connection in tuple(connections.values()):
                connection.close()

    def close_all(self) -> None:
        """End all connections, because the rules of access have changed."""
        for connection in [each for group in self._all for each in group.values()]:
            connection.close()

    def request_begins(self, request: BaseRequest) -> None:
        """Count the bytes of its connection from 0: those until now were the head."""
        if isinstance(request.protocol, _Protocol):
            request.protocol.received = request.protocol.lines = 0

    @contextmanager
    def allowed(self, request: BaseRequest) -> Iterator[None]:
        """Keep the connection of a request that is allowed until its answer is written."""
        protocol = request.protocol
        if not isinstance(protocol, _Protocol):
            yield
            return
        connection = self._strangers.pop(protocol, None) or self._idle.pop(protocol, None)
        if connection is None:  # it was closed meanwhile
            yield
            return
        self._busy[protocol] = connection
        try:
            yield
        finally:
            if self._busy.pop(protocol, None) is not None:
                self._idle[protocol] = connection

    async def _connect(self, connection: _Connection) -> None:
        protocol = self._make_protocol()
        protocol.source = connection.address
        self._strangers[protocol] = connection
        if self._sweeping is None:
            self._sweep()
        context = self._context()
        if context is not None:
            connection.socket = _TlsSocket(connection.socket, protocol)
        try:
            connection.transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection.socket,
                ssl=context,
                ssl_handshake_timeout=_HANDSHAKE if context is not None else None,
            )
        except (OSError, asyncio.TimeoutError) as error:  # the client's: no TLS, no certificate, disconnected
            log.debug("No connection", extra=fields(err=error))
            # The error refers to itself through its frames, which would hold the TLS buffer until a full
            # garbage collection.
            error.__traceback__ = None
        finally:
            if connection.transport is None:
                self.forget(protocol)

    def _sweep(self) -> None:
        """Close strangers that stay too long; go on each second while there are any."""
        oldest = time.monotonic() - STRANGER_SECONDS
        for connection in tuple(self._strangers.values()):
            if connection.since < oldest:
                connection.close()
        self._sweeping = call_next_second(self._sweep) if self._strangers else None

    def forget(self, protocol: _Protocol) -> None:
        """Forget a connection that has ended."""
        for group in self._all:
            group.pop(protocol, None)

    def _make_room(self) -> bool:
        """Close another connection if there are too many; return whether a new one is possible."""
        most = connection_limit()
        if len(self._strangers) >= min(MAX_STRANGERS, most // 2):
            return self._close_oldest(self._strangers)
        return sum(map(len, self._all)) < most or self._close_oldest(*self._all)

    def _close_oldest(self, *groups: dict[_Protocol, _Connection]) -> bool:
        """Close the oldest connection of the address that has the most, of the first group that has any."""
        addresses = Counter(each.address for group in groups for each in group.values())
        most = max(addresses.values(), default=0)
        for group in groups:
            for protocol, connection in group.items():
                if addresses[connection.address] == most:
                    del group[protocol]
                    connection.close()
                    return True
        return False
