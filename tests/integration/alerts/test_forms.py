"""The other forms in which people take rules: a mixin, and the rule engine of VictoriaMetrics."""

import json
import math
import subprocess
from pathlib import Path

import pytest

from tests.support.alerts.nodes import Holder, Node
from tests.support.alerts.parts import LEAK, TRAINER, grows
from tests.support.alerts.promtool import ALERTS, EVALUATION, RULE_FILES, evaluation_order, rules
from tests.support.alerts.shipped import first_of_each_rule, watched_for
from tests.support.dashboards.files import FILES
from tests.support.requirements import PROJECT, require_newer, require_tool

MIXIN = """
local mixin = import 'deploy/mixin/mixin.libsonnet';
{
  rules: mixin.prometheusRules.groups,
  alerts: mixin.prometheusAlerts.groups,
  dashboards: mixin.grafanaDashboards,
}
"""


def test_the_mixin_has_the_same_rules_and_dashboards() -> None:
    """What jsonnet renders are the groups, rules and dashboards of the files, none more and none fewer."""
    command: list[str | Path] = [require_tool("jsonnet"), "-e", MIXIN]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=PROJECT)
    rendered = json.loads(done.stdout)
    groups = [*rendered["rules"], *rendered["alerts"]]
    named = {
        (group["name"], group["interval"], rule.get("alert") or rule["record"], rule["expr"])
        for group in groups
        for rule in group["rules"]
    }

    assert named == {
        (each["group"], each["interval"], each.get("alert") or each["record"], each["expr"])
        for each in rules()
    }
    assert len({group["name"] for group in groups}) == len(groups)
    assert rendered["dashboards"] == {
        f"vramledger-{path.name}": json.loads(path.read_text("utf-8")) for path in FILES
    }


@pytest.mark.thorough
def test_victoriametrics_accepts_the_rules() -> None:
    """The rule engine of VictoriaMetrics reads every expression and every text."""
    command: list[str | Path] = [require_newer("vmalert"), "-dryRun", f"-rule={ALERTS}/*.rules.yml"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-2000:]


FOR_VICTORIAMETRICS = (
    "GpuMemoryDead-page GpuMemoryOrphaned-page GpuMemoryStopped-warning GpuMemoryHoarded-warning"
    " GpuMemoryLeakSuspected-warning GpuMemoryGrowing-warning GpuAllocatorRetries-warning"
    " GpuOutOfMemory-warning GpuDeviceLost-page GpuMemoryNearlyFull-info GpuMemoryUnattributed-warning"
    " GpuNotebookIdle-warning GpuMemoryPreallocatedShared-warning GpuXidError-warning"
    " GpuEccUncorrectable-warning VramLedgerRulesFailing-page GpuJobHung-page GpuJobHung-warning"
    " GpuBusyWithoutWork-info healthy"
).split()

CLEARLY = {
    "GpuMemoryLeakSuspected-warning": (Node([LEAK]), 60),
    "GpuMemoryGrowing-warning": (Node([Holder(7, grows(1))]), 70),
}
"""Above the thresholds: vmalert reads a growth up to a fifth smaller, from records an evaluation late."""

LATER = 2
"""Minutes after a boundary was watched: vmalert begins to wait an evaluation later than Prometheus."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOR_VICTORIAMETRICS)
def test_victoriametrics_fires_the_same(name: str, tmp_path: Path) -> None:
    """The rule engine of VictoriaMetrics raises the same alerts from the same series."""
    if name == "healthy":
        test = unit_test(Node([TRAINER]), 70, 'severity!="none"', 0)
    else:
        alert, severity = name.split("-")
        boundary = first_of_each_rule(within=math.inf)[name]
        node, minute = CLEARLY.get(name) or (boundary.fires, watched_for(boundary) + LATER)
        test = unit_test(node, minute, f'alertname="{alert}",severity="{severity}"', 1)
    path = tmp_path / "case.yml"
    path.write_text(json.dumps(test), encoding="utf-8")
    command: list[str | Path] = [require_newer("vmalert-tool"), "unittest", f"--files={path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def unit_test(node: Node, minute: float, alerts: str, count: int) -> dict[str, object]:
    """Return a unit test of vmalert-tool: how many of some alerts fire on a node at a minute."""
    asked = {
        "expr": f'count(ALERTS{{alertstate="firing",{alerts}}}) or vector(0)',
        "eval_time": f"{round(minute * 60)}s",
        "exp_samples": [{"labels": "{}", "value": count}],
    }
    case = {"interval": "15s", "input_series": node.series(minute), "metricsql_expr_test": [asked]}
    return {
        "rule_files": [str(path) for path in RULE_FILES],
        "evaluation_interval": f"{EVALUATION}s",
        "group_eval_order": evaluation_order(),
        "tests": [case],
    }
