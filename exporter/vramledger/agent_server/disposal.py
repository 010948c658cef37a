"""Close strangers' sockets without ever waiting for what is in them.

When the last descriptor of a socket is closed, the messages that wait in it are dropped, and so are the files
that their sender has put there. Dropping a TCP socket with SO_LINGER and unsent data takes as long as its
owner likes, and a file of FUSE or NFS may hang for ever. So the exporter itself never receives or drops such
a file. It passes a socket that may hold one to a process that only ends. The kernel does not linger at the
end of a process; and if that process hangs for another reason, the exporter does not. Each user's sockets go
to a process of their own: who makes one hang keeps only the own places taken. So does who does not read what
we have sent: the kernel keeps it until then, and counts it as our memory.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import itertools
import os
import socket
import struct
import sys
import termios
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress

SWEEP_INTERVAL = 1.0
"""Seconds between two looks at what has to be closed or forgotten."""


def call_next_second(callback: Callable[[], None]) -> asyncio.TimerHandle:
    """Call it at the loop's next full second: one wake for two things took 50 µs less than two."""
    loop = asyncio.get_running_loop()
    return loop.call_at(loop.time() // SWEEP_INTERVAL + SWEEP_INTERVAL, callback)


_CREDENTIALS_SPACE = socket.CMSG_SPACE(12)
"""Room for a message's credentials alone: a descriptor does not fit, and MSG_CTRUNC tells of it."""

_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_DO_NOT_WAIT = int(socket.MSG_DONTWAIT)
_TRUNCATED_CONTROL = int(socket.MSG_CTRUNC)
"""The standard library's flags, as plain numbers: to combine them took a third of the time of a message."""

_MAX_PROCESSES = 64
_MAX_STARTS = 4
"""The maximum numbers of processes that hang at the same time, one of a user, and that start in a sweep."""

_MAX_DRAINED = 1024
_PIECE = 1 << 16
"""The maximum number of messages read to find a socket empty, and of bytes of a stream read at once."""

_MAX_WAITING = 256
"""The maximum number of sockets that may wait for a process before no new connection is accepted; those of
users who cannot connect any more do not count."""

CREDENTIALS = struct.Struct("3i")


def read_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and uid that the kernel recorded when the peer connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return pid, uid


def holds_descriptors(connection: socket.socket) -> bool:
    """Tell of descriptors with the next message. Raises BlockingIOError if none waits, or OSError."""
    _, _, flags, _ = connection.recvmsg(1, _CREDENTIALS_SPACE, _PEEK)
    return bool(flags & _TRUNCATED_CONTROL)


def receive_plain(connection: socket.socket, size: int) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
    """Receive a message without descriptors, its credentials and flags. Raises as for descriptors."""
    data, ancillary, flags, _ = connection.recvmsg(size, _CREDENTIALS_SPACE, _DO_NOT_WAIT)
    return data, ancillary, flags


def receive_bytes(connection: socket.socket, size: int) -> bytes | None:
    """Receive what waits; None if a descriptor is in it, which stays. Raises BlockingIOError or OSError."""
    seen, _, flags, _ = connection.recvmsg(size, _CREDENTIALS_SPACE, _PEEK)
    if flags & _TRUNCATED_CONTROL:
        return None
    return connection.recv(len(seen), _DO_NOT_WAIT) if seen else seen


class Disposal:
    """Close sockets; used from the event loop only. What is not closed yet counts for its user."""

    def __init__(self, most: int) -> None:
        """Prepare; a user of whom more than ``most`` sockets are not closed should not connect."""
        self._most = most
        self._waiting: list[tuple[int, socket.socket]] = []
        self._processes: dict[int, Counter[int]] = {}  # by pid: whose sockets, and how many
        self._unread: defaultdict[int, list[socket.socket]] = defaultdict(list)  # by user: nothing is in them
        self._held: Counter[int] = Counter()  # by user: how many connections have ended and are not closed
        self._barred: frozenset[int] = frozenset()

    @property
    def full(self) -> bool:
        """Whether so many sockets wait for a process that there should be no new ones."""
        return sum(uid not in self._barred for uid, _ in self._waiting) >= _MAX_WAITING

    def held(self, uid: int) -> int:
        """Return how many connections of a user have ended and are not closed."""
        self._close_read(uid)
        return self._held[uid]

    def close(self, connection: socket.socket) -> None:
        """Close a connection at once if nothing in it can make that wait, otherwise leave it to a process."""
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RD)  # from now on no process can put anything into it
        drained = _drain(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        if not drained:
            self.close_passed_on(connection)
        elif _is_read(connection):
            connection.close()
        else:
            self._unread[self._count_for_user(connection)].append(connection)

    def close_passed_on(self, connection: socket.socket) -> None:
        """Close our descriptor of a connection that another process uses; it may be the last descriptor."""
        self._waiting.append((self._count_for_user(connection), connection))

    def _count_for_user(self, connection: socket.socket) -> int:
        uid = read_credentials(connection)[1]
        self._held[uid] += 1
        return uid

    def _close_read(self, uid: int) -> None:
        unread = self._unread.pop(uid, [])
        for each in unread:
            if _is_read(each):
                each.close()
                self._held[uid] -= 1
            else:
                self._unread[uid].append(each)

    def close_listening(self, listening: socket.socket) -> None:
        """Close a listening socket and the connections that were not accepted."""
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RD)  # no client can connect now
        while True:
            try:
                accepted, _ = listening.accept()
            except OSError:
                break
            accepted.setblocking(False)  # noqa: FBT003 the standard library's
            self.close(accepted)
        self.close_passed_on(listening)

    def run(self, bar: Callable[[frozenset[int]], frozenset[int]]) -> None:
        """Give waiting sockets to processes that end; called from time to time.

        ``bar`` lets these users not connect, and others again; it returns those who really cannot.
        """
        for pid in [each for each in self._processes if os.waitpid(each, os.WNOHANG) != (0, 0)]:
            self._held -= self._processes.pop(pid)  # which drops what is 0
        for uid in list(self._unread):
            self._close_read(uid)
        closing = {uid for each in self._processes.values() for uid in each}
        ready = [uid for uid in dict.fromkeys(uid for uid, _ in self._waiting) if uid not in closing]
        for uid in ready[: min(_MAX_STARTS, _MAX_PROCESSES - len(self._processes))]:
            self._give_away(uid)
        self._barred = bar(frozenset(uid for uid, _ in self._waiting if self._held[uid] >= self._most))

    def end(self) -> None:
        """Give all waiting sockets to processes, also of users of whom one hangs: our end must not."""
        for uid in {uid for uid, _ in self._waiting}:
            self._give_away(uid)
        for each in itertools.chain(*self._unread.values()):
            each.close()

    def _give_away(self, uid: int) -> None:
        waiting = [each for owner, each in self._waiting if owner == uid]
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        here.setblocking(False)  # noqa: FBT003 the standard library's
        with ExitStack() as until_ours_are_closed:
            with here, there:
                # They wait in the queue of ``there``, the process's standard input, which it never reads.
                sent = [each for each in waiting if _send_off(here, each)]
                try:
                    pid = _start_ending(there.fileno(), until_ours_are_closed)
                except OSError:
                    # There is no process or memory left. We still have our descriptors, and try again.
                    return
            self._processes[pid] = Counter({uid: len(sent)})
            for each in sent:
                each.close()
        self._waiting = [each for each in self._waiting if each[1].fileno() >= 0]


