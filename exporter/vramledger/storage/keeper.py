"""Run the process that opens the directory of the storage, and starts those that write and read there.

The exporter gives up its rights when it starts, and may not write to the directory: it listens on the
network. So this process opens the directory first, becomes the same user, and keeps the right to change files
there and nowhere else. It reads nothing but requests to start. It holds the lock of the directory, and
imports little, because it is there all the time.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any, NoReturn

from vramledger.errors import StartupError
from vramledger.logs import configure
from vramledger.sampling.privileges import User, drop_privileges, forbid_changes
from vramledger.sampling.starter import DeclaredChild, StartLoop
from vramledger.storage.protocol import OURS, PACKET_BYTES, READ, READY, WRITE, process_command
from vramledger_agent.private_files import open_folder

LOCK_SECONDS = 5.0
"""For how long we wait for the processes of an exporter that has just ended, which still write."""

_NICENESS = 10
_DIRECTORY_MODE = 0o700
OTHERS_WRITE = 0o022
_ROOT = 0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The exporter handles these signals, and we end with it."""


def open_directory(path: Path, owner: tuple[int, int] | None = None) -> int:
    """Open the directory of a storage, made if it is not there; return its descriptor. Raises StartupError.

    ``owner``: user and group that it must belong to; None for our own. Root gives them a directory that is
    new, empty, or was made by us.
    """
    ours = owner or (os.geteuid(), os.getegid())
    try:
        if not path.exists() and not path.is_symlink():
            path.mkdir(mode=_DIRECTORY_MODE, parents=True)
        place = open_folder(path)
        try:
            directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
        finally:
            os.close(place)
    except OSError as error:
        _refuse(path, error.strerror or str(error), error)
    try:
        found = os.fstat(directory)
        if found.st_uid == _ROOT == os.geteuid() and ours[0] != _ROOT and _is_ours(directory):
            _give(directory, ours)
            found = os.fstat(directory)
        if found.st_uid != ours[0]:
            _refuse(path, f"it belongs to user {found.st_uid}, and the exporter runs as user {ours[0]}")
        if found.st_mode & OTHERS_WRITE:
            _refuse(path, "other users may write to it; make it mode 0700")
    except OSError as error:
        os.close(directory)
        _refuse(path, error.strerror or str(error), error)
    except StartupError:
        os.close(directory)
        raise
    return directory


def _refuse(path: Path, why: str, cause: OSError | None = None) -> NoReturn:
    raise StartupError(f"--storage.path={path} cannot be used: {why}") from cause


def _is_ours(directory: int) -> bool:
    """Tell whether a directory is empty, or has nothing but files of a storage."""
    return all(OURS.fullmatch(name) for name in os.listdir(directory))


def _give(directory: int, owner: tuple[int, int]) -> None:
    for name in os.listdir(directory):
        os.chown(name, *owner, dir_fd=directory, follow_symlinks=False)
    os.fchmod(directory, _DIRECTORY_MODE)
    os.fchown(directory, *owner)


def lock_directory(directory: int) -> bool:
    """Make us the only one who writes there; tell whether nobody else does."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _open(config: dict[str, Any]) -> int:
    """Open the directory, and wait for its lock. Raises StartupError if unusable or another's."""
    path, user = Path(config["path"]), config["user"]
    directory = open_directory(path, tuple(user) if user else None)
    end = time.monotonic() + LOCK_SECONDS
    while not lock_directory(directory):
        if time.monotonic() > end:
            raise StartupError(f"--storage.path={path} is in use by another exporter; give each its own")
        time.sleep(0.05)
    return directory


def main() -> None:
    """Serve the exporter at the other end of standard input until it ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    config = json.loads(sys.argv[1])
    configure(*sys.argv[2:4])
    exporter = socket(fileno=os.dup(0))
    try:
        directory = _open(config)
    except StartupError as error:
        with suppress(OSError):  # the exporter has ended
            exporter.send(str(error).encode()[:PACKET_BYTES])
        return
    drop_privileges(become=User(*config["user"]) if config["user"] else None)
    forbid_changes([], [Path(config["path"])])
    with suppress(OSError):  # a filter of system calls may forbid it
        os.nice(_NICENESS)
    os.set_inheritable(directory, True)  # noqa: FBT003 the standard library's
    children = {
        kind: DeclaredChild(process_command(kind, *sys.argv[1:]), single=kind == WRITE)
        for kind in (WRITE, READ)
    }
    with suppress(OSError):  # the exporter has ended
        exporter.send(READY)
        StartLoop(exporter, children).run()
