"""Each query of each panel is answered, with the columns and labels that the panel needs."""

import re
import urllib.request
from pathlib import Path

import pytest

from tests.integration.dashboards.test_contract import ALL_OR_NOTHING, TARGET
from tests.integration.dashboards.test_files import properties, selectors
from tests.support.dashboards import database
from tests.support.dashboards.answers import EMPTY, Answer, answers
from tests.support.dashboards.database import Samples
from tests.support.dashboards.figures import pid_of, query_of, rows_of
from tests.support.dashboards.files import all_queries, load_dashboards, panels, substitute_variables
from tests.support.dashboards.nodes import NEWEST, SCRAPE
from tests.support.fleet.engines import Engine, running, until
from tests.support.ports import free_port
from tests.support.requirements import require_newer
from tests.support.sure import sure

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder


def test_every_query_is_answered(answered: list[Answer]) -> None:
    """Each query has a result, or is in a list with the reason; the queries in the list have none."""
    empty = [each.asked for each in answered if not each.series]

    assert {(asked.dashboard, asked.panel, asked.ref) for asked in empty} == EMPTY.keys()


def test_columns_exist_in_the_answers(engine: Engine) -> None:
    """Every column of a table is a figure of one of its queries or a label of the answers."""
    for content in load_dashboards().values():
        for panel in panels(content):
            if panel["type"] != "table":
                continue
            # A process has neighbours only where its own pid is chosen.
            uuids = {"uuid": ".+"}
            if panel["title"] in ("Neighbours", "Newest failed allocation"):
                uuids |= {"instance": "hoarder", "pid": pid_of(engine, "hoarder", owner="18")}
            labels = {"Value", *(f"Value #{target['refId']}" for target in panel["targets"])}
            for target in panel["targets"]:
                for row in rows_of(engine, substitute_variables(target["expr"], **uuids)):
                    labels |= row.keys() - {"value"}
            assert set(properties(panel)) <= labels, panel["title"]


NEVER_RECORDED = {
    *(f"vramledger_process:demand_growth_bytes:delta{span}" for span in ("3h", "12h", "1d", "6d")),
    *(f"vramledger_device:{what}_dropped:max4m" for what in ("processes", "owners")),
    "vramledger_device_asleep",
}
"""What no node has: what takes longer than three hours, series that are dropped, GPUs that sleep."""


def test_labels_exist_on_the_series(samples: Samples) -> None:
    """Every label that a query matches on is one that the metric has on some node."""
    had: dict[str, set[str]] = {}
    for labels in samples.points:
        names = {name for name, _ in labels}
        had.setdefault(dict(labels)["__name__"], set()).update(names)
    wrong = {
        (asked.panel, metric, label)
        for asked in all_queries()
        for metric, matchers in selectors(asked.expr)
        if metric not in NEVER_RECORDED
        for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", matchers)
        if label not in TARGET | had[metric] and not re.fullmatch(ALL_OR_NOTHING.get(label, ""), metric)
    }

    assert wrong == set()


def test_the_variable_of_devices_shows_names_and_gives_uuids(engine: Engine) -> None:
    """Grafana's text is node, index and product, of an instance its id too; its value is the UUID."""
    listed = load_dashboards()["vramledger-device"]["templating"]["list"]
    (variable,) = [each for each in listed if each["name"] == "uuid"]
    query = sure(re.fullmatch(r"query_result\((.*)\)", variable["query"]["query"]))
    found = rows_of(engine, substitute_variables(query[1]))
    pattern = re.compile(variable["regex"].strip("/").replace("(?<", "(?P<"))
    lines = [
        "{" + ", ".join(f'{k}="{v}"' for k, v in sorted(row.items()) if k != "value") + "}" for row in found
    ]
    matched = [sure(pattern.search(line)) for line in lines]
    texts = {match["text"] for match in matched}
    instances = {f"mig / 0 instance {number} / NVIDIA H200 MIG 1g.18gb" for number in (7, 8, 9)}
    assert instances | {"mig / 0 / NVIDIA H200", "hoarder / 0 / NVIDIA A100-SXM4-40GB"} <= texts
    assert len(texts) == len(found)
    assert {match["value"] for match in matched} == {row["uuid"] for row in found}


def test_no_age_is_in_the_future(engine: Engine) -> None:
    """A host's clock that is ahead of Prometheus' gives ages of 0, never less."""
    for asked in all_queries():
        if asked.expr.startswith("clamp_min(time()"):
            past = substitute_variables(asked.expr.replace("time()", "(time() - 7200)"))
            assert all(row["value"] >= 0 for row in rows_of(engine, past)), asked.panel


