"""Accept connections, and bound what each of them and all of them may hold.

Before a request is allowed, anybody can cost us memory: a connection, the head of a request, within TLS a
buffer of 256 KiB. So there are few such connections, and each may send little. A new connection is always
accepted: for it, the connection that has been idle for the longest time is closed.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from aiohttp import hdrs, web, web_protocol
from aiohttp.http import HttpVersion11
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_request import BaseRequest

from vramledger.logs import fields, log
from vramledger.web.access.passwords import failure_source
from vramledger.web.response_headers import BareResponse

MAX_CONNECTIONS = 640
"""The maximum number of connections: 500 viewers of the page, 40 scrapes, and enough for all others."""

MAX_STRANGERS = 128
"""The maximum number of connections without an allowed request so far. Within TLS they take 40 MiB."""

_DESCRIPTORS_SHARE = 2
"""Connections take at most one of this number of descriptors."""

MAX_REQUEST_BYTES = 1 << 16
"""The maximum size of a request's head, and of its body: no request of ours has a body, and no client sends
longer heads."""

_HANDSHAKE = 10.0
"""Seconds for a TLS handshake; asyncio's default would let a silent client hold a descriptor for a minute."""

_REPEATED_MAX = 4096
"""The maximum size of a head that is kept; Prometheus sends 400 bytes."""

_UNREAD_MAX = 1 << 16
"""Bytes of answers that asyncio takes before a write has to wait; the rest is for :class:`RequestLimiter`."""

_HEAD_END = b"\r\n\r\n"

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


class _Repeatable(NamedTuple):
    """The newest request of a connection that can be answered again.

    Attributes:
        head: its bytes.
        host: its Host header, "" without one.
        answer: makes the bytes of the whole answer; None if that must not be done at once.
    """

    head: bytes
    host: str
    answer: Callable[[], bytes | None]


