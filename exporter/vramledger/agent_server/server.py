"""Run the agents' socket in the exporter's event loop: connections, last reports, requests.

Every message costs a bounded time: it is short, only a few a second of one peer are read, and of several that
wait only the newest is read. All messages together get a small share of our time, which users share fairly,
so that scrapes come first. A peer that breaks the format is disconnected and counted.

Choose whose messages are read next, so that each user gets a fair share of time and connections.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vramledger.agent_server.connection import (
    MESSAGE_BURST,
    MESSAGE_RATE,
    AgentConnection,
    Message,
    Peer,
    identify_peer,
    require_pidfd,
)
from vramledger.agent_server.disposal import SWEEP_INTERVAL, Disposal, call_next_second, read_credentials
from vramledger.agent_server.requests import answer_request
from vramledger.agent_server.unix_socket import SocketFile, SocketSettings
from vramledger.errors import StartupError
from vramledger.logs import fields, log
from vramledger.model.agent_report import (
    REASONS,
    Agent,
    AgentSocket,
    RefusedError,
    locate_rank,
    parse,
    read_report,
    refuse,
)
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot
from vramledger.rate_limit import TokenBucket


class FairQueue:
    """Connections by user; who took the least time is first, without what others used in a long silence."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[AgentConnection]] = {}
        self._used: dict[int, float] = {}
        self._served = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, connection: AgentConnection) -> None:
        uid = connection.peer.uid
        if uid not in self._waiting:
            self._waiting[uid] = deque()
            self._used[uid] = max(self._used.get(uid, 0.0), self._served)
        self._waiting[uid].append(connection)

    def pop(self) -> AgentConnection:
        uid = min(self._waiting, key=self._used.__getitem__)
        self._served = self._used[uid]
        connection = self._waiting[uid].popleft()
        if not self._waiting[uid]:
            del self._waiting[uid]
        return connection

    def charge(self, uid: int, seconds: float) -> None:
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


MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_USER = 64
_DESCRIPTORS_SHARE = 8
"""Agents get one connection for so many descriptors that we may have; a connection takes two."""

MAX_REPORT_BYTES = 4 * 2**20
"""The maximum size of all reports that are kept, as they were sent. In memory they take about eight times as
much, since what was read from a report is kept beside it; those of 512 holders are 0.5 MiB."""

_TIME_SHARE = 0.1
_TIME_BURST = 0.1
_TURN = 0.005
"""The share of one core that agents' messages may take, the seconds that they may take in one burst, and
those after which anything else has its turn."""

_MILLISECONDS = 1000.0
RETRY_INTERVAL = 30.0
FIRST_MESSAGE_TIMEOUT = 10.0
REFUSAL_SHOWN_FOR = 60.0
_FORMAT_REASONS = ("format", "version", "size", "limits")
_ACCEPTS_AT_ONCE = 16
ACCEPT_RATE = 200.0
ACCEPT_BURST = 128.0
"""Connections that are accepted: the number per second, and the maximum in one burst, as many as the kernel
queues."""

_USER_ACCEPT_RATE = 50.0
_USER_ACCEPT_BURST = 64.0
"""The same for one user; more are closed before we look who it is, and do not count above."""

_CLOSE_RATE = 1000.0
_CLOSE_BURST = 128.0
_CLOSE_COST = 10.0
"""Connections a second, and in one burst, that are accepted only to be closed. A millisecond in which what
waits in one is dropped counts as so many: that takes at most a tenth of one core, too."""

_NO_DESCRIPTORS_PAUSE = 1.0

