"""Descriptors whose close blocks: what a hostile process passes to whoever receives descriptors."""

import array
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


class Lingerer:
    """A maker of TCP sockets with data that nobody reads, and with SO_LINGER.

    Whoever closes the last descriptor of one waits for so many seconds, or until the maker has closed.
    """

    def __init__(self, seconds: int, opened: ExitStack) -> None:
        self._seconds = seconds
        self._opened = opened

    def send(self, connection: socket.socket, data: bytes) -> None:
        """Send a message with such a socket, and keep no descriptor of it."""
        with self._make() as sender:
            rights = array.array("i", [sender.fileno()])
            try:
                connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except OSError:
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
                raise

    def _make(self) -> socket.socket:
        listening = self._opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = socket.create_connection(listening.getsockname())
        self._opened.enter_context(listening.accept()[0])
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, self._seconds))
        sender.setblocking(False)
        try:
            while True:
                sender.send(bytes(1 << 16))
        except BlockingIOError:
            return sender


@contextmanager
def lingering(seconds: int) -> Iterator[Lingerer]:
    """Give a maker of such sockets; at the end nobody waits for one any more."""
    with ExitStack() as opened:
        yield Lingerer(seconds, opened)
