"""Tell a client who listens at a Unix socket, before it trusts or sends anything there.

Any user can listen in a directory of their own. So only a listener of root, of the caller's own user, or of
the user who owns the exporter's usual directory is trusted: nobody but root can make that one. The root of a
container is uid 0, too, and may reach a socket through a mount: namespaces and root file system tell it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from vramledger_agent.errors import VramledgerError
from vramledger_agent.protocol.messages import DEFAULT_SOCKET

PROC = Path("/proc")
"""This is the real /proc, not --path.procfs: the kernel names a peer by its pid in our own PID namespace."""

_INIT = 1


_MOUNTS_MOST = 16 * 2**20
"""Bytes of a list of mounts that are read: a user can make it so long that it takes minutes."""


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
    """Return device and directory of the root file system; None if the list of mounts is too long.

    The kernel writes spaces and line feeds in names as numbers, and no other character.
    """
    try:
        with (PROC / pid / "mountinfo").open("rb") as file:
            mounts = file.read(_MOUNTS_MOST)
    except OSError:
        return None
    fields = (line.split(b" ") for line in mounts.split(b"\n"))
    roots = [(each[2], each[3]) for each in fields if len(each) > 4 and each[4] == b"/"]  # noqa: PLR2004
    return roots[-1] if roots and len(mounts) < _MOUNTS_MOST else None


_CREDENTIALS = struct.Struct("3i")
_ROOT = 0
_USUAL = Path(DEFAULT_SOCKET).parent
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedListenerError(VramledgerError):
    """What listens there may be anybody's."""


def check_listener(connection: socket.socket, path: Path) -> None:
    """Check that root, our user or root's exporter listens, or raise UntrustedListenerError or OSError."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    if uid == _ROOT:
        _check_root(pid, path)
    if uid not in {_ROOT, os.geteuid(), exporters_user(_USUAL)}:
        message = (
            f"what listens at {path} belongs to user {uid}, neither to root nor to you, and is ignored; "
            f"an exporter of another user needs its socket in {_USUAL}, and that as its own"
        )
        raise UntrustedListenerError(message)


def _check_root(pid: int, path: Path) -> None:
    """Check that root is the host's: a container's is uid 0, too. Raises UntrustedListenerError if not."""
    if exporters_user(Path(os.path.realpath(path.parent))) == _ROOT:
        return
    if not is_outside_containers(pid):
        message = (
            f"what listens at {path} is in a container, and is ignored; an exporter in a container needs its "
            f"socket in a directory of root alone, such as {_USUAL}"
        )
        raise UntrustedListenerError(message)


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
