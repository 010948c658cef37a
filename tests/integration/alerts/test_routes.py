"""The example of Alertmanager's configuration: the receivers, the inhibitions, and the text."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.alerts.test_rules import texts
from tests.support.alerts.nodes import Node
from tests.support.alerts.parts import DEAD, with_labels
from tests.support.alerts.promtool import ALERTS, alert_names
from tests.support.requirements import EACH_VERSION, VERSIONS, require_version

CONFIG = ALERTS / "alertmanager.yml"


Amtool = Callable[..., str]


@pytest.fixture(params=VERSIONS)
def amtool(request: pytest.FixtureRequest) -> Amtool:
    program = require_version("amtool", request.param)

    def ask(*arguments: str) -> str:
        done = subprocess.run([program, *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    return ask


def test_alertmanager_accepts_the_example(amtool: Amtool) -> None:
    """Alertmanager loads the configuration and its templates."""
    assert "1 templates" in amtool("check-config", str(CONFIG))


def test_receivers_send_nothing_until_they_are_filled_in() -> None:
    """The example names receivers and no address: one that does not exist would fail with every alert."""
    receivers = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["receivers"]
    assert [each for each in receivers if set(each) != {"name"}] == []


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ("alertname=VramLedgerWatchdog severity=none", "heartbeat"),
        ("alertname=GpuMemoryNearlyFull severity=info instance=a", "digest"),
        ("alertname=GpuStrayContext severity=info owner_type=pod namespace=team-a", "digest"),
        ("alertname=GpuDeviceLost severity=page instance=a uuid=GPU-1", "oncall"),
        ("alertname=VramLedgerAbsent severity=page", "oncall,discard"),
        ("alertname=VramLedgerExporterDown severity=warning instance=a", "platform"),
        ("alertname=GpuMemoryOrphaned severity=warning instance=a owner_type=user", "platform"),
        ("alertname=GpuMemoryDead severity=page instance=a owner_type=user", "oncall,discard"),
        ("alertname=GpuMemoryDead severity=page owner_type=pod namespace=team-a-dev", "oncall,team-a"),
        ("alertname=GpuMemoryHoarded severity=warning owner_type=pod namespace=team-a", "team-a"),
        ("alertname=GpuMemoryHoarded severity=warning owner_type=pod namespace=team-b", "platform"),
        ("alertname=GpuMemoryHoarded severity=warning owner_type=user owner=ann user=ann", "users,platform"),
        ("alertname=GpuMemoryHoarded severity=warning owner_type=user owner=root user=root", "platform"),
        ("alertname=GpuMemoryHoarded severity=info owner_type=user owner=ann user=ann", "digest"),
        ("alertname=GpuNotebookIdle severity=warning owner_type=notebook", "notebooks"),
        ("alertname=GpuNotebookIdle severity=warning owner_type=pod owner=lab/kernel-7", "notebooks"),
        ("alertname=GpuMemoryStopped severity=warning owner_type=pod namespace=jupyterhub", "notebooks"),
        ("alertname=GpuMemoryHoarded severity=warning owner_type=user notebook=a.ipynb", "platform"),
        ("alertname=GpuMemoryHoarded severity=page owner_type=user notebook=a.ipynb", "oncall,discard"),
        ("alertname=GpuMemoryHoarded severity=warning owner_type=pod owner=hub/proxy-1", "platform"),
    ],
)
def test_routes(labels: str, receivers: str, amtool: Amtool) -> None:
    """Pages reach the on-call and the owner, warnings the owner or the platform, infos the daily list."""
    said = amtool("config", "routes", "test", f"--config.file={CONFIG}", *labels.split())

    assert said.strip() == receivers


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ("alertname=VramLedgerWatchdog severity=none", "heartbeat"),
        ("alertname=GpuMemoryHoardedWhileShort severity=page owner_type=pod owner=a/b user=ann", "discard"),
        ("alertname=GpuMemoryHoarded severity=info owner_type=user owner=ann", "discard"),
        ("alertname=GpuMemoryHoarded severity=warning owner_type=user owner=bob user=bob", "users,platform"),
    ],
)
def test_a_user_is_excluded(labels: str, receivers: str, amtool: Amtool, tmp_path: Path) -> None:
    """With the README's routes, no alert with that user as a label reaches anybody."""
    routes = "".join(
        re.findall(r"^    - \{matchers.*\n", (ALERTS / "README.md").read_text("utf-8"), re.MULTILINE)
    )
    before, heartbeat, after = CONFIG.read_text("utf-8").partition("      repeat_interval: 5m\n")
    config = tmp_path / "alertmanager.yml"
    config.write_text(f"{before}{heartbeat}{routes}{after}", encoding="utf-8")

    said = amtool("config", "routes", "test", f"--config.file={config}", *labels.split())
    assert (routes.count("discard"), said.strip()) == (2, receivers)


OWN = """
alert_prefix: Acme
selector: env="prod", team=~"gpu|ml"
labels: [site, cluster]
severities: {page: critical, warning: minor, info: notice}
grafana: https://grafana.test
"""
"""What a place with conventions of its own writes."""


