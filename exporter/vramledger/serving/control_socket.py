"""Run the control socket, through which commands and people ask the exporter, and make it release the GPUs.

It speaks HTTP by aiohttp; :mod:`vramledger.serving.control_messages` has the paths. Every user may connect:

| who | may |
|---|---|
| root of the host, and the exporter's own user | everything |
| any other user of the host | read what the page shows to everybody, if it asks for no password |
| a process of a container, except the exporter's own container | nothing, also as root |

A connection has one request. It costs
little and has a deadline, and a user has only few at the same time. aiohttp never reads a stranger's socket.
Any read of a Unix socket, also one that asks for no descriptors, closes those that come with the bytes, and
waits for that as long as their owner likes: 5 s with a TCP socket that lingers for 5. So we look at what
waits before we take it, refuse what has a descriptor, and pass only bytes on to aiohttp.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from vramledger.agent_server.connection import Peer, has_ended, identify_peer
from vramledger.agent_server.disposal import Disposal, call_next_second, read_credentials, receive_bytes
from vramledger.agent_server.unix_socket import SocketFile, SocketSettings
from vramledger.errors import StartupError, VramledgerError
from vramledger.logs import fields, log
from vramledger.model.agent_report import RefusedError
from vramledger.rate_limit import LineLimit, TokenBucket
from vramledger.serving import control_messages as messages
from vramledger.web.cancellation import cancel_and_wait
from vramledger.web.error_log import RequestErrorFilter
from vramledger_agent.client import PROC, is_outside_containers

_ROOT = 0


def may_be_trusted(uid: int) -> bool:
    """Tell whether a process of a user may request everything if it is in no container."""
    return uid in (_ROOT, os.geteuid())


class Caller(NamedTuple):
    """A connected process: who it is, whether it may request everything, and whether it may read."""

    peer: Peer
    outside: bool

    @property
    def trusted(self) -> bool:
        """Whether it may request everything."""
        return self.outside and may_be_trusted(self.peer.uid)

    def check_read(self, *, page_open: bool) -> None:
        """Check that it may read the ledger. Raises ControlError if it may not."""
        self._check_outside()
        if not self.trusted and not page_open:
            raise messages.ControlError(
                "the page asks for a password, so only root and the exporter's own user may read it here"
            )

    def check_control(self) -> None:
        """Check that it may make the exporter do something. Raises ControlError if it may not."""
        self._check_outside()
        if not self.trusted:
            raise messages.ControlError("only root and the exporter's own user may request that")

    def _check_outside(self) -> None:
        if not self.outside:
            raise messages.ControlError(
                "this process is in a container, or the exporter may not see it; run this on the host, or in "
                "the exporter's own container"
            )


def identify_caller(connection: socket.socket) -> Caller:
    """Return who connected; the caller closes ``pidfd``. Raises RefusedError if outside or ended."""
    peer = identify_peer(connection, str(PROC))
    # If the process still runs now, the namespaces that were read were its own.
    outside = is_outside_containers(peer.pid) and not has_ended(peer.pidfd)
    return Caller(peer, outside)


MAX_CONNECTIONS = 64
"""The maximum number of open connections of those who may not request everything."""

MAX_CONNECTIONS_PER_USER = 8

USER_RATE, USER_BURST = 4.0, 16.0
"""Requests of one user: the number per second, and the maximum in one burst."""

_ACCEPT_RATE, _ACCEPT_BURST = 200.0, 128.0
"""Connections that are accepted: without a limit, a program that only connects would take all our time."""

_PAUSE = 1.0

_END_SECONDS = 0.1
"""Seconds between two attempts to end all connections: one may just have begun."""

_MAX_PIECES = 32
"""Reads of one request: to be woken for each of its bytes would cost 0.1 ms each."""

_PIECE_BYTES = 1 << 16
"""Bytes of an answer that are passed on at once."""

_UNREAD_BYTES = 1 << 14
"""Bytes of an answer that the kernel keeps, twice, until its client reads: as long as it likes, so little."""

_SOCKET = SocketSettings(
    kind=socket.SOCK_STREAM,
    mode=0o666,
    backlog=128,
    failure="cannot make the control socket",
    in_use="another exporter answers there",
    parents=True,
    pass_credentials=True,
)


class ControlHandlers(NamedTuple):
    """What the exporter does on request."""

    # release the GPUs for so many seconds, or reopen them (None); only the trusted get here
    release: Callable[[float | None], Awaitable[messages.Released]]
    # return the JSON document of the ledger, as the page's address gives it
    document: Callable[[], Awaitable[bytes]]
    # return a snapshot, as this caller may see it, and its head
    snapshot: Callable[[messages.SnapshotRequest, Caller], Awaitable[tuple[messages.SnapshotHead, bytes]]]
    # answer a question about the past, as this caller may know it
    past: Callable[[messages.PastQuestion, Caller], Awaitable[tuple[messages.PastHead, bytes]]]
    page_open: Callable[[], bool]  # whether everybody may read the page


@asynccontextmanager
async def serve_control(
    path: Path, handlers: ControlHandlers, *, required: bool, owner: int | None = None
) -> AsyncIterator[None]:
    """Answer on the socket until the block ends; only root, we and ``owner`` may own its directory.

    Where it cannot be made the exporter goes on without, unless it is ``required``: then StartupError.
    """
    try:
        file = SocketFile(path, _SOCKET, owner)
    except StartupError as error:
        if required:
            raise StartupError(f"{error}; choose another path with --control.socket") from error
        log.info("No control socket: commands will not find this exporter", extra=fields(err=error))
        yield
        return
    server = _ControlServer(file, handlers)
    try:
        yield
    finally:
        await server.close()


class _ControlServer:
    """The connections of the control socket; used from the event loop only."""

    def __init__(self, file: SocketFile, handlers: ControlHandlers) -> None:
        self._file = file
        self._handlers = handlers
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], Caller] = {}
        self._pairs: set[socket.socket] = set()
        self._accept_bucket = TokenBucket(time.monotonic(), _ACCEPT_RATE, _ACCEPT_BURST)
        self._user_buckets: dict[int, TokenBucket] = {}
        self._disposal = Disposal(MAX_CONNECTIONS_PER_USER)
        self._logger = logging.getLogger(f"{log.name}.control")
        self._filter = RequestErrorFilter()
        self._refused, self._failed = LineLimit(), LineLimit()
        self._logger.addFilter(self._filter)
        self._resuming: asyncio.TimerHandle | None = None
        self._loop.add_reader(file.socket, self._accept)
        self._sweeping = call_next_second(self._sweep)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        self._sweeping.cancel()
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._file.socket)
        while self._tasks:  # not cancelled, which could interrupt their cleaning up
            for each in self._pairs:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            await asyncio.wait(self._tasks, timeout=_END_SECONDS)
        self._disposal.close_listening(self._file.socket)
        self._file.remove()
        self._disposal.end()
        self._logger.removeFilter(self._filter)

    def _sweep(self) -> None:
        now = time.monotonic()
        for uid in [uid for uid, bucket in self._user_buckets.items() if bucket.is_full(now)]:
            del self._user_buckets[uid]
        self._disposal.run(self._file.bar)
        self._sweeping = call_next_second(self._sweep)

    def _accept(self) -> None:
        if not self._accept_bucket.consume(time.monotonic()):
            self._pause_accepting(self._accept_bucket.wait)
            return
        if self._disposal.full:
            self._pause_accepting(_PAUSE)
            return
        try:
            accepted, _ = self._file.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor left: the socket would be readable for ever
            log.debug("Cannot accept a command", extra=fields(err=str(error)))
            self._pause_accepting(_PAUSE)
            return
        accepted.setblocking(False)  # noqa: FBT003 the standard library's
        # Out of line, an urgent byte is not seen by a look, and a read drops it with its descriptor.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        caller: Caller | None = None
        try:
            uid = read_credentials(accepted)[1]
            if not may_be_trusted(uid):  # first, as reading of a process costs more than to refuse it
                self._take_place(uid)
            caller = identify_caller(accepted)
            if may_be_trusted(uid) and not caller.trusted:
                self._take_place(uid)
        except (RefusedError, OSError, messages.ControlError) as error:
            if caller is not None:
                os.close(caller.peer.pidfd)
            self._dismiss(accepted, error)
            return
        task = self._loop.create_task(self._serve(accepted, caller))
        self._tasks[task] = caller
        task.add_done_callback(self._end)

    def _pause_accepting(self, seconds: float) -> None:
        """Accept no connection for a while; new ones wait in the kernel."""
        self._loop.remove_reader(self._file.socket)
        self._resuming = self._loop.call_later(
            seconds, self._loop.add_reader, self._file.socket, self._accept
        )

    def _take_place(self, uid: int) -> None:
        """Take a place of a user who may not request everything. Raises ControlError if there is none."""
        now = time.monotonic()
        users = Counter(each.peer.uid for each in self._tasks.values() if not each.trusted)
        if (
            users[uid] + self._disposal.held(uid) >= MAX_CONNECTIONS_PER_USER
            or users.total() >= MAX_CONNECTIONS
        ):
            raise messages.ControlError("too many commands ask at the same time; try again")
        bucket = self._user_buckets.setdefault(uid, TokenBucket(now, USER_RATE, USER_BURST))
        if not bucket.consume(now):
            raise messages.ControlError("too many requests of one user; try again in some seconds")

    def _dismiss(self, accepted: socket.socket, why: object) -> None:
        log.debug("Refused a command", extra=fields(err=str(why)))
        if self._disposal.held(read_credentials(accepted)[1]) < MAX_CONNECTIONS_PER_USER:
            _send_refusal(accepted, why)
        self._disposal.close(accepted)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and (dropped := self._failed.admit()) is not None:
            extra = fields(err=repr(error), not_logged_before=dropped)
            log.error("A request of a command failed", extra=extra, exc_info=error)

    async def _serve(self, accepted: socket.socket, caller: Caller) -> None:
        """Let aiohttp answer the request of a connection, over a pair of sockets of ours."""
        ours, theirs = socket.socketpair()
        self._pairs.add(ours)
        transport: asyncio.Transport | None = None
        tasks: list[asyncio.Task[Any]] = []
        try:
            ours.setblocking(False)  # noqa: FBT003 the standard library's
            asked = asyncio.Event()
            server = web.Server(
                partial(self._answer, caller, asked),
                access_log=None,
                logger=self._logger,
                auto_decompress=False,
                handler_cancellation=True,  # an answer that nobody waits for is not computed
                lingering_time=0,
            )
            transport, _ = await self._loop.connect_accepted_socket(server, theirs)
            tasks = [
                self._loop.create_task(_pass_request(self._loop, accepted, ours)),
                self._loop.create_task(_pass_answer(self._loop, ours, accepted)),
            ]
            tasks.append(asking := self._loop.create_task(asked.wait()))
            await asyncio.wait(tasks, timeout=messages.REQUEST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if asked.is_set():
                tasks.remove(asking)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if transport is None:
                theirs.close()
            elif not transport.is_closing():
                transport.abort()
            await cancel_and_wait(*tasks)
            self._pairs.discard(ours)
            ours.close()
            os.close(caller.peer.pidfd)
            self._disposal.close(accepted)

    async def _answer(
        self, caller: Caller, asked: asyncio.Event, request: web.BaseRequest
    ) -> web.StreamResponse:
        """Answer a request, in pieces that wait for the client, and end its connection."""
        try:
            content = await request.read()
            asked.set()
            parts, status = await self._respond(request, content, caller), HTTPStatus.OK
        except _ForbiddenError as error:
            parts, status = (messages.write(messages.Refused(str(error))),), error.status
        except VramledgerError as error:
            parts, status = (messages.write(messages.Refused(str(error))),), HTTPStatus.CONFLICT
        response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
        response.content_length = sum(map(len, parts))
        response.force_close()
        await response.prepare(request)
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE_BYTES):
                await response.write(view[start : start + _PIECE_BYTES])
        await response.write_eof()
        return response

    async def _respond(self, request: web.BaseRequest, content: bytes, caller: Caller) -> tuple[bytes, ...]:
        what = request.method, request.path
        if what in {("POST", messages.RELEASE), ("POST", messages.RESUME)}:
            who = {"pid": caller.peer.pid, "uid": caller.peer.uid, "ask": request.path}
            try:
                caller.check_control()
            except messages.ControlError as error:
                if (dropped := self._refused.admit()) is not None:
                    extra = fields(**who, not_logged_before=dropped)
                    log.warning("Refused a request on the control socket", extra=extra)
                raise _ForbiddenError(HTTPStatus.FORBIDDEN, error) from error
            seconds = (
                messages.read(content, messages.ReleaseRequest).seconds
                if request.path == messages.RELEASE
                else None
            )
            log.info("Got a request on the control socket", extra=fields(**who))
            # What has begun is finished, also if nobody waits for its answer.
            return (messages.write(await asyncio.shield(self._handlers.release(seconds))),)
        if request.method != "GET" or request.path not in {messages.LEDGER, messages.SNAPSHOT, messages.PAST}:
            raise _ForbiddenError(HTTPStatus.NOT_FOUND, "the exporter does not know this request")
        try:
            caller.check_read(page_open=self._handlers.page_open())
        except messages.ControlError as error:
            raise _ForbiddenError(HTTPStatus.FORBIDDEN, error) from error
        if request.path == messages.LEDGER:
            return (await self._handlers.document(),)
        parameters = dict(request.rel_url.query)
        head: messages.SnapshotHead | messages.PastHead
        if request.path == messages.SNAPSHOT:
            head, text = await self._handlers.snapshot(
                messages.read(parameters, messages.SnapshotRequest), caller
            )
        else:
            head, text = await self._handlers.past(messages.read_question(parameters), caller)
        return messages.write(head), text


class _ForbiddenError(messages.ControlError):
    def __init__(self, status: HTTPStatus, why: object) -> None:
        super().__init__(str(why))
        self.status = status


def _send_refusal(accepted: socket.socket, why: object) -> None:
    body = messages.write(messages.Refused(str(why)))
    head = (
        "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with suppress(OSError):
        accepted.send(head.encode() + body)


async def _pass_request(loop: asyncio.AbstractEventLoop, client: socket.socket, to: socket.socket) -> None:
    """Pass a request on; return when the client has gone, or has sent too much or a descriptor."""
    left = messages.MAX_REQUEST_BYTES
    with suppress(OSError):
        for _ in range(_MAX_PIECES):
            await _wait_until_readable(loop, client)
            with suppress(BlockingIOError):
                data = receive_bytes(client, left)
                if data is None:
                    _send_refusal(client, "a request has no descriptors")
                if not data:
                    return
                left -= len(data)
                await loop.sock_sendall(to, data)
                if not left:
                    break
        most = f"{messages.MAX_REQUEST_BYTES} bytes, in {_MAX_PIECES} pieces"
        _send_refusal(client, f"a request has at most {most}")


async def _pass_answer(loop: asyncio.AbstractEventLoop, answer: socket.socket, client: socket.socket) -> None:
    """Pass an answer on; return at its end, or when the client has gone or does not read."""
    with suppress(OSError, asyncio.TimeoutError):
        while data := await loop.sock_recv(answer, _PIECE_BYTES):
            await asyncio.wait_for(loop.sock_sendall(client, data), messages.REQUEST_SECONDS)


async def _wait_until_readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    readable = loop.create_future()

    def notice() -> None:
        loop.remove_reader(connection)
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, notice)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
