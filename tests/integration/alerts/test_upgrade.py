"""An upgrade in the middle of an idle hour: the alert fires when it would have fired without one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.support.faults.evaluation import Firing, Manager, evaluate
from tests.support.host.model import GIB, Gpu, Host, Process
from tests.support.host.programs import Fixed
from tests.support.host.scrapes import SCRAPE, Renderer
from tests.support.host.series import Trace
from tests.support.past import StoredPast
from tests.support.requirements import require_tool
from vramledger.model.snapshot import State
from vramledger.storage.protocol import READING, RESTORE, Entry
from vramledger.storage.state import advance, recall

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

MINUTES = 80
UPGRADED_AT = 35.0
STEP = 30.0


def replaced(past: StoredPast) -> StoredPast:
    """End an exporter, and return the next one, which goes on from what is stored."""
    past.end()
    newer = StoredPast(past.path, past.host)
    head, known = newer.ask(ask=RESTORE)
    assert head["found"]
    recall(newer.tracker, newer.timeline, known["state"])
    for time, value in known["readings"]:
        advance(newer.tracker, newer.timeline, Entry(READING, time, value))
    newer.tracker.recall(newer.tracker.state)
    newer.host.restart()
    return newer


def idle_host() -> Host:
    """Return a Hopper GPU with one program that holds half of it and does nothing."""
    holder = Process(4711, {0: Fixed(40 * GIB)}, begin=-60.0, user="ann", framework="")
    return Host([Gpu()], [holder], Random(1), SCRAPE)  # noqa: S311 a simulation


def hoarded(scratch: Path, down: float) -> Firing:
    """Return when the alert fires over a host whose exporter is away for some seconds."""
    require_tool("promtool")
    (scratch / "past").mkdir(parents=True)
    past, trace, renderer = StoredPast(scratch / "past", idle_host()), Trace("gpu1"), Renderer()
    away = UPGRADED_AT * 60, UPGRADED_AT * 60 + down
    restarted = down == 0
    since: list[float | None] = []
    for slot in range(int(MINUTES * 60 / SCRAPE)):
        now = slot * SCRAPE
        if away[0] <= now < away[1]:
            trace.scraped(["up 0"])
            continue
        if now >= away[1] and not restarted:
            restarted = True
            past = replaced(past)
        past.now = now
        snapshot = past.sample()
        trace.scraped(renderer.lines(snapshot))
        if now >= away[0] - SCRAPE:
            ((holding,),) = [device.holdings for device in snapshot.devices]
            since.append(holding.since if holding.state is State.IDLE else None)
    assert since[0] is not None
    assert since[1] == since[0], "the exporter itself still knows it, and not the rules alone"
    (found,) = evaluate([trace], scratch, Manager(STEP, alerts=["GpuMemoryHoarded"]))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Firing:
    """Return when the alert fires without an upgrade."""
    return hoarded(tmp_path_factory.mktemp("undisturbed"), 0.0)


@pytest.mark.parametrize("down", [15.0, 150.0])
def test_an_upgrade_does_not_delay_the_alert(tmp_path: Path, undisturbed: Firing, down: float) -> None:
    """A holder that idles for an hour is reported on time, though its exporter was replaced meanwhile."""
    found = hoarded(tmp_path, down)
    assert abs(found.begin - undisturbed.begin) <= STEP
    assert found.end == undisturbed.end, "it goes on to fire"
    assert undisturbed.begin >= 3600, "an hour of idleness, and 5 minutes"
