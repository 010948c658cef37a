"""Find out which process is at the other end of a Unix socket; only the kernel is asked.

SO_PEERCRED gives the pid of the process that connected, as our PID namespace sees it; the pid is 0 if that
process is outside of the namespace. SO_PEERPIDFD (Linux 6.5) gives a descriptor of exactly that process, even
after its pid was reused.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

from vramledger.errors import StartupError
from vramledger.model.agent_report import refuse
from vramledger.readers.hosts.stat import read_row

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")
SCM_CREDENTIALS = 2


class Peer(NamedTuple):
    """A connected process; ``start`` in clock ticks since boot. Its end makes ``pidfd`` readable."""

    pid: int
    start: int
    uid: int
    pidfd: int


def require_pidfd() -> None:
    """Check that pidfd_open works (Linux 5.3, no seccomp filter): pids are reused. Raises StartupError."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:  # the first error of a Python that was built on such a system
        said = error.strerror if isinstance(error, OSError) else str(error)
        message = (
            f"agents need pidfd_open, which Linux has from 5.3 on ({said}); use a newer kernel or container "
            "runtime, or give --no-collector.agent"
        )
        raise StartupError(message) from error


def read_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and uid that the kernel recorded when the peer connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def identify_peer(connection: socket.socket, procfs: str) -> Peer:
    """Return the connected process; the caller closes ``pidfd``. Raises RefusedError if outside or ended."""
    pid, uid = read_credentials(connection)
    if pid <= 0:
        refuse("pid", "the peer is outside our PID namespace")
    try:
        pidfd = _open_pidfd(connection, pid)
    except OSError:
        refuse("process", "the peer has ended")
    row = read_row(procfs, pid)
    # Read while the process was alive: the start time cannot be that of another process with its pid.
    if row is None or has_ended(pidfd):
        os.close(pidfd)
        refuse("process", "the peer has ended")
    return Peer(pid, row.start, uid, pidfd)


def has_ended(pidfd: int) -> bool:
    """Tell whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _open_pidfd(connection: socket.socket, pid: int) -> int:
    with suppress(OSError):  # before Linux 6.5; also for an ended peer, which the next call finds out too
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    # The pid may have been reused since the peer connected, some milliseconds ago. We only accept a process
    # that has the same pid, and the user that SO_PEERCRED saw.
    return os.pidfd_open(pid)


def read_sender(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """Return the pid that sent a message (SCM_CREDENTIALS), which after a fork may be a child's."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0])
    return None
