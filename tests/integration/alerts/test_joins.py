"""No node can make a rule fail, whatever label sets its series come in at one time."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.alerts.nodes import Holder, Node
from tests.support.alerts.parts import IDLE, PREALLOCATED, grows, torch, with_labels
from tests.support.alerts.promtool import evaluation_order
from tests.support.alerts.shipped import first_of_each_rule, watched_for
from tests.support.faults.evaluation import Manager, ask
from tests.support.requirements import EACH_VERSION, VERSIONS, require_version

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

STEP = 240
"""Seconds between evaluations: label sets are the same in all of them."""

LONGEST = 45.0
"""Minutes: nearly every alert has fired by then."""

FIRST = first_of_each_rule(within=LONGEST)
_NODES = {rule: each.fires for rule, each in FIRST.items()}
"""A node for each alert."""

BESIDES = {
    "GpuJobHung-warning": {"GpuMemoryHoarded"}, "GpuJobHung-page": {"GpuMemoryStopped"},
    "GpuNotebookIdle-warning": {"GpuMemoryHoarded"},
    "GpuMemoryHoardedWhileShort-page": {"GpuAllocatorRetries"},
    "GpuMemoryHoardedInPieces-warning-several": {"GpuAllocatorRetries"},
}  # fmt: skip
"""What else is true on the node of a boundary, and fires when it is watched."""

_FIRING = 'ALERTS{alertstate="firing",severity!="none"}'
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
IDENTITY = {"job", "instance", "uuid", "pid", "rule_group"}
"""What tells a node, a device or a process from others: what differs in these is another one."""

OTHER = {"state": "idle", "grade": "seen", "type": "shared", "reason": "other", "framework": "jax"}
"""What a label may be besides, where the rules select by its value."""


def variants(series: str) -> Iterator[str]:
    """Yield a series as it may come besides: another value of each label but the identities, more labels.

    So do two exporters in an update, two servers that scrape one node, and another cluster.
    """
    name, _, rest = series.partition("{")
    labels = dict(_LABEL.findall(rest))

    def written(changed: Mapping[str, str]) -> str:
        return name + "{" + ",".join(f'{key}="{value}"' for key, value in {**labels, **changed}.items()) + "}"

    yield written({"replica": "2"})
    yield written({"cluster": "other"})
    yield written({"cluster": "other", "exported_pod": "new"})
    for label in labels.keys() - IDENTITY:
        yield written({label: OTHER.get(label, "other")})
    yield written({label: OTHER.get(label, "others") for label in labels.keys() - IDENTITY})


def multiplied(node: Node) -> dict[str, str]:
    """Return the series of a node with all variants, by their text; the first one with a text counts."""
    plain = {each["series"]: each["values"] for each in node.series(LONGEST)}
    found = dict(plain)
    seen = {(name.partition("{")[0], frozenset(_LABEL.findall(name))) for name in plain}
    for name, values in plain.items():
        for other in variants(name):
            key = (other.partition("{")[0], frozenset(_LABEL.findall(other)))
            if key not in seen:
                seen.add(key)
                found[other] = values
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("version", VERSIONS)
def test_no_label_set_fails_a_rule(version: str, tmp_path: Path) -> None:
    """Each rule is evaluated for all nodes, although one has each of its series in several label sets."""
    nodes = {name: multiplied(node) for name, node in _NODES.items()}
    # Each node has an instance of its own.
    series = {
        each.replace('instance="gpu-1:10839"', f'instance="gpu-{number}:10839"'): values
        for number, found in enumerate(nodes.values())
        for each, values in found.items()
    }
    promtool = require_version("promtool", version)
    manager = Manager(STEP, order=evaluation_order(), promtool=promtool, everything=True)

    fired = ask(_FIRING, range(0, round(LONGEST * 60) + 1, STEP), series.items(), tmp_path, manager)

    names = {dict(key)["alertname"] for key in fired}
    wanted = {rule.partition("-")[0] for rule in _NODES}
    assert len(names & wanted) > len(wanted) / 2, "the nodes still have what the rules select"


Told = set[tuple[frozenset[tuple[str, str]], float]]
"""The labels of alerts, without their nodes, and the times at which they fire."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Told]:
    """Return what fires on each boundary's node, by its rule, where "one" server or "two" scrape the node."""
    folder, found = tmp_path_factory.mktemp("servers"), dict[tuple[str, str], Told]()
    series: dict[tuple[int, int], dict[str, str]] = {}
    until = {rule: watched_for(each) + 2 * STEP / 60 for rule, each in FIRST.items()}
    for rule, each in FIRST.items():
        kind = (60 if "Leak" in rule else STEP, 32 if until[rule] <= 32 else 52)  # a leak needs each
        for one in each.fires.series(kind[1]):
            for server in ('instance="one', 'replica="a",instance="two', 'replica="b",instance="two'):
                named = one["series"].replace('instance="gpu-1:10839"', f'{server} {rule}"')
                series.setdefault(kind, {})[named] = one["values"]
    for (step, minutes), of in series.items():
        manager = Manager(step, order=evaluation_order(), promtool=require_version("promtool", VERSIONS[0]))
        for key, seen in ask(_FIRING, range(0, minutes * 60 + 1, step), of.items(), folder, manager).items():
            fired = dict(key)
            server, _, rule = fired.pop("instance", "").partition(" ")
            found.setdefault((server, rule), set()).update(
                (frozenset(fired.items()), at) for at in seen if rule and at <= until[rule] * 60
            )
    return found


