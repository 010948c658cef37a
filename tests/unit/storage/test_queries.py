"""The queries of STORAGE.md answer what they say, over a past that the exporter's own parts have recorded."""

import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.host.model import EPOCH, GIB
from tests.support.past import StoredPast, night, owner_of
from tests.support.requirements import PROJECT
from vramledger.model.snapshot import Snapshot, State
from vramledger.storage.protocol import NAME

DOCUMENT = (PROJECT / "exporter/docs/STORAGE.md").read_text("utf-8")
MOST, RAN, IDLE, PEAK, NOBODY = re.findall(r"```sql\n(.+?)```", DOCUMENT, re.DOTALL)
AWAY = 300
SECONDS = 300


class _SoonIdle(StoredPast):
    idle_after = 60.0


class _Watched:
    """A recorded past, and every snapshot that was published."""

    def __init__(self, path: Path) -> None:
        self.past = _SoonIdle(path, night(8, Random(1)))  # noqa: S311 a simulation
        self.snapshots: list[Snapshot] = []
        self._watch()
        self.past.now += AWAY
        self._watch()
        self.past.process.flush()

    def _watch(self) -> None:
        self.snapshots += [self.past.sample() for _ in range(SECONDS)]

    def ask(self, query: str) -> list[Any]:
        """Return what ``sqlite3`` prints."""
        with closing(sqlite3.connect(f"file:{self.past.path / NAME}?mode=ro", uri=True)) as connection:
            return connection.execute(query).fetchall()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> _Watched:
    """Return one past for all tests."""
    return _Watched(tmp_path_factory.mktemp("past"))


def test_who_held_most(watched: _Watched) -> None:
    """The GiB-hours of each owner are those of the samples, but for what changed within a minute."""
    counted: Counter[str] = Counter()
    for snapshot in watched.snapshots:
        for holding in snapshot.devices[0].holdings:
            counted[owner_of(snapshot, holding.pid)[1]] += holding.held or 0
    answer = watched.ask(MOST.replace("date('now', '-7 days')", "'1970-01-01'"))
    assert [kind for kind, _, _ in answer] == ["user"] * 3
    assert {owner: hours for _, owner, hours in answer} == {
        owner: pytest.approx(held / GIB / 3600, rel=0.03) for owner, held in counted.items()
    }
    hours = [each for _, _, each in answer]
    assert hours == sorted(hours, reverse=True)


def test_what_ran_then(watched: _Watched) -> None:
    """Everybody who held memory on that GPU within the minute is there, and nobody else."""
    at = EPOCH + 240
    ran = RAN.replace("4711", "4000")
    ran = ran.replace("unixepoch('2026-11-22 03:12:00')", str(at))
    ran = ran.replace("unixepoch('2026-11-22 03:11:00')", str(at - 60))
    expected = {
        holding.pid
        for snapshot in watched.snapshots
        if at - 60 <= (snapshot.time or 0) <= at
        for holding in snapshot.devices[0].holdings
    }
    assert {pid for _, pid, *_ in watched.ask(ran)} == expected


def test_idle_hours_by_user(watched: _Watched) -> None:
    """Idle GiB-hours are exact to the second in who was idle."""
    counted: Counter[str] = Counter()
    for snapshot in watched.snapshots:
        for holding in snapshot.devices[0].holdings:
            if holding.state is State.IDLE:
                counted[owner_of(snapshot, holding.pid)[1]] += holding.held or 0
    assert counted
    assert dict(watched.ask(IDLE)) == {
        user: pytest.approx(held / GIB / 3600, rel=0.03, abs=0.02) for user, held in counted.items()
    }


def test_the_peak_is_the_highest_of_all_samples(watched: _Watched) -> None:
    """A peak between two minutes is seen, because each sample counts."""
    ledgers = [snapshot.devices[0].ledger for snapshot in watched.snapshots[:-60]]
    highest = max(each.used for each in ledgers if each is not None)
    ((gpu, _, peak, total, _),) = watched.ask(PEAK)
    assert (gpu, peak >= highest, total) == (0, True, ledgers[0].total if ledgers[0] else 0)
    every = [each.devices[0].ledger for each in watched.snapshots]
    assert peak <= max(each.used for each in every if each is not None)


def test_when_nobody_was_watching(watched: _Watched) -> None:
    """The gap between the two runs is the only one, to the second."""
    ((stopped, _, seconds),) = watched.ask(NOBODY)
    assert stopped == "1970-01-01 02:04:59"
    assert seconds == AWAY + 1
