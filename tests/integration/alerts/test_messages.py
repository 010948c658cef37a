"""What a person reads: short, complete, true, and without what machines leave in a text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.alerts.nodes import Holder, Node
from tests.support.alerts.parts import DEAD, IDLE, LEAK, ORPHAN, TRAINER
from tests.support.alerts.promtool import Alert, expect, firing, rules
from tests.support.alerts.shipped import RULES, TABLE, first_of_each_rule, watched_for
from tests.support.dashboards.files import load_dashboards
from vramledger.commands.report import plain

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

LONG = "team-with-a-long-name/" + "a-very-long-name-of-a-training-job-" * 6
RUBBISH = re.compile(
    r"(?<!\w)\(\)|\(,|,\)| ,|<no value>|NaN|  |\.\d+ \+0000|\d\.\d+ms|user (\S+) of user \1\b"
)
"""What templates leave where a label is empty, a query finds nothing, or a time has fractions."""


OTHERS: Sequence[Mapping[str, object]] = (
    {"since": -61.00731},
    *(
        {"owner_type": kind, "owner": LONG, "command": "", "user": "", "notebook": ""}
        for kind in ("pod", "slurm")
    ),
)
"""How the holders of a node are too: with fractions of time, and with long and missing names."""

LEAKS = {"GpuMemoryLeakSuspected"}
MINUTES, EVERY = (8, 18, 26, 36, 46), 120
"""When is looked, as some alerts fire for ten minutes only; and the seconds between evaluations."""


@pytest.fixture(
    scope="module", params=["a node for each alert", pytest.param("all nodes", marks=pytest.mark.thorough)]
)
def alerts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Alert]:
    """Return what fires on the nodes of boundaries, each with its text."""
    first = first_of_each_rule(within=MINUTES[-1])
    every = request.param == "all nodes"
    nodes, found = TABLE if every else first.values(), list[Alert]()
    # A step costs as much for what has fired as for what has not: most need the shorter time alone.
    for after, looks in ((0, MINUTES[:2]), (MINUTES[1], MINUTES)):
        series = (
            each
            for number, node in enumerate(
                node.fires for node in nodes if after < watched_for(node) <= looks[-1]
            )
            for turn, other in enumerate((OTHERS[0], OTHERS[1 + number % 2]))
            if turn == 0 or node.holders
            for each in replace(
                node,
                instance=f"{number}-{turn}",
                holders=[replace(holder, **other) for holder in node.holders],  # type: ignore[arg-type]
            ).series(looks[-1])
        )
        found += firing(tmp_path_factory.mktemp("messages"), series, *looks, step=EVERY)
    leak = Node([replace(LEAK, **OTHERS[1])], instance="leak").series(45)  # type: ignore[arg-type]
    found += firing(tmp_path_factory.mktemp("messages"), leak, 45, about=LEAKS)  # its span needs every round
    assert {(rule["alert"], rule["labels"]["severity"]) for rule in (RULES[name] for name in first)} <= {
        (each.name, each.labels["severity"]) for each in found
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
    nodes = [
        Node([replace(IDLE, notebook=notebook, agent_up=up)], instance=f"{notebook}{up}")
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
    [alert] = firing(tmp_path, Node([LEAK]).series(45), 45, about=LEAKS)
    text = alert.annotations["description"]

    assert alert.name == "GpuMemoryLeakSuspected"
    assert "pid 7 (train.py) of user ann, on GPU 0 grew by 7.5GiB in 30 minutes" in text
    assert re.search(r"fills the GPU in about 5h 1\dm 0s at this pace", text)


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


SAID = {
    "python3.11": "python3.11", "train_model.py": "train_model.py", "모델_학습": "모델_학습",
    "ray::Worker_1": "ray::Worker_1", "team/train": "team/train", "<!channel>": "??channel?",
    "@everyone": "?everyone", "[pay](evil.example)": "?pay??evil.example?",
    "http://evil.example/pay": "http:?evil.example/pay", "WWW.evil.example/pay": "?evil.example/pay",
    "mailto:evil": "mailto?evil", "_now_ *_now_* a__b": "?now_ ??now_? a__b",
    ":rotating_light:": "?rotating_light?", "::+1::": ":?+1?:", "a:b:c:d": "a?b?c?d",
}  # fmt: skip
"""What programs say of themselves, and what a chat gets of it."""


def test_alerts_and_reports_say_the_same(tmp_path: Path) -> None:
    """A name is as readable in the text of an alert as in a mail, and as harmless."""
    named = [replace(IDLE, pid=7 + place, command=name) for place, name in enumerate(SAID)]
    found = firing(tmp_path, Node(named).series(12), 12, about={"GpuMemoryHoarded"})
    said = [each.annotations["description"] for each in found]

    assert {name: plain(name) for name in SAID} == SAID
    assert {text for each in said for text in re.findall(r"pid \d+ \((.*?)\) of", each)} == {*SAID.values()}


def test_a_user_is_named_once(tmp_path: Path) -> None:
    """A user's own program is of that user; a pod's program has its user beside it."""
    own = replace(ORPHAN, state="zombie")
    pods = replace(own, pid=8, owner_type="pod", owner="team/train")
    said = [each.annotations["description"] for each in firing(tmp_path, Node([own, pods]).series(6), 6)]

    assert sorted(text.partition(", holds")[0] for text in said) == [
        "gpu-1:10839: pid 7 (train.py) of user ann",
        "gpu-1:10839: pid 8 (train.py) of pod team/train, user ann",
    ]


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
    [alert] = firing(tmp_path, given, 18, about={"VramLedgerExporterDown", "VramLedgerAbsent"})

    assert alert.annotations["runbook_url"] == link


@pytest.mark.parametrize("stores", [True, False])
def test_an_alert_links_to_the_page_as_it_was(tmp_path: Path, stores: bool) -> None:
    """With a storage the link carries the time of the evaluation; without one there is none."""
    stored = {"vramledger_storage_newest_timestamp_seconds{NODE}": lambda m: 60 * m}
    [alert] = firing(tmp_path, Node([DEAD], extra=stored if stores else {}).series(6), 6)

    assert alert.annotations["page_url"] == (f"http://{alert.labels['instance']}/#at=360" if stores else "")


def test_the_heartbeat_always_beats(tmp_path: Path) -> None:
    """The watchdog fires when there is nothing to watch, and while other alerts fire."""
    beats = {'ALERTS{alertname="VramLedgerWatchdog",alertstate="firing"}': 1}
    assert expect(tmp_path, [{"series": "other", "values": "0x50"}], 1, beats) == ""
    assert expect(tmp_path, Node([DEAD], driver_up=0).series(10), 10, beats) == ""


def test_a_silent_agent_says_why(tmp_path: Path) -> None:
    """The text has the exporter's reason."""
    silent = {'vramledger_agent_up{NODE,pid="9",reason="refused"}': 0}
    [alert] = firing(tmp_path, Node([TRAINER], extra=silent).series(6), 6)
    assert "(reason: refused)" in alert.annotations["description"]
