"""Tell whether a process is in a container: by its namespaces and its root file system.

A user ID alone says little: the root of a container is uid 0, too, and may reach a socket through a mount.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

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
