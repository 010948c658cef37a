"""What is closed at once, and what is left to a process."""

import array
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from vramledger.agent_server import disposal
from vramledger.agent_server.disposal import Disposal

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def stream() -> Iterator[Pair]:
    """Return both ends of a stream; the second is the exporter's."""
    client, ours = socket.socketpair()
    with client, ours:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # as of all that the exporter accepts
        yield client, ours


def test_bytes_of_a_stream_are_dropped_many_at_once(stream: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stranger has written byte by byte is read in a few pieces, and its socket is closed at once."""
    monkeypatch.setattr(disposal, "_MAX_DRAINED", 2)
    client, ours = stream
    for _ in range(100):
        client.send(b"x")
    Disposal(1).close(ours)
    assert ours.fileno() == -1


def test_a_descriptor_behind_bytes_is_left_to_a_process(stream: Pair) -> None:
    """A descriptor is never received, wherever in a stream it comes; its socket counts for its user."""
    client, ours = stream
    client.send(bytes(5000))
    client.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [client.fileno()]))])
    closing = Disposal(1)
    closing.close(ours)
    assert ours.fileno() >= 0
    assert closing.held(os.getuid()) == 1


@pytest.mark.parametrize("end", [lambda client: client.recv(10), lambda client: client.close()])
def test_what_is_unread_counts_for_its_user(stream: Pair, end: Callable[[socket.socket], object]) -> None:
    """A connection counts until its peer has read all, or has gone; the peer learns at once that it ended."""
    client, ours = stream
    ours.send(b"answer")
    closing = Disposal(1)
    closing.close(ours)
    with pytest.raises(BrokenPipeError):
        client.send(b"x")
    assert closing.held(os.getuid()) == 1
    end(client)
    assert closing.held(os.getuid()) == 0
    assert ours.fileno() == -1
