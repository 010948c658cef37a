"""The states of real processes: which are orphans, and above all which are not."""

import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.integration.readers.owners.test_owners_real import cgroup
from tests.support.host import model as simulated
from tests.support.host.model import GIB, Gpu
from tests.support.host.programs import Fixed
from tests.support.players.stage import Stage, parent_of
from tests.support.players.tree import ALIVE, Cast, Tree, Verdict
from tests.support.players.trees.catalogue import HEALTHY, LEFTOVERS, OTHERS
from tests.support.stranger import as_user
from tests.support.waiting import wait_until
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.snapshot import Grade, Holding, State
from vramledger.readers.hosts import sockets, tie_search
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.tie_search import Watched, find_ties

PROC = Path("/proc")
NOBODY = 65534
RANK = {"PMIX_RANK": "0", "INVOCATION_ID": "5d0f"}


class Watcher:
    """The sampler's part and the ledger's, with a GPU that lists the holders of a tree."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._processes = Host(PROC)
        self._tracker = HoldingTracker(idle_after=600)
        self._told: dict[int, tuple[int, int]] = {}
        self._watched: dict[int, Watched] = {}
        self._now = 0.0
        holders = [simulated.Process(pid, {0: Fixed(GIB)}) for pid in self._pids]
        self._gpus = simulated.Host([Gpu()], holders, Random(1))  # noqa: S311 nothing here is left to chance

    def look(self) -> list[Holding]:
        """Take a sample and return the holdings in the order of the holders."""
        self._now += 1.0
        rows, unseen = self._processes.rows(self._pids)
        news = [row for row in rows if self._told.get(row.pid) != (row.start, row.ppid)]
        self._told.update({row.pid: (row.start, row.ppid) for row in rows})
        told = tuple(facts for row in news if (facts := self._processes.facts(row)) is not None)
        by_pid = {row.pid: row for row in rows}
        for facts in told:
            row = by_pid[facts.pid]
            before = self._watched.get(row.pid)
            self._watched[row.pid] = Watched(row, facts, row.ppid if before is None else before.first_parent)
        watched = [each._replace(row=by_pid[pid]) for pid, each in self._watched.items() if pid in by_pid]
        reading = self._gpus.reading(
            self._now, boot_time=self._processes.boot_time, ticks=self._processes.ticks, rows=rows,
            unseen=unseen, facts=told, ties=find_ties(str(PROC), watched, host_namespace=True),
        )  # fmt: skip
        found = {holding.pid: holding for holding in self._tracker.update(reading).devices[0].holdings}
        return [found[pid] for pid in self._pids]


def play(*trees: Tree) -> pytest.MarkDecorator:
    """Run a test on each of these trees."""
    return pytest.mark.parametrize("tree", trees, ids=lambda tree: str(tree.name))


@pytest.fixture
def cast(tree: Tree) -> Iterator[Cast]:
    """Set a tree up, and kill everything of it afterwards."""
    with tree.play() as cast:
        yield cast


def judged(holdings: Iterable[Holding], expected: Verdict) -> bool:
    """Tell whether every holder has the state, ``alive`` if nothing is wrong with it, and the evidence."""
    alive = {State.ACTIVE, State.IDLE}
    return all(
        expected.state == ("alive" if holding.state in alive else holding.state.value)
        and holding.why
        and (holding.state in alive or expected.grade == holding.grade.value)
        and expected.words in holding.why
        for holding in holdings
    )


def said(holdings: Iterable[Holding]) -> list[tuple[str, str]]:
    """Return what is said of each holder."""
    return [(holding.state.value, holding.why) for holding in holdings]


@play(*HEALTHY, *LEFTOVERS)
def test_every_moment_has_its_verdict(tree: Tree, cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the end of the launcher, for who watched, who comes late and who may see less.

    While the launcher lives, every holder is alive. Nothing healthy is ended, whatever is inferred of it.
    Another user cannot read who has the other ends, so all that is left behind is only inferred for him.
    """
    watcher = Watcher(cast.pids)
    before = watcher.look()
    assert judged(before, tree.late if cast.launcher is None else ALIVE), said(before)
    cast.lose_launcher()
    # From here on all see the same sockets; for each list of them the kernel goes through a large table.
    monkeypatch.setattr(tie_search, "tcp_sockets", cache(sockets.tcp_sockets))
    watched, late = watcher.look(), Watcher(cast.pids).look()
    assert judged(watched, tree.watched), said(watched)
    assert judged(late, tree.late), said(late)
    if tree.kind == "healthy":
        assert not any(each.left_over or each.wasted for each in (*watched, *late))
    if os.geteuid() == 0:
        with as_user(NOBODY):
            seen = Watcher(cast.pids).look()
        for each, known in zip(seen, late, strict=True):
            assert not each.left_over, each
            assert State.ACTIVE is each.state or State.ORPHANED is known.state or each.grade is Grade.INFERRED


@pytest.mark.parametrize(
    ("unit", "env", "expected"),
    [
        ("train.service", RANK, ALIVE),
        ("train.service", {**RANK, "SYSTEMD_EXEC_PID": "1"}, Verdict("orphaned", "PMIX_RANK")),
        ("session-7.scope", RANK, Verdict("orphaned", "PMIX_RANK")),
    ],
)
def test_a_rank_of_an_old_service(stage: Stage, unit: str, env: dict[str, str], expected: Verdict) -> None:
    """Where systemd does not name a service's main process, it is not an orphan, though it seems a worker."""
    starter = stage.start()
    player = starter.start(session=True, env=env)
    starter.end()
    wait_until(lambda: parent_of(player.pid) == 1, "init does not adopt")
    with cgroup(f"system.slice/{unit}") as place:
        (place / "cgroup.procs").write_text(str(player.pid))
        holdings = Watcher([player.pid]).look()
        (place.parents[1] / "cgroup.procs").write_text(str(player.pid))
    assert judged(holdings, expected), said(holdings)


@play(*OTHERS)
def test_the_other_states(tree: Tree, cast: Cast) -> None:
    """A zombie leader with live threads, a zombie, a stopped process and a dead pid have different states."""
    holdings = Watcher(cast.pids).look()
    assert judged(holdings, tree.watched), said(holdings)
