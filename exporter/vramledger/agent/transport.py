"""The connection to the exporter: whole messages, never waiting, never into a descriptor that is not ours.

A Unix SEQPACKET socket keeps messages whole and tells the exporter, from the kernel, who sends. A program may
close every descriptor it does not know and open its own in their place, so the socket is compared with the
one that we opened before each use, and is dropped without closing it when it is another's by now.
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import socket
import struct
import time

LONGEST = 65536
"""Bytes of a message."""

FIRST_DESCRIPTOR = 3
"""A program that closed its standard streams must not print into our socket."""

DESCRIPTORS = 8
"""As many come with a message at most."""

WAIT = (1.0, 5.0)
"""Seconds until the next try to connect: the first time, and at most."""

_CREDENTIALS = struct.Struct("3i")


class AgentTransport:
    """One process's connection, which comes and goes with the exporter.

    Attributes:
        dropped: messages that the socket would not take.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.dropped = 0
        self._socket: socket.socket | None = None
        self._identity = (0, 0)
        self._next = 0.0
        self._wait = WAIT[0]

    def open(self, now: float) -> bool:
        """Say whether there is a connection, after a try to make one when it is time for that.

        Args:
            now: of a clock that never goes back, in seconds.
        """
        if self._ours():
            return True
        if now < self._next:
            return False
        self._next = now + self._wait
        self._wait = min(self._wait * 2, WAIT[1])
        try:
            self._socket = connect(self.path)
            self._identity = identity(self._socket.fileno())
        except OSError:  # no exporter, a full queue, no right, no descriptor left: all the same here
            self.close()
            return False
        self._wait = WAIT[0]
        return True

    def send(self, message: bytes) -> bool:
        """Send a message if the socket takes it now; what it does not take is counted and gone."""
        if self._ours() and self._socket is not None:
            try:
                self._socket.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:  # the exporter does not read: it gets the next state
                pass
            except OSError as error:
                if error.errno not in (errno.ENOBUFS, errno.EMSGSIZE):
                    self.close()
            else:
                return True
        self.dropped += 1
        return False

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Return a message that is there, with the descriptors that came along, or None."""
        if not self._ours() or self._socket is None:
            return None
        try:
            return receive(self._socket)
        except BlockingIOError:
            return None
        except OSError:
            self.close()
            return None

    def close(self) -> None:
        """Let go of the socket; its descriptor is closed only if it is still ours."""
        held, self._socket = self._socket, None
        if held is None:
            return
        try:
            ours = self._identity == identity(held.fileno())
        except OSError:
            ours = False
        if ours:
            held.close()
        else:
            held.detach()

    def _ours(self) -> bool:
        """Say whether the descriptor still is the socket that we opened; without it there is none."""
        if self._socket is None:
            return False
        try:
            if identity(self._socket.fileno()) == self._identity:
                return True
        except OSError:
            pass
        self._socket.detach()
        self._socket = None
        return False


def identity(descriptor: int) -> tuple[int, int]:
    """Return what the kernel calls the open file: no two open at a time are called the same."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def connect(path: str) -> socket.socket:
    """Return a socket that is connected and never waits.

    Raises:
        OSError: there is nobody, or nobody who lets us.
    """
    fresh = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if fresh.fileno() < FIRST_DESCRIPTOR:
            low = fresh
            fresh = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR))
            fresh.settimeout(0)
            low.close()
        fresh.connect(path)
    except BaseException:
        fresh.close()
        raise
    return fresh


def receive(connected: socket.socket) -> tuple[bytes, list[int]]:
    """Return one message and its descriptors; an empty one is the end of the connection.

    Raises:
        BlockingIOError: there is none.
        OSError: the connection broke.
    """
    space = socket.CMSG_LEN(DESCRIPTORS * array.array("i").itemsize)
    message, ancillary, _, _ = connected.recvmsg(LONGEST, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if not message and not descriptors:
        raise ConnectionResetError
    return message, list(descriptors)


def peer(connected: socket.socket) -> tuple[int, int]:
    """Return pid and user of who is at the other end of a socket, from the kernel.

    Raises:
        OSError: it is no Unix socket.
    """
    if connected.family != socket.AF_UNIX:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def ask(path: str, question: dict[str, object], seconds: float) -> dict[str, object] | None:
    """Ask the exporter something on a connection of its own; None when there is no answer in time."""
    deadline = time.monotonic() + seconds
    try:
        with connect(path) as asked:
            asked.settimeout(seconds)
            asked.send(json.dumps(question).encode(), socket.MSG_NOSIGNAL)
            asked.settimeout(max(0.001, deadline - time.monotonic()))
            answer = json.loads(asked.recv(LONGEST))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and answer.get("ok") is True else None
