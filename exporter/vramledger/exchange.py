"""Ask a server, and give up at one moment: who answers byte by byte gains no time."""

from __future__ import annotations

import io
import json
import socket
import time
from contextlib import suppress
from typing import Any


def by(until: float, connection: socket.socket) -> socket.socket:
    """Return a connection whose next call ends by a monotonic time. Raises TimeoutError after it."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the answer takes too long")
    connection.settimeout(left)
    return connection


class _Received(io.RawIOBase):
    """What a connection receives by a time; to http.client it is a socket, and its file."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 a buffer, which has a name from Python 3.12 on
        return by(self._until, self._connection).recv_into(buffer)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)


def ask_http(connection: socket.socket, request: bytes, until: float, most: int) -> tuple[int, bytes]:
    """Return the status and the body of an answer. Raises OSError or ValueError if none comes whole by then.

    It has at most so many bytes, and is not unpacked.
    """
    from http.client import HTTPException, HTTPResponse  # noqa: PLC0415 it loads ssl, which takes 5 MiB

    with suppress(BrokenPipeError, ConnectionResetError):  # it has refused us, and its answer says why
        by(until, connection).sendall(request)
    answer = HTTPResponse(_Received(connection, until))  # type: ignore[arg-type]
    try:
        answer.begin()
        body = answer.read(most + 1)
    except HTTPException as error:
        raise ValueError(f"this does not speak HTTP: {error!r}") from error
    if len(body) > most:
        raise ValueError(f"the answer is longer than {most} bytes")
    if answer.length:
        raise ValueError("the answer is cut short")
    return answer.status, body


def read_json(text: bytes | bytearray | str) -> Any:  # noqa: ANN401 another program's JSON
    """Return what a text says. Raises ValueError if that is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
