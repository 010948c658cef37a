"""Find which device files of the driver a process has open."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

DEVICE_PREFIX = "/dev/nvidia"
_PROC = Path("/proc")
"""This is the real /proc, not --path.procfs: these processes are in our own PID namespace."""


def read_open_device_files(prefix: str = DEVICE_PREFIX) -> dict[int, list[str]]:
    """Return the open files of this process and its descendants that begin with ``prefix``, by pid."""
    found = {}
    for pid in (os.getpid(), *_child_pids(os.getpid())):
        if names := sorted(open_files(pid, prefix)):
            found[pid] = names
    return found


def _child_pids(pid: int) -> Iterable[int]:
    for listed in (_PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            for child in map(int, listed.read_text(encoding="ascii").split()):
                yield child
                yield from _child_pids(child)


def open_files(pid: int, prefix: str) -> set[str]:
    """Return the open files of a process that begin with ``prefix``; none if we may not see them."""
    found: set[str] = set()
    with suppress(OSError):  # the process has ended, or has rights that we gave up
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith(prefix):
                    found.add(target)
    return found