class _Protocol(web_protocol.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """A connection that reads no more than a request may have; its errors do not name our software.

    Prometheus sends the same bytes again in each scrape. After an answer, bytes that are those of the request
    before are the same request: they are answered without the parser, three turns of the loop, two tasks and
    the routes, which took 0.4 ms a scrape.

    Attributes:
        received: bytes that count towards a request's maximum.
        head: the bytes of the newest request, if exactly these were read when no other byte was expected.
    """

    __slots__ = ("_bounded", "_connections", "_repeatable", "head", "received")

    def __init__(self, server: web.Server, connections: Connections, **options: Any) -> None:  # noqa: ANN401 aiohttp's
        super().__init__(server, loop=asyncio.get_running_loop(), lingering_time=_LINGER, **options)
        self._connections = connections
        self._repeatable: _Repeatable | None = None
        self._bounded = True
        self.head: bytes | None = None
        self.received = 0

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self.received > MAX_REQUEST_BYTES:
            self.force_close()
            return
        if self._repeatable is not None and data == self._repeatable.head and self._answer_again():
            return
        # Within TLS the first request may come before aiohttp has begun to wait for it.
        begins = self._bounded and (self._request_count == 0 or self._is_waiting())
        super().data_received(data)
        self._bounded = begins and self._is_whole(data)
        self.head = data if self._bounded else None
        if not self._bounded:
            self._repeatable = None

    def repeat(self, request: BaseRequest, answer: Callable[[], bytes | None]) -> None:
        """Answer the request that has just been answered by ``answer`` whenever it comes again."""
        headers = request.headers
        usual = request.version == HttpVersion11 and request.keep_alive and hdrs.EXPECT not in headers
        if usual and self.head is not None:
            self._repeatable = _Repeatable(self.head, headers.get(hdrs.HOST, ""), answer)

    def _is_waiting(self) -> bool:
        """Tell whether aiohttp has answered all that it has read, and waits for the next request."""
        waiter = self._waiter
        return (
            waiter is not None
            and not waiter.done()
            and not (self._messages or self._close or self._force_close or self._upgraded)
        )

    def _is_whole(self, data: bytes) -> bool:
        """Tell whether aiohttp has read just these bytes as one request without a body."""
        return (
            len(self._messages) == 1
            and self._messages[0][1] is EMPTY_PAYLOAD
            and not (self._close or self._force_close or self._upgraded)
            and len(data) <= _REPEATED_MAX
            and data.find(_HEAD_END) == len(data) - len(_HEAD_END)
        )

    def _answer_again(self) -> bool:
        """Answer the newest request again, if it is allowed and its answer needs no waiting."""
        transport, known = self.transport, self._repeatable
        if transport is None or known is None or not self._is_waiting():
            return False
        if not self._connections.allows_again(self, known.host):
            return False
        answer = known.answer()
        if answer is None or transport.get_write_buffer_size() + len(answer) > _UNREAD_MAX:
            return False
        self.received = 0
        transport.write(answer)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        return True

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
    """One connection, from its first packet to its end."""

    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.socket = accepted
        self.address = address
        self.transport: asyncio.BaseTransport | None = None

    def close(self) -> None:
        """End it now, also in its handshake."""
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()
        with suppress(OSError):  # it has been closed already
            self.socket.shutdown(socket.SHUT_RDWR)


class Connections:
    """All connections of the web server; used from the event loop only."""

    def __init__(
        self,
        server: web.Server,
        context: Callable[[], ssl.SSLContext | None],
        allowed_by_host: Callable[[str], bool],
        **options: Any,  # noqa: ANN401 aiohttp's
    ) -> None:
        """Prepare.

        Args:
            server: answers the requests.
            context: returns the newest for TLS, None for plain HTTP.
            allowed_by_host: tells whether a request with this Host header is allowed, whatever else it has.
            options: of aiohttp's protocol.
        """
        self._make_protocol = partial(_Protocol, server, self, **options)
        self._context = context
        self._allowed_by_host = allowed_by_host
        self._strangers: dict[object, _Connection] = {}
        self._idle: dict[object, _Connection] = {}
        self._busy: dict[object, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections for ever."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)  # noqa: FBT003 the socket module's own
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
            if self._make_room():
                source = failure_source(str(address[0])) if isinstance(address, tuple) else ""
                task = asyncio.create_task(self._connect(_Connection(accepted, source)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                accepted.close()
            await asyncio.sleep(0)  # sock_accept does not yield while others wait to be accepted

    def close(self) -> None:
        """End all connections that wait, and handshakes."""
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
            request.protocol.received = 0

    def answered(self, request: BaseRequest, again: Callable[[], bytes | None]) -> None:
        """Let ``again`` make the answer when the same bytes come again on its connection."""
        if isinstance(request.protocol, _Protocol):
            request.protocol.repeat(request, again)

    def allows_again(self, protocol: object, host: str) -> bool:
        """Tell whether a request that was allowed before is allowed now; it counts as the newest."""
        if protocol not in self._idle or not self._allowed_by_host(host):
            return False
        self._idle[protocol] = self._idle.pop(protocol)  # the one that has been idle for the shortest time
        return True

    @contextmanager
    def allowed(self, request: BaseRequest) -> Iterator[None]:
        """Keep the connection of a request that is allowed until its answer is written."""
        protocol = request.protocol
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
        """Shake hands, and give the connection to aiohttp."""
        protocol = self._make_protocol()
        self._strangers[protocol] = connection
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

    def forget(self, protocol: object) -> None:
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
        """Close the connection that has been idle for the longest time, if there is one.

        Connections without an allowed request are closed first, from the address that has most of them: a
        stranger loses his own.
        """
        addresses = Counter(each.address for each in self._strangers.values())
        for connections in (self._strangers, self._idle):
            for protocol, connection in connections.items():
                if connections is self._idle or addresses[connection.address] == max(addresses.values()):
                    del connections[protocol]
                    connection.close()
                    return True
        return False
