"""Tell whether a process is in a container: by its namespaces and its root file system.

A user ID alone says little: the root of a container is uid 0, too, and may reach a socket through a mount.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

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