def written(folder: Path, own: str, *more: str) -> Path:
    (folder / "mine.yml").write_text(own, encoding="utf-8")
    command = [sys.executable, "-m", "vramledger", "rules", "--thresholds", str(folder / "mine.yml"), *more]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    path = folder / f"written{'-'.join(more)}.yml"
    path.write_text(done.stdout, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("own", "names"),
    [("{}", ("page", "info", "")), ("severities: {page: critical}", ("critical", "info", "")),
     (OWN, ("critical", "notice", "Acme")), ("severities: {page: P1}", ("P1", "info", ""))],
    ids=["as it is", "critical", "all of it", "another name"],
)  # fmt: skip
def test_routes_follow_the_settings(
    own: str, names: tuple[str, str, str], tmp_path: Path, amtool: Amtool
) -> None:
    """Whatever alerts and severities are called, pages reach the on-call and others their lists."""
    page, info, prefix = names
    config = written(tmp_path, own, "--alertmanager")
    (tmp_path / "templates").symlink_to(ALERTS / "templates")
    amtool("check-config", str(config))
    for alert, severity, receiver in [
        ("GpuDeviceLost", page, "oncall"), ("GpuMemoryNearlyFull", info, "digest"),
        ("VramLedgerWatchdog", "none", "heartbeat"), ("GpuNotebookIdle", "other", "platform"),
    ]:  # fmt: skip
        labels = [f"alertname={prefix}{alert}", f"severity={severity}", "instance=a"]
        said = amtool("config", "routes", "test", f"--config.file={config}", *labels)
        assert said.strip() == receiver
    if prefix:
        text = config.read_text(encoding="utf-8")
        assert re.findall(r"(?<!Acme)\b(?:Gpu|VramLedger)[A-Z]\w+", text) == []
        assert {
            each for line in re.findall(r"(?:group_by|equal): \[(.*)\]", text) for each in line.split(", ")
        } >= {"site"}


@pytest.mark.parametrize("version", EACH_VERSION)
def test_rules_follow_the_settings(version: str, tmp_path: Path) -> None:
    """Prometheus loads them; each alert has the prefix, each query of an exporter's series the selector."""
    rules = written(tmp_path, OWN)
    subprocess.run(
        [require_version("promtool", version), "check", "rules", rules], check=True, capture_output=True
    )
    text = rules.read_text(encoding="utf-8")

    assert re.findall(r"(?<!Acme)\b(?:Gpu|VramLedger)[A-Z]\w+", text) == []
    queries = [
        one for group in yaml.safe_load(text)["groups"] for rule in group["rules"] for one in texts(rule)
    ]
    raw = r'(?<![\w:"|])(?:vramledger_[a-z0-9_]+|up)(?![\w:])(?!\{env=).{0,20}'
    assert [found for each in queries for found in re.findall(raw, each)] == []
    for env, fires in (("prod", True), ("test", False)):
        case = {
            "rule_files": [str(rules)], "evaluation_interval": "4m",
            "tests": [{
                "interval": "15s",
                "input_series": Node([DEAD], relabel=with_labels(env=env, team="ml")).series(12),
                "promql_expr_test": [{
                    "expr": 'count(ALERTS{alertname="AcmeGpuMemoryDead",severity="critical"}) or vector(0)',
                    "eval_time": "12m", "exp_samples": [{"labels": "{}", "value": int(fires)}],
                }],
            }],
        }  # fmt: skip
        path = tmp_path / "case.yml"
        path.write_text(json.dumps(case), encoding="utf-8")
        command: list[str | Path] = [require_version("promtool", version), "test", "rules", path]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_inhibitions_name_alerts_that_exist() -> None:
    """Each alert that an inhibition names exists: with a wrong name it would inhibit nothing."""
    text = json.dumps(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["inhibit_rules"])
    named = set(re.findall(r"\b(?:Gpu|VramLedger)[A-Z]\w+", text))

    assert named <= set(alert_names())


def test_no_inhibition_compares_labels_that_both_sides_lack() -> None:
    """Alertmanager takes two missing labels for equal; each rule compares one that its alerts always have."""
    for rule in yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["inhibit_rules"]:
        assert {"instance", "job"} & {*rule["equal"]}


def test_nodes_of_two_clusters_are_never_mixed() -> None:
    """Whatever is grouped or inhibited has all labels of thresholds.yml in common that distinguish nodes."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    labels = set(yaml.safe_load((ALERTS / "thresholds.yml").read_text(encoding="utf-8"))["labels"])
    routes = [config["route"], *config["route"]["routes"]]
    compared = [each["equal"] for each in config["inhibit_rules"]] + [
        each["group_by"] for each in routes if "group_by" in each
    ]

    assert labels
    assert [each for each in compared if not labels <= {*each}] == []


def test_a_message_about_several_alerts(tmp_path: Path, amtool: Amtool) -> None:
    """Its title counts them, a text makes no mention and no link of a chat, and it leads to a silence."""
    alert = {
        "status": "firing", "labels": {"alertname": "GpuMemoryDead"}, "startsAt": "2026-11-21T03:04:05Z",
        "annotations": {
            "description": "pid 8 <!channel> & <https://e.example|all>", "runbook_url": "http://a/b.md",
        },
    }  # fmt: skip
    data: dict[str, Any] = {
        "receiver": "oncall", "status": "firing", "alerts": [alert, alert],
        "groupLabels": {"owner_type": "pod", "owner": "team-a/job"}, "commonAnnotations": {},
        "commonLabels": {"alertname": "GpuMemoryDead", "severity": "page"}, "externalURL": "http://alertmanager",
    }  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps(data), encoding="utf-8")
    title, text = (
        amtool(
            "template", "render", f"--template.glob={ALERTS / 'templates'}/*.tmpl",
            f"--template.data={tmp_path}/data.json",
            f'--template.text={{{{ template "vramledger.{name}" . }}}}',
        ).strip()
        for name in ("title", "text")
    )  # fmt: skip

    assert title == "PAGE: 2 alerts about GPU memory (pod team-a/job)"
    assert text.splitlines()[0] == "pid 8 &lt;!channel&gt; &amp; &lt;https://e.example|all&gt;"
    assert text.splitlines()[-1] == "<http://alertmanager/#/alerts?receiver=oncall|Silence>"
