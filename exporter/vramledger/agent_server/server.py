"""The agents' socket in the exporter's event loop: who is connected, what they said last, what they ask.

Every message costs a bounded time: it is short, few a second of one peer are read, and of several that
wait only the newest is. A peer that breaks the format is closed and counted.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vramledger.agent_server.connection import AgentConnection, Message, TokenBucket
from vramledger.agent_server.credentials import Peer, identify_peer, require_pidfd
from vramledger.agent_server.requests import answer_request
from vramledger.agent_server.unix_socket import SocketFile
from vramledger.errors import StartupError
from vramledger.logs import fields, log
from vramledger.model.agent_report import (
    REASONS,
    Agent,
    AgentSocket,
    RefusedError,
    parse,
    read_report,
    refuse,
)
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_USER = 64
RETRY_INTERVAL = 30.0
"""Seconds after which a path at which we could not listen is tried again."""

FIRST_MESSAGE_TIMEOUT = 10.0
"""Seconds that a connection may stay without a first message."""

REFUSAL_SHOWN_FOR = 60.0
"""Seconds for which it is told that an agent's messages broke the format."""

_BROKEN = ("format", "version", "size", "limits")
_AT_ONCE = 16
ACCEPT_RATE = (200.0, 128.0)
"""Connections a second that are accepted, and at once: as many as the kernel lets wait for us. A program
that does nothing but connect took a fifth of a core without a limit, and scrapes waited for 40 ms."""

_NO_DESCRIPTORS = 1.0


