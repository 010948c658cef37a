"""Run the agents' socket in the exporter's event loop: connections, last reports, requests.

Every message costs a bounded time: it is short, only a few a second of one peer are read, and only the newest
of several waiting messages is read. A peer that breaks the format is disconnected and counted.
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

from vramledger.agent_server.connection import MESSAGE_BURST, MESSAGE_RATE, AgentConnection, Message
from vramledger.agent_server.credentials import Peer, identify_peer, require_pidfd
from vramledger.agent_server.requests import answer_request
from vramledger.agent_server.unix_socket import SocketFile, SocketSettings
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
from vramledger.rate_limit import TokenBucket

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_USER = 64
RETRY_INTERVAL = 30.0
"""Seconds after which we try again to listen at a path that failed."""

FIRST_MESSAGE_TIMEOUT = 10.0
"""Seconds that a connection may stay without a first message."""

REFUSAL_SHOWN_FOR = 60.0
"""Seconds for which the exporter shows that an agent's messages broke the format."""

_FORMAT_REASONS = ("format", "version", "size", "limits")
_ACCEPTS_AT_ONCE = 16
ACCEPT_RATE = 200.0
ACCEPT_BURST = 128.0
"""Connections that are accepted: the number per second, and the maximum in one burst, as many as the kernel
queues. Without a limit, a program that does nothing but connect took a fifth of a core, and scrapes waited
for 40 ms.
"""

_NO_DESCRIPTORS_PAUSE = 1.0


SOCKET = SocketSettings(
    kind=socket.SOCK_SEQPACKET,
    mode=0o666,
    backlog=128,
    failure="cannot listen for agents at",
    in_use="another exporter does; stop it, or choose another path with --agent.socket",
    remedy="; correct --agent.socket, or give --no-collector.agent",
    pass_credentials=True,
)
"""Agents of every user connect to this socket."""


