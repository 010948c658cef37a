"""What has changed is the difference of what was held at two moments, where somebody watched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.src.reasons import NO_DRIVER, NOT_COMPARABLE
from tests.support.dashboards import database, truth
from tests.support.dashboards.answers import SPAN
from tests.support.dashboards.database import Samples, ask
from tests.support.dashboards.figures import AT_NOW, over_minutes, query_of
from tests.support.dashboards.nodes import NOW, SCRAPE
from tests.support.fleet.engines import Engine

pytestmark = pytest.mark.timeout(600)


def test_an_empty_comparison_says_that_nobody_watched_then(engine: Engine) -> None:
    """Where nothing is known of the beginning of the range, the figure above Changed says so."""
    expr = query_of("vramledger-fleet", "Changed: count")
    shown = ask(engine, over_minutes(expr, 200, instance="leak"), **AT_NOW)

    assert [float(each["value"][1]) for each in shown] == [NOT_COMPARABLE]


def test_what_has_changed_is_only_said_of_nodes_watched_at_both_moments(engine: Engine) -> None:
    """Owners of a node that is not watched at one of the moments have not changed: nobody knows."""
    reasons: set[float] = set()
    for node, minutes in (
        ("down", 60),
        ("stalled", 60),
        ("driver-lost", 60),
        ("released", 60),
        ("leak", 200),
    ):
        shown = ask(
            engine, over_minutes(query_of("vramledger-fleet", "Changed"), minutes, instance=node), **AT_NOW
        )
        expr = over_minutes(query_of("vramledger-fleet", "Changed: count"), minutes, instance=node)
        counted = {float(each["value"][1]) for each in ask(engine, expr, **AT_NOW)}
        assert shown == [], node
        assert counted <= {NO_DRIVER, NOT_COMPARABLE}, f"{node}: nothing was compared"
        reasons |= counted
    assert NOT_COMPARABLE in reasons


def test_what_has_changed_is_what_the_simulation_changed(samples: Samples, engine: Engine) -> None:
    """The change of each owner is the difference of what the exporters said at the two moments."""
    for minutes in (30, 60, 120):
        chosen = {"instance": "leak|hoarder|pod|large-moment|notebook|tensorflow"}
        shown = ask(
            engine, over_minutes(query_of("vramledger-fleet", "Changed"), minutes, **chosen), **AT_NOW
        )
        now, then = (_held(samples, at, **chosen) for at in (NOW, NOW - 60 * minutes))
        found = {each["metric"]["owner"]: float(each["value"][1]) for each in shown}

        assert found, minutes
        for owner in now.keys() | then.keys():
            (low, high), (least, most) = now.get(owner, (0, 0)), then.get(owner, (0, 0))
            assert low - most <= found.get(owner, 0.0) <= high - least, (minutes, owner)


def test_a_week_ago_is_what_the_simulation_held_then(
    samples: Samples, require_tool: Callable[[str], Path], tmp_path: Path
) -> None:
    """Changed says what each owner holds, what it held before, and what it held at this hour a week ago.

    The same hours are there twice, the second time half an hour less than a week later.
    """
    chosen = {"instance": "leak|hoarder|pod|large-moment|notebook|tensorflow"}
    week, earlier, minutes = 7 * 86_400.0, 1800.0, 60
    asked = ("vramledger_owner:memory_held_bytes:sum", "vramledger_device_up", "exporter_status:code")
    needed = Samples()
    needed.points = {
        labels: points
        for labels, points in samples.points.items()
        if dict(labels)["__name__"].endswith(asked)
    }
    with database.prometheus(require_tool("prometheus"), tmp_path, needed) as engine:
        database.send(needed, engine, week - earlier)
        columns = {
            ref: {
                row["metric"]["owner"]: float(row["value"][1])
                for row in ask(
                    engine,
                    over_minutes(query_of("vramledger-fleet", "Changed", ref), minutes, **chosen),
                    instant=True,
                    span=SPAN,
                    ahead=week - earlier,
                )
            }
            for ref in "ABCD"
        }

    for ref, moment in (("B", NOW - 60 * minutes), ("C", NOW), ("D", NOW - earlier)):
        held = _held(samples, moment, **chosen)
        assert {owner for owner, (low, _) in held.items() if low} <= columns[ref].keys(), ref
        for owner, value in columns[ref].items():
            low, high = held.get(owner, (0.0, 0.0))
            assert low <= value <= high, (ref, owner)
    assert columns["D"] != columns["C"]
    for owner, change in columns["A"].items():
        assert change == columns["C"].get(owner, 0.0) - columns["B"].get(owner, 0.0), owner
    assert columns["A"]


def _held(samples: Samples, moment: float, **chosen: str) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest holdings of each owner when the rules may have looked last."""
    moments = [moment - SCRAPE * back for back in range(5)]
    held = [
        truth.by_label(truth.values(samples, "vramledger_owner_memory_bytes", at, **chosen), "owner")
        for at in moments
    ]
    owners = {owner for each in held for owner in each}
    return {
        owner: (min(each.get(owner, 0.0) for each in held), max(each.get(owner, 0.0) for each in held))
        for owner in owners
    }
