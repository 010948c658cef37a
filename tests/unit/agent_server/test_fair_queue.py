"""Whose messages are read next, and who makes room: no user is worse off for what another does."""

import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from vramledger.agent_server.connection import AgentConnection, Peer
from vramledger.agent_server.server import FairQueue, connection_to_close

NEW = 99
"""The pid of a process that has just connected."""


@pytest.fixture
def end() -> Iterator[socket.socket]:
    """Give a socket; nothing reads it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unused:
        yield unused


def connection(end: socket.socket, uid: int, pid: int = 1) -> AgentConnection:
    return AgentConnection(end, Peer(pid, 1, uid, -1), 0.0)


def read_next(queue: FairQueue, costs: dict[int, float]) -> int:
    """Read a message of the user whose turn it is, which takes so many seconds; return the user."""
    taken = queue.pop()
    queue.charge(taken.peer.uid, costs[taken.peer.uid])
    queue.add(taken)
    return taken.peer.uid


def test_expensive_users_share_what_they_leave(end: socket.socket) -> None:
    """A user whose messages are cheap is read as often as wanted, however many others send expensive ones."""
    queue = FairQueue()
    costs = {1: 0.001, **dict.fromkeys(range(2, 18), 0.1)}
    for uid in costs:
        for _ in range(5):
            queue.add(connection(end, uid))
    waited, longest, read = 0, 0, Counter[int]()
    for _ in range(400):
        uid = read_next(queue, costs)
        read[uid] += 1
        waited = 0 if uid == 1 else waited + 1
        longest = max(longest, waited)
    assert longest <= 16
    assert read[1] > 100
    expensive = [read[uid] for uid in range(2, 18)]
    assert max(expensive) - min(expensive) <= 1


def test_time_away_is_no_claim(end: socket.socket) -> None:
    """A user who comes back after a long time is not read alone until the others' time is made up for."""
    queue = FairQueue()
    queue.add(connection(end, 2))
    queue.charge(2, 0.0)
    for _ in range(1000):
        read_next(queue, {2: 1.0})
    queue.forget_users([2])
    queue.add(connection(end, 1))
    assert 4 <= [read_next(queue, {1: 1.0, 2: 1.0}) for _ in range(10)].count(1) <= 6


def test_a_new_connection_clears_no_debt(end: socket.socket) -> None:
    """A user who closes everything and connects again still has used what was used."""
    queue = FairQueue()
    for uid in (1, 2):
        queue.add(connection(end, uid))
    assert queue.pop().peer.uid == 1
    queue.charge(1, 10.0)
    queue.forget_users([2])
    queue.add(connection(end, 1))
    assert [read_next(queue, {2: 1.0}) for _ in range(9)] == [2] * 9


@pytest.mark.parametrize(
    ("counts", "uid", "holders", "closed"),
    [
        ({1: 3, 2: 1}, 9, (), 1), ({1: 3, 2: 2}, 2, (), None), ({1: 4, 2: 2}, 2, (), 1),
        ({1: 1, 2: 1}, 9, (), None), ({1: 1, 2: 1}, 9, (NEW,), 1), ({1: 3, 2: 1}, 1, (NEW, 10, 11, 12), 2),
        ({1: 3}, 9, (10, 11, 12), None), ({1: 3}, 9, (10, 11, 12, NEW), 1), ({1: 1}, 9, (10, NEW), None),
    ],
)  # fmt: skip
def test_who_makes_room(
    end: socket.socket, counts: dict[int, int], uid: int, holders: tuple[int, ...], closed: int | None
) -> None:
    """A user without memory makes room for one that holds memory; many connections make room for few."""
    pids = iter(range(10, NEW))
    connections = [connection(end, user, next(pids)) for user, count in counts.items() for _ in range(count)]
    found = connection_to_close(connections, Counter(counts), uid, holders=holders, holds=NEW in holders)
    assert (None if found is None else found.peer.uid) == closed