_REST_MOST = 4.0
"""Seconds after which connections are read also without a sample: the sockets of agents must not fill."""


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
        owner: int | None = None,
    ) -> None:
        """Prepare the server. ``owner``: who may own the socket's directory, besides root and us."""
        self._path = path
        self._owner = owner
        self._procfs = str(procfs)
        self._node = os.uname().nodename
        self._snapshot = snapshot
        self._clock = clock
        self._socket_file: SocketFile | None = None
        self._connections: set[AgentConnection] = set()
        self._agent_connections: dict[int, AgentConnection] = {}
        self._last_reports: dict[int, Agent] = {}
        self._refused: dict[int, tuple[Agent, float]] = {}
        self._users: Counter[int] = Counter()
        self._request_buckets: dict[int, TokenBucket] = {}
        self._user_accept_buckets: dict[int, TokenBucket] = {}
        self._accept_bucket = TokenBucket(clock(), ACCEPT_RATE, ACCEPT_BURST)
        self._close_bucket = TokenBucket(clock(), _CLOSE_RATE, _CLOSE_BURST)
        self._queue = FairQueue()
        # Those that have reported, and are not watched: all are read when a sample wants their reports.
        self._resting: dict[AgentConnection, None] = {}
        self._rested_at = float("-inf")
        self._turn: asyncio.Handle | None = None
        # CPU time passes by itself, whatever the clock is.
        self._time_bucket = TokenBucket(
            time.monotonic(), _TIME_SHARE * _MILLISECONDS, _TIME_BURST * _MILLISECONDS
        )
        self._report_bytes: Counter[AgentConnection] = Counter()
        self._disposal = Disposal(MAX_CONNECTIONS_PER_USER)
        self._rejected: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._logged_problem: str | None = None

    # --- for the rest of the exporter -------------------------------------------------------------

    @property
    def health(self) -> AgentSocket:
        return AgentSocket(self._socket_file is not None, len(self._connections), dict(self._rejected))

    async def add_agents(self, reading: Reading) -> Reading:
        """Return a reading with the agents of the processes that the driver lists in it.

        The last reports of programs that ran out of memory and have ended since the reading before come too:
        no other reading will have them.
        """
        self._read_resting()
        pids = {entry.pid for device in reading.devices for entry in device.processes or ()}
        agents = {**self._last_reports, **{agent.pid: agent for agent in self.agents(pids)}}
        self._last_reports = {}
        return replace(reading, agents=tuple(agents[pid] for pid in sorted(agents)), agent_socket=self.health)

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot()

    def agent_connection(self, pid: int) -> AgentConnection | None:
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
            self._socket_file = SocketFile(self._path, SOCKET, self._owner)
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
        for timer in (self._timer, self._turn):
            if timer is not None:
                timer.cancel()
        for connection in list(self._connections):
            self._close_connection(connection)
        if self._socket_file is not None:
            self._loop.remove_reader(self._socket_file.socket)
            self._disposal.close_listening(self._socket_file.socket)
            self._socket_file.remove()
            self._socket_file = None
        self._disposal.end()

    def _sweep(self) -> None:
        now = self._clock()
        for connection in [each for each in self._connections if each.report_time is None]:
            if now - connection.since > FIRST_MESSAGE_TIMEOUT:
                self._reject(connection, "mute")
        self._refused = {pid: each for pid, each in self._refused.items() if now < each[1]}
        for buckets in (self._request_buckets, self._user_accept_buckets):
            for uid in [uid for uid, bucket in buckets.items() if bucket.is_full(now)]:
                del buckets[uid]
        self._queue.forget_users(self._users)
        if time.monotonic() - self._rested_at > _REST_MOST:
            self._read_resting()
        assert self._socket_file is not None  # noqa: S101 we are called only while it listens
        self._disposal.run(self._socket_file.bar)
        self._timer = call_next_second(self._sweep)

    def _accept(self) -> None:
        assert self._socket_file is not None  # noqa: S101 its reader called us
        begun = time.thread_time()
        for _ in range(_ACCEPTS_AT_ONCE):
            if time.thread_time() - begun > _TURN:
                return
            now = self._clock()
            for bucket in (self._accept_bucket, self._close_bucket):
                if bucket.is_empty(now):
                    self._pause_accepting(bucket.wait)
                    return
            if self._disposal.full:
                self._pause_accepting(SWEEP_INTERVAL)
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
            accepted.setblocking(False)  # noqa: FBT003 the standard library's
            self._add_connection(accepted, now)

    def _pause_accepting(self, seconds: float) -> None:
        assert self._socket_file is not None  # noqa: S101 its reader called us
        self._loop.remove_reader(self._socket_file.socket)
        self._loop.call_later(seconds, self._resume_accepting, self._socket_file.socket)

    def _resume_accepting(self, listening: socket.socket) -> None:
        if self._socket_file is not None and self._socket_file.socket is listening:
            self._loop.add_reader(listening, self._accept)

    def _add_connection(self, accepted: socket.socket, now: float) -> None:
        try:
            peer = self._admit(accepted, now)
        except (RefusedError, OSError) as error:
            self._rejected[error.reason if isinstance(error, RefusedError) else "process"] += 1
            log.debug("Refused an agent", extra=fields(err=str(error)))
            begun = time.thread_time()
            self._disposal.close(accepted)
            self._close_bucket.charge(now, (time.thread_time() - begun) * _MILLISECONDS * _CLOSE_COST)
            return
        connection = AgentConnection(accepted, peer, now)
        self._connections.add(connection)
        self._users[peer.uid] += 1
        self._loop.add_reader(peer.pidfd, self._end_connection, connection)
        self._loop.add_reader(accepted, self._queue_connection, connection)

    def _admit(self, accepted: socket.socket, now: float) -> Peer:
        """Return who connected, if there is a place, and have another connection make one if need be."""
        pid, uid = read_credentials(accepted)
        fresh = TokenBucket(now, _USER_ACCEPT_RATE, _USER_ACCEPT_BURST)
        allowed = self._user_accept_buckets.setdefault(uid, fresh).consume(now)
        if not allowed or self._users[uid] + self._disposal.held(uid) >= MAX_CONNECTIONS_PER_USER:
            self._close_bucket.consume(now)
            refuse("connections-of-user", f"more than {MAX_CONNECTIONS_PER_USER} of uid {uid}, or too fast")
        self._accept_bucket.consume(now)
        if len(self._connections) >= min(MAX_CONNECTIONS, _descriptor_limit() // _DESCRIPTORS_SHARE):
            holders = {each.pid for device in self._snapshot().devices for each in device.holdings}
            closing = connection_to_close(
                self._connections, self._users, uid, holders=holders, holds=pid in holders
            )
            if closing is None:
                refuse("connections", "too many, and none that must make room")
            self._reject(closing, "connections", f"makes room for pid {pid}")
        return identify_peer(accepted, self._procfs)

    def _end_connection(self, connection: AgentConnection) -> None:
        """Have an ended process' connection closed when its turn comes."""
        self._loop.remove_reader(connection.peer.pidfd)
        connection.ended = True
        self._queue_connection(connection)

    def _close_connection(self, connection: AgentConnection) -> None:
        """Close a connection and forget it, and its report too, unless the process has a newer connection."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        del self._report_bytes[connection]
        self._resting.pop(connection, None)
        self._users[connection.peer.uid] -= 1
        if not self._users[connection.peer.uid]:
            del self._users[connection.peer.uid]
        if self._agent_connections.get(connection.peer.pid) is connection:
            del self._agent_connections[connection.peer.pid]
            ran_out = connection.report is not None and connection.report.last_oom is not None
            if ran_out and len(self._last_reports) < MAX_CONNECTIONS:
                self._last_reports[connection.peer.pid] = connection.agent(self._clock())
        self._loop.remove_reader(connection.peer.pidfd)
        self._loop.remove_reader(connection.socket)
        os.close(connection.peer.pidfd)
        if connection.passed_on:
            self._disposal.close_passed_on(connection.socket)
        else:
            self._disposal.close(connection.socket)

    def _reject(self, connection: AgentConnection, reason: str, about: str = "") -> None:
        self._rejected[reason] += 1
        if reason in _FORMAT_REASONS and len(self._refused) < MAX_CONNECTIONS:
            refused = connection.agent(self._clock())._replace(problem="refused", report=None)
            self._refused[connection.peer.pid] = refused, self._clock() + REFUSAL_SHOWN_FOR
        log.debug("Closed an agent", extra=fields(pid=connection.peer.pid, reason=reason, err=about))
        self._close_connection(connection)

    # --- reading -----------------------------------------------------------------------------------

    def _queue_connection(self, connection: AgentConnection) -> None:
        """Have a connection wait for its turn; it is not watched until it has been read."""
        self._loop.remove_reader(connection.socket)
        self._queue.add(connection)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._read_queue)

    def _read_queue(self) -> None:
        self._turn = None
        begin = last = time.thread_time()
        while self._queue and last - begin < _TURN and not self._time_bucket.is_empty(time.monotonic()):
            connection = self._queue.pop()
            for _ in range(1 + connection.ended):  # only a second look finds the last report
                if connection in self._connections:
                    self._receive(connection)
            if connection.ended:
                self._close_connection(connection)
            now = time.thread_time()
            self._queue.charge(connection.peer.uid, now - last)
            self._time_bucket.charge(time.monotonic(), (now - last) * _MILLISECONDS)
            last = now
        if self._queue:
            self._turn = self._loop.call_later(self._time_bucket.wait, self._read_queue)

    def _receive(self, connection: AgentConnection) -> None:
        now = self._clock()
        if not connection.bucket.consume(now):
            # The connection is not read until its bucket has a token again; its socket fills, and the agent
            # drops reports.
            self._rejected["rate"] += 1
            self._loop.call_later(connection.bucket.wait, self._receive_again, connection)
            return
        try:
            message = connection.receive_newest()
            if connection.overfull:
                self._rejected["rate"] += 1
            if message is not None:
                self._handle_message(connection, message, now)
        except RefusedError as error:
            self._reject(connection, error.reason, str(error))
        except (OSError, EOFError):
            self._close_connection(connection)
        self._receive_again(connection)

    def _receive_again(self, connection: AgentConnection) -> None:
        """Have a connection read again: at once before its first report, then once a sample.

        To be woken for each report costs more CPU time than to read it.
        """
        if connection not in self._connections:
            return
        if connection.report is None:
            self._loop.add_reader(connection.socket, self._queue_connection, connection)
        else:
            self._resting[connection] = None

    def _read_resting(self) -> None:
        """Read all resting connections; the user whose messages took the least time comes first."""
        self._rested_at = time.monotonic()
        for connection in self._resting:
            self._queue.add(connection)
        self._resting.clear()
        if self._queue and self._turn is None:
            self._read_queue()

    def _handle_message(self, connection: AgentConnection, message: Message, now: float) -> None:
        if message.sender != connection.peer.pid:
            self._rejected["sender"] += 1  # a forked child on its parent's connection, which stays open
            return
        content = parse(message.data)
        if "ask" in content:
            self._answer_request(connection, content, now)
            return
        if "sequence" not in content:  # of a newer version: it costs itself, and no report
            log.debug("Unknown message of an agent", extra=fields(pid=connection.peer.pid))
            return
        connection.report = locate_rank(read_report(content, connection.report), self._node)
        connection.report_time, connection.received = now, time.time()
        self._report_bytes[connection] = len(message.data)
        earlier = self._agent_connections.get(connection.peer.pid)
        if earlier is not None and earlier is not connection:
            self._close_connection(earlier)  # the agent was started again in the same process
        self._agent_connections[connection.peer.pid] = connection
        self._refused.pop(connection.peer.pid, None)
        self._limit_reports()

    def _limit_reports(self) -> None:
        if self._report_bytes.total() <= MAX_REPORT_BYTES:
            return
        users: Counter[int] = Counter()
        for connection, size in self._report_bytes.items():
            users[connection.peer.uid] += size
        largest = max(self._report_bytes, key=lambda each: (users[each.peer.uid], self._report_bytes[each]))
        self._reject(largest, "limits", "the reports of all agents are too large")

    def _answer_request(self, connection: AgentConnection, content: Mapping[str, Any], now: float) -> None:
        """Answer a client, and close; an agent to which the request was passed has its own copy."""
        if connection.report is not None:
            refuse("format", "an agent sends requests on a separate connection")
        fresh = TokenBucket(now, MESSAGE_RATE, MESSAGE_BURST)
        if not self._request_buckets.setdefault(connection.peer.uid, fresh).consume(now):
            refuse("rate", "too many requests of one user")
        with suppress(OSError):  # the client has gone
            answer_request(connection, content, self)
        self._close_connection(connection)


def _descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else MAX_CONNECTIONS * _DESCRIPTORS_SHARE


@asynccontextmanager
async def run_agent_server(
    path: Path, procfs: Path, snapshot: Callable[[], Snapshot], owner: int | None = None
) -> AsyncIterator[AgentServer]:
    """Listen for agents until the block ends; ``owner`` as in :class:`AgentServer`."""
    server = AgentServer(path, procfs, snapshot, owner=owner)
    server.start()
    try:
        yield server
    finally:
        server.close()