def boot_clock() -> float:
    """Return seconds of the clock that agents use too, which goes on while the machine is suspended."""
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
        """Prepare the server.

        Args:
            path: where to listen.
            procfs: root of the proc file system.
            snapshot: returns the newest, for a client that requests the devices.
            clock: seconds that only grow.
        """
        self._path = path
        self._procfs = str(procfs)
        self._snapshot = snapshot
        self._clock = clock
        self._socket_file: SocketFile | None = None
        self._connections: set[AgentConnection] = set()
        self._agent_connections: dict[int, AgentConnection] = {}
        self._refused: dict[int, tuple[Agent, float]] = {}
        self._users: Counter[int] = Counter()
        self._request_buckets: dict[int, TokenBucket] = {}
        self._accept_bucket = TokenBucket(clock(), ACCEPT_RATE, ACCEPT_BURST)
        self._rejected: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._logged_problem: str | None = None

    # --- for the rest of the exporter -------------------------------------------------------------

    @property
    def health(self) -> AgentSocket:
        """The state of the socket."""
        return AgentSocket(self._socket_file is not None, len(self._connections), dict(self._rejected))

    async def add_agents(self, reading: Reading) -> Reading:
        """Return a reading with the agents of the processes that the driver lists in it."""
        pids = {entry.pid for device in reading.devices for entry in device.processes or ()}
        return replace(reading, agents=self.agents(pids), agent_socket=self.health)

    @property
    def snapshot(self) -> Snapshot:
        """Return the exporter's newest snapshot."""
        return self._snapshot()

    def agent_connection(self, pid: int) -> AgentConnection | None:
        """Return the connection of a process' agent."""
        return self._agent_connections.get(pid)

    def agents(self, pids: Collection[int] | None = None) -> tuple[Agent, ...]:
        """Return the agents of ``pids``, or of all processes when None, by pid."""
        now = self._clock()
        known = {pid: each for pid, (each, until) in self._refused.items() if now < until}
        known |= {pid: each.agent(now) for pid, each in self._agent_connections.items()}
        return tuple(known[pid] for pid in sorted(known if pids is None else known.keys() & set(pids)))

    # --- listening ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen; if that fails, log why and try again later."""
        try:
            require_pidfd()
            self._socket_file = SocketFile(self._path, SOCKET)
        except StartupError as error:
            if str(error) != self._logged_problem:
                self._logged_problem = str(error)
                log.warning("No agents", extra=fields(err=str(error)))
            self._timer = self._loop.call_later(RETRY_INTERVAL, self.start)
            return
        self._logged_problem = None
        log.info("Listening for agents", extra=fields(socket=self._path))
        self._loop.add_reader(self._socket_file.socket, self._accept)
        self._sweep()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._connections):
            self._close_connection(connection)
        if self._socket_file is not None:
            self._loop.remove_reader(self._socket_file.socket)
            self._socket_file.close()
            self._socket_file = None

    def _sweep(self) -> None:
        """Close connections without a first message, and forget full buckets; called every few seconds."""
        now = self._clock()
        for connection in [each for each in self._connections if each.report_time is None]:
            if now - connection.since > FIRST_MESSAGE_TIMEOUT:
                self._reject(connection, "mute")
        self._refused = {pid: each for pid, each in self._refused.items() if now < each[1]}
        self._request_buckets = {
            uid: bucket for uid, bucket in self._request_buckets.items() if not bucket.is_full(now)
        }
        self._timer = self._loop.call_later(FIRST_MESSAGE_TIMEOUT / 2, self._sweep)

    def _accept(self) -> None:
        assert self._socket_file is not None  # noqa: S101 its reader called us
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._accept_bucket.is_empty(self._clock()):
                self._pause_accepting(self._accept_bucket.wait)
                return
            try:
                accepted, _ = self._socket_file.socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no descriptor left: the socket would be readable for ever
                log.debug("Cannot accept an agent", extra=fields(err=str(error)))
                self._pause_accepting(_NO_DESCRIPTORS_PAUSE)
                return
            self._accept_bucket.consume(self._clock())
            self._add_connection(accepted)

    def _pause_accepting(self, seconds: float) -> None:
        """Accept no connection for a while; new ones wait in the kernel."""
        assert self._socket_file is not None  # noqa: S101 its reader called us
        self._loop.remove_reader(self._socket_file.socket)
        self._loop.call_later(seconds, self._resume_accepting, self._socket_file.socket)

    def _resume_accepting(self, listening: socket.socket) -> None:
        if self._socket_file is not None and self._socket_file.socket is listening:
            self._loop.add_reader(listening, self._accept)

    def _add_connection(self, accepted: socket.socket) -> None:
        try:
            peer = self._identify_peer(accepted)
        except (RefusedError, OSError) as error:
            self._rejected[error.reason if isinstance(error, RefusedError) else "process"] += 1
            log.debug("Refused an agent", extra=fields(err=str(error)))
            accepted.close()
            return
        connection = AgentConnection(accepted, peer, self._clock())
        self._connections.add(connection)
        self._users[peer.uid] += 1
        self._loop.add_reader(peer.pidfd, self._close_connection, connection)
        self._loop.add_reader(accepted, self._receive, connection)

    def _identify_peer(self, accepted: socket.socket) -> Peer:
        if len(self._connections) >= MAX_CONNECTIONS:
            refuse("connections", f"more than {MAX_CONNECTIONS}")
        accepted.setblocking(False)  # noqa: FBT003 the standard library's
        peer = identify_peer(accepted, self._procfs)
        if self._users[peer.uid] >= MAX_CONNECTIONS_PER_USER:
            os.close(peer.pidfd)
            refuse("connections-of-user", f"more than {MAX_CONNECTIONS_PER_USER} of uid {peer.uid}")
        return peer

    def _close_connection(self, connection: AgentConnection) -> None:
        """Close a connection and forget it, and its report too, unless the process has a newer connection."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._users[connection.peer.uid] -= 1
        if not self._users[connection.peer.uid]:
            del self._users[connection.peer.uid]
        if self._agent_connections.get(connection.peer.pid) is connection:
            del self._agent_connections[connection.peer.pid]
        self._loop.remove_reader(connection.peer.pidfd)
        self._loop.remove_reader(connection.socket)
        connection.close()

    def _reject(self, connection: AgentConnection, reason: str, about: str = "") -> None:
        self._rejected[reason] += 1
        if reason in _FORMAT_REASONS and len(self._refused) < MAX_CONNECTIONS:
            refused = connection.agent(self._clock())._replace(problem="refused", report=None)
            self._refused[connection.peer.pid] = refused, self._clock() + REFUSAL_SHOWN_FOR
        log.debug("Closed an agent", extra=fields(pid=connection.peer.pid, reason=reason, err=about))
        self._close_connection(connection)

    # --- reading -----------------------------------------------------------------------------------

    def _receive(self, connection: AgentConnection) -> None:
        now = self._clock()
        if not connection.bucket.consume(now):
            # The connection is not read until its bucket has a token again; its socket fills, and the agent
            # drops reports.
            self._rejected["rate"] += 1
            self._loop.remove_reader(connection.socket)
            self._loop.call_later(connection.bucket.wait, self._receive_again, connection)
            return
        try:
            message = connection.receive_newest()
            if message is None:
                return
            with message:
                self._handle_message(connection, message, now)
            if message.last:
                self._close_connection(connection)
        except RefusedError as error:
            self._reject(connection, error.reason, str(error))
        except (OSError, EOFError):
            self._close_connection(connection)

    def _receive_again(self, connection: AgentConnection) -> None:
        if connection in self._connections:
            self._loop.add_reader(connection.socket, self._receive, connection)

    def _handle_message(self, connection: AgentConnection, message: Message, now: float) -> None:
        if message.sender != connection.peer.pid:
            self._rejected["sender"] += 1  # a forked child on its parent's connection, which stays open
            return
        content = parse(message.data)
        if "ask" in content:
            self._answer_request(connection, content, message, now)
            return
        if message.descriptors:
            refuse("limits", "a report has no descriptors")
        connection.report = read_report(content)
        connection.report_time, connection.received = now, time.time()
        earlier = self._agent_connections.get(connection.peer.pid)
        if earlier is not None and earlier is not connection:
            self._close_connection(earlier)  # the agent was started again in the same process
        self._agent_connections[connection.peer.pid] = connection
        self._refused.pop(connection.peer.pid, None)

    def _answer_request(
        self, connection: AgentConnection, content: Mapping[str, Any], message: Message, now: float
    ) -> None:
        """Answer a client, and close; an agent to which the request was passed has its own copy."""
        if connection.report is not None:
            refuse("format", "an agent sends requests on a separate connection")
        fresh = TokenBucket(now, MESSAGE_RATE, MESSAGE_BURST)
        if not self._request_buckets.setdefault(connection.peer.uid, fresh).consume(now):
            refuse("rate", "too many requests of one user")
        with suppress(OSError):  # the client has gone
            answer_request(connection, content, message, self)
        self._close_connection(connection)


@asynccontextmanager
async def run_agent_server(
    path: Path, procfs: Path, snapshot: Callable[[], Snapshot]
) -> AsyncIterator[AgentServer]:
    """Listen for agents until the block ends."""
    server = AgentServer(path, procfs, snapshot)
    server.start()
    try:
        yield server
    finally:
        server.close()
