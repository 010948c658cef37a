"""The draws, and the comparison with other rules: what is counted, and one draw of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.faults import comparison, intervals, rules
from tests.support.faults.draws import DRAWS
from tests.support.faults.evaluation import Firing
from tests.support.faults.suite import SCENARIOS, Pace, RuleSet, Run, run
from tests.support.requirements import require_tool


@pytest.mark.parametrize(
    ("events", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (2, 0.2422, 7.225), (10, 4.795, 18.39)]
)
def test_the_interval_of_a_rate_is_exact(events: int, low: float, high: float) -> None:
    """The interval of events in 1,000 hours is Garwood's, of which tables are printed."""
    assert intervals.rate(events, 1000) == pytest.approx((low, high), abs=0.006)


@pytest.mark.parametrize(
    ("found", "of", "low", "high"), [(20, 20, 0.839, 1.0), (0, 20, 0.0, 0.161), (15, 20, 0.531, 0.888)]
)
def test_the_interval_of_a_share_is_wilsons(found: int, of: int, low: float, high: float) -> None:
    """All of twenty is at least 84 %, and none of twenty at most 16 %."""
    assert intervals.share(found, of) == pytest.approx((low, high), abs=0.001)


def test_the_interval_of_a_median_comes_from_the_order() -> None:
    """Of twenty values it is the 6th and the 15th, and of few values the first and the last."""
    assert intervals.median([float(value) for value in range(20, 0, -1)]) == (6.0, 15.0)
    assert intervals.median([3.0, 1.0]) == (1.0, 3.0)


def firing(alert: str, minute: float, severity: str = "page", **labels: str) -> Firing:
    """Return an alert that fires for a minute."""
    return Firing(alert, severity, {"instance": "a", **labels}, minute * 60, minute * 60 + 60)


def test_a_leak_counts_as_found_before_the_card_is_full() -> None:
    """An alert before the onset, or after the card is full to nine tenths, has found nothing."""
    times = [
        comparison.detected([Run("drawn-leak", 1, 9, 3600.0, 7200.0, (firing("GpuMemoryGrowing", minute),))])
        for minute in (59, 61, 121)
    ]

    assert [each["drawn-leak"].times for each in times] == [[], [60.0], []]


def test_each_page_of_healthy_work_is_false() -> None:
    """It counts whatever the scenario allows as a warning; a warning does not count."""
    fired = (firing("GpuMemoryOrphaned", 9), firing("GpuMemoryOrphaned", 9, "warning"))

    pages, hours = comparison.false_pages([Run("working-orphans", 1, 24.0, None, None, fired)])
    assert (pages, hours) == (["working-orphans/1: GpuMemoryOrphaned at 9 min"], 24.0)


def test_fewer_rules_are_all_that_the_wanted_alerts_need(tmp_path: Path) -> None:
    """Of the rules those that page are left, and every record that they read; no other alert."""
    home = rules.reduce(rules.HOME, tmp_path / "pages", lambda rule: rule["labels"]["severity"] == rules.PAGE)
    groups = [
        each for path in rules.files(home) for each in yaml.safe_load(path.read_text("utf-8"))["groups"]
    ]
    every = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in every if "record" in rule}

    assert sorted(each.name for each in rules.alerts(home)) == sorted(
        each.name for each in rules.alerts() if each.severity == rules.PAGE
    )
    read = {name for rule in every for name in re.findall(r"\bvramledger_\w+:\w+(?::\w+)?", rule["expr"])}
    assert read == recorded
    assert "vramledger_process:demand_bytes:min3m" in recorded


def test_draws_have_names_of_their_own_and_alerts_that_exist() -> None:
    """No draw has the name of another scenario, and each names alerts that exist."""
    names = [each.name for each in DRAWS]
    known = {each.name for each in rules.alerts()}

    assert len({*names, *SCENARIOS}) == len(names) + len(SCENARIOS)
    assert {alert for each in DRAWS for alert in (*each.expects, *each.allows)} <= known


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_draw_of_each_is_found_and_pages_nobody() -> None:
    """One draw of each scenario: faults are found, healthy work pages nobody; simple rules fire."""
    require_tool("promtool")
    pace = Pace(sample=60.0, step=60.0, scrape=60.0, longest=8.0)
    drawn = [(each.name, 1001) for each in DRAWS]
    ours, simple = run(drawn, pace, [RuleSet(), RuleSet(home=comparison.SIMPLE)])

    assert [f"{each.scenario}/{each.seed}" for each in ours if not comparison.is_found(each)] == []
    assert comparison.false_pages(ours)[0] == []
    assert any(each.firings for each in simple)
