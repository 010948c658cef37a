"""The dashboards' files match their sources, and are what Grafana and its linter expect."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.src.__main__ import rendered_files
from tests.support.dashboards.files import FILES, HOME, Json, all_queries, load_dashboards, panels
from vramledger.views.colours import GRAFANA, PARTS

DASHBOARDS = load_dashboards()
EACH = pytest.mark.parametrize("uid", list(DASHBOARDS))

UNITS = {
    *("bytes", "percentunit", "none", "short", "s", "celsius", "watt", "hertz", "Bps", "string"),
    "binBps",  # the growth of memory, beside GiB
    *("suffix: GiB·h", "suffix: h", "suffix:cores", "suffix:per minute", "suffix:per second"),
    "suffix:s",  # of a difference of clocks: 200 s, not 3.33 mins
}
"""Units from Grafana's list that we use, and some of our own."""

ALLOWED = {
    # A rule of dashboard-linter that one query does not follow: the query's metric, and why.
    "vramledger_device_xid_errors_total": "a number's series begins with its first error",
    "vramledger_owner_ooms_total": "an owner's series begins with its first failure",
    "vramledger_torch_ooms_total": "all since the program started",
    "vramledger_owner_memory_byte_seconds_total": "its rise between both ends of a range, exactly",
    "vramledger_owner_memory_wasted_byte_seconds_total": "its rise between both ends of a range, exactly",
}

LARGEST = 500_000
"""Bytes; a ConfigMap holds a million."""


def selectors(expr: str) -> Iterator[tuple[str, str]]:
    """Yield (metric, matchers) of every selector in a query."""
    yield from re.findall(r"\b([a-z_A-Z][\w:]*)\{([^{}]*)\}", expr)


def properties(panel: Json) -> dict[str, dict[str, Any]]:
    """Return what a panel's overrides set, by the name of the field."""
    return {
        each["matcher"]["options"]: {one["id"]: one["value"] for one in each["properties"]}
        for each in panel["fieldConfig"]["overrides"]
        if each["matcher"]["id"] == "byName"
    }


def links(dashboard: Json) -> Iterator[tuple[Json, str]]:
    for panel in panels(dashboard):
        for each in (panel["fieldConfig"]["defaults"], *properties(panel).values()):
            for link in each.get("links", ()):
                yield panel, link["url"]


def test_the_files_are_what_the_sources_make() -> None:
    """No file was changed by hand, and no source without ``make dashboards``."""
    made = rendered_files()

    assert {path.name for path in made} == {path.name for path in FILES}
    assert [path.name for path, text in made.items() if path.read_text("utf-8") != text] == []


@EACH
def test_grafana_takes_the_file(uid: str) -> None:
    """A file has the classic schema, nothing of one Grafana installation, and fits into a ConfigMap."""
    content = DASHBOARDS[uid]

    assert content["schemaVersion"] <= 42
    assert not content.keys() & {"id", "__inputs", "__requires", "elements", "spec"}
    assert content["editable"] is False
    assert (content["title"], content["tags"]) == (f"GPU memory / {content['title'][13:]}", ["vramledger"])
    assert len(json.dumps(content)) < LARGEST


def test_dashboards_have_names_of_their_own() -> None:
    """No two dashboards have the same uid or title, and each uid fits into an address."""
    titles = [content["title"] for content in DASHBOARDS.values()]

    assert len(DASHBOARDS) == len(FILES) == len(set(titles)) == 7
    assert all(re.fullmatch(r"[a-z][a-z-]{1,39}", uid) for uid in DASHBOARDS)


@EACH
def test_variables_come_in_their_order(uid: str) -> None:
    """Variables: data source, cluster, job, model, node; they are read again with the time range."""
    first, *others = DASHBOARDS[uid]["templating"]["list"]
    named = {each["name"]: each for each in others}

    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")
    assert first["label"] == "Data Source"
    assert list(named)[:4] == ["cluster", "job", "model", "instance"]
    asked = [each for each in others if each["type"] != "custom"]
    assert all(each["datasource"]["uid"] == "${datasource}" and each["refresh"] == 2 for each in asked)
    assert named["instance"]["label"] == "Node"
    assert named["job"]["label"] == "Scrape job"
    # With a pattern for All, `up` of every other job would count as an exporter that is down, and the chosen
    # models would not filter the nodes.
    assert "allValue" not in named["job"]
    assert "allValue" not in named["instance"]
    assert "$model" in named["instance"]["definition"]
    # A cluster is a label that few have: All has to fit a series without it.
    assert named["cluster"]["allValue"] == ".*"


