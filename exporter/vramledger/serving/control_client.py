"""Send requests to the control socket, from a command that does not load the exporter."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from vramledger.errors import StartupError
from vramledger.serving.control_messages import (
    LEDGER,
    LEDGER_SECONDS,
    MAX_MESSAGE_BYTES,
    PAST,
    PAST_SECONDS,
    RESPONSE_SECONDS,
    SNAPSHOT_PACKET_BYTES,
    ControlError,
    ControlRequest,
    ControlResponse,
    LedgerHeader,
    PastHeader,
    read_ledger_header,
    read_past_header,
    read_response,
    write_request,
)

_T = TypeVar("_T")

_BUSY_PAUSE = 0.05
"""Seconds between two attempts to connect to an exporter whose queue is full."""


class NoExporterError(StartupError):
    """No exporter listens there, or it gave no answer; a later request may reach one."""


async def request_exporter(path: Path, request: ControlRequest) -> ControlResponse:
    """Send a request to the exporter that listens there.

    Raises:
        NoExporterError: no exporter answers.
        StartupError: it refuses this request.
    """

    async def exchange() -> bytes:
        async with _connect(path) as connection:
            await _send(connection, request)
            return await _receive(connection, MAX_MESSAGE_BYTES)

    try:
        return read_response(await _within(path, RESPONSE_SECONDS, exchange()))
    except ControlError as error:
        raise _refusal(error) from error


async def request_ledger(
    path: Path, after: str | None = None, wait: float = 0.0
) -> tuple[LedgerHeader, bytes]:
    """Return the exporter's newest snapshot as it sent it, and what precedes it.

    Args:
        path: of the control socket.
        after: the token of a snapshot; wait for a newer one.
        wait: seconds for which the exporter may wait for it, as its last answer said.

    Raises:
        NoExporterError: no exporter answers.
        StartupError: it refuses, or is of another version.
    """

    async def exchange() -> tuple[LedgerHeader, bytes]:
        async with _connect(path) as connection:
            await _send(connection, ControlRequest(LEDGER, after=after))
            header = read_ledger_header(await _receive(connection, MAX_MESSAGE_BYTES))
            return header, await _receive_content(connection, header.size)

    try:
        return await _within(path, LEDGER_SECONDS + wait, exchange())
    except ControlError as error:
        raise _refusal(error) from error


async def request_past(path: Path, question: Mapping[str, Any]) -> tuple[str, dict[str, Any], bytes]:
    """Return the exporter's version, and head and content of its answer to a question about the past.

    Raises:
        NoExporterError: no exporter answers.
        StartupError: it refuses, or keeps no past.
    """

    async def exchange() -> tuple[PastHeader, bytes]:
        async with _connect(path) as connection:
            await _send(connection, ControlRequest(PAST, question=question))
            header = read_past_header(await _receive(connection, MAX_MESSAGE_BYTES))
            return header, await _receive_content(connection, header.size)

    try:
        header, content = await _within(path, PAST_SECONDS, exchange())
    except ControlError as error:
        raise _refusal(error) from error
    return header.program, dict(header.head), content


async def _within(path: Path, seconds: float, exchange: Coroutine[Any, Any, _T]) -> _T:
    """Return what an exchange with the exporter gives, within a time."""
    try:
        return await asyncio.wait_for(exchange, seconds)
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        raise NoExporterError(_describe(path, error)) from error


def _refusal(error: ControlError) -> StartupError:
    return StartupError(f"the exporter says: {error}")


@asynccontextmanager
async def _connect(path: Path) -> AsyncIterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.setblocking(False)  # noqa: FBT003 the standard library's
        while True:
            try:
                connection.connect(str(path))
                break
            except BlockingIOError:  # its queue is full
                await asyncio.sleep(_BUSY_PAUSE)
        yield connection


async def _send(connection: socket.socket, request: ControlRequest) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it has refused us, and its answer says why
        await asyncio.get_running_loop().sock_sendall(connection, write_request(request))


async def _receive_content(connection: socket.socket, size: int) -> bytes:
    """Receive what follows a header, packet by packet."""
    content = bytearray()
    while len(content) < size:
        content += await _receive(connection, SNAPSHOT_PACKET_BYTES)
    return bytes(content)


async def _receive(connection: socket.socket, size: int) -> bytes:
    """Return the next packet, which is never empty.

    Raises:
        EOFError: the exporter has closed.
    """
    packet = await asyncio.get_running_loop().sock_recv(connection, size)
    if not packet:
        raise EOFError
    return packet


def _describe(path: Path, error: Exception) -> str:
    """Say why there is no answer, and what to do."""
    if isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
        return f"no exporter answers at {path}; is 'vramledger serve' running, with this --control.socket?"
    if isinstance(error, PermissionError):
        return f"{path} cannot be reached by this user; run this as root or as the exporter's user"
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return f"the exporter at {path} does not answer; see its log"
    if isinstance(error, OSError) and error.errno == errno.EPROTOTYPE:
        return f"what listens at {path} is of another version; use the vramledger that runs the exporter"
    return f"the exporter at {path} gave no answer; see its log"
