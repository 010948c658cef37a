"""The alerts find planted faults in time, and do not fire for healthy work: a short run of the suite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.lab.faults import BEGIN, END, MEASURED
from tests.support.faults import rules
from tests.support.faults.detection import Verdict, judge, names_in
from tests.support.faults.suite import SCENARIOS, Pace, Run, run
from tests.support.requirements import NEWER, VERSIONS, require_version

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

SHORT = Pace(sample=30.0, step=60.0, scrape=30.0, longest=3.0, after=2.5)
"""The longest fault is found an hour and a half after its onset."""

SOME = "some of them"
"""What ``make test`` judges: each eighth scenario. That each alert fires is in tests/integration/alerts."""


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, Verdict]:
    """Return the result of one variation of scenarios, by version; with other seeds than the table."""
    chosen = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = {each.params["verdict"] for each in chosen if each and "verdict" in each.params}
    there = {"older"} | ({"newer"} if (NEWER / "promtool").exists() else set())
    versions = [each for each in VERSIONS if each in wanted & there]
    if not versions:
        return {SOME: judge(_run([*SCENARIOS][::8], ["older"])[0])}
    runs = _run([*SCENARIOS], versions)
    found = {version: judge(each) for version, each in zip(versions, runs, strict=True)}
    return {**found, SOME: found[versions[0]]}


def _run(names: Sequence[str], versions: Sequence[str]) -> list[list[Run]]:
    promtools = [str(require_version("promtool", each)) for each in versions]
    return run([(name, 1001) for name in names], SHORT, promtools)


@pytest.fixture(params=[SOME, *(pytest.param(each, marks=pytest.mark.thorough) for each in VERSIONS)])
def verdict(request: pytest.FixtureRequest, verdicts: dict[str, Verdict]) -> Verdict:
    """Return the result of some scenarios, or of all by one version of the rule manager."""
    if request.param != SOME:
        require_version("promtool", request.param)
    return verdicts[request.param]


def test_every_fault_is_found_in_time(verdict: Verdict) -> None:
    """Recall is 100 %: leaks before nine tenths of the card, visible faults within two minutes."""
    assert verdict.missed == []


def test_healthy_work_wakes_nobody(verdict: Verdict) -> None:
    """Healthy work causes no page, and at most one warning a day, the last day counted whole."""
    assert verdict.pages == 0, verdict.false
    assert verdict.warnings <= math.ceil(verdict.hours / 24), verdict.false


def test_every_page_says_whose(verdict: Verdict) -> None:
    """A page about a holder has its pid and its owner as labels."""
    assert verdict.nameless == []


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
    many |= {"GpuHeldHardlyUsed"}  # it takes six hours: tests/support/alerts/holder_cases.py
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
    """Every label of a scenario names an alert that exists."""
    known = {alert.name for alert in rules.alerts()}
    for scenario in SCENARIOS.values():
        assert {*scenario.expects, *scenario.allows} <= known, scenario.name


def test_the_table_is_of_these_alerts() -> None:
    """The measured table names every alert; 'make faults' writes it."""
    _, begin, rest = MEASURED.read_text(encoding="utf-8").partition(BEGIN)
    inside, end, _ = rest.partition(END)
    assert begin, "the page has a place for the table"
    assert end, "the page has a place for the table"
    alerts = sorted({alert.name for alert in rules.alerts() if alert.severity != "none"})
    assert names_in(inside.splitlines()) == alerts
