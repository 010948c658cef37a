"""One cause that many nodes or many jobs have is one message; and what labels of targets do is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.alerts.holder_cases import LAST_OOM, counting
from tests.support.alerts.nodes import Holder, Node, changing_at
from tests.support.alerts.promtool import firing

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too


def series(nodes: Iterable[Node], minutes: float) -> list[dict[str, str]]:
    """Return the series of nodes, each with an instance of its own."""
    return [
        each
        for number, node in enumerate(nodes)
        for each in replace(node, instance=f"gpu-{number}:10839").series(minutes)
    ]


def texts(folder: Path, given: list[dict[str, str]], minute: float) -> dict[str, list[str]]:
    """Return the descriptions of what fires, by alert."""
    found: dict[str, list[str]] = {}
    for each in firing(folder, given, minute):
        found.setdefault(each.name, []).append(each.annotations["description"])
    return found


@pytest.mark.parametrize(("lost", "many"), [(2, 0), (3, 1), (20, 1)])
def test_a_driver_that_many_nodes_lose_is_one_page(lost: int, many: int, tmp_path: Path) -> None:
    """From three nodes and a tenth of the fleet on, the page about all of them fires with the first."""
    nodes = [Node(driver_up=changing_at(5, 1, 0))] * lost + [Node()] * (22 - lost)
    found = texts(tmp_path, series(nodes, 11), 10)

    assert len(found["GpuDriverLost"]) == lost
    assert len(found.get("GpuManyNodes", [])) == many
    if many:
        assert f"GpuDriverLost fires for {lost} nodes" in found["GpuManyNodes"][0]
        assert "gpu-" in found["GpuManyNodes"][0]


def test_a_page_about_many_nodes_does_not_count_itself(tmp_path: Path) -> None:
    """While it fires it says how many nodes there are, and it ends when they are too few."""
    lost, back = Node(driver_up=changing_at(5, 1, 0)), Node(driver_up=lambda m: float(not 5 <= m < 20))
    given = series([lost, lost, back], 60)

    assert "GpuDriverLost fires for 3 nodes" in texts(tmp_path, given, 15)["GpuManyNodes"][0]
    assert sorted(texts(tmp_path, given, 60)) == ["GpuDriverLost"]


@pytest.mark.parametrize("back", [14, 21.5])
def test_exporters_that_come_back_together_tell_nothing(back: float, tmp_path: Path) -> None:
    """The page about all exporters lasts at least as long as the warning about any of them."""
    nodes = [Node(missing=lambda minute: 6 <= minute < back)] * 8
    given = series(nodes, back + 10)
    told = [{each.name for each in firing(tmp_path, given, back + after)} for after in (0, 6, 8)]

    assert all("VramLedgerExporterDown" in each for each in told[:2])
    assert all("VramLedgerManyExportersDown" in each for each in told if "VramLedgerExporterDown" in each)


def test_three_nodes_of_a_large_fleet_are_three(tmp_path: Path) -> None:
    """Where a tenth of the nodes are four, three that lose their driver are each their own."""
    nodes = [Node(driver_up=changing_at(5, 1, 0))] * 3 + [Node()] * 37
    found = texts(tmp_path, series(nodes, 11), 10)

    assert sorted(found) == ["GpuDriverLost"]


def _of_torch(job: int) -> Node:
    counter = changing_at(20, 0, 1)
    holder = replace(
        counting(torch_ooms_total=counter), user="ann", owner_type="slurm", owner=f"{1700 + job}"
    )
    return Node([holder])


def _of_jax(job: int) -> Node:
    holder = Holder(9, 30, user="ann", owner_type="slurm", owner=f"{1700 + job}")
    return Node(
        [holder],
        extra={f'{LAST_OOM}{{NODE,pid="9",framework="jax",verdict="too_big"}}': changing_at(20, None, 1190)},
    )


def _that_has_ended(job: int) -> Node:
    owner = f'NODE,owner_type="slurm",owner="{1700 + job}"'
    holder = Holder(
        9, lambda m: 30 if m < 19 else None, user="ann", owner_type="slurm", owner=f"{1700 + job}"
    )
    counted = f'vramledger_owner_memory_byte_seconds_total{{{owner},gpu="0",uuid="GPU-1",state="active"}}'
    last = f'vramledger_owner_last_oom_timestamp_seconds{{{owner},framework="torch"}}'
    return Node([holder], extra={counted: lambda m: m, last: changing_at(20, None, 1190)})


@pytest.mark.parametrize("kind", [_of_torch, _of_jax, _that_has_ended])
def test_jobs_of_an_array_that_run_out_of_memory_are_one_message(kind: object, tmp_path: Path) -> None:
    """Twelve jobs of one user raise one message more, which names the user; nine raise none."""
    assert callable(kind)
    minute = 24.0
    for jobs, many in ((12, 1), (9, 0)):
        found = texts(tmp_path, series(map(kind, range(jobs)), minute + 1), minute)
        assert len(found["GpuOutOfMemory"]) == jobs
        told = found.get("GpuManyOwners", [])
        assert len(told) == many
        assert all("12 jobs of user ann" in each and "job 17" in each for each in told)


def test_jobs_of_many_users_are_no_array(tmp_path: Path) -> None:
    """Twelve users whose jobs run out of memory have twelve causes."""
    nodes = [
        Node([replace(holder, user=f"user-{job}") for holder in _of_torch(job).holders]) for job in range(12)
    ]
    found = texts(tmp_path, series(nodes, 25), 24)

    assert sorted(found) == ["GpuOutOfMemory"]


@pytest.mark.parametrize("label", ["namespace", "pod", "container"])
def test_labels_of_targets_that_replace_ours_are_said_once(label: str, tmp_path: Path) -> None:
    """Without honor_labels the exporter's own pod owns everything: one message for the fleet says so."""

    def as_scraped(_: float, labels: dict[str, str]) -> dict[str, str]:
        own = {f"exported_{label}": labels[label]} if labels.get(label) else {}
        return {**labels, **own, label: "monitoring"}

    holder = Holder(9, 30, owner_type="pod", owner="team-a/train")
    extra = {
        'vramledger_process_info{NODE,pid="8",user="ann",command="x",framework="",policy="",owner_type="pod",'
        'owner="team-a/train",namespace="team-a",pod="train",container="main",slurm_job="",unit="",'
        'notebook=""}': 1
    }
    nodes = [Node([holder], extra=extra, relabel=as_scraped)] * 3  # type: ignore[arg-type]
    found = texts(tmp_path, series(nodes, 9), 8)

    assert Counter({name: len(each) for name, each in found.items()}) == {"VramLedgerLabelsReplaced": 1}
    assert "On 3 nodes" in found["VramLedgerLabelsReplaced"][0]
    assert texts(tmp_path, series([Node([holder], extra=extra)] * 3, 9), 8) == {}


