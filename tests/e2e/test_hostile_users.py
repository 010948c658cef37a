"""Users who send all they may over the agents' socket, and a scrape that does not notice."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.agent_client import report, torch
from tests.support.exporter import QUICK, serving
from tests.support.players.stage import Stage
from tests.support.requirements import require_root
from tests.support.standin.library import StandIn
from tests.support.waiting import wait_until
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

SCRAPE_TIMEOUT = 10.0
"""Seconds: Prometheus' default."""


def test_scrapes_come_before_agents(tmp_path: Path, standin_library: Path, stage: Stage) -> None:
    """While eight users send expensive reports as fast as they can, scrapes have their data in time."""
    require_root()
    place = stage.directory / "agents"  # where every user may look
    costly = json.dumps(report(zz=[[] for _ in range(16_000)], frameworks=[torch()]))
    assert len(costly) <= MAX_MESSAGE_BYTES
    with (
        StandIn(tmp_path, standin_library, devices=1) as standin,
        serving(*QUICK, f"--agent.socket={place}", driver=standin.env()) as exporter,
    ):
        wait_until(place.exists, "the socket")
        exporter.until(lambda page: page.up, "data")
        for number in range(8):
            stage.start(("flood", str(place), 60, costly), user=60_000 + number)
        exporter.until(lambda page: (page.value("agent_connections") or 0) > 400, "their connections")
        for _ in range(5):
            exporter.next_sample()
            assert exporter.scrape(SCRAPE_TIMEOUT).up