def boot_clock() -> float:
    """Return seconds of the clock that agents use too, which goes on in a suspended machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class AgentServer:
    """The connected agents; used from the event loop only."""

    def __init__(
        self,
        path: Path,
        procfs: Path,
        snapshot: Callable[[], Snapshot],
        *,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """Prepare.

        Args:
            path: where to listen.
            procfs: root of the proc file system.
            snapshot: the newest, for who asks what is on the devices.
            clock: seconds that only grow.
        """
        self._path = path
        self._procfs = str(procfs)
        self._snapshot = snapshot
        self._clock = clock
        self._place: SocketFile | None = None
        self._connections: set[AgentConnection] = set()
        self._reporting: dict[int, AgentConnection] = {}
        self._refused: dict[int, tuple[Agent, float]] = {}
        self._users: Counter[int] = Counter()
        self._asked: dict[int, TokenBucket] = {}
        self._comers = TokenBucket(clock(), *ACCEPT_RATE)
        self._rejected: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._complained: str | None = None

    # --- for the rest of the exporter -------------------------------------------------------------

    @property
    def health(self) -> AgentSocket:
        """How the socket fares."""
        return AgentSocket(self._place is not None, len(self._connections), dict(self._rejected))

    async def attach(self, reading: Reading) -> Reading:
        """Return a reading with the agents of those that the driver lists in it."""
        pids = {entry.pid for device in reading.devices for entry in device.processes or ()}
        return replace(reading, agents=self.agents(pids), agent_socket=self.health)

    @property
    def snapshot(self) -> Snapshot:
        """The exporter's newest."""
        return self._snapshot()

    def reporting(self, pid: int) -> AgentConnection | None:
        """Return the connection of a process' agent."""
        return self._reporting.get(pid)

    def agents(self, pids: Collection[int] | None = None) -> tuple[Agent, ...]:
        """Return the agents among ``pids`` (of everybody when None), by pid."""
        now = self._clock()
        known = {pid: each for pid, (each, until) in self._refused.items() if now < until}
        known |= {pid: each.agent(now) for pid, each in self._reporting.items()}
        return tuple(known[pid] for pid in sorted(known if pids is None else known.keys() & set(pids)))

    # --- listening ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, or say why not and try again later."""
        try:
            require_pidfd()
            self._place = SocketFile(self._path)
        except StartupError as error:
            if str(error) != self._complained:
                self._complained = str(error)
                log.warning("No agents", extra=fields(err=str(error)))
            self._timer = self._loop.call_later(RETRY_INTERVAL, self.start)
            return
        self._complained = None
        log.info("Listening for agents", extra=fields(socket=self._path))
        self._loop.add_reader(self._place.socket, self._accept)
        self._sweep()

    def close(self) -> None:
        """Let go of everybody."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._connections):
            self._drop(connection)
        if self._place is not None:
            self._loop.remove_reader(self._place.socket)
            self._place.close()
            self._place = None

    def _sweep(self) -> None:
        """Close who connected and never spoke, and forget askers; once in a while."""
        now = self._clock()
        for connection in [each for each in self._connections if each.heard is None]:
            if now - connection.since > FIRST_MESSAGE_TIMEOUT:
                self._reject(connection, "mute")
        self._refused = {pid: each for pid, each in self._refused.items() if now < each[1]}
        self._asked = {uid: limits for uid, limits in self._asked.items() if not limits.full(now)}
        self._timer = self._loop.call_later(FIRST_MESSAGE_TIMEOUT / 2, self._sweep)

    def _accept(self) -> None:
        assert self._place is not None  # noqa: S101 its reader called us
        for _ in range(_AT_ONCE):
            if self._comers.empty(self._clock()):
                self._rest(self._comers.pause)
                return
            try:
                accepted, _ = self._place.socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no descriptor left: it would be readable for ever
                log.debug("Cannot accept an agent", extra=fields(err=str(error)))
                self._rest(_NO_DESCRIPTORS)
                return
            self._comers.take(self._clock())
            self._welcome(accepted)

    def _rest(self, seconds: float) -> None:
        """Accept nobody for a while; who comes waits in the kernel."""
        assert self._place is not None  # noqa: S101 its reader called us
        self._loop.remove_reader(self._place.socket)
        self._loop.call_later(seconds, self._listen_again, self._place.socket)

    def _listen_again(self, listening: socket.socket) -> None:
        if self._place is not None and self._place.socket is listening:
            self._loop.add_reader(listening, self._accept)

    def _welcome(self, accepted: socket.socket) -> None:
        try:
            peer = self._admitted(accepted)
        except (RefusedError, OSError) as error:
            self._rejected[error.reason if isinstance(error, RefusedError) else "process"] += 1
            log.debug("Refused an agent", extra=fields(err=str(error)))
            accepted.close()
            return
        connection = AgentConnection(accepted, peer, self._clock())
        self._connections.add(connection)
        self._users[peer.uid] += 1
        self._loop.add_reader(peer.pidfd, self._drop, connection)
        self._loop.add_reader(accepted, self._read, connection)

    def _admitted(self, accepted: socket.socket) -> Peer:
        if len(self._connections) >= MAX_CONNECTIONS:
            refuse("connections", f"more than {MAX_CONNECTIONS}")
        accepted.setblocking(False)  # noqa: FBT003 the standard library's
        peer = identify_peer(accepted, self._procfs)
        if self._users[peer.uid] >= MAX_CONNECTIONS_PER_USER:
            os.close(peer.pidfd)
            refuse("connections-of-user", f"more than {MAX_CONNECTIONS_PER_USER} of uid {peer.uid}")
        return peer

    def _drop(self, connection: AgentConnection) -> None:
        """Forget a connection; its report with it, unless the process has a newer connection."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._users[connection.peer.uid] -= 1
        if not self._users[connection.peer.uid]:
            del self._users[connection.peer.uid]
        if self._reporting.get(connection.peer.pid) is connection:
            del self._reporting[connection.peer.pid]
        self._loop.remove_reader(connection.peer.pidfd)
        self._loop.remove_reader(connection.socket)
        connection.close()

    def _reject(self, connection: AgentConnection, reason: str, about: str = "") -> None:
        self._rejected[reason] += 1
        if reason in _BROKEN and len(self._refused) < MAX_CONNECTIONS:
            told = connection.agent(self._clock())._replace(problem="refused", report=None)
            self._refused[connection.peer.pid] = told, self._clock() + REFUSAL_SHOWN_FOR
        log.debug("Closed an agent", extra=fields(pid=connection.peer.pid, reason=reason, err=about))
        self._drop(connection)

    # --- reading -----------------------------------------------------------------------------------

    def _read(self, connection: AgentConnection) -> None:
        now = self._clock()
        if not connection.limits.take(now):
            # It is not read on until it may speak again; its socket fills, and it drops its reports.
            self._rejected["rate"] += 1
            self._loop.remove_reader(connection.socket)
            self._loop.call_later(connection.limits.pause, self._read_again, connection)
            return
        try:
            message = connection.newest()
            if message is None:
                return
            with message:
                self._hear(connection, message, now)
            if message.last:
                self._drop(connection)
        except RefusedError as error:
            self._reject(connection, error.reason, str(error))
        except (OSError, EOFError):
            self._drop(connection)

    def _read_again(self, connection: AgentConnection) -> None:
        if connection in self._connections:
            self._loop.add_reader(connection.socket, self._read, connection)

    def _hear(self, connection: AgentConnection, message: Message, now: float) -> None:
        if message.sender != connection.peer.pid:
            self._rejected["sender"] += 1  # a forked child on its parent's connection, which goes on
            return
        content = parse(message.data)
        if "ask" in content:
            self._answer(connection, content, message, now)
            return
        if message.descriptors:
            refuse("limits", "a report has no descriptors")
        connection.report = read_report(content)
        connection.heard, connection.received = now, time.time()
        before = self._reporting.get(connection.peer.pid)
        if before is not None and before is not connection:
            self._drop(before)  # the agent was started again in the same process
        self._reporting[connection.peer.pid] = connection
        self._refused.pop(connection.peer.pid, None)

    def _answer(
        self, connection: AgentConnection, content: Mapping[str, Any], message: Message, now: float
    ) -> None:
        """Answer who asks, and close: the agent that it was passed to goes on with a copy of its own."""
        if connection.report is not None:
            refuse("format", "an agent asks on a connection of its own")
        if not self._asked.setdefault(connection.peer.uid, TokenBucket(now)).take(now):
            refuse("rate", "too many questions of one user")
        with suppress(OSError):  # the asker has gone
            answer_request(connection, content, message, self)
        self._drop(connection)


@asynccontextmanager
async def run_agent_server(
    path: Path, procfs: Path, snapshot: Callable[[], Snapshot]
) -> AsyncIterator[AgentServer]:
    """Listen for agents until the block ends."""
    listener = AgentServer(path, procfs, snapshot)
    listener.start()
    try:
        yield listener
    finally:
        listener.close()
