"""What has changed is the difference of what was held at two moments, where somebody watched."""

import pytest

from tests.support.dashboards import truth
from tests.support.dashboards.database import Samples
from tests.support.dashboards.figures import over_minutes, query_of, rows_of
from tests.support.dashboards.nodes import NOW, SCRAPE
from tests.support.fleet.engines import Engine

CHANGED = query_of("fleet", "Changed, up to 4 min old")

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder


def test_what_has_changed_is_only_said_of_nodes_watched_at_both_moments(engine: Engine) -> None:
    """Owners of a node that is not watched at one of the moments have not changed: nobody knows."""
    for node, ago in (("down", 60), ("stalled", 60), ("driver-lost", 60), ("released", 60), ("leak", 200)):
        assert rows_of(engine, over_minutes(CHANGED, ago, instance=node)) == [], node


def test_what_has_changed_is_what_the_simulation_changed(samples: Samples, engine: Engine) -> None:
    """The change of each owner is the difference of what the exporters said at the two moments."""
    for minutes in (30, 60, 120):
        chosen = {"instance": "leak|hoarder|pod|large-moment|notebook|tensorflow"}
        now, then = (_held(samples, at, **chosen) for at in (NOW, NOW - 60 * minutes))
        shown = rows_of(engine, over_minutes(CHANGED, minutes, **chosen))
        found = {row["owner"]: row["value"] for row in shown}

        assert found, minutes
        for owner in now.keys() | then.keys():
            (low, high), (least, most) = now.get(owner, (0, 0)), then.get(owner, (0, 0))
            changed = found.get(owner, 0.0)
            assert max(low - most, least - high, 0) <= changed, (minutes, owner)
            assert changed <= max(abs(high - least), abs(low - most)), (minutes, owner)


def _held(samples: Samples, moment: float, **chosen: str) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest holdings of each owner when the rules may have looked last."""
    name, moments = "vramledger_owner_memory_bytes", (moment - SCRAPE * back for back in range(5))
    held = [truth.by_label(truth.values(samples, name, at, **chosen), "owner") for at in moments]
    bounds = {}
    for owner in set().union(*held):
        sizes = [each.get(owner, 0.0) for each in held]
        bounds[owner] = (min(sizes), max(sizes))
    return bounds
