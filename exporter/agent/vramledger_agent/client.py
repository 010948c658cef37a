"""Send a request to the agent in a process: through the exporter, which passes our own connection on.

The agent responds to us directly. It learns from the kernel who we are, and obeys only root and its own user.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vramledger_agent.errors import AgentError
from vramledger_agent.listener import UntrustedListenerError, check_listener
from vramledger_agent.printable import printable
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES, make_request

_T = TypeVar("_T")

_EXTRA_TIME = 10.0
"""Seconds that an answer may take beyond the requested time, to write a snapshot or collect garbage."""


def request_agent(
    path: Path, pid: int, name: str, arguments: dict[str, object], file: int | None = None
) -> dict[str, Any]:
    """Return an agent's answer; ``arguments["seconds"]`` says how long it may take to begin.

    ``file``: a descriptor that the agent writes to. Raises AgentError if no exporter listens, there is no
    such agent, it refused, or did not answer in time.
    """
    if file is not None:
        arguments = {**arguments, "file": True}
    request = json.dumps(make_request(name, to=pid, **arguments)).encode()
    seconds = arguments.get("seconds")
    # The agent waits for a training step at most twice: for its beginning and for its end.
    timeout = 2 * (seconds if isinstance(seconds, int | float) else 0.0) + _EXTRA_TIME
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        response = _exchange(connection, request, file, path=path, pid=pid, timeout=timeout)
    finally:
        # Left open until this command ends: to close what a hostile agent may have sent beside its answer, a
        # descriptor, would take as long as it likes, and the kernel does not linger at the end of a process.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.detach()
    return _parse_response(response, pid)


def _exchange(  # noqa: PLR0913 what the messages need
    connection: socket.socket, request: bytes, file: int | None, *, path: Path, pid: int, timeout: float
) -> bytes:
    connection.settimeout(timeout)
    try:
        connection.connect(os.fspath(path))
        check_listener(connection, path)
        connection.send(request)
        if file is not None:
            rights = array.array("i", [file])
            with suppress(BrokenPipeError):  # it was refused already, and we read why
                connection.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    except UntrustedListenerError as error:
        raise AgentError(str(error)) from error
    except OSError as error:
        message = (
            f"no exporter answers at {path} ({error.strerror or error}); start 'vramledger "
            "serve', or give its socket with --agent.socket"
        )
        raise AgentError(message) from error
    try:
        flags = _again_after_reset(lambda: connection.recvmsg(1, 0, socket.MSG_PEEK))[2]
        if flags & socket.MSG_CTRUNC:
            message = f"pid {pid} sent a descriptor, which no agent does; its answer was not read"
            raise AgentError(message)
        return _again_after_reset(lambda: connection.recv(MAX_MESSAGE_BYTES))
    except TimeoutError as error:
        message = f"the agent in pid {pid} did not answer within {timeout:g} s"
        raise AgentError(message) from error
    except OSError as error:
        message = f"the connection broke ({error.strerror}); the exporter or pid {pid} may have ended"
        raise AgentError(message) from error


def _again_after_reset(receive: Callable[[], _T]) -> _T:
    """Receive, twice if need be: if our file was not read, the kernel says so before it gives the answer."""
    try:
        return receive()
    except ConnectionResetError:
        return receive()


def _parse_response(response: bytes, pid: int) -> dict[str, Any]:
    if not response:
        message = f"the connection was closed without an answer; has pid {pid} ended?"
        raise AgentError(message)
    try:
        content = json.loads(response)
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("ok"), bool):
        message = f"pid {pid} gave an invalid answer; does its agent have another version?"
        raise AgentError(message)
    if not content["ok"]:
        reason = printable(str(content.get("error")))
        message = reason[:500] or "refused without a reason"
        raise AgentError(message)
    return content
