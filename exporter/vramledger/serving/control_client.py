"""Ask the exporter over its control socket, from a command that does not load the exporter."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from vramledger.errors import StartupError
from vramledger.exchange import ask_http, by
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


async def _exchange(path: Path, seconds: float, method: str, target: str, body: bytes = b"") -> bytes:
    """Return the body of an answer. Raises NoExporterError if there is none, StartupError if refused."""
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    until, given_up = time.monotonic() + seconds, threading.Event()
    request = partial(_request, connection, path, head.encode() + body, until, given_up)
    try:
        status, answer = await asyncio.to_thread(request)
    except UntrustedListenerError as error:
        raise NoExporterError(str(error)) from error
    except (OSError, ValueError) as error:
        raise NoExporterError(_describe(path, error)) from error
    finally:
        given_up.set()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    if status != HTTPStatus.OK:
        raise StartupError(f"the exporter says: {_read(answer, messages.Refused).error}")
    return answer


def _request(
    connection: socket.socket, path: Path, request: bytes, until: float, given_up: threading.Event
) -> tuple[int, bytes]:
    with connection:
        while True:
            try:
                by(until, connection).connect(str(path))
                break
            except BlockingIOError:  # its queue is full
                if given_up.wait(_BUSY_PAUSE):
                    raise
        check_listener(connection, path)
        return ask_http(connection, request, until, messages.MAX_ANSWER_BYTES)


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
    if isinstance(error, TimeoutError):
        return f"the exporter at {path} does not answer; see its log"
    if isinstance(error, OSError) and error.errno == errno.EPROTOTYPE:
        return f"what listens at {path} is of another version; use the vramledger that runs the exporter"
    return f"the exporter at {path} gave no answer; see its log"
