"""Connect to the exporter: whole messages, never waiting, never into a descriptor that is not ours.

A Unix SEQPACKET socket keeps messages whole, and the kernel tells the exporter who sends. A program may close
every descriptor that it does not know and open its own in their place. So before each use we compare the
socket with the one that we opened. If it is another's, we drop it without closing it.
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

from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

LOWEST_DESCRIPTOR = 3
"""The lowest descriptor that we use: a program may have closed its standard streams and still print."""

MAX_RECEIVED_DESCRIPTORS = 8
FIRST_RETRY_SECONDS = 1.0
"""From a failed connect to the next try; it doubles with each failure."""

MAX_RETRY_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")


class AgentTransport:
    """The connection of this process, which opens and closes with the exporter."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.dropped = 0  # messages that the socket would not take
        self._socket: socket.socket | None = None
        self._identity = (0, 0)
        self._next_try = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS

    def open(self, now: float) -> bool:
        """Return whether there is a connection; try to make one when it is due."""
        if self._is_still_ours():
            return True
        if now < self._next_try:
            return False
        self._next_try = now + self._retry_seconds
        self._retry_seconds = min(self._retry_seconds * 2, MAX_RETRY_SECONDS)
        try:
            self._socket = connect(self.path)
            self._identity = file_identity(self._socket.fileno())
        except OSError as error:
            if belongs_to_program(error):
                raise
            # No exporter, a full queue, no permission, no descriptor left: all the same here.
            self.close()
            return False
        self._retry_seconds = FIRST_RETRY_SECONDS
        return True

    def send(self, message: bytes) -> bool:
        """Send a message if the socket takes it now; otherwise count it as dropped."""
        if self._is_still_ours() and self._socket is not None:
            try:
                self._socket.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:  # the exporter does not read: it gets the next state
                pass
            except OSError as error:
                if belongs_to_program(error):
                    raise
                if error.errno not in (errno.ENOBUFS, errno.EMSGSIZE):
                    self.close()
            else:
                return True
        self.dropped += 1
        return False

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Return a message that has arrived, with the descriptors that came with it, or None."""
        if not self._is_still_ours() or self._socket is None:
            return None
        try:
            return receive(self._socket)
        except BlockingIOError:
            return None
        except OSError as error:
            if belongs_to_program(error):
                raise
            self.close()
            return None

    def close(self) -> None:
        """Drop the socket; close its descriptor only if it is still ours."""
        dropped, self._socket = self._socket, None
        if dropped is None:
            return
        try:
            ours = self._identity == file_identity(dropped.fileno())
        except OSError as error:
            if belongs_to_program(error):
                raise
            ours = False
        if ours:
            dropped.close()
        else:
            dropped.detach()

    def _is_still_ours(self) -> bool:
        """Return whether the descriptor is still the socket that we opened; drop the socket otherwise."""
        if self._socket is None:
            return False
        try:
            if file_identity(self._socket.fileno()) == self._identity:
                return True
        except OSError as error:
            if belongs_to_program(error):
                raise
        self._socket.detach()
        self._socket = None
        return False


def file_identity(descriptor: int) -> tuple[int, int]:
    """Return the device and inode of an open file: no two files that are open at one time share them."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def connect(path: str) -> socket.socket:
    """Return a connected socket that never waits. Raises OSError if nothing listens, or we may not."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if opened.fileno() < LOWEST_DESCRIPTOR:
            lower = opened
            duplicate = fcntl.fcntl(lower.fileno(), fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR)
            opened = socket.socket(fileno=duplicate)
            opened.settimeout(0)
            lower.close()
        opened.connect(path)
    except BaseException:
        opened.close()
        raise
    return opened


def receive(connected: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and descriptors; empty at the end. Raises BlockingIOError if none came, or OSError."""
    # A socket that the exporter has accepted gives credentials, too, and before the descriptors.
    space = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_LEN(
        MAX_RECEIVED_DESCRIPTORS * array.array("i").itemsize
    )
    message, ancillary, _, _ = connected.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if not message and not descriptors:
        raise ConnectionResetError
    return message, list(descriptors)


def peer_credentials(connected: socket.socket) -> tuple[int, int]:
    """Return the pid and user at the other end, from the kernel. Raises OSError if it is no Unix socket."""
    if connected.family != socket.AF_UNIX:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def request(path: str, message: dict[str, object], timeout: float) -> dict[str, object] | None:
    """Send the exporter a request on a new connection; return None if no answer comes in time."""
    deadline = time.monotonic() + timeout
    try:
        with connect(path) as connection:
            connection.settimeout(timeout)
            connection.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            answer = json.loads(connection.recv(MAX_MESSAGE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        if belongs_to_program(error):
            raise
        return None
    return answer if isinstance(answer, dict) and answer.get("ok") is True else None
