"""Each alert fires, does not fire, and is tested at its boundary; and one cause makes one alert."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.alerts.cases import DEAD, TRAINER, Case
from tests.support.alerts.exporter_cases import EXPORTER_CASES
from tests.support.alerts.holder_cases import HOLDER_CASES
from tests.support.alerts.nodes import Node
from tests.support.alerts.promtool import STEP, alert_names, alerts_over_time, expect, firing
from tests.support.faults.evaluation import Manager
from tests.support.requirements import EACH_VERSION

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

CASES = [*EXPORTER_CASES, *HOLDER_CASES]

LONG = 121.0
"""Minutes: cases that last longer are about slow alerts, and are asked about all others after this time."""

SLOW = {"GpuHeldHardlyUsed", "GpuMemoryLeakSuspected", "GpuMemoryGrowing"}


@pytest.fixture(scope="module", params=EACH_VERSION)
def fired(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the alerts of each case at its minute."""
    nodes = {case.name: (case.node, min(case.minute, LONG)) for case in CASES}
    assert len(nodes) == len(CASES), "no name stands for two cases"
    long = {case.name: (case.node, case.minute) for case in CASES if case.minute > LONG}
    fires: dict[str, list[str]] = {case.name: [] for case in CASES}
    for some, alerts in ((nodes, set[str]()), (long, SLOW)):
        minutes = [minute for _, minute in some.values()]
        folder, manager = tmp_path_factory.mktemp("cases"), Manager(STEP, alerts=alerts)
        for key, times in alerts_over_time(some, minutes, folder, request.param, manager).items():
            labels = dict(key)
            name, alert = labels.get("instance", ""), labels["alertname"]
            if name not in some or (some is nodes and name in long and alert in SLOW):
                continue  # it is about many nodes, or asked later
            if labels["alertstate"] == "firing" and some[name][1] * 60 in times:
                fires[name].append(f"{alert}-{labels['severity'][0]}")
    return fires


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fires(case: Case, fired: dict[str, list[str]]) -> None:
    """The alerts that should fire do, and no others, whatever else happens on this node and on others."""
    assert sorted(fired[case.name]) == sorted(case.fires.split())


ANSWERS, SILENT = 'up{job="vramledger",instance="a:1"}', 'up{job="vramledger",instance="b:2"}'


@pytest.mark.parametrize(
    ("series", "link"),
    [
        ({ANSWERS: "1x99", SILENT: "1x4 0x99"}, "http://a:1/runbooks/VramLedgerExporterDown"),
        ({SILENT: "1x4 0x99"}, ""),
        ({ANSWERS: "1x8 _x99", SILENT: "0x8 _x99"}, "http://a:1/runbooks/VramLedgerAbsent"),
    ],
    ids=["another one answers", "none answers", "none is known any more"],
)
def test_the_link_leads_to_an_exporter_that_answers(
    series: dict[str, str], link: str, tmp_path: Path
) -> None:
    """If the alert's own exporter cannot answer, the link leads to another one, or is missing."""
    given = [{"series": name, "values": values} for name, values in series.items()]
    [alert] = firing(tmp_path, given, 18)

    assert alert.annotations["runbook_url"] == link


@pytest.mark.parametrize("stores", [True, False])
def test_an_alert_links_to_the_page_as_it_was(tmp_path: Path, stores: bool) -> None:
    """With a storage the link carries the time of the evaluation; without one there is none."""
    stored = {"vramledger_storage_newest_timestamp_seconds{NODE}": lambda m: 60 * m}
    [alert] = firing(tmp_path, Node([DEAD], extra=stored if stores else {}).series(6), 6)

    name = alert.labels["instance"]
    assert alert.annotations["page_url"] == (f"http://{name}/#at=360" if stores else "")


def test_the_heartbeat_always_beats(tmp_path: Path) -> None:
    """The watchdog fires when there is nothing to watch, and while other alerts fire."""
    beats = {'ALERTS{alertname="VramLedgerWatchdog",alertstate="firing"}': 1}
    assert expect(tmp_path, [{"series": "other", "values": "0x50"}], 1, beats) == ""
    assert expect(tmp_path, Node([DEAD], driver_up=0).series(10), 10, beats) == ""


def test_every_alert_is_tested() -> None:
    """Each alert has a case in which it fires."""
    fires = {word.rpartition("-")[0] for case in CASES for word in case.fires.split()}

    of_fleets = {
        "VramLedgerAbsent", "VramLedgerManyExportersDown", "VramLedgerScrapesTooRare",
        "VramLedgerLabelsReplaced", "GpuManyNodes", "GpuManyOwners",
    }  # fmt: skip
    assert set(alert_names()) - fires == {"VramLedgerWatchdog", *of_fleets}


def test_a_silent_agent_says_why(tmp_path: Path) -> None:
    """The text has the exporter's reason, and an agent that is only degraded does not count as silent."""
    silent = {'vramledger_agent_up{NODE,pid="9",reason="refused"}': 0}
    [alert] = firing(tmp_path, Node([TRAINER], extra=silent).series(6), 6)
    assert "(reason: refused)" in alert.annotations["description"]
