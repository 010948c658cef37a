"""The states of real processes: which are orphans, and above all which are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.integration.readers.owners.test_owners_real import cgroup
from tests.support.host import model as simulated
from tests.support.host.model import GIB, Gpu
from tests.support.host.programs import Fixed
from tests.support.players.stage import Stage
from tests.support.players.tree import ALIVE, Cast, Tree, Verdict
from tests.support.players.trees.catalogue import HEALTHY, LEFTOVERS, OTHERS, TREES
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.snapshot import Holding, State
from vramledger.readers.hosts.host import Host

PROC = Path("/proc")


class Watcher:
    """The sampler's part and the ledger's, with a GPU that lists the holders of a tree."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Start to watch; what happened before is not known."""
        self._pids = tuple(pids)
        self._processes = Host(PROC)
        self._tracker = HoldingTracker(idle_after=600)
        self._told: dict[int, tuple[int, int]] = {}
        self._now = 0.0
        holders = [simulated.Process(pid, {0: Fixed(GIB)}) for pid in self._pids]
        self._gpus = simulated.Host([Gpu()], holders, Random(1))  # noqa: S311 nothing here is left to chance

    def look(self) -> list[Holding]:
        """Take a sample and return the holdings in the order of the holders."""
        self._now += 1.0
        rows, unseen = self._processes.rows(self._pids)
        news = [row for row in rows if self._told.get(row.pid) != (row.start, row.ppid)]
        self._told.update({row.pid: (row.start, row.ppid) for row in rows})
        reading = self._gpus.reading(
            self._now,
            boot_time=self._processes.boot_time,
            ticks=self._processes.ticks,
            rows=rows,
            unseen=unseen,
            facts=tuple(facts for row in news if (facts := self._processes.facts(row)) is not None),
        )
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
        and expected.words in holding.why
        for holding in holdings
    )


@play(*HEALTHY, *LEFTOVERS)
def test_nobody_is_an_orphan_while_its_launcher_lives(cast: Cast) -> None:
    """While the launcher lives, every holder is alive."""
    holdings = Watcher(cast.pids).look()

    assert judged(holdings, ALIVE), [(holding.state, holding.why) for holding in holdings]


@play(*HEALTHY, *LEFTOVERS)
def test_the_loss_of_a_launcher_seen_from_the_start(tree: Tree, cast: Cast) -> None:
    """An exporter that watched before and after the end distinguishes orphans from detached jobs."""
    watcher = Watcher(cast.pids)
    watcher.look()
    cast.lose_launcher()

    holdings = watcher.look()

    assert judged(holdings, tree.watched), [(holding.state, holding.why) for holding in holdings]


@play(*HEALTHY, *LEFTOVERS)
def test_the_loss_of_a_launcher_seen_late(tree: Tree, cast: Cast) -> None:
    """An exporter that starts after the end finds the same orphans by other evidence, and no others."""
    cast.lose_launcher()

    holdings = Watcher(cast.pids).look()

    assert judged(holdings, tree.late), [(holding.state, holding.why) for holding in holdings]


RANK = {"PMIX_RANK": "0", "INVOCATION_ID": "5d0f"}


@pytest.mark.parametrize(
    ("unit", "env", "expected"),
    [
        ("train.service", RANK, ALIVE),
        ("train.service", {**RANK, "SYSTEMD_EXEC_PID": "1"}, Verdict("orphaned", "PMIX_RANK")),
        ("session-7.scope", RANK, Verdict("orphaned", "PMIX_RANK")),
    ],
)
def test_a_rank_in_the_service_of_an_old_systemd(
    stage: Stage, unit: str, env: dict[str, str], expected: Verdict
) -> None:
    """If systemd does not name a service's main process, it is not an orphan, even with worker evidence."""
    manager = stage.start(name="systemd")
    player = manager.start(session=True, env=env)
    with cgroup(f"system.slice/{unit}") as place:
        (place / "cgroup.procs").write_text(str(player.pid))
        holdings = Watcher([player.pid]).look()
        (place.parents[1] / "cgroup.procs").write_text(str(player.pid))

    assert judged(holdings, expected), [(holding.state, holding.why) for holding in holdings]


@play(*OTHERS)
def test_the_other_states(tree: Tree, cast: Cast) -> None:
    """A zombie leader with live threads, a zombie, a stopped process and a dead pid have different states."""
    holdings = Watcher(cast.pids).look()

    assert judged(holdings, tree.watched), [(holding.state, holding.why) for holding in holdings]


def test_each_tree_says_what_it_is() -> None:
    """Every tree has a name of its own and says in one line what it is: the documents list them."""
    assert len({tree.name for tree in TREES}) == len({tree.what for tree in TREES}) == len(TREES)
    assert [tree.name for tree in TREES if not (tree.build.__doc__ or "").startswith("Play ")] == []
