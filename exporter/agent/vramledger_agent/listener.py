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


class _Place(NamedTuple):
    """Where a process lives.

    ``users`` is the mapping of its user namespace to ours; ``depth`` counts the PID namespaces below ours in
    which it is; ``root`` is device and directory of its root file system.
    """

    users: str
    depth: int
    root: tuple[str, str]


def is_outside_containers(pid: int) -> bool:
    """Tell whether a process is in our own container or in none; False if that cannot be read.

    In none: it has our user namespace and PID namespace, and the root file system of pid 1.
    """
    place, ours = _read_place(str(pid)), _read_place("self")
    if place is None or ours is None or place[:2] != ours[:2]:
        return False
    if place.root == ours.root:
        return True
    host = _read_place(str(_INIT))
    return host is not None and place.root == host.root


def _read_place(pid: str) -> _Place | None:
    home = PROC / pid
    try:
        users = " ".join((home / "uid_map").read_text(encoding="ascii").split())
        status = (home / "status").read_text(encoding="utf-8", errors="replace")
        mounts = (home / "mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    depth = next((len(line.split()) for line in status.splitlines() if line.startswith("NSpid:")), None)
    fields = (line.split() for line in mounts.splitlines())
    roots = [(each[2], each[3]) for each in fields if len(each) > 4 and each[4] == "/"]  # noqa: PLR2004
    return None if depth is None or not roots else _Place(users, depth, roots[-1])


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
