"""The marks of a Kubernetes node over the fault suite: leftovers taint it, and nothing else does."""

from random import Random

import msgspec
import pytest

from tests.support.faults.suite import SCENARIOS
from tests.support.host.scrapes import SimulatedExporter
from vramledger.kubernetes.command import NodeJudge, NodeMarks, cannot_tell, read_answer
from vramledger.verdicts.cleanliness import find_leftovers, leftovers

PLANTED = frozenset(
    "orphaned orphaned-restarted orphaned-skewed replaced-then-orphaned pod-ended dead zombie stuck"
    " unattributed".split()
)
"""The scenarios that leave memory of work that has ended."""

SAMPLE, AFTER, LONGEST = 30.0, 60.0, 2.5 * 3600
FOUND = 330.0
"""Seconds within which it must be marked: a thread is stuck after a minute, a dead parent is seen at once,
and an exporter that restarts 90 s after the onset needs its own minute."""


def taints(name: str, seed: int) -> tuple[float | None, list[float], bool]:
    """Return the onset, when the node got a taint (seconds), and whether it has one at the end."""
    random = Random(f"{name}/{seed}")  # noqa: S311 it is chance for tests
    scene = SCENARIOS[name].build(random)
    host = scene.build(random, SAMPLE)
    exporter = SimulatedExporter(host)
    judge, marks = NodeJudge(AFTER, gap=4 * SAMPLE, boot="b"), NodeMarks(tainted=False)
    restarts, begun, snapshot, offset = sorted(scene.weather.restarts), list[float](), None, 0.0
    now, end = 0.0, min(scene.hours * 3600, LONGEST)
    while now < end:
        if restarts and now >= restarts[0]:
            restarts.pop(0)
            exporter.restart()
        if snapshot is None or now < scene.weather.stalled:
            snapshot = exporter.sample(now)
            offset = offset if snapshot.time is None else snapshot.time - now
        if any(since <= now < until for since, until in scene.weather.down):
            seen = cannot_tell("no answer")
        else:
            said = leftovers(find_leftovers(snapshot), snapshot.watched_since, snapshot.time)
            seen = read_answer(msgspec.to_builtins(said), now + offset)
        judge.observe(seen, now)
        before, marks = marks, judge.marks(marks, now)
        if marks.tainted and not before.tainted:
            begun.append(now)
        now += SAMPLE
    return scene.onset, begun, marks.tainted


THOROUGH = pytest.mark.thorough
ORDINARY = frozenset("hoarder gradients-kept idle-notebook ranks mig device-lost exporter-down blind".split())
"""Of the scenarios without leftovers, those that make test runs; make test-all runs all."""


@pytest.mark.parametrize(
    "seed", [2001, pytest.param(2002, marks=THOROUGH), pytest.param(2003, marks=THOROUGH)]
)
@pytest.mark.parametrize("name", sorted(PLANTED))
def test_every_planted_leftover_taints_its_node(name: str, seed: int) -> None:
    """The taint comes within minutes of the leftover, not before it, and stays when the exporter restarts."""
    onset, begun, tainted = taints(name, seed)

    assert onset is not None
    assert tainted
    assert len(begun) == 1
    assert onset <= begun[0] <= onset + FOUND


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ORDINARY else THOROUGH)
        for name in sorted(set(SCENARIOS) - PLANTED)
    ],
)
def test_nothing_else_taints_a_node(name: str) -> None:
    """Healthy work, idle or leaking jobs, lost devices and blind or dead exporters set no taint."""
    _, begun, tainted = taints(name, 2001)

    assert (begun, tainted) == ([], False)
