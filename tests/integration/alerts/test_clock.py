"""A node's clock that is set moves no alert: every age counts as if it had not been set."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.support.alerts import parts
from tests.support.alerts.nodes import Holder, Node, Values, changing_at, value_at
from tests.support.alerts.promtool import STEP, alerts_over_time
from tests.support.faults.evaluation import Manager
from tests.support.requirements import VERSIONS
from tests.support.selected import selected_cases

HOUR = 3600
LAST = 52  # minutes: more than ten after the clock is set for the second time

NODES = {
    "GpuMemoryDead": Node([replace(parts.DEAD, since=17)]),
    "GpuMemoryOrphaned": Node([replace(parts.ORPHAN, gib=30, since=17)]),
    "GpuMemoryZombie": Node([replace(parts.ORPHAN, state="zombie", since=17)]),
    "GpuMemoryStuck": Node([replace(parts.ORPHAN, state="stuck", since=12)]),
    "GpuMemoryStopped": Node([replace(parts.ORPHAN, state="stopped", since=4)]),
    "GpuMemoryHoarded": Node([replace(parts.IDLE, since=-30, last_active=-30)]),
    "GpuMemoryHoardedWhileShort": Node([replace(parts.IDLE, since=4), parts.SHORT], total=60),
    "GpuMemoryHoardedInPieces": Node(parts.pieces(12, 6, since=-30)),
    "GpuNotebookIdle": Node([replace(parts.NOTEBOOK, since=-30, last_active=-30, start=-60)]),
    "GpuJobHung": Node(parts.job_of("a", "stopped"), gpus=2),
    "GpuBusyWithoutWork": Node([Holder(8, 30, waiting=8)]),
    "GpuOutOfMemory-agent": Node([parts.TRAINER], extra={parts.LAST_OOM: changing_at(15, None, 880)}),
    "GpuOutOfMemory-owner": Node([parts.TRAINER], extra={parts.BOBS_LAST_OOM: changing_at(15, None, 880)}),
}
"""A node for each alert whose age comes from a metric; most are due when the clock has been set once."""


def shift(minute: float, hours: float) -> float:
    """Return by how many seconds the clock is off: it is set twice."""
    return hours * HOUR * ((minute >= 20.5) + (minute >= 40.5))


def clock_set(node: Node, hours: float, *, follows: bool) -> Node:
    """Return a node whose clock is set; the times that its exporter tells follow the clock, or do not."""

    def later(values: Values, unit: float) -> Values:
        if values is None or not follows:
            return values

        def moved(minute: float) -> float | None:
            value = value_at(values, minute)
            return None if value is None else value + shift(minute, hours) / unit

        return moved

    holders = [
        replace(
            each, since=later(each.since, 60), start=later(each.start, 60), waiting=later(each.waiting, 60),
            last_active=later(each.last_active, 60),
        )
        for each in node.holders
    ]  # fmt: skip
    extra = {name: later(values, 1) for name, values in node.extra.items()}
    extra[parts.STAMP] = lambda m: 60 * m + shift(m, hours)
    return replace(node, holders=holders, extra=extra)


KINDS = {
    f"{'forward' if hours > 0 else 'back'}, {'followed' if follows else 'not followed'}": (hours, follows)
    for hours in (1, -1)
    for follows in (True, False)
}


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], list[float]]:
    """Return at which minutes the alert about each node fires, by what is done to its clock."""
    asked = {each["kind"] for each in selected_cases(request)}
    nodes = {(name, "not set"): node for name, node in NODES.items()} | {
        (name, kind): clock_set(node, hours, follows=follows)
        for name, node in NODES.items()
        for kind, (hours, follows) in KINDS.items()
        if kind in asked
    }
    watched = {"/".join(key): (node, float(LAST)) for key, node in nodes.items()}
    folder = tmp_path_factory.mktemp("clock")
    manager = Manager(STEP, alerts=sorted({name.partition("-")[0] for name in NODES}))
    found: dict[tuple[str, str], set[float]] = {key: set() for key in nodes}
    for key, seen in alerts_over_time(watched, range(LAST + 1), folder, VERSIONS[0], manager).items():
        labels = dict(key)
        name, _, kind = labels.get("instance", "").partition("/")
        if labels["alertstate"] == "firing" and name.partition("-")[0] == labels["alertname"]:
            found[name, kind] |= {at / 60 for at in seen}
    return {key: sorted(minutes) for key, minutes in found.items()}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if follows else pytest.mark.thorough)
        for kind, (_, follows) in KINDS.items()
    ],
)
@pytest.mark.parametrize("name", NODES)
def test_a_clock_that_is_set_moves_no_alert(
    name: str, kind: str, told: Mapping[tuple[str, str], list[float]]
) -> None:
    """It fires as soon as by a steady clock, without a pause, and is not told again."""
    steady, found = told[name, "not set"], told[name, kind]

    assert steady
    assert abs(found[0] - steady[0]) <= 2
    assert max(b - a for a, b in pairwise(found)) <= 1
    assert abs(found[-1] - steady[-1]) <= 10
