"""Run the control socket, through which commands ask the exporter of this host and make it release the GPUs.

Every user may connect to it; :mod:`vramledger.serving.callers` decides who may request what, and
:mod:`vramledger.serving.control_messages` defines the messages. A connection has one request. It costs little
and has a deadline, and a user has only few at the same time. As on the agents' socket, the exporter never
receives or closes a file that a client has sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vramledger.agent_server.disposal import Disposal, holds_descriptors, receive_plain
from vramledger.agent_server.sweeping import call_next_second
from vramledger.agent_server.unix_socket import SocketFile, SocketSettings
from vramledger.errors import StartupError, VramledgerError
from vramledger.logs import fields, log
from vramledger.model.agent_report import RefusedError
from vramledger.rate_limit import TokenBucket
from vramledger.serving.callers import Caller, identify_caller
from vramledger.serving.control_messages import (
    LEDGER,
    MAX_MESSAGE_BYTES,
    PAST,
    REQUEST_SECONDS,
    SNAPSHOT_PACKET_BYTES,
    ControlError,
    ControlRequest,
    ControlResponse,
    LedgerHeader,
    PastHeader,
    read_request,
    write_failure,
    write_response,
)
from vramledger.web.cancellation import cancel_and_wait

MAX_CONNECTIONS = 64
"""The maximum number of open connections of those who may not request everything."""

MAX_CONNECTIONS_PER_USER = 8

USER_RATE, USER_BURST = 4.0, 16.0
"""Requests of one user: the number per second, and the maximum in one burst."""

_ACCEPT_RATE, _ACCEPT_BURST = 200.0, 128.0
"""Connections that are accepted: without a limit, a program that only connects would take all our time."""

_PAUSE = 1.0

_SOCKET = SocketSettings(
    kind=socket.SOCK_SEQPACKET,
    mode=0o666,
    backlog=128,
    failure="cannot make the control socket",
    in_use="another exporter answers there",
    parents=True,
    pass_credentials=True,
)


class ControlHandlers(NamedTuple):
    """What the exporter does on request.

    Attributes:
        control: release the GPUs, or reopen them; only the trusted get here.
        ledger: return a snapshot, as this caller may see it, and what precedes it.
        past: answer a question about the past, as this caller may know it.
        page_open: whether everybody may read the page.
    """

    control: Callable[[ControlRequest], Awaitable[ControlResponse]]
    ledger: Callable[[ControlRequest, Caller], Awaitable[tuple[LedgerHeader, bytes]]]
    past: Callable[[ControlRequest, Caller], Awaitable[tuple[PastHeader, bytes]]]
    page_open: Callable[[], bool]


@asynccontextmanager
async def serve_control(path: Path, handlers: ControlHandlers, *, required: bool) -> AsyncIterator[None]:
    """Answer on the socket until the block ends.

    If that is not possible the exporter goes on without the socket, unless it is ``required``.

    Raises:
        StartupError: it is required, and cannot be made.
    """
    try:
        file = SocketFile(path, _SOCKET)
    except StartupError as error:
        if required:
            message = f"{error}; choose another path with --control.socket"
            raise StartupError(message) from error
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
        self._accept_bucket = TokenBucket(time.monotonic(), _ACCEPT_RATE, _ACCEPT_BURST)
        self._user_buckets: dict[int, TokenBucket] = {}
        self._disposal = Disposal()
        self._resuming: asyncio.TimerHandle | None = None
        self._loop.add_reader(file.socket, self._accept)
        self._sweeping = call_next_second(self._sweep)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        self._sweeping.cancel()
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._file.socket)
        await cancel_and_wait(*self._tasks)
        self._disposal.close_listening(self._file.socket)
        self._file.remove()
        self._disposal.run()

    def _sweep(self) -> None:
        now = time.monotonic()
        for uid in [uid for uid, bucket in self._user_buckets.items() if bucket.is_full(now)]:
            del self._user_buckets[uid]
        self._disposal.run()
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
        try:
            caller = identify_caller(accepted)
        except (RefusedError, OSError) as error:
            self._dismiss(accepted, error)
            return
        if (refusal := self._refusal(caller)) is not None:
            os.close(caller.peer.pidfd)
            self._dismiss(accepted, refusal)
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

    def _refusal(self, caller: Caller) -> str | None:
        """Say why a connection gets no place; those who may request everything always have one."""
        if caller.trusted:
            return None
        uid, now = caller.peer.uid, time.monotonic()
        users = Counter(each.peer.uid for each in self._tasks.values() if not each.trusted)
        if users[uid] >= MAX_CONNECTIONS_PER_USER or users.total() >= MAX_CONNECTIONS:
            return "too many commands ask at the same time; try again"
        bucket = self._user_buckets.setdefault(uid, TokenBucket(now, USER_RATE, USER_BURST))
        return None if bucket.consume(now) else "too many requests of one user; try again in some seconds"

    def _dismiss(self, accepted: socket.socket, why: object) -> None:
        log.debug("Refused a command", extra=fields(err=str(why)))
        with suppress(OSError):
            accepted.send(write_failure(why))
        self._disposal.close(accepted)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A request of a command failed", extra=fields(err=repr(error)), exc_info=error)

    async def _serve(self, accepted: socket.socket, caller: Caller) -> None:
        try:
            for message in await self._respond(accepted, caller):
                sending = self._loop.sock_sendall(accepted, message)
                await asyncio.wait_for(sending, REQUEST_SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # no client left to answer, or one that does not read
        finally:
            os.close(caller.peer.pidfd)
            self._disposal.close(accepted)

    async def _respond(self, accepted: socket.socket, caller: Caller) -> list[bytes | memoryview]:
        """Return the packets of the response."""
        try:
            request = read_request(await asyncio.wait_for(_receive(self._loop, accepted), REQUEST_SECONDS))
            if request.ask == LEDGER:
                caller.check_read(page_open=self._handlers.page_open())
                return _packets(*await self._handlers.ledger(request, caller))
            if request.ask == PAST:
                caller.check_read(page_open=self._handlers.page_open())
                return _packets(*await self._handlers.past(request, caller))
            who = fields(pid=caller.peer.pid, uid=caller.peer.uid, ask=request.ask)
            try:
                caller.check_control()
            except ControlError:
                log.warning("Refused a request on the control socket", extra=who)
                raise
            log.info("Got a request on the control socket", extra=who)
            return [write_response(await self._handlers.control(request))]
        except VramledgerError as error:
            return [write_failure(error)]


def _packets(header: LedgerHeader | PastHeader, content: bytes) -> list[bytes | memoryview]:
    view = memoryview(content)
    starts = range(0, len(view), SNAPSHOT_PACKET_BYTES)
    return [write_response(header), *(view[at : at + SNAPSHOT_PACKET_BYTES] for at in starts)]


async def _receive(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    """Return the one message of a client.

    Raises:
        ControlError: it is too long, or came with descriptors.
        EOFError: the client has closed.
        OSError: the connection broke.
    """
    while True:
        try:
            if holds_descriptors(connection):
                message = "a request has no descriptors"
                raise ControlError(message)
            data, _, flags = receive_plain(connection, MAX_MESSAGE_BYTES)
        except BlockingIOError:
            await _wait_until_readable(loop, connection)
            continue
        if flags & socket.MSG_TRUNC:
            message = "that is not a message of the control socket"
            raise ControlError(message)
        if not data:
            raise EOFError
        return data


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
