"""What flickers, restarts or ends in part is told once, and what is over ends."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.support.alerts.cases import DEAD, DEVICE, TRAINER
from tests.support.alerts.exporter_cases import RESERVED, USES
from tests.support.alerts.holder_cases import IDLE, with_agent
from tests.support.alerts.nodes import Holder, Node, Values, changing_at, value_at
from tests.support.alerts.promtool import ALERTS, alerts_over_time
from tests.support.faults.evaluation import Manager
from tests.support.requirements import VERSIONS, require_version
from vramledger.commands.alert_settings import read_content, read_settings
from vramledger.commands.rules import render_expression

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

STEP = 60


def bursts(minute: float) -> float:
    """Return GiB of a leak that grows by 4 GiB in half an hour, and then rests for fifty minutes."""
    whole, rest = divmod(minute, 80)
    return 10 + 4 * (whole + min(rest, 30) / 30)


def owner_that_flips(minute: float, labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels in which the owner is a pod for three minutes, and its user for the next three."""
    pod = {"owner_type": "pod", "owner": "team/train"}
    return {**labels, **pod} if labels.get("owner") and minute // 3 % 2 else labels


def owner_forgotten(minute: float, labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels as a restarted exporter gives them for a process that it has never seen alive."""
    nobody = {"owner_type": "", "owner": "", "user": "", "command": ""}
    return {**labels, **nobody} if "command" in labels and minute >= 15 else labels


def relapsing(well: float, begin: float, end: float, period: float, short: float = 1) -> Values:
    """Return a figure that is 0 for a while, and then at the end of each period for some minutes."""
    return lambda m: well * (m < begin or (m >= end and (m - end) % period < period - short))


FAILURES = 'prometheus_rule_evaluation_failures_total{NODE,rule_group="/etc/x.yml;vramledger-growth"}'

LEAK = with_agent(lambda m: 10 + 0.25 * m)


def _until(minute: float, values: Values) -> Values:
    return lambda now: value_at(values, now) if now < minute else None


def used_again(minute: float) -> float | None:
    """Return GiB of a leak that ends, and of another process a minute later, which does not grow."""
    return 10.5 + 0.25 * minute if minute < 60 else 40 if minute >= 61 else None


def _between(values: Values) -> Values:
    return lambda now: value_at(values, now) if now < 60 else value_at(values, 61) if now >= 61 else None


LEAK_WITHOUT_AGENT = replace(
    LEAK, agent={name: _until(80, values) for name, values in LEAK.agent.items()}, agent_up=_until(80, 1)
)
"""Its agent ends at minute 80."""

NODES: dict[str, tuple[Node, str, tuple[float, float], tuple[float, float]]] = {
    "a GPU that answers four of six minutes": (
        Node(extra={f"vramledger_device_up{DEVICE}": lambda m: float(m % 6 < 4 or m > 90)}),
        "GpuDeviceLost", (5, 9), (90, 110),
    ),
    "a driver that comes and goes": (
        Node(driver_up=lambda m: float(m < 20 or 27 <= m < 29 or 36 <= m < 38 or m > 60)),
        "GpuDriverLost", (25, 26), (60, 75),
    ),
    "an exporter that answers half of the time": (
        Node(missing=lambda m: 20 <= m < 140 and m % 4 < 2),
        "VramLedgerExporterDown", (30, 45), (140, 190),
    ),
    "an exporter that is away for eight of ten minutes": (
        Node(missing=lambda m: 20 <= m < 140 and m % 10 < 8),
        "VramLedgerExporterDown", (25, 26), (138, 150),
    ),
    "an exporter that is away for five of ten minutes": (
        Node(missing=lambda m: 20 <= m < 140 and m % 10 < 5),
        "VramLedgerExporterDown", (25, 52), (135, 175),
    ),
    "a driver that answers a third of the time": (
        Node(driver_up=lambda m: float(not 20 <= m < 140 or m % 3 >= 2)),
        "GpuDriverLost", (25, 40), (138, 165),
    ),
    "a driver that is lost, then a minute of every nine": (
        Node(driver_up=relapsing(1.0, 20, 28, 9)), "GpuDriverLost", (25, 26), (28, 45),
    ),
    "a GPU that is lost, then a sample of every ten minutes": (
        Node(extra={f"vramledger_device_up{DEVICE}": relapsing(1.0, 20, 28.25, 10, 0.25)}),
        "GpuDeviceLost", (20, 22), (28, 50),
    ),
    "a collector that fails, then three minutes of every ten": (
        Node(extra={'vramledger_collector_success{NODE,collector="x"}': relapsing(1.0, 20, 45, 10, 3)}),
        "VramLedgerCollectorFailing", (30, 33), (45, 62),
    ),
    "a storage that fails, then a minute of every ten": (
        Node(extra={"vramledger_storage_up{NODE}": relapsing(1.0, 20, 45, 10)}),
        "VramLedgerStorageFailing", (30, 31), (45, 62),
    ),
    "a socket that is away, then a minute of every ten": (
        Node(extra={"vramledger_agent_socket_up{NODE}": relapsing(1.0, 20, 45, 10)}),
        "VramLedgerAgentSocketDown", (30, 31), (45, 62),
    ),
    "rules that fail, then once in twelve minutes": (
        Node(extra={FAILURES: lambda m: max(0, min(m, 50) - 20) + max(0, m - 50) // 12}),
        "VramLedgerRulesFailing", (30, 32), (50, 72),
    ),
    "3 GiB a minute without an agent, full at minute 40": (
        Node([Holder(7, lambda m: min(79.4, 20 + 3 * max(0, m - 20)))], total=80),
        "GpuMemoryAboutToFill", (36, 38), (39, 48),
    ),
    "a leak with rests": (
        Node([with_agent(bursts)]), "GpuMemoryLeakSuspected", (30, 120), (300, 301),
    ),
    "a leak whose program ends": (
        Node([replace(LEAK, gib=lambda m: 10.5 + 0.25 * m if m < 80 else None)]),
        "GpuMemoryLeakSuspected", (30, 50), (80, 96),
    ),
    "a leak whose pid is used again": (
        Node([replace(LEAK, gib=used_again, start=changing_at(60, -600, 61), agent={
            name: _between(values) for name, values in LEAK.agent.items()
        })]),
        "GpuMemoryLeakSuspected", (30, 50), (60, 76),
    ),
    "a growth without an agent whose pid is used again": (
        Node([Holder(7, used_again, start=changing_at(60, -600, 61))]),
        "GpuMemoryGrowing", (30, 50), (60, 76),
    ),
    "a leak whose agent ends": (
        Node([LEAK_WITHOUT_AGENT]),
        "GpuMemoryLeakSuspected|GpuMemoryGrowing", (30, 50), (300, 301),
    ),
    "an owner that flips": (
        Node([replace(IDLE, since=-61, owner="ann")], relabel=owner_that_flips),
        "GpuMemoryHoarded", (5, 8), (300, 301),
    ),
    "dead memory over an update of five minutes, after which its owner is not known": (
        Node([DEAD], missing=lambda m: 10 <= m < 15, relabel=owner_forgotten),
        "GpuMemoryDead", (5, 7), (300, 301),
    ),
    "a reservation over two updates": (
        Node(extra=RESERVED | USES, missing=lambda m: 60 <= m < 66 or 110 <= m < 116),
        "GpuReservedUnused", (120, 124), (300, 301),
    ),
    "a stopped program over an update each twenty minutes": (
        Node(
            [replace(TRAINER, state="stopped", since=lambda m: m // 20 * 20)],
            missing=lambda m: m % 20 < 5,
        ),
        "GpuMemoryStopped", (30, 46), (300, 301),
    ),
}  # fmt: skip
"""A node, the alert about it, and between which minutes it must begin and end; the watch ends at 300."""


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, list[tuple[str, frozenset[str], list[float]]]]:
    """Return what fires on each node: the alert, what tells it from others of the node, and the minutes."""
    nodes = {name: (each[0], 300.0) for name, each in NODES.items()}
    times = range(301)
    folder = tmp_path_factory.mktemp("hysteresis")
    found: dict[str, list[tuple[str, frozenset[str], list[float]]]] = {name: [] for name in nodes}
    manager = Manager(STEP, alerts={alert for each in NODES.values() for alert in each[1].split("|")})
    for key, seen in alerts_over_time(nodes, times, folder, VERSIONS[0], manager).items():
        labels = dict(key)
        if labels["alertstate"] == "firing" and labels.get("instance") in found:
            own = frozenset(f"{name}={labels.get(name, '')}" for name in ("owner", "pid", "source", "uuid"))
            found[labels["instance"]].append((labels["alertname"], own, [at / 60 for at in seen]))
    return found


@pytest.mark.parametrize("name", NODES)
def test_it_is_told_once(
    name: str, told: Mapping[str, list[tuple[str, frozenset[str], list[float]]]]
) -> None:
    """An alert begins when it should, stays while its cause does, and ends soon after it."""
    _, alerts, begins, ends = NODES[name]
    mine = [(own, minutes) for alert, own, minutes in told[name] if alert in alerts.split("|")]
    firing = sorted({minute for _, minutes in mine for minute in minutes})

    assert firing
    assert begins[0] <= firing[0] <= begins[1]
    assert ends[0] <= firing[-1] <= ends[1]
    assert [each for each in pairwise(firing) if each[1] - each[0] > STEP / 60] == [], "no pause"
    if "|" not in alerts:
        assert len({own for own, _ in mine}) == 1, "one cause has one set of labels"
    if "owner is not known" in name:
        assert "owner=ann" in mine[0][0]


@pytest.fixture(scope="module")
def of_an_exporter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return when its alerts fire, for an exporter that was down, and then answers three of five minutes."""
    node = Node(missing=lambda m: 20 <= m < 32 or (32 <= m < 180 and m % 5 < 2))
    folder = tmp_path_factory.mktemp("sometimes")
    found: dict[str, list[float]] = {}
    manager = Manager(STEP, alerts={"VramLedgerExporterDown"})
    for key, seen in alerts_over_time({"n": (node, 240)}, range(241), folder, VERSIONS[0], manager).items():
        labels = dict(key)
        if labels["alertname"] == "VramLedgerExporterDown" and labels["alertstate"] == "firing":
            found[labels.get("answers", "")] = [at / 60 for at in seen]
    return found


def test_an_exporter_that_answers_again_is_not_down(of_an_exporter: dict[str, list[float]]) -> None:
    """A scrape that is lost does not keep the alert that silences its node; later losses have their own."""
    assert 32 < of_an_exporter[""][-1] < 60
    assert 60 < of_an_exporter["sometimes"][0] < 110


@pytest.mark.parametrize("span", ["3h", "12h", "1d", "6d"])
def test_a_pid_that_is_used_again_has_no_growth_of_the_one_before(span: str, tmp_path: Path) -> None:
    """The growth of hours is recorded each hour; a process that began since then has none."""
    of = 'cluster="", job="vramledger", instance="n"'
    series = {
        f'vramledger_process:demand_growth_bytes:delta{span}{{{of}, uuid="U", pid="7", source="x"}}': "10",
        f'vramledger_device:memory_total_bytes:last{{{of}, uuid="U"}}': "100x100",
        f'vramledger_process:start_time_seconds:young{{{of}, pid="7"}}': "_x4 200x100",
    }
    asked = f'vramledger_process:demand_growth:ratio{{span="{span}"}}'
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": f"count({asked})", "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": 1}]},
            {"expr": f"count({asked})", "eval_time": "6m", "exp_samples": []},
        ],
    }
    path = tmp_path / "case.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS / "growth.rules.yml")], "tests": [case]}))
    promtool = require_version("promtool", VERSIONS[0])
    done = subprocess.run([promtool, "test", "rules", path], check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_span_that_an_owner_leaves_out_leaves_the_others() -> None:
    """Growth of an owner with ``growth_medium_share: never`` still counts over the other spans."""
    text = (ALERTS / "thresholds.yml").read_text(encoding="utf-8")
    owner = '  - {name: x, match: {owner: "a/b"}, growth_medium_share: never}\n'
    content = read_content(text.replace("owners:\n", f"owners:\n{owner}"))
    source = "g{a!=''<<owner_matchers>>} >= <<growth_medium_share>> or g >= <<growth_fast_share>>"
    written = render_expression(source, read_settings(content))

    assert "g{a!='', owner=~\"a/b\"} >= Inf or g >= 0.05" in written
    assert "g{a!='', owner!~\"a/b\"} >= 0.02 or g >= 0.05" in written
