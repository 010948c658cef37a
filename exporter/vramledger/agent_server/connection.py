"""Keep one connected process: who it is, as the kernel says, its messages, its last report.

SO_PEERCRED gives the pid of the process that connected, as our PID namespace sees it; the pid is 0 if that
process is outside of the namespace. SO_PEERPIDFD (Linux 6.5) gives a descriptor of exactly that process, even
after its pid was reused.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from vramledger.agent_server.disposal import CREDENTIALS, holds_descriptors, read_credentials, receive_plain
from vramledger.errors import StartupError
from vramledger.model.agent_report import Agent, AgentReport, refuse
from vramledger.rate_limit import TokenBucket
from vramledger.readers.hosts.stat import read_row
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

_SO_PEERPIDFD = 77
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
        raise StartupError(
            f"agents need pidfd_open, which Linux has from 5.3 on ({said}); use a newer kernel or container "
            "runtime, or give --no-collector.agent"
        ) from error


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
            return int(CREDENTIALS.unpack(data[: CREDENTIALS.size])[0])
    return None


MESSAGE_RATE = 4.0
MESSAGE_BURST = 16.0
"""Messages that are read from one connection: per second, and in one burst after a pause."""

SILENT_AFTER = 10.0
"""Seconds without a report after which an agent is silent, or five intervals if that is more."""

_RECEIVES_AT_ONCE = 128
"""Messages that are read from one connection at once; the kernel queues about as many."""


_TRUNCATED = int(socket.MSG_TRUNC)
"""As a plain number, which is faster to compare."""


class Message(NamedTuple):
    """One message and its sender."""

    data: bytes
    sender: int | None


@dataclass(eq=False, slots=True)
class AgentConnection:
    """A connected process."""

    socket: socket.socket  # our end
    peer: Peer  # which process it is
    since: float  # when it connected (the server's clock)
    report_time: float | None = None  # when its newest report came
    received: float | None = None  # the time of the newest report in Unix time
    report: AgentReport | None = None  # the newest report
    overfull: bool = False  # whether more messages waited at the last reading than are read at once
    ended: bool = False  # whether its process has
    passed_on: bool = False  # whether an agent has got this connection, to answer a request
    bucket: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self.bucket = TokenBucket(self.since, MESSAGE_RATE, MESSAGE_BURST)

    def agent(self, now: float) -> Agent:
        """Return what is known of it now, without a report that is too old."""
        peer, report = self.peer, self.report
        silent = True
        if report is not None and self.report_time is not None:
            silent = now - self.report_time > max(SILENT_AFTER, 5 * report.interval)
        problem = "silent" if silent else ""
        return Agent(peer.pid, peer.start, peer.uid, self.received, problem, None if silent else report)

    def receive_newest(self) -> Message | None:
        """Return the newest of the waiting messages, None if none waits.

        A report is the full state, so the older ones say nothing more. Before the first report only one
        message is read: it may be a request, and what follows on its connection is for the agent. Raises
        EOFError if the peer has closed. Raises RefusedError if a message was too long, or came with
        descriptors.
        """
        newest: Message | None = None
        self.overfull = False
        for _ in range(_RECEIVES_AT_ONCE if self.report is not None else 1):
            try:
                message = self._receive_message()
            except BlockingIOError:
                break
            except (EOFError, ConnectionError):
                if newest is None:
                    raise
                break  # the socket says so again
            if newest is not None and message.sender != self.peer.pid == newest.sender:
                continue  # a forked child's message must not hide its parent's
            newest = message
        else:
            self.overfull = self.report is not None
        return newest

    def _receive_message(self) -> Message:
        if holds_descriptors(self.socket):
            refuse("limits", "a message to the exporter has no descriptors")
        data, ancillary, flags = receive_plain(self.socket, MAX_MESSAGE_BYTES + 1)
        if not data:
            raise EOFError
        if flags & _TRUNCATED or len(data) > MAX_MESSAGE_BYTES:
            refuse("size", f"longer than {MAX_MESSAGE_BYTES} bytes")
        return Message(data, read_sender(ancillary))
