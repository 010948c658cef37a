"""Run the control socket, through which ``vramledger release`` reaches the exporter of this host.

It is a Unix socket with mode 0600. The kernel says who is at the other end, and only root and the exporter's
own user are accepted. The messages are in :mod:`vramledger.serving.control_messages`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from vramledger.agent_server.credentials import read_credentials
from vramledger.agent_server.unix_socket import SocketFile, SocketSettings
from vramledger.errors import StartupError, VramledgerError
from vramledger.logs import fields, log
from vramledger.serving.control_messages import (
    MAX_LINE_BYTES,
    REQUEST_SECONDS,
    ControlRequest,
    ControlResponse,
    read_request,
    write_failure,
    write_response,
)

ControlHandler = Callable[[ControlRequest], Awaitable[ControlResponse]]

_SOCKET = SocketSettings(
    kind=socket.SOCK_STREAM,
    mode=0o600,
    backlog=8,
    failure="cannot make the control socket",
    in_use="another exporter answers there",
    parents=True,
)


@asynccontextmanager
async def serve_control(path: Path, handle: ControlHandler, *, required: bool) -> AsyncIterator[None]:
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
        log.info(
            "No control socket: 'vramledger release' will not find this exporter", extra=fields(err=error)
        )
        yield
        return
    server = await asyncio.start_unix_server(_request_handler(handle), sock=file.socket, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        file.remove()


def _request_handler(
    handle: ControlHandler,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await _respond(handle, reader, writer.get_extra_info("socket")))
            await writer.drain()
        except (ConnectionError, asyncio.TimeoutError):
            pass  # no client left to answer
        finally:
            writer.close()

    return respond


async def _respond(handle: ControlHandler, reader: asyncio.StreamReader, peer: socket.socket) -> bytes:
    pid, uid = read_credentials(peer)
    try:
        line = await asyncio.wait_for(reader.readline(), REQUEST_SECONDS)
    except ValueError:  # a line without an end
        return write_failure("that is not a message of the control socket")
    # not earlier: a client that is refused before it has sent its request gets a broken pipe
    if uid not in (0, os.geteuid()):
        log.warning("Refused another user on the control socket", extra=fields(pid=pid, uid=uid))
        return write_failure("only root and the exporter's own user may request that")
    try:
        request = read_request(line)
        log.info("Got a request on the control socket", extra=fields(pid=pid, uid=uid, ask=request.ask))
        return write_response(await handle(request))
    except VramledgerError as error:
        return write_failure(error)
