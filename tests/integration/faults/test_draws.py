"""The draws: what is counted, and one draw of each."""

from __future__ import annotations

import pytest

from tests.support.faults import rules
from tests.support.faults.detection import false_pages, time_to_detect
from tests.support.faults.draws import DRAWS
from tests.support.faults.evaluation import Firing
from tests.support.faults.suite import KNOWN, SCENARIOS, Pace, Run, run
from tests.support.requirements import require_tool


def firing(alert: str, minute: float, severity: str = "page", **labels: str) -> Firing:
    """Return an alert that fires for a minute."""
    return Firing(alert, severity, {"instance": "a", **labels}, minute * 60, minute * 60 + 60)


def test_a_leak_counts_as_found_before_the_card_is_full() -> None:
    """An alert before the onset, or after the card is full to nine tenths, has found nothing."""
    times = [
        time_to_detect(Run("drawn-leak", 1, 9, 3600.0, 7200.0, (firing("GpuMemoryGrowing", minute),)))
        for minute in (59, 61, 121)
    ]

    assert times == [None, 60.0, None]


def test_each_page_of_healthy_work_is_false() -> None:
    """It counts whatever the scenario allows as a warning; a warning does not count."""
    fired = (firing("GpuMemoryOrphaned", 9), firing("GpuMemoryOrphaned", 9, "warning"))

    pages, hours = false_pages([Run("working-orphans", 1, 24.0, None, None, fired)])
    assert (pages, hours) == (["working-orphans/1: GpuMemoryOrphaned at 9 min"], 24.0)


def test_draws_have_names_of_their_own_and_alerts_that_exist() -> None:
    """No draw has the name of another scenario, and each names alerts that exist."""
    names = [each.name for each in DRAWS]
    known = {each.name for each in rules.alerts()}

    assert len({*names, *SCENARIOS}) == len(names) + len(SCENARIOS)
    assert {alert for each in DRAWS for alert in (*each.expects, *each.allows)} <= known


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_draw_of_each_is_found_and_pages_nobody() -> None:
    """One draw of each scenario: faults are found, healthy work pages nobody."""
    require_tool("promtool")
    pace = Pace(sample=60.0, step=60.0, scrape=60.0, longest=8.0)
    drawn = [(each.name, 1001) for each in DRAWS]
    [ours] = run(drawn, pace)

    planted = [each for each in ours if not KNOWN[each.scenario].healthy]
    assert [f"{each.scenario}/{each.seed}" for each in planted if time_to_detect(each) is None] == []
    assert false_pages(ours)[0] == []
