"""The draws: their names, and one draw of each."""

from __future__ import annotations

import pytest

from tests.support.faults import rules
from tests.support.faults.detection import false_pages, time_to_detect
from tests.support.faults.draws import DRAWS
from tests.support.faults.suite import KNOWN, SCENARIOS, Pace, run
from tests.support.requirements import require_tool


def test_draws_have_names_of_their_own_and_alerts_that_exist() -> None:
    """No draw has the name of another scenario, and each names alerts that exist."""
    names = [each.name for each in DRAWS]
    known = {each.name for each in rules.alerts()}

    assert len({*names, *SCENARIOS}) == len(names) + len(SCENARIOS)
    assert {alert for each in DRAWS for alert in (*each.expects, *each.allows)} <= known


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_draw_is_found_and_pages_nobody() -> None:
    """One draw of each third scenario: faults are found, healthy work pages nobody."""
    require_tool("promtool")
    pace = Pace(sample=60.0, step=60.0, scrape=60.0, longest=8.0)
    drawn = [(each.name, 1001) for each in DRAWS[::3]]
    [ours] = run(drawn, pace)

    planted = [each for each in ours if not KNOWN[each.scenario].healthy]
    assert [f"{each.scenario}/{each.seed}" for each in planted if time_to_detect(each) is None] == []
    assert false_pages(ours)[0] == []
