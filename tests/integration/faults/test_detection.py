"""The alerts find planted faults in time, and do not fire for healthy work: a short run of the suite."""

import math

import pytest

from tests.lab.faults import BEGIN, END, MEASURED
from tests.support.faults import rules
from tests.support.faults.detection import Verdict, false_pages, judge, names_in, time_to_detect
from tests.support.faults.draws import DRAWS
from tests.support.faults.suite import KNOWN, SCENARIOS, Pace, run
from tests.support.requirements import require_version

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

SHORT = Pace(sample=30.0, step=60.0, scrape=30.0, longest=3.0, after=2.5)
"""The longest fault is found an hour and a half after its onset."""


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    """Return the result of all scenarios; their seeds are not the table's.

    tests/integration/alerts has each alert on the older rule manager.
    """
    [found] = run([(name, 1001) for name in SCENARIOS], SHORT, [str(require_version("promtool", "newer"))])
    return judge(found)


@pytest.mark.thorough
def test_every_fault_is_found_in_time(verdict: Verdict) -> None:
    """Recall is 100 %: leaks before nine tenths of the card, visible faults within two minutes."""
    assert verdict.missed == []


@pytest.mark.thorough
def test_healthy_work_wakes_nobody(verdict: Verdict) -> None:
    """Healthy work causes no page, and at most one warning a day, the last day counted whole."""
    assert verdict.pages == 0, verdict.false
    assert verdict.warnings <= math.ceil(verdict.hours / 24), verdict.false


@pytest.mark.thorough
def test_every_page_says_whose(verdict: Verdict) -> None:
    """A page about a holder has its pid and its owner as labels."""
    assert verdict.nameless == []


@pytest.mark.thorough
def test_no_alert_blames_another(verdict: Verdict) -> None:
    """The owner in an alert had that pid at that time, not before or after."""
    assert verdict.misnamed == []


def test_every_alert_is_planted() -> None:
    """Each alert has a scenario that must raise it, except the heartbeat, which always fires."""
    planted = {alert for scenario in SCENARIOS.values() for alert in scenario.expects}
    # Of many hosts, and of scrapes that were never made: tests/integration/alerts has them.
    many = {
        "VramLedgerManyExportersDown", "VramLedgerScrapesTooRare", "VramLedgerLabelsReplaced",
        "GpuManyNodes", "GpuManyOwners",
    }  # fmt: skip
    many |= {"GpuHeldHardlyUsed"}  # it takes six hours: tests/support/alerts/holder_situations.py
    assert {alert.name for alert in rules.alerts() if alert.severity != "none"} - planted == many


def test_what_is_plain_is_to_be_found_in_time() -> None:
    """Orphans, dead pids and lost devices: within two minutes after ``for``; leaks before nine tenths."""
    for scenario in SCENARIOS.values():
        if {"GpuMemoryOrphaned", "GpuMemoryDead", "GpuDeviceLost"} & {*scenario.expects}:
            assert scenario.within is not None, scenario.name
            assert scenario.within <= 120, scenario.name
        if "GpuMemoryLeakSuspected" in scenario.expects:
            assert scenario.leak, scenario.name


def test_scenarios_name_alerts_that_exist() -> None:
    """No draw has the name of another scenario, and every label names an alert that exists."""
    known = {alert.name for alert in rules.alerts()}

    assert len(KNOWN) == len(SCENARIOS) + len(DRAWS)
    assert {alert for each in KNOWN.values() for alert in (*each.expects, *each.allows)} <= known


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_draw_is_found_and_pages_nobody() -> None:
    """One draw of each third scenario: faults are found, healthy work pages nobody."""
    promtool = str(require_version("promtool", "older"))
    pace = Pace(sample=60.0, step=60.0, scrape=60.0, longest=8.0)
    [ours] = run([(each.name, 1001) for each in DRAWS[::3]], pace, [promtool])

    planted = [each for each in ours if not KNOWN[each.scenario].healthy]
    assert [f"{each.scenario}/{each.seed}" for each in planted if time_to_detect(each) is None] == []
    assert false_pages(ours)[0] == []


def test_the_table_is_of_these_alerts() -> None:
    """The measured table names every alert; 'make faults' writes it."""
    _, begin, rest = MEASURED.read_text(encoding="utf-8").partition(BEGIN)
    inside, end, _ = rest.partition(END)
    assert begin, "the page has a place for the table"
    assert end, "the page has a place for the table"
    alerts = sorted({alert.name for alert in rules.alerts() if alert.severity != "none"})
    assert names_in(inside.splitlines()) == alerts
