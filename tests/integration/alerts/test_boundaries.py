"""Each alert at each of its thresholds, and at the end of its ``for``."""

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import yaml

from tests.support.alerts.boundaries import boundaries
from tests.support.alerts.boundary import Boundary
from tests.support.alerts.nodes import Node
from tests.support.alerts.promtool import ALERTS, EVALUATION, STEP, alerts_over_time
from tests.support.alerts.shipped import RULES, TABLE, WAITS, name_of, thresholds, watched_for
from tests.support.faults.evaluation import Manager, ask
from tests.support.faults.rules import alerts
from tests.support.requirements import VERSIONS, require_version
from tests.support.selected import selected_cases
from vramledger.commands.alert_settings import default_content, read_settings
from vramledger.commands.rules import read_sources

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

THRESHOLD_FACTOR = 1.05
"""The difference between every threshold and its value in the second table."""

TESTED_ELSEWHERE = {
    "VramLedgerWatchdog-none": "it has no condition",
    "VramLedgerAbsent-page": "it is about no node: test_absence_at_its_boundary",
    "VramLedgerManyExportersDown-page": "it is about many nodes: test_many.py",
    "GpuMemoryAboutToFill-page-fast": "it is about a course: growth_situations.py",
    "VramLedgerScrapesTooRare-warning": "it is about all nodes: test_many.py",
    "GpuHeldHardlyUsed-warning": "it takes 6 hours: holder_situations.py",
    "VramLedgerLabelsReplaced-warning": "it is about all nodes: test_many.py",
    "GpuManyNodes-page": "it is about many nodes: test_many.py",
    "GpuManyOwners-warning": "it is about many owners: test_many.py",
}
_THRESHOLD = re.compile(r"<<(\w+)>>")


class Activity(NamedTuple):
    """When a rule was pending or firing on a node, and when it fired, in minutes and in order."""

    at_all: list[float]
    firing: list[float]


ActivityByNode = Mapping[tuple[str, str], Activity]
"""By node and rule."""


def rule_activity(table: Mapping[int, Boundary], folder: Path, version: str, home: Path) -> ActivityByNode:
    """Let one Prometheus watch both nodes of every boundary; the moved ones at whole minutes alone."""
    step = EVALUATION if home == ALERTS else STEP
    nodes, about = dict[str, tuple[Node, float]](), dict[str, str]()
    for index, each in table.items():
        for name, node in ((f"quiet {index}", each.quiet), (f"fires {index}", each.fires)):
            nodes[name], about[name] = (node, watched_for(each)), RULES[each.rule]["alert"]
    longest = max(minutes for _, minutes in nodes.values())
    seen: dict[tuple[str, str], Activity] = {}
    times = [each * step / 60 for each in range(int(longest * 60 / step) + 1)]
    fired = alerts_over_time(nodes, times, folder, version, Manager(step, home), about)
    for key, moments in fired.items():
        labels = dict(key)
        own = [
            labels[each]
            for each in ("severity", "blind", "told_by", "answers", "holder", "whose")
            if each in labels
        ]
        name = labels.get("instance", "")
        if name not in nodes:
            continue  # it is about all of them together
        activity = seen.setdefault((name, "-".join([labels["alertname"], *own])), Activity([], []))
        watched = [at / 60 for at in moments if at / 60 <= nodes[name][1]]
        activity.at_all.extend(watched)
        if labels["alertstate"] == "firing":
            activity.firing.extend(watched)
    return {key: Activity(sorted(set(each.at_all)), sorted(set(each.firing))) for key, each in seen.items()}


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of rules in which every threshold is different."""
    home = tmp_path_factory.mktemp("moved")
    shutil.copytree(ALERTS / "src", home / "src", ignore=shutil.ignore_patterns("__pycache__"))
    content = yaml.safe_load((ALERTS / "thresholds.yml").read_text(encoding="utf-8"))
    content["defaults"] = {
        name: round(value * THRESHOLD_FACTOR) if value > 100 else value * THRESHOLD_FACTOR  # bytes, seconds
        for name, value in thresholds(ALERTS).items()
    }
    (home / "thresholds.yml").write_text(yaml.safe_dump(content), encoding="utf-8")
    subprocess.run([sys.executable, home / "src" / "generate.py"], check=True, capture_output=True)
    return home


SHIPPED = pytest.param(VERSIONS[-1], marks=pytest.mark.thorough)
"""What fails with a shipped threshold fails with another one too, and so does a number in an expression."""


@pytest.fixture(scope="module", params=[SHIPPED, "moved"])
def watched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Boundary], ActivityByNode]:
    """Return each selected boundary's result: shipped thresholds on the newer version, moved on the older."""
    home, version, table = ALERTS, request.param, TABLE
    if version == "moved":
        home, version = request.getfixturevalue("moved"), VERSIONS[0]
        table = boundaries(thresholds(home), WAITS)
    asked = {at: table[at] for at in (cast("int", each["index"]) for each in selected_cases(request))}
    return table, rule_activity(asked, tmp_path_factory.mktemp("boundaries"), version, home)


