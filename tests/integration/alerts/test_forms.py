"""The other forms in which people take rules: a mixin, and the rule engine of VictoriaMetrics."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.alerts.test_alerts import CASES
from tests.support.alerts.cases import Case
from tests.support.alerts.promtool import ALERTS, EVALUATION, RULE_FILES, evaluation_order, rules
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
    "healthy dead orphaned-much stopped hoarded leak growing retries out-of-memory device-lost "
    "nearly-full unattributed notebook preallocated xid ecc rules-failing "
    "hung hung-by-one-that-does-nothing busy-without-work"
).split()

LATER = 2
"""Minutes after the moment of a case: vmalert begins to wait an evaluation later than Prometheus."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOR_VICTORIAMETRICS)
def test_victoriametrics_fires_the_same(name: str, tmp_path: Path) -> None:
    """The rule engine of VictoriaMetrics raises the same alerts from the same series."""
    [case] = [each for each in CASES if each.name == name]
    path = tmp_path / "case.yml"
    path.write_text(json.dumps(unit_test(case)), encoding="utf-8")
    command: list[str | Path] = [require_newer("vmalert-tool"), "unittest", f"--files={path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def unit_test(case: Case) -> dict[str, object]:
    """Return a unit test of vmalert-tool: which alerts fire after a case, and how many of each."""
    fires = [name.rpartition("-")[0] for name in case.fires.split()]
    query = 'count by (alertname) (ALERTS{alertstate="firing", severity!="none"}) or vector(0)'
    expected = [
        *({"labels": f'{{alertname="{name}"}}', "value": fires.count(name)} for name in sorted({*fires})),
        {"labels": "{}", "value": 0},
    ]
    return {
        "rule_files": [str(path) for path in RULE_FILES],
        "evaluation_interval": f"{EVALUATION}s",
        "group_eval_order": evaluation_order(),
        "tests": [
            {
                "interval": "15s",
                "input_series": case.node.series(case.minute + LATER),
                "metricsql_expr_test": [
                    {
                        "expr": query,
                        "eval_time": f"{round((case.minute + LATER) * 60)}s",
                        "exp_samples": expected,
                    }
                ],
            }
        ],
    }