POOLS = "Pools and use, by framework"


@pytest.mark.parametrize(
    ("dashboard", "panel", "ref", "live"),
    [
        *(
            ("framework", POOLS, ref, f"sum by (framework) (vramledger_framework_{name}_bytes{{}})")
            for ref, name in zip("AB", ("pool", "in_use"), strict=True)
        ),
        *(
            ("framework", "torch: pools and tensors", ref, f"sum(vramledger_torch_{name}_bytes{{}})")
            for ref, name in zip("ABCD", ("reserved", "allocated", "active", "requested"), strict=True)
        ),
        ("framework", "torch: pools and tensors", "E", "sum(vramledger_torch_private_pools_bytes{})"),
        ("exporter", "Collector success", "B", "min by (collector) (vramledger_collector_success{})"),
    ],
)
def test_what_is_recorded_for_graphs_is_what_the_exporters_said(
    engine: Engine, dashboard: str, panel: str, ref: str, live: str
) -> None:
    """The newest point of a graph of recorded sums is what the exporters said, at most 5 minutes before."""
    drawn = rows_of(engine, substitute_variables(query_of(dashboard, panel, ref), instance="leak|jax"))
    said = live.replace("{}", '{instance=~"leak|jax"}')
    before = [rows_of(engine, said, ahead=-SCRAPE * scrapes) for scrapes in range(12)]
    assert drawn
    assert any(sorted(drawn, key=str) == sorted(each, key=str) for each in before)


LATER = 472_222 * 3600.0
"""Seconds that are added for VictoriaMetrics, which misreads times soon after 1970: whole hours, so that the
steps of subqueries fall on the same moments."""


def test_victoriametrics_answers_the_same(samples: Samples, answered: list[Answer], tmp_path: Path) -> None:
    """VictoriaMetrics also answers every query, with the same current series and figures."""
    program = require_newer("victoria-metrics")
    newest = sum(1 for values in samples.points.values() if values[-1][0] == NEWEST)
    port = free_port()
    flags = ("-retentionPeriod=100y", "-search.latencyOffset=0s", "-loggerLevel=ERROR")
    place = (f"-storageDataPath={tmp_path / 'data'}", f"-httpListenAddr=127.0.0.1:{port}")
    command: list[str | Path] = [program, *place, *flags]
    with running(command, tmp_path, f"http://127.0.0.1:{port}", "/health") as other:
        database.send(samples, other, LATER)
        urllib.request.urlopen(f"{other.url}/internal/force_flush", timeout=60).close()  # noqa: S310 loopback
        count = 'count({__name__!=""})'
        until(lambda: rows_of(other, f"{count} >= {newest}", LATER), "VictoriaMetrics finds all it was given")
        theirs = {each.asked: each for each in answers(other, LATER)}

    for mine in answered:
        if "< 120" in mine.asked.expr or "- time()" in mine.asked.expr:
            continue  # what happened within two minutes is long ago there, and what is to come is past
        given = theirs[mine.asked]
        # A graph has other points in time, and other processes may live then. Current values are the same; a
        # sum over subqueries is almost the same.
        assert bool(given.series) == bool(mine.series), mine.asked
        if mine.asked.instant and mine.value is not None:
            assert given.series == mine.series, mine.asked
            # Times in figures are not later, but `time()` is; what `timestamp()` gives is later too.
            told = not mine.asked.expr.startswith("count(") and "timestamp(" not in mine.asked.expr
            told |= mine.asked.panel == "Nodes that are not fully watched"  # the largest is a figure there
            later = LATER if "time()" in mine.asked.expr and told else 0.0
            # Prometheus 2 also counts the sample where a span begins: a step is a sixth less steep there.
            near = 0.2 if "deriv(" in mine.asked.expr else 0.05
            assert given.value == pytest.approx(mine.value + later, rel=near), mine.asked


def test_a_newer_prometheus_answers_too(samples: Samples, answered: list[Answer], tmp_path: Path) -> None:
    """Prometheus 3 gives as many series for every query as Prometheus 2."""
    with database.prometheus(require_newer("prometheus"), tmp_path, samples) as newer:
        theirs = {each.asked: each.series for each in answers(newer)}

    assert {each.asked: each.series for each in answered} == theirs
