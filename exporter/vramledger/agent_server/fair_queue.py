"""Choose whose messages are read next, so that each user gets a fair share of time and connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from vramledger.agent_server.connection import AgentConnection


class FairQueue:
    """Connections by user; who took the least time is first, without what others used in a long silence."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[AgentConnection]] = {}
        self._used: dict[int, float] = {}
        self._served = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, connection: AgentConnection) -> None:
        """Add a connection at the end of its user's queue."""
        uid = connection.peer.uid
        if uid not in self._waiting:
            self._waiting[uid] = deque()
            self._used[uid] = max(self._used.get(uid, 0.0), self._served)
        self._waiting[uid].append(connection)

    def pop(self) -> AgentConnection:
        """Take out the connection that is next."""
        uid = min(self._waiting, key=self._used.__getitem__)
        self._served = self._used[uid]
        connection = self._waiting[uid].popleft()
        if not self._waiting[uid]:
            del self._waiting[uid]
        return connection

    def charge(self, uid: int, seconds: float) -> None:
        """Record the time that a message of a user took."""
        self._used[uid] = self._used.get(uid, self._served) + seconds

    def forget_users(self, connected: Collection[int]) -> None:
        """Forget the users without a connection whose time is not above that of the others."""
        self._used = {
            uid: used for uid, used in self._used.items() if uid in connected or used > self._served
        }


def connection_to_close(
    connections: Iterable[AgentConnection],
    counts: Mapping[int, int],
    uid: int,
    *,
    holders: Collection[int],
    holds: bool,
) -> AgentConnection | None:
    """Return the connection that must make room for a new one, None if the new one must go.

    Processes that hold GPU memory come before all others: the socket is for their agents. Among equals, a
    user with fewer connections comes first.
    """
    others = [each for each in connections if each.peer.pid not in holders]
    if not holds or not others:
        fewer = counts.get(uid, 0) + 1
        pool = others if not holds else connections
        others = [each for each in pool if counts[each.peer.uid] > fewer]
    return max(others, key=lambda each: (counts[each.peer.uid], each.since), default=None)
