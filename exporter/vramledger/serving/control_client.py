"""Ask the exporter over its control socket, from a command that does not load the exporter."""

from __future__ import annotations

import asyncio
import errno
import http.client
import socket
import time
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from vramledger.errors import StartupError
from vramledger.serving import control_messages as messages
from vramledger_agent.client import UntrustedListenerError, check_listener

_T = TypeVar("_T")

_BUSY_PAUSE = 0.05
"""Seconds between two attempts to connect to an exporter whose queue is full."""


class NoExporterError(StartupError):
    """No exporter listens there, or it gave no answer; a later request may reach one."""


async def request_release(path: Path, seconds: float | None) -> float | None:
    """Have GPUs released or, with None, reopened; return until when. Raises NoExporterError, StartupError."""
    target, body = (
        (messages.RESUME, b"")
        if seconds is None
        else (messages.RELEASE, messages.write(messages.ReleaseRequest(seconds)))
    )
    answer = await _exchange(path, messages.RELEASE_SECONDS, "POST", target, body)
    return _read(answer, messages.Released).released_until


async def request_snapshot(
    path: Path, after: str | None = None, wait: float = 0.0
) -> tuple[messages.SnapshotHead, bytes]:
    """Return the exporter's newest snapshot as it sent it, for which it may ``wait`` seconds, and its head.

    Raises NoExporterError if no exporter answers, StartupError if it refuses, or is of another version.
    """
    query = "" if after is None else f"?{urlencode({'after': after})}"
    answer = await _exchange(path, messages.LEDGER_SECONDS + wait, "GET", messages.SNAPSHOT + query)
    head, _, text = answer.partition(b"\n")
    return _read(head, messages.SnapshotHead), text


async def request_past(path: Path, question: dict[str, Any]) -> tuple[str, dict[str, Any], bytes]:
    """Return version, head and content of an answer about the past. Raises NoExporterError, StartupError."""
    answer = await _exchange(path, messages.PAST_SECONDS, "GET", f"{messages.PAST}?{urlencode(question)}")
    line, _, content = answer.partition(b"\n")
    head = _read(line, messages.PastHead)
    return head.program, head.head, content


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path
        self._deadline = time.monotonic() + seconds

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(self.timeout)
        while True:
            try:
                self.sock.connect(str(self._path))
                break
            except BlockingIOError:  # its queue is full
                if time.monotonic() > self._deadline:
                    raise TimeoutError from None
                time.sleep(_BUSY_PAUSE)
        check_listener(self.sock, self._path)

    def interrupt(self) -> None:
        """End what another thread waits for."""
        self._deadline = 0.0
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


async def _exchange(path: Path, seconds: float, method: str, target: str, body: bytes = b"") -> bytes:
    """Return the body of an answer. Raises NoExporterError if there is none, StartupError if refused."""
    connection = _UnixConnection(path, seconds)
    exchange = asyncio.to_thread(_request, connection, method, target, body)
    try:
        status, answer = await asyncio.wait_for(exchange, seconds)
    except UntrustedListenerError as error:
        raise NoExporterError(str(error)) from error
    except (OSError, http.client.HTTPException, asyncio.TimeoutError) as error:
        raise NoExporterError(_describe(path, error)) from error
    finally:
        connection.interrupt()
    if status != HTTPStatus.OK:
        raise StartupError(f"the exporter says: {_read(answer, messages.Refused).error}")
    return answer


def _request(connection: _UnixConnection, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has refused us, and its answer says why
            connection.request(method, target, body or None)
        response = connection.getresponse()
        answer = response.read(messages.MAX_ANSWER_BYTES)
        if not response.isclosed() and response.length:
            raise http.client.IncompleteRead(answer, response.length)
        return response.status, answer
    finally:
        connection.close()


def _read(answer: bytes, kind: type[_T]) -> _T:
    """Return what an exporter of this version has said. Raises StartupError if it is something else."""
    try:
        return messages.read(answer, kind)
    except messages.ControlError as error:
        raise StartupError(
            f"what answers is of another version; use the vramledger that runs the exporter ({error})"
        ) from error


def _describe(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
        return (
            f"no exporter answers at {path}; is 'vramledger serve' running, with this --control.socket? "
            "One that plays a recording answers no command"
        )
    if isinstance(error, PermissionError):
        return f"{path} cannot be reached by this user; run this as root or as the exporter's user"
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return f"the exporter at {path} does not answer; see its log"
    if isinstance(error, OSError) and error.errno == errno.EPROTOTYPE:
        return f"what listens at {path} is of another version; use the vramledger that runs the exporter"
    return f"the exporter at {path} gave no answer; see its log"
