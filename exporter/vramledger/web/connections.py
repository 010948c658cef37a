"""Accept connections, and bound what each of them and all of them may hold.

Before a request is allowed, anybody can cost us memory: a connection, the head of a request, within TLS a
buffer of 256 KiB. So there are few such connections, each may send little and stay a minute. A new connection
is always accepted: for it, the connection that has been idle for the longest time is closed.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
"""Bytes of what a client sends that the kernel keeps, or twice as many. TLS handles all of them in one turn
of our loop, and 256 KiB of KeyUpdates took seconds."""

_SEND_BUFFER = 1 << 16
"""Bytes of answers that the kernel keeps for a client, or twice as many. By itself it keeps up to 4 MiB, and
they count against our memory limit: 128 clients that read nothing took 398 MiB, and take 24 MiB."""

_OTHER_BYTES, _OVERHEAD = 1 << 16, 4
"""Bytes that a client may send besides its requests, and in all for each byte of them: for the handshake and
what TLS adds."""

_BYTES_RECEIVED = slice(128, 136)
"""Where the kernel has ``tcpi_bytes_received`` (Linux 4.1)."""

STRANGER_SECONDS = 60.0
"""Seconds for which a connection may stay without an allowed request."""

_LINGER = 1.0
"""Seconds for which the rest of a request is read after its answer. If we closed before, the kernel would
report a reset connection to the client instead of our answer."""

_NO_DESCRIPTORS_PAUSE = 0.1


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


class _Connection:
    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.socket = accepted
        self.address = address
        self.since = time.monotonic()
        self.transport: asyncio.Transport | None = None

    @property
    def received(self) -> int:
        """How many bytes have come, also those of TLS itself; 0 if that is not known."""
        try:
            found = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
        except OSError:  # closed, or not of TCP
            return 0
        return int.from_bytes(found[_BYTES_RECEIVED], sys.byteorder)

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
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections for ever."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)  # noqa: FBT003 the socket module's own
        _limit_buffers(listening)
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except ConnectionError:  # it has gone already
                continue
            except OSError as error:
                loop.call_exception_handler({"message": "Cannot accept a connection", "exception": error})
                self._close_oldest()
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
        for connection in (*self._strangers.values(), *self._idle.values(), *self._busy.values()):
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
        """Close strangers that stay too long, and who sends much beside requests; go on each second."""
        oldest = time.monotonic() - STRANGER_SECONDS
        everyone = (*self._strangers.items(), *self._idle.items(), *self._busy.items())
        for protocol, connection in everyone:
            late = connection.since < oldest and protocol in self._strangers
            if late or connection.received > _OTHER_BYTES + _OVERHEAD * protocol.received_in_all:
                connection.close()
        self._sweeping = call_next_second(self._sweep) if everyone else None

    def forget(self, protocol: _Protocol) -> None:
        """Forget a connection that has ended."""
        for connections in (self._strangers, self._idle, self._busy):
            connections.pop(protocol, None)

    def _make_room(self) -> bool:
        """Close another connection if there are too many; return whether a new one is possible."""
        most = connection_limit()
        count = len(self._strangers) + len(self._idle) + len(self._busy)
        if len(self._strangers) < min(MAX_STRANGERS, most // 2) and count < most:
            return True
        return self._close_oldest()

    def _close_oldest(self) -> bool:
        """Close the longest idle connection, first unallowed ones of the busiest address."""
        addresses = Counter(each.address for each in self._strangers.values())
        for connections in (self._strangers, self._idle):
            for protocol, connection in connections.items():
                if connections is self._idle or addresses[connection.address] == max(addresses.values()):
                    del connections[protocol]
                    connection.close()
                    return True
        return False
