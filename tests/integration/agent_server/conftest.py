"""A server in an event loop, on a thread of its own, as in the exporter."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from vramledger.agent_server import server as module
from vramledger.agent_server.server import AgentServer
from vramledger.model.agent_report import Agent, AgentSocket
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot

_T = TypeVar("_T")

EMPTY = Reading(time=1.0, monotonic=1.0, duration=0.1, boot_time=0.0)
"""A reading in which the driver lists nobody."""


class Running:
    def __init__(self, path: Path, procfs: Path) -> None:
        self.path = path
        self.clock = SimpleNamespace(now=module.boot_clock())
        self.snapshot = Snapshot()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._listener = self.inside(
            lambda: AgentServer(path, procfs, lambda: self.snapshot, clock=lambda: self.clock.now)
        )
        self.inside(self._listener.start)

    def inside(self, call: Callable[[], _T]) -> _T:
        """Call something in the event loop, the only place where the server may be used."""

        async def run() -> _T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    @property
    def agents(self) -> tuple[Agent, ...]:
        """Return the agents of all users after one more sample, which reads what they have sent."""
        self.reading()
        return self.agents_without_sample

    @property
    def agents_without_sample(self) -> tuple[Agent, ...]:
        """Return the agents of all users as they are known now."""
        return self.inside(self._listener.agents)

    def reading(self) -> Reading:
        """Return a reading without holders, with the agents that come to it."""
        return asyncio.run_coroutine_threadsafe(self._listener.add_agents(EMPTY), self._loop).result(30)

    @property
    def health(self) -> AgentSocket:
        return self.inside(lambda: self._listener.health)

    @property
    def next_health(self) -> AgentSocket:
        self.reading()
        return self.health

    def rejected(self, reason: str) -> int:
        return self.health.rejected[reason]

    def close(self) -> None:
        self.inside(self._listener.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Return a server; other users can reach its socket."""
    path = tmp_path / "agent.sock"
    for each in tmp_path.parents:
        if each.stat().st_mode & 0o001 == 0:
            each.chmod(each.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    listening = Running(path, Path("/proc"))
    yield listening
    listening.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened
