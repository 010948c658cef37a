"""What the exporter adds to a reading of the sampler can fail alone."""

import asyncio
import logging

import pytest
from msgspec.structs import replace

from vramledger.model.agent_report import AgentSocket
from vramledger.model.reading import Reading
from vramledger.serving.source import attach_agents

SOCKET = AgentSocket(True, 0, {})


def test_agents_that_cannot_be_added_cost_their_own_part(caplog: pytest.LogCaptureFixture) -> None:
    """What the sampler read is there, one line is logged for each time that it fails, and it comes back."""
    failing = True

    async def add_agents(reading: Reading) -> Reading:
        if failing:
            message = "injected"
            raise RuntimeError(message)
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