LONG = 31
"""Minutes: the fifteen boundaries that are watched for longer take half of the time."""


def _boundary(index: int) -> str:
    return f"{TABLE[index].rule}-{TABLE[index].threshold}"


CASES = [
    pytest.param(index, marks=() if watched_for(each) <= LONG else pytest.mark.thorough)
    for index, each in enumerate(TABLE)
]


@pytest.mark.parametrize("index", CASES, ids=_boundary)
def test_boundary(index: int, watched: tuple[list[Boundary], ActivityByNode]) -> None:
    """Just inside its threshold a rule does not fire; at it, it waits for its ``for`` and fires."""
    table, activity = watched
    rule, begins = table[index].rule, table[index].begins
    nothing = Activity([], [])
    quiet, fires = (activity.get((f"{side} {index}", rule), nothing) for side in ("quiet", "fires"))

    assert quiet.firing == []
    assert fires.firing, "it fires"
    if begins is not None:
        assert quiet.at_all == []
        assert fires.at_all[0] == (begins if table is TABLE else math.ceil(begins))
    assert fires.firing[0] == fires.at_all[0] + WAITS[rule]


def test_absence_at_its_boundary(tmp_path: Path) -> None:
    """The alert that there is no exporter fires when ``for`` is over, not earlier."""
    wait = WAITS["VramLedgerAbsent-page"]
    steps = [step * EVALUATION for step in range(int(wait * 60 / EVALUATION) + 2)]
    query = 'ALERTS{alertname="VramLedgerAbsent",alertstate="firing"}'
    for up, expected in (
        ('up{job="other"}', [wait * 60, wait * 60 + EVALUATION]),
        ('up{job="vramledger"}', []),
    ):
        for version in VERSIONS:
            promtool = require_version("promtool", version)
            manager = Manager(EVALUATION, promtool=promtool, alerts=["VramLedgerAbsent"])
            found = ask(query, steps, [(up, f"0x{2 * len(steps)}")], tmp_path, manager)
            assert [at for times in found.values() for at in times] == expected


NAMES = {"job", "owner_matchers", "target", "fleet", "told"}
"""What an expression is filled in with besides thresholds."""


def test_every_rule_has_its_boundaries() -> None:
    """Each rule is in the table, with each threshold of its expression, or with its condition."""
    sources = [
        (name_of(rule), set(_THRESHOLD.findall(rule["expr"])) - NAMES)
        for content in read_sources(read_settings(default_content())).values()
        for group in content["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    table = {(each.rule, each.threshold) for each in TABLE}

    assert {name for name, _ in sources} - {rule for rule, _ in table} == set(TESTED_ELSEWHERE)
    days = {"growth_half_day_share", "growth_day_share", "growth_week_share"}  # test_slow_growth.py
    told = {(name, each) for name, used in sources if name not in TESTED_ELSEWHERE for each in used - days}
    assert told - table == set()


def test_every_threshold_is_tried() -> None:
    """A change of any threshold, of an alert or of a recording rule, changes a result here."""
    # The situations, test_many.py and test_slow_growth.py have them.
    others = {
        "many_down_share", "scrapes_in_10m", "growth_half_day_share", "growth_day_share", "growth_week_share",
        "hardly_used_share", "hardly_used_after", "hardly_used_held_share",
        "many_nodes_share", "many_nodes", "many_owners", "fill_soon",
    }  # fmt: skip
    assert set(thresholds(ALERTS)) - {each.threshold for each in TABLE} == others


def test_the_table_waits_as_the_rules_do() -> None:
    """The ``for`` that is read here is the one that the fault suite reads."""
    assert sorted(WAITS.values()) == sorted(each.hold / 60 for each in alerts())
