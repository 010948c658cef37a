"""One cause that many nodes or many jobs have is one message; and what labels of targets do is said."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.alerts.nodes import Holder, Node, changing_at
from tests.support.alerts.parts import LAST_OOM, on_gpu, series, torch, until
from tests.support.alerts.promtool import firing

LOSES_DRIVER = Node(driver_up=changing_at(5, 1, 0))
LOSSES = ("GpuDriverLost", "GpuManyNodes")
FLEET = ("VramLedgerExporterDown", "VramLedgerManyExportersDown")


def of(nodes: Iterable[Node], minutes: float) -> list[dict[str, str]]:
    """Return the series of nodes, each with an instance of its own."""
    named = (replace(node, instance=f"gpu-{number}:10839") for number, node in enumerate(nodes))
    return [each for node in named for each in node.series(minutes)]


def texts(folder: Path, given: list[dict[str, str]], minute: float, *about: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in firing(folder, given, minute, about=about):
        found.setdefault(each.name, []).append(each.annotations["description"])
    return found


@pytest.mark.parametrize(("lost", "of_all", "many"), [(2, 22, 0), (3, 22, 1), (20, 22, 1), (3, 40, 0)])
def test_a_driver_that_many_nodes_lose_is_one_page(lost: int, of_all: int, many: int, tmp_path: Path) -> None:
    """From three nodes and a tenth of the fleet on, the page about all of them fires with the first."""
    found = texts(tmp_path, of([LOSES_DRIVER] * lost + [Node()] * (of_all - lost), 11), 10, *LOSSES)
    told = found.pop("GpuManyNodes", [])

    assert {name: len(each) for name, each in found.items()} == {"GpuDriverLost": lost}
    assert len(told) == many
    assert all(f"GpuDriverLost fires for {lost} nodes" in each and "gpu-" in each for each in told)


def test_a_page_about_many_nodes_does_not_count_itself(tmp_path: Path) -> None:
    """While it fires it says how many nodes there are, and it ends when they are too few."""
    given = of([LOSES_DRIVER, LOSES_DRIVER, Node(driver_up=lambda m: float(not 5 <= m < 20))], 60)

    assert "GpuDriverLost fires for 3 nodes" in texts(tmp_path, given, 15, *LOSSES)["GpuManyNodes"][0]
    assert names(tmp_path, given, 60, *LOSSES) == ["GpuDriverLost"] * 2


@pytest.mark.parametrize("back", [14, 21.5])
def test_exporters_that_come_back_together_tell_nothing(back: float, tmp_path: Path) -> None:
    """The page about all exporters lasts at least as long as the warning about any of them."""
    given = of([Node(missing=lambda minute: 6 <= minute < back)] * 8, back + 10)
    told = [names(tmp_path, given, back + after, *FLEET) for after in (0, 6, 8)]

    assert all("VramLedgerExporterDown" in each for each in told[:2])
    assert all("VramLedgerManyExportersDown" in each for each in told if "VramLedgerExporterDown" in each)


RAN_OUT = changing_at(10, None, 590)


def _of_torch(owner: dict[str, str]) -> Node:
    return Node([replace(torch(ooms=changing_at(10, 0, 1)), user="ann", **owner)])  # type: ignore[arg-type]


def _of_jax(owner: dict[str, str]) -> Node:
    return Node([Holder(9, 30, user="ann", **owner)], extra={LAST_OOM: RAN_OUT})  # type: ignore[arg-type]


def _that_has_ended(owner: dict[str, str]) -> Node:
    held = on_gpu("owner_memory_byte_seconds_total", 0, **owner, state="active")
    last = series("owner_last_oom_timestamp_seconds", **owner, framework="torch")
    ended = Holder(9, until(9, 30), user="ann", **owner)  # type: ignore[arg-type]
    return Node([ended], extra={held: lambda m: m, last: RAN_OUT})


@pytest.mark.parametrize("kind", [_of_torch, _of_jax, _that_has_ended])
def test_jobs_of_an_array_that_run_out_of_memory_are_one_message(
    kind: Callable[[dict[str, str]], Node], tmp_path: Path
) -> None:
    """Twelve jobs of one user raise one message more, which names the user; nine raise none."""
    for jobs, many in ((12, 1), (9, 0)):
        nodes = [kind({"owner_type": "slurm", "owner": f"{1700 + job}"}) for job in range(jobs)]
        found = texts(tmp_path, of(nodes, 15), 14, "GpuManyOwners", "GpuOutOfMemory")
        told = found.get("GpuManyOwners", [])
        assert len(found["GpuOutOfMemory"]) == jobs
        assert len(told) == many
        assert all("12 jobs of user ann" in each and "job 17" in each for each in told)


def test_jobs_of_many_users_are_no_array(tmp_path: Path) -> None:
    """Twelve users whose jobs run out of memory have twelve causes."""
    (holder,) = _of_torch({"owner_type": "slurm", "owner": "1700"}).holders
    nodes = [Node([replace(holder, owner=f"{1700 + job}", user=f"user-{job}")]) for job in range(12)]

    assert {*names(tmp_path, of(nodes, 15), 14, "GpuManyOwners", "GpuOutOfMemory")} == {"GpuOutOfMemory"}


def test_labels_of_targets_that_replace_ours_are_said_once(tmp_path: Path) -> None:
    """Without honor_labels the exporter's own pod owns everything: one message for the fleet says so."""

    def as_scraped(label: str, _: float, labels: Mapping[str, str]) -> Mapping[str, str]:
        own = {f"exported_{label}": labels[label]} if labels.get(label) else {}
        return {**labels, **own, label: "monitoring", "cluster": label}

    info = series(
        "process_info", pid=8, user="ann", command="x", framework="", policy="", owner_type="pod",
        owner="team-a/train", namespace="team-a", pod="train", container="main", slurm_job="", unit="",
        notebook="",
    )  # fmt: skip
    node = Node([Holder(9, 30, owner_type="pod", owner="team-a/train")], extra={info: 1})
    replaced = ("container", "namespace", "pod")
    nodes = [replace(node, relabel=partial(as_scraped, label)) for label in replaced for _ in range(3)]
    found = firing(tmp_path, of([*nodes, *[node] * 3], 9), 8)

    assert sorted(each.labels["cluster"] for each in found) == [*replaced]
    assert {each.name for each in found} == {"VramLedgerLabelsReplaced"}
    assert all("On 3 nodes" in each.annotations["description"] for each in found)


