"""Readings become snapshots: at once where that is quick, in a thread where it is not."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from vramledger.model.agent_report import AgentSocket
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot
from vramledger.serving import source
from vramledger.serving.source import attach_agents


class Source:
    """Three readings."""

    pid = None
    idle_after = None

    async def readings(self) -> AsyncIterator[Reading | None]:
        for number in range(3):
            yield Reading(float(number), float(number))


class Accounting:
    """Remembers for each reading whether it was accounted in the thread of the loop."""

    def __init__(self) -> None:
        self.at_once: list[bool] = []

    def update(self, reading: Reading) -> Snapshot:
        self.at_once.append(threading.current_thread() is threading.main_thread())
        return Snapshot(serial=int(reading.time))

    def reset(self) -> None:
        """Forget nothing."""


@pytest.mark.parametrize(
    ("quick", "at_once"), [(0.0, [False, False, False]), (60.0, [False, True, True])], ids=["slow", "quick"]
)
def test_readings_in_the_loop(monkeypatch: pytest.MonkeyPatch, quick: float, at_once: list[bool]) -> None:
    """The first reading, and one whose predecessor took long, are left to a thread: requests are served."""
    monkeypatch.setattr(source, "_QUICK", quick)
    accounting = Accounting()

    async def test() -> list[int]:
        return [each.serial async for each in source.snapshots(Source(), accounting)]

    assert asyncio.run(test()) == [0, 1, 2]
    assert accounting.at_once == at_once


SOCKET = AgentSocket(True, 0, {})


def test_agents_that_cannot_be_added_cost_their_own_part(caplog: pytest.LogCaptureFixture) -> None:
    """What the sampler read is there, one line is logged for each time that it fails, and it comes back."""
    failing = True

    async def add_agents(reading: Reading) -> Reading:
        if failing:
            raise RuntimeError("injected")
        return replace(reading, agent_socket=SOCKET)

    attach = attach_agents(add_agents)

    async def read() -> Reading:
        return await attach(Reading(1.0, 1.0, collectors={"ledger": (True, 0.5)}))

    with caplog.at_level(logging.ERROR, "vramledger"):
        readings = [asyncio.run(read()) for _ in range(3)]
        failing = False
        whole = asyncio.run(read())
        failing = True
        asyncio.run(read())
    for reading in readings:
        assert reading.agent_socket is None
        assert reading.collectors["ledger"] == (True, 0.5)
        assert reading.collectors["agent"][0] is False
    assert (whole.agent_socket, set(whole.collectors)) == (SOCKET, {"ledger"})
    assert [vars(record)["fields"]["collector"] for record in caplog.records] == ["agent", "agent"]
