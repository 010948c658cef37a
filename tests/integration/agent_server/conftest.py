"""A server in an event loop, on a thread of its own, as in the exporter."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.support.agent_client import connect, send
from tests.support.waiting import wait_until
from vramledger.agent_server import server as module
from vramledger.agent_server.server import AgentServer
from vramledger.model.agent_report import Agent, AgentSocket
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot

_T = TypeVar("_T")

ME = os.getpid()
EMPTY = Reading(time=1.0, monotonic=1.0, duration=0.1, boot_time=0.0)
"""A reading in which the driver lists nobody."""


class Running:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = SimpleNamespace(now=module.boot_clock())
        self.snapshot = Snapshot()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._opened = ExitStack()
        made = (path, Path("/proc"), lambda: self.snapshot)
        self._listener = self.inside(lambda: AgentServer(*made, clock=lambda: self.clock.now))
        self.inside(self._listener.start)

    def connect(self) -> socket.socket:
        """Return a connection as an agent's, open until the server is closed."""
        return self._opened.enter_context(connect(self.path))

    def hear(self, message: Mapping[str, Any]) -> socket.socket:
        """Return a connection whose report was read."""
        connection = self.connect()
        send(connection, message)
        wait_until(lambda: self.sequence() is not None, "the report")
        return connection

    def inside(self, call: Callable[[], _T]) -> _T:
        """Call something in the event loop, the only place where the server may be used."""

        async def run() -> _T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    @property
    def agents(self) -> tuple[Agent, ...]:
        """Return the agents of all users after one more sample, which reads what they have sent."""
        self.reading()
        return self.inside(self._listener.agents)

    def sequence(self, pid: int = ME, *, sample: bool = True) -> int | None:
        """Return the sequence of an agent's report, ours for example, None while there is none."""
        known = self.agents if sample else self.inside(self._listener.agents)
        reports = [each.report for each in known if each.pid == pid]
        return reports[0].sequence if reports and reports[0] else None

    def reading(self) -> Reading:
        """Return a reading without holders, with the agents that come to it."""
        return asyncio.run_coroutine_threadsafe(self._listener.add_agents(EMPTY), self._loop).result(30)

    @property
    def health(self) -> AgentSocket:
        return self.inside(lambda: self._listener.health)

    def rejected(self, reason: str) -> int:
        return self.health.rejected[reason]

    def close(self) -> None:
        self._opened.close()
        self.inside(self._listener.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Return a server; other users can reach its socket."""
    for each in tmp_path.parents:
        if each.stat().st_mode & 0o001 == 0:
            each.chmod(each.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    with closing(Running(tmp_path / "agent.sock")) as listening:
        yield listening


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened
