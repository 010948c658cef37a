"""What a person reads: short, complete, true, and without what machines leave in a text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.alerts.test_alerts import CASES
from tests.integration.alerts.test_false_pages import torch
from tests.support.alerts.cases import Case
from tests.support.alerts.nodes import Holder, Node
from tests.support.alerts.promtool import Alert, firing, rules
from tests.support.dashboards.files import load_dashboards

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

LONG = "team-with-a-long-name/" + "a-very-long-name-of-a-training-job-" * 6
RUBBISH = re.compile(
    r"(?<!\w)\(\)|\(,|,\)| ,|<no value>|NaN|  |\.\d+ \+0000|\d\.\d+ms|user (\S+) of user \1\b"
)
"""What templates leave where a label is empty, a query finds nothing, or a time has fractions."""


FIRST = {case.fires: case for case in reversed(CASES) if case.fires and case.minute <= 45}
"""The first case that raises the same alerts: together they have every text."""


def messages(folder: Path, cases: Sequence[Case], minute: float) -> list[Alert]:
    """Return what fires at a minute on the nodes of cases, each as it is and with long and missing names."""
    nodes = [
        replace(
            case.node,
            instance=f"{case.name}-{turn}",
            holders=[replace(each, **other) for each in case.node.holders],  # type: ignore[arg-type]
        )
        for kind, case in zip(itertools.cycle(("pod", "slurm")), cases)
        for turn, other in enumerate(
            (
                {"since": -61.00731},
                {"owner_type": kind, "owner": LONG, "command": "", "user": "", "notebook": ""},
            )
        )
        if turn == 0 or case.node.holders
    ]
    return firing(folder, [one for node in nodes for one in node.series(minute)], minute)


@pytest.fixture(scope="module", params=["each alert", pytest.param("each case", marks=pytest.mark.thorough)])
def alerts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Alert]:
    """Return what fires on the nodes of cases, each with its text."""
    chosen = CASES if request.param == "each case" else list(FIRST.values())
    found, begin = [], 0.0
    for minute in (12.0, 21.0, 45.0):  # some alerts fire for ten minutes only
        cases = [each for each in chosen if each.fires and begin < each.minute <= minute]
        found += messages(tmp_path_factory.mktemp("messages"), cases, minute)
        begin = minute
    assert {word for fires in FIRST for word in fires.split()} <= {
        f"{each.name}-{each.labels['severity'][0]}" for each in found
    }
    return found


def test_no_message_is_long(alerts: list[Alert]) -> None:
    """A message has at most 600 characters, however long the names in it are."""
    texts = {each.annotations["description"]: each.name for each in alerts}

    assert {name: text for text, name in texts.items() if len(text) > 600} == {}


def test_a_message_has_no_rubbish(alerts: list[Alert]) -> None:
    """No brackets are empty, no time has milliseconds, and no user is the user of the same user."""
    texts = {each.annotations["description"]: each.name for each in alerts}

    assert {name: text for text, name in texts.items() if RUBBISH.search(text)} == {}


def test_a_message_names_a_job_as_the_dashboards_do(alerts: list[Alert]) -> None:
    """A job is a job, and not the name of its scheduler."""
    texts = {each.annotations["description"] for each in alerts}

    assert any(" job team-with-a-long-name" in text for text in texts)
    assert [text for text in texts if re.search(r"\b(?:slurm|nomad) \S", text)] == []


def test_reclaim_is_advised_only_beside_an_agent(tmp_path: Path) -> None:
    """Only the agent in a program can free its cache; to others the text does not name the command."""
    idle = Holder(7, 30, "idle", since=-61, sm=None)
    nodes = [
        Node([replace(idle, notebook=notebook, agent_up=up)], instance=f"{notebook}{up}")
        for notebook in ("", "a.ipynb")
        for up in (None, 0, 1)
    ]
    found = firing(tmp_path, [one for node in nodes for one in node.series(5)], 5)
    told = {
        each.labels["instance"]: "reclaim 7" in each.annotations["description"]
        for each in found
        if each.name in ("GpuMemoryHoarded", "GpuNotebookIdle")
    }

    assert told == {node.instance: node.instance.endswith("1") for node in nodes}


def test_no_text_shows_the_label_of_the_kind_of_an_owner() -> None:
    """Each text that shows the kind of an owner calls the jobs of all schedulers jobs."""
    shown = [
        (rule["alert"], action)
        for rule in rules()
        for text in rule.get("annotations", {}).values()
        for action in re.findall(r"\{\{(.*?)\}\}", text, re.DOTALL)
        if "owner_type" in action and "query" not in action and action.split()[0] != "if"
    ]

    assert len(shown) > 20
    assert [each for each in shown if 'reReplaceAll "^(?:slurm|nomad) " "job "' not in each[1]] == []


def test_a_message_leads_to_its_dashboard(alerts: list[Alert]) -> None:
    """The link has the alert's own node and GPU, and sets only variables that its dashboard has."""
    dashboards = load_dashboards()
    for each in alerts:
        url = each.annotations["dashboard_url"]
        found = re.search(r"/d/([a-z-]+)\?var-job=[^&]", url)
        assert found, url
        assert "var-cluster=&" not in url, "an empty variable would choose nothing"
        variables = {one["name"] for one in dashboards[found[1]]["templating"]["list"]}
        assert set(re.findall(r"[?&]var-(\w+)=", url)) <= variables, url
        if "instance" in each.labels and "instance" in url:
            assert f"var-instance={each.labels['instance'].replace(':', '%3A')}" in url


def test_growth_says_how_fast_and_how_long(tmp_path: Path) -> None:
    """Growth comes with its span, and with the time that is left at this pace."""
    program = torch(gib=lambda minute: 10 + 0.25 * minute)
    [alert] = firing(tmp_path, Node([program]).series(45), 45)

    assert alert.name == "GpuMemoryLeakSuspected"
    assert (
        "pid 8 (train.py) of user bob, on GPU 0 grew by 7.5GiB in 30 minutes"
        in alert.annotations["description"]
    )
    assert re.search(r"fills the GPU in about 5h 1\dm 0s at this pace", alert.annotations["description"])


def test_a_program_writes_nothing_into_a_chat(tmp_path: Path) -> None:
    """What a program says of itself makes neither mention nor link nor markup in the text of an alert."""
    names = "<!channel> @here [pay](http://e.example) https://e.example *a*`b`|~c~ <@U024BE7LH>".split()
    hostile = [
        Holder(7 + place, 30, "idle", since=-90, sm=None, command=name, notebook=f"/home/{name}.ipynb")
        for place, name in enumerate(names)
    ]
    said = [each.annotations["description"] for each in firing(tmp_path, Node(hostile).series(12), 12)]

    assert len(said) >= len(names)
    assert [text for text in said if re.search(r"[<>@*`~|\[\]]|//", text)] == []


def test_a_user_is_named_once(tmp_path: Path) -> None:
    """A user's own program is of that user; a pod's program has its user beside it."""
    own = Holder(7, 10, "zombie", since=0, user="ann", owner="ann")
    pods = replace(own, pid=8, owner_type="pod", owner="team/train")
    said = [each.annotations["description"] for each in firing(tmp_path, Node([own, pods]).series(6), 6)]

    assert sorted(text.partition(", holds")[0] for text in said) == [
        "gpu-1:10839: pid 7 (train.py) of user ann",
        "gpu-1:10839: pid 8 (train.py) of pod team/train, user ann",
    ]