def targets(values: dict[str, int]) -> list[dict[str, str]]:
    """Return the `up` of exporters: how many there are with which values, as promtool notes them."""
    counts = enumerate((each for each, count in values.items() for _ in range(count)), 1)
    return [
        {"series": f'up{{job="vramledger",instance="node-{number}"}}', "values": each}
        for number, each in counts
    ]


def names(folder: Path, series: list[dict[str, str]], minute: float) -> list[str]:
    """Return the alerts that fire, each as often as it does."""
    return sorted(each.name for each in firing(folder, series, minute))


@pytest.mark.parametrize(("down", "page"), [(2, 0), (3, 1), (10, 1)])
def test_more_than_a_fifth_of_the_exporters_is_one_page(down: int, page: int, tmp_path: Path) -> None:
    """Two of ten that are down do not page, three of them do."""
    series = targets({"1x99": 10 - down, "1x4 0x99": down})

    assert names(tmp_path, series, 12) == [
        *["VramLedgerExporterDown"] * down, *["VramLedgerManyExportersDown"] * page
    ]  # fmt: skip


def test_a_page_about_many_exporters_ends_although_they_are_lost_for_a_minute_again(tmp_path: Path) -> None:
    """A minute without them in every ten does not keep the page of an hour before."""
    assert names(tmp_path, targets({"1x199": 7, "1x19 0x59 " + "1x35 0x3 " * 8: 3}), 60) == []


def test_one_exporter_is_not_many(tmp_path: Path) -> None:
    """Where there are two nodes and one of them is down, it is one node's matter."""
    assert names(tmp_path, targets({"1x99": 1, "1x4 0x99": 1}), 12) == ["VramLedgerExporterDown"]


def test_the_clusters_count_apart(tmp_path: Path) -> None:
    """All exporters of a small cluster that are down are a page, although the large one hides them."""
    small = [
        {**each, "series": each["series"].replace("{", '{cluster="small",')} for each in targets({"0x99": 3})
    ]
    found = firing(tmp_path, [*targets({"1x99": 50}), *small], 12)

    assert [each.labels["cluster"] for each in found if each.name == "VramLedgerManyExportersDown"] == [
        "small"
    ]


@pytest.mark.parametrize(
    ("values", "fires"),
    [
        ("1x400", False),  # each 15 seconds
        ("1 _x3 " * 100, False),  # each minute
        ("1 _x7 " * 50, True),  # each 2 minutes
        ("1x40 _x40 1x300", False),  # Prometheus was away for 10 minutes
    ],
    ids=["15 s", "1 min", "2 min", "a pause"],
)
def test_rare_scrapes_are_said_once(values: str, fires: bool, tmp_path: Path) -> None:
    """A scrape interval with which rules would miss what happens is named, for all exporters together."""
    found = [each for each in names(tmp_path, targets({values: 5}), 45) if each != "VramLedgerExporterDown"]

    assert found == ["VramLedgerScrapesTooRare"] * fires