def test_two_servers_that_scrape_a_node_raise_each_alert_once(told: Mapping[tuple[str, str], Told]) -> None:
    """A ruler over two replicas of Prometheus says what it says over one of them, with the same labels."""
    assert {rule for kind, rule in told if kind == "one"} == FIRST.keys()
    for rule in FIRST:
        assert told.get(("two", rule)) == told["one", rule], rule


BUSY = (
    replace(IDLE, since=-12),
    torch(grows(0.25), retries=grows(4, 0), pid=8, owner="bob"),
    Holder(9, 10, "orphaned", since=0, owner="cy"),
    replace(PREALLOCATED, pid=10, gib=1),
)
"""Something for as many rules as possible."""


@pytest.mark.parametrize("version", EACH_VERSION)
def test_two_clusters_may_have_a_node_of_one_name(tmp_path: Path, version: str) -> None:
    """What happens in one cluster is found there, and the same pid of the other's node is another process."""
    nodes = {
        "east": Node(BUSY, total=75, relabel=with_labels(cluster="east")),
        "west": Node([Holder(7, 10, "zombie", since=0)], relabel=with_labels(cluster="west")),
    }
    manager = Manager(
        60, order=evaluation_order(), promtool=require_version("promtool", version), everything=True
    )
    series = ((each["series"], each["values"]) for node in nodes.values() for each in node.series(35))
    fired = map(dict, ask(_FIRING, [35 * 60], series, tmp_path, manager))
    found = {(each.get("cluster", ""), each["alertname"], each.get("pid", "")) for each in fired}

    assert {each for each in found if each[0] != "east"} == {("west", "GpuMemoryZombie", "7")}
    assert {("east", "GpuMemoryOrphaned", "9"), ("east", "GpuMemoryHoardedWhileShort", "7")} <= found
    assert ("east", "GpuMemoryLeakSuspected", "8") in found


def test_nothing_else_fires_at_a_boundary(told: Mapping[tuple[str, str], Told]) -> None:
    """On the node on which an alert must fire, no other one does, unless it is true there as well."""
    for rule in FIRST:
        fires = {dict(labels)["alertname"] for labels, _ in told["one", rule]}
        assert fires == {rule.partition("-")[0]} | BESIDES.get(rule, set()), rule