def _is_read(connection: socket.socket) -> bool:
    """Tell whether the peer has read all that was sent, or has closed (SIOCOUTQ)."""
    return not int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _start_ending(held: int, block: ExitStack) -> int:
    """Start a process that ends, and thereby closes its descriptor ``held``, as soon as a block has ended."""
    end, ours = os.pipe2(os.O_CLOEXEC)
    block.callback(os.close, ours)
    actions = [
        (os.POSIX_SPAWN_DUP2, held, 0),
        (os.POSIX_SPAWN_DUP2, end, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    program = [sys.executable, "-I", "-S", "-c", "import posix; posix.read(1, 1)"]
    try:
        return os.posix_spawn(sys.executable, program, {}, file_actions=actions)
    finally:
        os.close(end)


def _drain(connection: socket.socket) -> bool:
    """Read and drop the messages before the first one with a descriptor; return whether there was none."""
    for _ in range(_MAX_DRAINED):
        try:
            if connection.type is socket.SOCK_STREAM:
                piece = receive_bytes(connection, _PIECE)
                if not piece:
                    return piece is not None
                continue
            if holds_descriptors(connection):
                return False
            data, ancillary, _ = receive_plain(connection, 1)
        except ConnectionResetError:  # said once, when the peer has not read all: the messages come after it
            continue
        except OSError:
            return False
        if not data and not ancillary:  # the end, and no message without bytes, which somebody has sent
            return True
    return False


def _send_off(to: socket.socket, connection: socket.socket) -> bool:
    rights = array.array("i", [connection.fileno()])
    try:
        to.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    except OSError:  # its queue is full, or too many sockets are under way: the next process takes it
        return False
    return True
