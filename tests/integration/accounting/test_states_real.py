"""The states of real processes: which are orphans, and above all which are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.processes.scenarios import NOT_ORPHANS, ORPHANS, OTHERS, Builder, Scenario, play
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.reading import DeviceReading, MemoryReading, ProcessEntry, Reading
from vramledger.model.snapshot import Holding, State
from vramledger.readers.hosts.host import Host

GIB = 1024**3
PROC = Path("/proc")


class Watcher:
    """The sampler's part and the ledger's part, with a GPU that lists the holders of a scenario."""

    def __init__(self, holders: Iterable[int]) -> None:
        """Start to watch; what happened before is not known."""
        self._holders = tuple(holders)
        self._host = Host(PROC)
        self._tracker = HoldingTracker(idle_after=600)
        self._told: dict[int, tuple[int, int]] = {}
        self._clock = 0.0

    def look(self) -> list[Holding]:
        """Take a sample and return the holdings in the order of the holders."""
        self._clock += 1.0
        rows, unseen = self._host.rows(self._holders)
        news = [row for row in rows if self._told.get(row.pid) != (row.start, row.ppid)]
        self._told.update({row.pid: (row.start, row.ppid) for row in rows})
        used = GIB * len(self._holders)
        device = DeviceReading(
            0,
            "GPU-0",
            memory=MemoryReading(80 * GIB, 80 * GIB - used, used, 0),
            processes=tuple(ProcessEntry(pid, GIB, "C") for pid in self._holders),
        )
        snapshot = self._tracker.update(
            Reading(
                time=self._clock,
                monotonic=self._clock,
                boot_time=self._host.boot_time,
                ticks=self._host.ticks,
                host_pid_namespace=True,
                devices=(device,),
                rows=rows,
                unseen=unseen,
                facts=tuple(facts for row in news if (facts := self._host.facts(row)) is not None),
            )
        )
        found = {holding.pid: holding for holding in snapshot.devices[0].holdings}
        return [found[pid] for pid in self._holders]


@pytest.fixture
def scenario(request: pytest.FixtureRequest) -> Iterator[Scenario]:
    """Set up a scenario, and kill all its processes at the end."""
    builder: Builder = request.param
    with play(builder) as played:
        yield played


def named(builder: Builder) -> str:
    """Return the scenario's name as the name of the test."""
    return builder.__name__


def states(holdings: Iterable[Holding]) -> set[str]:
    """Return the states; ``alive`` replaces those of a process with which nothing is wrong."""
    alive = {State.ACTIVE, State.IDLE}
    return {"alive" if holding.state in alive else holding.state.value for holding in holdings}


@pytest.mark.parametrize("scenario", NOT_ORPHANS + ORPHANS, ids=named, indirect=True)
def test_nobody_is_an_orphan_while_its_launcher_lives(scenario: Scenario) -> None:
    """While the launcher lives, every holder is alive."""
    assert states(Watcher(scenario.holders).look()) == {"alive"}


@pytest.mark.parametrize("scenario", NOT_ORPHANS + ORPHANS, ids=named, indirect=True)
def test_the_loss_of_a_launcher_seen_from_the_start(scenario: Scenario) -> None:
    """An exporter that watched before and after the end distinguishes orphans from detached jobs."""
    watcher = Watcher(scenario.holders)
    watcher.look()
    scenario.orphan()

    holdings = watcher.look()

    assert states(holdings) == {scenario.verdict}, [holding.why for holding in holdings]
    assert all(holding.why for holding in holdings)


@pytest.mark.parametrize("scenario", NOT_ORPHANS + ORPHANS, ids=named, indirect=True)
def test_the_loss_of_a_launcher_seen_late(scenario: Scenario) -> None:
    """An exporter that starts after the end finds the same orphans by other evidence, and no others."""
    scenario.orphan()

    holdings = Watcher(scenario.holders).look()

    assert states(holdings) == {scenario.late or scenario.verdict}, [holding.why for holding in holdings]


@pytest.mark.parametrize("scenario", OTHERS, ids=named, indirect=True)
def test_the_other_states(scenario: Scenario) -> None:
    """A zombie leader with live threads, a zombie, a stopped process and a dead pid have different states."""
    assert states(Watcher(scenario.holders).look()) == {scenario.verdict}