@EACH
def test_every_panel_says_what_it_shows(uid: str) -> None:
    """Each panel has title, description, unit, text for no data, data source, and a legend for lines."""
    titles = Counter(panel["title"] for panel in panels(DASHBOARDS[uid]))
    assert [title for title, times in titles.items() if times > 1] == []
    for panel in panels(DASHBOARDS[uid]):
        defaults, targets = panel["fieldConfig"]["defaults"], panel["targets"]
        about = f"{uid}: {panel['title']}"
        assert re.search(r"\w{3,}.*[.:]$", panel["description"]), about
        assert len(panel["description"]) > 20, about
        assert defaults["unit"] in UNITS, about
        if panel["type"] not in ("table", "state-timeline"):
            assert defaults["noValue"].strip(" -0N/A"), f"{about}: a missing value must not look like one"
        assert panel["datasource"]["uid"] == "${datasource}", about
        assert targets, about
        assert all(each["datasource"]["uid"] == "${datasource}" for each in targets), about
        if panel["type"] in ("timeseries", "barchart", "state-timeline"):
            assert panel["options"]["legend"]["showLegend"] is True, about
            automatic = [each["expr"] for each in targets if each["legendFormat"] == "__auto"]
            nameless = [expr for expr in automatic if re.search(r"\bby\b", expr)]
            assert panel["type"] == "barchart" or not nameless, f"{about}: series need names"
        for column in properties(panel).values():
            assert column.get("unit", "short") in UNITS, about


@EACH
def test_places_and_ids(uid: str) -> None:
    """Every panel has its own id and a place that no other panel covers."""
    top = DASHBOARDS[uid]["panels"]
    rows = [panel for panel in top if panel["type"] == "row"]
    ids = [panel["id"] for panel in [*panels(DASHBOARDS[uid]), *rows]]
    assert len(ids) == len(set(ids))
    for together in (top, *(row["panels"] for row in rows)):
        for panel in together:
            place = panel["gridPos"]
            assert min(place["w"], place["h"]) >= 1
            assert 0 <= place["x"] <= 24 - place["w"]
        for pair in combinations([panel["gridPos"] for panel in together], 2):
            sides = [(one, other, *way) for one, other in (pair, pair[::-1]) for way in ("xw", "yh")]
            apart = any(one[at] + one[size] <= other[at] for one, other, at, size in sides)
            assert apart, f"{uid}: {pair[0]} covers {pair[1]}"


def test_every_query_asks_the_chosen_targets() -> None:
    """Each selector is limited by cluster, job and instance, except those of alerts without a node."""
    strays = [
        (asked.dashboard, asked.panel, metric)
        for asked in all_queries()
        for metric, matchers in selectors(asked.expr)
        if not metric.startswith(("ALERTS", "vramledger_alert:"))
        if not all(f'{name}=~"${name}"' in matchers for name in ("cluster", "job", "instance"))
    ]

    assert strays == []


def test_every_metric_is_asked_by_a_selector() -> None:
    """Every metric has braces, because without them it would not be limited."""
    metric = re.compile(r"\b(?:vramledger|scrape|process)_[\w:]+(?![\w:{])")
    bare = [
        (asked.panel, found)
        for asked in all_queries()
        for found in metric.findall(re.sub('"[^"]*"', "", asked.expr))
    ]

    assert bare == []


def test_counters_are_rated_over_an_interval_that_fits() -> None:
    """A counter is inside rate or increase, over Grafana's interval or the time range."""
    for asked in all_queries():
        for counter in re.findall(r"\bvramledger_\w+_total\b", asked.expr):
            if counter not in ALLOWED:
                assert re.search(rf"(?:rate|increase)\({counter}\{{", asked.expr), (asked.panel, counter)
        if not asked.panel.startswith("annotation"):
            spans = set(re.findall(r"(?:rate|increase)\([^\[\]]*\[([^\]]+)\]", asked.expr))
            assert spans <= {"$__rate_interval", "$__range"}, asked.panel


