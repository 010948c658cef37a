"""What the exporter adds to a reading of the sampler: each step can fail alone."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from vramledger.model.agent_report import AgentSocket
from vramledger.model.reading import LaunchCount, Reading
from vramledger.serving.source import attach_each

SOCKET = AgentSocket(True, 0, {})
COUNTS = (LaunchCount(7, 70, 600.0),)


def test_a_step_that_fails_costs_its_own_part(caplog: pytest.LogCaptureFixture) -> None:
    """The other step's part is there, one line is logged for each time that it fails, and it comes back."""
    failing = True

    async def add_agents(reading: Reading) -> Reading:
        if failing:
            message = "injected"
            raise RuntimeError(message)
        return replace(reading, agent_socket=SOCKET)

    async def add_counts(reading: Reading) -> Reading:
        return replace(reading, launches=COUNTS)

    attach = attach_each({"agent": add_agents, "launches": add_counts})

    async def read() -> Reading:
        return await attach(Reading(1.0, 1.0, collectors={"ledger": (True, 0.5)}))

    with caplog.at_level(logging.ERROR, "vramledger"):
        readings = [asyncio.run(read()) for _ in range(3)]
        failing = False
        whole = asyncio.run(read())
        failing = True
        asyncio.run(read())

    for reading in readings:
        assert (reading.agent_socket, reading.launches) == (None, COUNTS)
        assert reading.collectors["ledger"] == (True, 0.5)
        assert reading.collectors["agent"][0] is False
    assert (whole.agent_socket, whole.launches, set(whole.collectors)) == (SOCKET, COUNTS, {"ledger"})
    assert [vars(record)["fields"]["collector"] for record in caplog.records] == ["agent", "agent"]
