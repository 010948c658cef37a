"""The control socket: how ``vramledger release`` reaches the exporter that runs on this host.

A Unix socket with mode 0600; the kernel says who is at the other end, and only root and the exporter's own
user are heard. A request and its answer are a line of JSON each.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from vramledger.agent_server.credentials import read_credentials
from vramledger.agent_server.unix_socket import SocketFile, SocketSettings
from vramledger.errors import StartupError, VramledgerError
from vramledger.logs import fields, log
from vramledger.serving.control_client import MAX_LINE

_REQUEST_TIMEOUT = 5.0
# Seconds in which a client must have asked.

ControlResponse = Mapping[str, object]
ControlHandler = Callable[[Mapping[str, object]], Awaitable[ControlResponse]]

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

    Where that is not possible the exporter goes on without, unless it is ``required``.

    Raises:
        StartupError: it is required, and cannot be made.
    """
    try:
        file = SocketFile(path, _SOCKET)
    except StartupError as error:
        if required:
            message = f"{error}; choose another place with --control.socket"
            raise StartupError(message) from error
        log.info("No control socket: 'vramledger release' will not find us", extra=fields(err=error))
        yield
        return
    server = await asyncio.start_unix_server(_request_handler(handle), sock=file.socket, limit=MAX_LINE)
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
            response = await _respond(handle, reader, writer.get_extra_info("socket"))
            writer.write(json.dumps(response).encode() + b"\n")
            await writer.drain()
        except (ConnectionError, asyncio.TimeoutError):
            pass  # nobody to answer
        finally:
            writer.close()

    return respond


async def _respond(
    handle: ControlHandler, reader: asyncio.StreamReader, peer: socket.socket
) -> ControlResponse:
    pid, uid = read_credentials(peer)
    try:
        line = await asyncio.wait_for(reader.readline(), _REQUEST_TIMEOUT)
        if uid not in (0, os.geteuid()):  # only now: who is refused before having asked meets a broken pipe
            log.warning("Refused a stranger on the control socket", extra=fields(pid=pid, uid=uid))
            return {"error": "only root and the exporter's own user may ask that"}
        request = json.loads(line)
    except ValueError:  # no JSON, or a line without an end
        return {"error": "that is no request"}
    if not isinstance(request, dict):
        return {"error": "that is no request"}
    log.info("Asked on the control socket", extra=fields(pid=pid, uid=uid, request=json.dumps(request)))
    try:
        return await handle(request)
    except VramledgerError as error:
        return {"error": str(error)}