def targets(values: dict[str, int], cluster: str = "") -> list[dict[str, str]]:
    """Return the `up` of exporters: how many there are with which values, as promtool notes them."""
    each = (each for each, count in values.items() for _ in range(count))
    up = f'up{{cluster="{cluster}",job="vramledger",instance="node-%d"}}'
    return [{"series": up % number, "values": value} for number, value in enumerate(each, 1)]


def names(folder: Path, given: list[dict[str, str]], minute: float, *about: str) -> list[str]:
    return sorted(each.name for each in firing(folder, given, minute, about=about))


@pytest.mark.parametrize(("down", "of_all", "page"), [(1, 2, 0), (2, 10, 0), (3, 10, 1), (10, 10, 1)])
def test_more_than_a_fifth_of_the_exporters_is_one_page(
    down: int, of_all: int, page: int, tmp_path: Path
) -> None:
    """Two of ten that are down do not page, three of them do; one of two is one node's matter."""
    given = targets({"1x99": of_all - down, "1x4 0x99": down})
    wanted = ["VramLedgerExporterDown"] * down + ["VramLedgerManyExportersDown"] * page

    assert names(tmp_path, given, 12, "VramLedgerAbsent", *FLEET) == wanted


def test_a_page_about_many_exporters_ends_although_they_are_lost_for_a_minute_again(tmp_path: Path) -> None:
    """A minute without them in every ten does not keep the page of an hour before."""
    assert names(tmp_path, targets({"1x199": 7, "1x19 0x59 " + "1x35 0x3 " * 8: 3}), 60, *FLEET) == []


def test_the_clusters_count_apart(tmp_path: Path) -> None:
    """All exporters of a small cluster that are down are a page, although the large one hides them."""
    given = [*targets({"1x99": 50}), *targets({"0x99": 3}, "small")]
    found = firing(tmp_path, given, 12, about={"VramLedgerManyExportersDown"})

    assert [each.labels["cluster"] for each in found] == ["small"]


@pytest.mark.parametrize(
    ("values", "fires"),  # 15 s, 1 and 2 minutes; Prometheus was away for 10
    [("1x400", False), ("1 _x3 " * 100, False), ("1 _x7 " * 50, True), ("1x40 _x40 1x300", False)],
)
def test_rare_scrapes_are_said_once(values: str, fires: bool, tmp_path: Path) -> None:
    """A scrape interval with which rules would miss what happens is named, for all exporters together."""
    assert len(names(tmp_path, targets({values: 5}), 45, "VramLedgerScrapesTooRare")) == fires