@pytest.mark.parametrize("value", ["", '""', "~"])
def test_without_an_address_of_pages_no_dashboard_links_to_one(value: str, tmp_path: Path) -> None:
    """An empty ``pages`` in thresholds.yml leaves the link to the exporter's page out of every dashboard."""
    shutil.copytree(HOME, tmp_path / "dashboards")
    (tmp_path / "alerts").mkdir()
    thresholds = (HOME.parent / "alerts" / "thresholds.yml").read_text("utf-8")
    changed = re.sub(r"^pages:.*$", f"pages: {value}", thresholds, flags=re.MULTILINE)
    (tmp_path / "alerts" / "thresholds.yml").write_text(changed, "utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{HOME.parent / 'exporter'}"}
    subprocess.run([sys.executable, "-m", "dashboards.src"], cwd=tmp_path, check=True, env=environment)

    made = {path.name: path.read_text("utf-8") for path in (tmp_path / "dashboards").glob("*.json")}
    assert made
    assert [name for name, content in made.items() if "#at=" in content] == []


@EACH
def test_links_lead_somewhere_and_lose_nothing(uid: str) -> None:
    """A link keeps time range and filters, and sets variables of its target from raw values of its row."""
    kept = ("${__url_time_range}", *(f"${{{name}:queryparam}}" for name in ("datasource", "cluster", "job")))
    for panel, url in links(DASHBOARDS[uid]):
        for field in re.findall(r"\$\{__data\.fields\.(\w+)", url):
            assert properties(panel).get(field, {}).get("unit") == "string", f"{panel['title']}: {field}"
        if "#at=" in url:
            assert url == "http://${instance:raw}/#at=${__value.time}"
            assert DASHBOARDS[uid]["links"][-1]["url"] == "http://${instance:raw}/#at=${__to}"
        elif "/runbooks/" not in url:
            found = re.match(r"/d/([\w-]+)\?", url)
            assert found, url
            assert all(each in url for each in kept), url
            variables = {each["name"] for each in DASHBOARDS[found[1]]["templating"]["list"]}
            assert set(re.findall(r"[?&]var-(\w+)=", url)) <= variables, url


def test_the_menu_leads_everywhere() -> None:
    """Every dashboard has the menu of all dashboards, which keeps time range and variables."""
    for content in DASHBOARDS.values():
        menu = content["links"][0]
        assert (menu["type"], menu["tags"]) == ("dashboards", ["vramledger"])
        assert (menu["keepTime"], menu["includeVars"]) == (True, True)


def test_every_dashboard_says_whether_its_exporters_live() -> None:
    """The first panel of each dashboard distinguishes "nothing is collected" from a missing value."""
    for content in DASHBOARDS.values():
        first = next(panels(content))
        assert first["title"] in ("Exporters", "Exporter")
        assert first["fieldConfig"]["defaults"]["noValue"] == "no exporter is known"
        assert "/d/vramledger-exporter" in first["fieldConfig"]["defaults"]["links"][0]["url"]


def test_a_state_has_one_colour_everywhere() -> None:
    """A part of the ledger that is coloured by its name has the colour of ``vramledger.views.colours``."""
    seen = set()
    for panel in (panel for content in DASHBOARDS.values() for panel in panels(content)):
        columns = properties(panel)
        for name in columns.keys() & PARTS:
            color = columns[name]["color"].get("fixedColor")
            seen.add((name, color or columns[name]["thresholds"]["steps"][-1]["color"]))
        for look in (panel["fieldConfig"]["defaults"], *columns.values()):
            words = [word for each in look.get("mappings", ()) for word in each["options"].values()]
            seen |= {(word["text"], word["color"]) for word in words if word["text"] in PARTS}

    assert seen == {(name, GRAFANA[name]) for name in PARTS}


def test_provisioning_finds_what_compose_mounts(project: Path) -> None:
    """Grafana loads the folder that deploy/compose mounts, and has a Prometheus as its data source."""
    compose = yaml.safe_load((project / "deploy/compose/compose.yaml").read_text("utf-8"))
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["grafana"]["volumes"])
    dashboards, sources = (
        yaml.safe_load((HOME / "provisioning" / path).read_text("utf-8"))
        for path in ("dashboards/vramledger.yml", "datasources/prometheus.yml")
    )
    (provider,), (source,) = dashboards["providers"], sources["datasources"]

    assert mounts["../../dashboards"] == provider["options"]["path"]
    assert mounts["../../dashboards/provisioning"] == "/etc/grafana/provisioning"
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert "prometheus" in compose["services"]
