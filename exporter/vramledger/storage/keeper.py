"""Run the process that opens the directory of the storage, and starts the one that stores whenever it ended.

The exporter gives up its rights when it starts, and may not write to the directory: it listens on the
network. So this process opens the directory first, becomes the same user, and keeps the right to change files
there and nowhere else. It reads nothing but requests to start. It holds the lock of the directory, and
imports little, because it is there all the time.
"""

from __future__ import annotations

import array
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, SCM_RIGHTS, SOL_SOCKET, socket
from typing import Any

from vramledger.errors import StartupError
from vramledger.logs import configure
from vramledger.sampling.landlock import forbid_changes
from vramledger.sampling.privileges import User, drop_privileges
from vramledger.storage.archive import lock_directory, open_directory
from vramledger.storage.protocol import PACKET_BYTES, READY, START, storage_command

LOCK_SECONDS = 5.0
"""For how long we wait for the processes of an exporter that has just ended, which still write."""

_NICENESS = 10
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The exporter handles these signals, and we end with it."""


def _open(config: dict[str, Any]) -> int:
    """Open the directory, and wait for its lock.

    Raises:
        StartupError: it cannot be used, or another exporter uses it.
    """
    path, user = Path(config["path"]), config["user"]
    directory = open_directory(path, tuple(user) if user else None)
    end = time.monotonic() + LOCK_SECONDS
    while not lock_directory(directory):
        if time.monotonic() > end:
            message = f"--storage.path={path} is in use by another exporter; give each its own"
            raise StartupError(message)
        time.sleep(0.05)
    return directory


def _serve(exporter: socket, command: list[str]) -> None:
    """Start a process for each request, after the one before has ended, until the exporter ends."""
    running: int | None = None
    while True:
        try:
            pipes = _receive_pipes(exporter)
        except OSError:
            pipes = None
        if running is not None:
            os.waitpid(running, 0)
            running = None
        if pipes is None:
            return
        with suppress(OSError):  # the exporter sees that the pipes are closed, and requests a start later
            running = _start(command, *pipes)
        for each in pipes:
            os.close(each)


def _receive_pipes(exporter: socket) -> tuple[int, int] | None:
    """Return the pipes of the next process that stores, None when the exporter has ended."""
    descriptors = array.array("i")
    space = CMSG_SPACE(2 * descriptors.itemsize)
    message, ancillary, _, _ = exporter.recvmsg(PACKET_BYTES, space, MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if message != START or len(descriptors) != 2:  # noqa: PLR2004 a pipe for each direction
        return None
    return descriptors[0], descriptors[1]


def _start(command: list[str], source: int, target: int) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, target, 1)]
    return os.posix_spawn(command[0], command, os.environ, file_actions=actions)


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
    try:
        exporter.send(READY)
        _serve(exporter, storage_command(str(directory), *sys.argv[1:]))
    except OSError:
        pass  # the exporter has ended
