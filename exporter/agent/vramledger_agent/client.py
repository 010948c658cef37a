"""Send a request to the agent in a process: through the exporter, which passes our own connection on.

The agent responds to us directly. It learns from the kernel who we are, and obeys only root and its own user.

Any user can listen in a directory of their own. So only a listener of root, of the caller's own user, or of
the user who owns the exporter's usual directory is trusted: nobody but root can make that one. The root of a
container is uid 0, too, and may reach a socket through a mount: namespaces and root file system tell it.
"""

from __future__ import annotations

import array
import json
import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vramledger_agent.errors import AgentError, VramledgerError
from vramledger_agent.printable import printable
from vramledger_agent.protocol.messages import DEFAULT_SOCKET, MAX_MESSAGE_BYTES, make_request

PROC = Path("/proc")
"""This is the real /proc, not --path.procfs: the kernel names a peer by its pid in our own PID namespace."""

_INIT = 1


_MOUNTS_MOST = 1000
"""Mounts that are looked at: a list can be so long that it takes minutes, and the root is among the first."""


class _Namespaces(NamedTuple):
    """The mapping of a process' user namespace to ours, and how many PID namespaces below ours it is in."""

    users: str
    depth: int


def is_outside_containers(pid: int) -> bool:
    """Tell whether a process is in our own container or in none; False if that cannot be read.

    In none: it has our user namespace and PID namespace, and the root file system of pid 1. Who has a user
    namespace of its own also has mounts of its own, and these are not read.
    """
    ours = _read_namespaces("self")
    if ours is None or _read_namespaces(str(pid)) != ours:
        return False
    root = _read_root(str(pid))
    return root is not None and root in (_read_root("self"), _read_root(str(_INIT)))


def _read_namespaces(pid: str) -> _Namespaces | None:
    try:
        users = (PROC / pid / "uid_map").read_bytes()
        status = (PROC / pid / "status").read_bytes()
    except OSError:
        return None
    depth = next((len(line.split()) for line in status.split(b"\n") if line.startswith(b"NSpid:")), None)
    return None if depth is None else _Namespaces(b" ".join(users.split()).decode(), depth)


def _read_root(pid: str) -> tuple[bytes, bytes] | None:
    """Return device and directory of the root file system; None if it is not among the first mounts.

    The kernel writes spaces and line feeds in names as numbers, and no other character.
    """
    try:
        with (PROC / pid / "mountinfo").open("rb") as file:
            fields = (line.split(b" ", 5) for line in islice(file, _MOUNTS_MOST))
            return next(((each[2], each[3]) for each in fields if each[4] == b"/"), None)
    except OSError:
        return None


_CREDENTIALS = struct.Struct("3i")
_ROOT = 0
_USUAL = Path(DEFAULT_SOCKET).parent
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedListenerError(VramledgerError):
    """What listens there may be anybody's."""


def check_listener(connection: socket.socket, path: Path) -> None:
    """Check that root, our user or root's exporter listens, or raise UntrustedListenerError or OSError.

    A container has root and other users, too, and may reach many paths: only at the usual one, of which no
    part is a link, can nobody but root have put what listens.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    ours, usual = os.geteuid(), exporters_user(_USUAL)
    if uid not in {_ROOT, ours, usual}:
        raise UntrustedListenerError(
            f"what listens at {path} belongs to user {uid}, neither to root nor to you, and is ignored; "
            f"an exporter of another user needs its socket in {_USUAL}, and that as its own"
        )
    placed = path.parent == _USUAL and uid == usual
    if not placed and not uid == ours != _ROOT and not is_outside_containers(pid):
        raise UntrustedListenerError(
            f"what listens at {path} is in a container, and is ignored; an exporter in a container needs its "
            f"socket in {_USUAL}, and that as its own"
        )


def is_trusted(path: Path, kind: socket.SocketKind) -> bool:
    """Tell whether somebody listens there whom :func:`check_listener` lets pass."""
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as connection:
        connection.setblocking(False)  # noqa: FBT003 the standard library's
        try:
            connection.connect(str(path))
            check_listener(connection, path)
        except (OSError, ValueError, UntrustedListenerError):
            return False
    return True


def exporters_user(directory: Path) -> int | None:
    """Return the owner of the directory if root has given it to them, None otherwise."""
    try:
        place, above = directory.lstat(), [each.lstat() for each in directory.parents]
    except OSError:
        return None
    safe = all(each.st_uid == _ROOT and not each.st_mode & _OTHERS_WRITE for each in above)
    given = safe and stat.S_ISDIR(place.st_mode) and not place.st_mode & _OTHERS_WRITE
    return place.st_uid if given else None


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
        raise AgentError(
            f"no exporter answers at {path} ({error.strerror or error}); start 'vramledger "
            "serve', or give its socket with --agent.socket"
        ) from error
    try:
        flags = _again_after_reset(lambda: connection.recvmsg(1, 0, socket.MSG_PEEK))[2]
        if flags & socket.MSG_CTRUNC:
            raise AgentError(f"pid {pid} sent a descriptor, which no agent does; its answer was not read")
        return _again_after_reset(lambda: connection.recv(MAX_MESSAGE_BYTES))
    except TimeoutError as error:
        raise AgentError(f"the agent in pid {pid} did not answer within {timeout:g} s") from error
    except OSError as error:
        raise AgentError(
            f"the connection broke ({error.strerror}); the exporter or pid {pid} may have ended"
        ) from error


def _again_after_reset(receive: Callable[[], _T]) -> _T:
    """Receive, twice if need be: if our file was not read, the kernel says so before it gives the answer."""
    try:
        return receive()
    except ConnectionResetError:
        return receive()


def _parse_response(response: bytes, pid: int) -> dict[str, Any]:
    if not response:
        raise AgentError(f"the connection was closed without an answer; has pid {pid} ended?")
    try:
        content = json.loads(response)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("ok"), bool):
        raise AgentError(f"pid {pid} gave an invalid answer; does its agent have another version?")
    if not content["ok"]:
        reason = printable(str(content.get("error")))
        raise AgentError(reason[:500] or "refused without a reason")
    return content
