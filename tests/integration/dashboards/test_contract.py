"""The queries use only the metric contract and the shipped recording rules; promtool parses all of them."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from dashboards.src import first_steps
from tests.integration.dashboards.test_files import selectors
from tests.support.alerts.promtool import alert_names
from tests.support.dashboards.database import intervals
from tests.support.dashboards.files import CHOICES, all_queries, load_dashboards, substitute_variables
from tests.support.listening import PROJECT
from vramledger.metrics.contract import FAMILIES

OF_THE_EXPORTER = ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds")
OF_A_SCRAPE = ("up", "scrape_duration_seconds", "scrape_samples_scraped")
OF_PROMETHEUS = {
    **{name: set[str]() for name in (*OF_A_SCRAPE, *OF_THE_EXPORTER)},
    "ALERTS": {"alertname", "alertstate", "severity", "uuid", "owner"},
    "ALERTS_FOR_STATE": {"alertname", "severity", "uuid", "owner"},
}
TARGET = {"cluster", "job", "instance"}
RULE_LABELS = {
    *("gpu", "uuid", "pid", "state", "user", "command", "framework", "policy", "owner_type", "owner"),
    *("namespace", "notebook", "source", "team", "name", "grade"),
}
"""Labels of the recording rules' series; a real Prometheus says which rule has which."""

ALL_OR_NOTHING = {"team": r"vramledger_owner_memory_(?:bytes|(?:wasted_)?byte_seconds_total)"}
"""A label that a metric lacks, and by which it is selected on purpose: All matches it, a choice does not."""

QUERY_LABELS = {"device", "reason", "shown", "step", "blocker", "like", "beside", "to"}
"""Labels that a query makes itself."""


def labels_of(metric: str) -> set[str]:
    if metric in FAMILIES:
        return TARGET | set(FAMILIES[metric].labels)
    return TARGET | (RULE_LABELS if ":" in metric else OF_PROMETHEUS[metric])


def test_every_metric_and_label_exists() -> None:
    """A selector uses a metric of the contract, a rule or Prometheus, and labels that this metric has."""
    known = {*FAMILIES, *intervals(), *OF_PROMETHEUS}
    assert {metric for asked in all_queries() for metric, _ in selectors(asked.expr)} <= known
    wrong = [
        (asked.panel, metric, label)
        for asked in all_queries()
        for metric, matchers in selectors(asked.expr)
        for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", matchers)
        if label not in labels_of(metric) and not re.fullmatch(ALL_OR_NOTHING.get(label, ""), metric)
    ]

    assert wrong == []


def test_every_grouping_is_by_labels_that_exist() -> None:
    """Each label in a sum or a join is a label of some metric."""
    known = {label for family in FAMILIES.values() for label in family.labels}
    known |= TARGET | RULE_LABELS | QUERY_LABELS | OF_PROMETHEUS["ALERTS"]
    used = {
        label
        for asked in all_queries()
        for inside in re.findall(r"\b(?:by|on|without|group_left|group_right)\s*\(([^)]*)\)", asked.expr)
        for label in re.findall(r"\w+", inside)
    }

    assert used - known == set()


def test_variables_ask_for_what_exists() -> None:
    """The queries of the variables also use metrics and labels of the contract."""
    for content in load_dashboards().values():
        for each in content["templating"]["list"][1:]:
            if each["type"] == "custom":
                continue
            plain = (each["definition"].split("(")[1].split(",")[0], "")
            found = list(selectors(each["definition"])) or [plain]
            for metric, _ in found:
                assert metric in {*FAMILIES, *intervals(), "up"}, each["definition"]
            label = re.search(r", (\w+)\)$", each["definition"])
            if label:
                assert label[1] in labels_of(found[0][0]), each["definition"]


def test_promtool_reads_every_query(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    """Each query, as Grafana would send it, is PromQL to the real promtool."""
    recorded = [
        {"record": f"query:number:{number}", "expr": substitute_variables(asked.expr)}
        for number, asked in enumerate(all_queries())
    ]
    path = tmp_path / "queries.rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}), encoding="utf-8")
    command: list[str | Path] = [require_tool("promtool"), "check", "rules", path]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{len(recorded)} rules found" in done.stdout


def test_no_variable_is_left_unsaid() -> None:
    """Every variable in a query is one of the dashboard, or an interval of Grafana."""
    for content in load_dashboards().values():
        named = {each["name"] for each in content["templating"]["list"]}
        text = json.dumps([content["panels"], content["annotations"]])
        used = set(re.findall(r"\$([a-z]\w*)", text)) - {"1"}
        assert used <= named & CHOICES.keys(), content["uid"]


def test_every_alert_has_the_first_step_of_its_runbook() -> None:
    """Firing alerts names a first step for each alert, and its words stand in the runbook's first steps."""
    assert first_steps.OF_ALERTS.keys() == {*alert_names()} - {"VramLedgerWatchdog"}
    for alert, text in first_steps.OF_ALERTS.items():
        runbook = (PROJECT / "alerts" / "runbooks" / f"{alert}.md").read_text()
        steps = runbook.partition("## What to do first")[2].partition("## When")[0].lower()
        commands = re.findall(r"vramledger \w+|[a-z]+[-_.][a-z.-]+|promtool|ps$", text.lower())
        assert [each for each in commands if each not in steps] == [], alert
        words = re.findall(r"[a-z]{4,}", text.lower())
        assert 2 * sum(word in steps for word in words) >= len(words), alert
