"""The alerts find what is planted, in time, and leave healthy work alone: a short run of the suite."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import rules
from tests.faults.__main__ import BEGIN, END, README
from tests.faults.detection import Verdict, judge, names_in
from tests.faults.suite import SCENARIOS, Pace, run

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

HEALTHY_HOURS = 3.0
SHORT = Pace(sample=15.0, step=60.0, longest=HEALTHY_HOURS)


@pytest.fixture(scope="module")
def verdict(require_tool: Callable[[str], Path]) -> Verdict:
    """Return what one variation of every scenario comes to; other seeds than those of the table."""
    require_tool("promtool")
    return judge(run([(name, 1001) for name in SCENARIOS], SHORT))


@pytest.mark.slow
def test_every_fault_is_found_in_time(verdict: Verdict) -> None:
    """Recall is 100 %: leaks before nine tenths of the card, what is plain to see within two minutes."""
    assert verdict.missed == []


@pytest.mark.slow
def test_healthy_work_wakes_nobody(verdict: Verdict) -> None:
    """Not one page comes from healthy work, and no more warnings than days, the last one counted whole."""
    assert verdict.pages == 0, verdict.false
    assert verdict.warnings <= math.ceil(verdict.hours / 24), verdict.false


@pytest.mark.slow
def test_every_page_says_whose(verdict: Verdict) -> None:
    """A page about a holder has its pid and its owner as labels."""
    assert verdict.nameless == []


def test_every_loud_alert_is_planted() -> None:
    """An alert that wakes or bothers somebody is raised by a scenario, or is listed here with the reason."""
    planted = {alert for scenario in SCENARIOS.values() for alert in (*scenario.expects, *scenario.allows)}
    without = {
        "GpuOwnerOverBudget",  # fires where a budget is configured: none is by default
        "GpuMemoryOutsideReservation",  # needs a scheduler's reservations
        "VramLedgerAbsent",  # about the configuration of Prometheus, no host
        "VramLedgerSamplingFailed",  # a host that never had a driver: no GPU to hold memory
    }
    loud = {alert.name for alert in rules.alerts() if alert.severity in ("page", "warning")}
    assert loud - planted - without == set()


def test_scenarios_name_alerts_that_exist() -> None:
    """A label that names no alert would be a promise about nothing."""
    known = {alert.name for alert in rules.alerts()}
    for scenario in SCENARIOS.values():
        assert {*scenario.expects, *scenario.allows} <= known, scenario.name


def test_the_table_is_of_these_scenarios() -> None:
    """The table in alerts/README.md names every alert and every scenario; 'make faults' writes it anew."""
    _, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    inside, end, _ = rest.partition(END)
    assert begin, "alerts/README.md has a place for the table"
    assert end, "alerts/README.md has a place for the table"
    alerts = sorted({alert.name for alert in rules.alerts() if alert.severity != "none"})
    assert names_in(inside.splitlines()) == [*alerts, *SCENARIOS]
