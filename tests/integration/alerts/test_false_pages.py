"""What a healthy fleet goes through, and which alerts come of all of it; most often none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.alerts.nodes import Holder, Node, Values, changing_at, uuid
from tests.support.alerts.promtool import ALERTS, STEP, alerts_over_time, evaluation_order
from tests.support.faults.evaluation import Manager, ask
from tests.support.host.model import GIB
from tests.support.requirements import EACH_VERSION, VERSIONS, require_version

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

DEVICE = f'NODE,gpu="0",uuid="{uuid(0)}"'


class Course(NamedTuple):
    """What happens on a node over some minutes, and all that fires meanwhile, with its severity's letter."""

    name: str
    node: Node
    minutes: float
    fires: str = ""


def torch(pid: int = 8, gib: Values = 10, gpu: int = 0, **figures: Values) -> Holder:
    """Return a torch program of bob with an agent; its counters do not change unless they are given."""
    agent: dict[str, Values] = {
        "torch_allocated_bytes": gib,
        "torch_reserved_bytes": gib,
        "torch_alloc_retries_total": 0,
        "torch_ooms_total": 0,
    }
    held: Values = (lambda minute: (gib(minute) or 0) + 0.5) if callable(gib) else (gib or 0) + 0.5
    return Holder(pid, held, gpu=gpu, owner="bob", user="bob", agent=agent | figures)


def up_to(last: float, rate: float, base: float, start: float = 0) -> Callable[[float], float]:
    """Return GiB that rise by ``rate`` a minute from ``base`` on, and stay at ``last``."""
    return lambda minute: min(last, base + rate * max(0.0, minute - start))


def away(begin: float, end: float) -> Callable[[float], bool]:
    """Return when an exporter does not answer."""
    return lambda minute: begin <= minute < end


def gone(begin: float, end: float, value: Values = 1) -> Callable[[float], float | None]:
    """Return a series that is absent for some minutes."""
    return lambda m: None if begin <= m < end else value(m) if callable(value) else value


MISSING = f'vramledger_device_up{{NODE,gpu="1",uuid="{uuid(1)}"}}'
HOARDER = Holder(7, 30, "idle", since=-12, sm=None)
OOM_BEFORE = torch(torch_ooms_total=1)
PREALLOCATED = Holder(7, 80, framework="tensorflow", policy="preallocate")
NEVER_AGAIN = {"vramledger_up{NODE}": lambda m: 1.0 if m < 20 else None}
POD = 'owner_type="pod",owner="team/train",framework="torch"'
DIED = {"ooms_total": changing_at(20, None, 1), "last_oom_timestamp_seconds": changing_at(20, None, 1195)}
BOBS_LAST = (
    'vramledger_owner_last_oom_timestamp_seconds{NODE,owner_type="user",owner="bob",framework="torch"}'
)
INTRUDER = Holder(9, 2, owner="eve", user="eve")
TASK = Holder(7, 30, owner_type="container", owner="0a1b2c3d")
NOMAD = {
    f'vramledger_device_reservation_info{{{DEVICE},owner_type="nomad",owner="train/main/1f"}}': 1,
    f'vramledger_device_reservations{{{DEVICE},use="held"}}': 1,
}


def unreserved(gib: float) -> dict[str, Values]:
    """Return what is held on the device without a reservation of it."""
    return {f"vramledger_device_unreserved_memory_bytes{{{DEVICE}}}": gib * GIB}


def sometimes_up(period: int, answers: int) -> Callable[[float], bool]:
    """Return when an exporter that crashes does not answer: so many scrapes of each ``period`` do."""
    return lambda minute: round(minute * 4) % period >= answers


COURSES = [
    # --- a counter that does not change, although scrapes are lost
    Course("lost-scrape", Node([OOM_BEFORE], missing=away(20, 20.2)), 45),
    Course("lost-scrapes-often", Node([OOM_BEFORE], missing=lambda m: round(m * 4) % 9 == 5), 60),
    Course(
        "away-for-7-minutes", Node([OOM_BEFORE, HOARDER], missing=away(20, 27)), 45,
        "VramLedgerExporterDown-w",
    ),
    Course("away-for-12-minutes", Node([OOM_BEFORE], missing=away(20, 32)), 60, "VramLedgerExporterDown-w"),
    Course("away-for-3-hours", Node([OOM_BEFORE], missing=away(20, 200)), 240, "VramLedgerExporterDown-w"),
    Course("agent-silent-for-4-minutes", Node([torch(torch_ooms_total=gone(20, 24))]), 45),
    Course(
        "exporter-restarted-after-the-program-reset-its-counter",
        Node([torch(torch_ooms_total=changing_at(20, 5, 1))], missing=away(19.7, 20.1)), 45,
    ),
    Course(
        "retries-before-the-exporter-was-away",
        Node([torch(torch_alloc_retries_total=40)], missing=away(20, 40)), 70, "VramLedgerExporterDown-w",
    ),
    Course("counter-that-begins-at-0-again", Node([torch(torch_ooms_total=changing_at(20, 3, 0))]), 45),
    Course(
        "ran-out-of-memory-again", Node([torch(torch_ooms_total=changing_at(20, 4, 5))]), 45,
        "GpuOutOfMemory-w",
    ),
    Course(
        "ran-out-of-memory-while-away",
        Node([torch(torch_ooms_total=changing_at(22, 4, 5))], missing=away(20, 24)), 45, "GpuOutOfMemory-w",
    ),
    Course(
        "ran-out-of-memory-in-its-first-minute",
        Node([replace(torch(torch_ooms_total=changing_at(20, None, 1)), start=19)]), 45, "GpuOutOfMemory-w",
    ),
    Course(
        "died-of-it-between-two-scrapes",
        Node(extra={f"vramledger_owner_{name}{{NODE,{POD}}}": value for name, value in DIED.items()}), 60,
        "GpuOutOfMemory-w",
    ),
    Course(
        "ran-out-of-memory-and-its-owner-counts-it-too",
        Node([torch(torch_ooms_total=changing_at(20, 0, 1))], extra={BOBS_LAST: changing_at(20, None, 1199)}),
        45, "GpuOutOfMemory-w",
    ),
    # --- a waiting job that could not use what is hoarded
    Course(
        "one-retry-on-another-gpu",
        Node([HOARDER, torch(gpu=1, torch_alloc_retries_total=changing_at(20, 0, 1))], gpus=2), 45,
    ),
    Course(
        "one-retry-on-the-same-gpu", Node([HOARDER, torch(torch_alloc_retries_total=changing_at(20, 0, 1))]),
        45,
    ),
    Course(
        "out-of-memory-on-another-gpu",
        Node([HOARDER, torch(gpu=1, torch_ooms_total=changing_at(20, 0, 1))], gpus=2), 45, "GpuOutOfMemory-w",
    ),
    Course(
        "short-beside-a-hoarder-whose-gpu-is-reserved",
        Node(
            [HOARDER, torch(torch_alloc_retries_total=lambda m: 4 * m // 1)],
            extra={f'vramledger_device_reservation_info{{{DEVICE},owner_type="user",owner="ann"}}': 1},
        ),
        30, "GpuAllocatorRetries-w",
    ),
    Course(
        "short-beside-a-hoarder-of-the-same-gpu",
        Node([HOARDER, torch(torch_alloc_retries_total=lambda m: 4 * m // 1)]), 45,
        "GpuAllocatorRetries-w GpuMemoryHoardedWhileShort-p",
    ),
    # --- reservations
    Course("nomad-task-in-its-container", Node([TASK], extra=NOMAD | unreserved(0)), 30),
    Course(
        "nomad-task-beside-an-intruder", Node([TASK, INTRUDER], extra=NOMAD | unreserved(2)), 30,
        "GpuMemoryOutsideReservation-w",
    ),
    # --- growth that ends by itself
    Course(
        "cache-that-fills-over-two-hours", Node([Holder(7, up_to(90, 0.6, 18))]), 240, "GpuMemoryGrowing-w"
    ),
    Course(
        "cache-that-fills-over-two-hours-with-an-agent", Node([torch(gib=up_to(92, 0.6, 18))]), 240,
        "GpuMemoryLeakSuspected-w",
    ),
    Course("cache-that-stays-at-95", Node([Holder(7, up_to(95, 0.62, 20))]), 240, "GpuMemoryGrowing-w"),
    Course("model-load-of-20-minutes", Node([replace(torch(gib=up_to(91, 4.5, 1)), start=0)]), 60),
    Course(
        "later-load-of-20-minutes", Node([torch(gib=up_to(80, 4, 1, 30))]), 90, "GpuMemoryLeakSuspected-w"
    ),
    Course(
        "later-load-to-91-which-nothing-tells-from-a-leak", Node([torch(gib=up_to(91, 4.5, 1, 30))]), 90,
        "GpuMemoryLeakSuspected-w GpuMemoryAboutToFill-p",
    ),
    Course(
        "later-load-to-96-which-nothing-tells-from-a-leak", Node([torch(gib=up_to(96, 4.5, 1, 30))]), 90,
        "GpuMemoryLeakSuspected-w GpuMemoryAboutToFill-p",
    ),
    Course("later-load-of-7-minutes-without-an-agent", Node([Holder(7, up_to(94, 12, 10, 30))]), 90),
    Course("first-load-of-26-minutes-without-an-agent", Node([Holder(7, up_to(96, 3, 18, 3), start=0)]), 60),
    Course(
        "jobs-that-fill-a-gpu-one-by-one",
        Node([Holder(100 + n, changing_at(20 + n, None, 4)) for n in range(24)]), 60,
    ),
    # --- a driver that is only on its way
    Course(
        "exporter-that-crash-loops",
        Node(driver_up=changing_at(20, 1, 0), missing=lambda m: m >= 20 and sometimes_up(4, 1)(m)), 60,
        "VramLedgerExporterDown-w",
    ),
    Course("new-node-whose-exporter-comes-4-minutes-late", Node(missing=away(0, 4)), 45),
    Course(
        "answered-once-and-went", Node(driver_up=changing_at(20, 1, 0), missing=lambda m: m >= 20.2), 40,
        "VramLedgerExporterDown-w",
    ),
    Course(
        "reboot-with-a-driver-build", Node(driver_up=lambda m: float(not 20 <= m < 27), missing=away(20, 23)),
        60,
    ),
    Course(
        "driver-updated-in-two-steps",
        Node(driver_up=lambda m: float(not (20 <= m < 24 or 24.5 <= m < 27))), 60,
    ),
    Course("driver-build-without-a-reboot", Node(driver_up=lambda m: float(not 20 <= m < 24.3)), 60),
    Course(
        "quick-reboot-with-a-driver-build",
        Node(driver_up=lambda m: float(not 20 <= m < 24.6), missing=away(20, 20.6)), 60,
    ),
    Course(
        "driver-that-is-back-when-its-page-is-due",
        Node(driver_up=lambda m: float(not 20 <= m < 35), missing=away(18, 20)),
        60,
    ),
    Course(
        "driver-lost-while-scrapes-are-lost",
        Node(driver_up=changing_at(20, 1, 0), missing=lambda m: round(m * 4) % 9 == 5), 60, "GpuDriverLost-p",
    ),
    Course(
        "driver-lost-in-a-reboot", Node(driver_up=changing_at(20, 1, 0), missing=away(20, 23)), 60,
        "GpuDriverLost-p",
    ),
    # --- a GPU that did not come back
    Course(
        "gpu-missing-after-a-reboot",
        Node(gpus=2, missing=away(20, 24), extra={MISSING: changing_at(20, 1, None)}), 300, "GpuDeviceLost-p",
    ),
    Course(
        "gpu-missing-after-hours-off",
        Node(gpus=2, missing=away(20, 140), extra={MISSING: changing_at(20, 1, None)}), 300,
        "GpuDeviceLost-p VramLedgerExporterDown-w",
    ),
    Course(
        "gpu-back-after-a-reboot", Node(gpus=2, missing=away(20, 24), extra={MISSING: gone(20, 24.5)}), 200
    ),
    # --- a GPU that nobody else really uses
    Course("preallocated-beside-its-own-helper", Node([PREALLOCATED, Holder(9, 5, command="helper")]), 40),
]  # fmt: skip


@pytest.fixture(scope="module", params=EACH_VERSION)
def fired(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """Return all that fires in each course at any time."""
    nodes = {each.name: (each.node, each.minutes) for each in COURSES}
    assert len(nodes) == len(COURSES), "no name stands for two courses"
    fires: dict[str, set[str]] = {each.name: set() for each in COURSES}
    times = range(round(max(each.minutes for each in COURSES)) + 1)
    folder = tmp_path_factory.mktemp("courses")
    for key, seen in alerts_over_time(nodes, times, folder, request.param, Manager(STEP)).items():
        labels = dict(key)
        name = labels.get("instance", "")
        if labels["alertstate"] == "firing" and name in fires and min(seen) <= nodes[name][1] * 60:
            fires[name].add(f"{labels['alertname']}-{labels['severity'][0]}")
    return fires


@pytest.mark.parametrize("course", COURSES, ids=lambda course: course.name)
def test_course(course: Course, fired: Mapping[str, set[str]]) -> None:
    """Over all of its course a node raises what is true of it, and nothing else."""
    quiet = {"GpuMemoryNearlyFull-i", "GpuMemoryFilling-w"}  # they are about the device, and true here
    assert fired[course.name] - quiet == {*course.fires.split()}


def in_cluster(name: str) -> Callable[[float, Mapping[str, str]], Mapping[str, str]]:
    """Return a change of labels that puts a node into a cluster."""
    return lambda _, labels: {**labels, "cluster": name}


def moved(minute: float, label: str, *values: str) -> Callable[[float, Mapping[str, str]], Mapping[str, str]]:
    """Return a change of one label at a minute, where it is, or everywhere if it is the target's."""

    def relabel(now: float, labels: Mapping[str, str]) -> Mapping[str, str]:
        if label == "gpu" and label not in labels:
            return labels
        return {**labels, label: values[now >= minute]}

    return relabel


BUSY = (
    HOARDER,
    torch(gib=lambda m: 10 + 0.25 * m, torch_alloc_retries_total=lambda m: 4 * m // 1),
    Holder(9, 10, "orphaned", since=0, owner="cy"),
    replace(PREALLOCATED, pid=10, gib=1),
)
"""Something for as many rules as possible."""

Fired = set[tuple[str, str, str]]
"""Cluster or other label, alert, pid."""


def fired_on(nodes: Mapping[str, Node], minutes: float, label: str, folder: Path, version: str) -> Fired:
    """Return what fires at the end on nodes of one instance; a rule that cannot be evaluated is an error."""
    promtool = require_version("promtool", version)
    manager = Manager(STEP, ALERTS, evaluation_order(), promtool, everything=True)
    series = ((each["series"], each["values"]) for node in nodes.values() for each in node.series(minutes))
    samples = ask(
        'ALERTS{alertstate="firing",severity!="none"}', [round(minutes * 60)], series, folder, manager
    )
    return {
        (labels.get(label, ""), labels["alertname"], labels.get("pid", "")) for labels in map(dict, samples)
    }


@pytest.mark.parametrize("version", EACH_VERSION)
def test_two_clusters_may_have_a_node_of_one_name(tmp_path: Path, version: str) -> None:
    """What happens in one cluster is found there, and the same pid of the other's node is another process."""
    nodes = {
        "east": Node(BUSY, relabel=in_cluster("east")),
        "west": Node([Holder(7, 10, "zombie", since=0)], relabel=in_cluster("west")),
    }
    found = fired_on(nodes, 60, "cluster", tmp_path, version)

    assert {each for each in found if each[0] != "east"} == {("west", "GpuMemoryZombie", "7")}
    assert {("east", "GpuMemoryOrphaned", "9"), ("east", "GpuMemoryHoardedWhileShort", "7")} <= found
    assert ("east", "GpuMemoryLeakSuspected", "8") in found


# What lingers overlaps with what follows in every selector, and what ends only in those with a range.
ENDS = pytest.param(True, marks=pytest.mark.thorough)


@pytest.mark.parametrize("version", EACH_VERSION)
@pytest.mark.parametrize("marked", [ENDS, False], ids=["series end", "series linger"])
@pytest.mark.parametrize("label", ["gpu", "rack"])
def test_a_label_may_change_on_one_node(label: str, marked: bool, tmp_path: Path, version: str) -> None:
    """While a GPU has two indices, or a target two racks, every rule judges this node and the others."""
    changing = Node(
        BUSY, relabel=moved(61, label, "0", "1"), extra={f"vramledger_device_hidden_holders{{{DEVICE}}}": 1}
    )
    steady = Node(BUSY, relabel=in_cluster("steady"))
    promtool = require_version("promtool", version)
    manager = Manager(STEP, ALERTS, evaluation_order(), promtool, everything=True)
    series = [
        (each["series"], each["values"] if marked else each["values"].replace("stale", "_"))
        for node in (changing, steady)
        for each in node.series(80)
    ]
    times = [minute * 60 for minute in (60, 61, 62, 63, 64, 66, 68, 70, 80)]
    samples = ask('ALERTS{alertstate="firing",severity!="none"}', times, series, tmp_path, manager)
    always = {
        (labels.get("cluster", ""), labels["alertname"]): len(seen)
        for key, seen in samples.items()
        if (labels := dict(key)) and labels["alertname"] == "GpuMemoryHoardedWhileShort"
    }

    assert always["steady", "GpuMemoryHoardedWhileShort"] == len(times)
    assert ("", "GpuMemoryHoardedWhileShort") in always


@pytest.mark.parametrize("version", EACH_VERSION)
def test_a_slow_clock_exempts_as_long_as_a_right_one(tmp_path: Path, version: str) -> None:
    """A program's first hour is an hour of its node's own clock, also where that is an hour behind."""
    program = Holder(7, lambda minute: 5 + 0.5 * min(minute, 50), start=0)
    behind = Node(
        [replace(program, start=-60)],
        extra={"vramledger_sample_timestamp_seconds{NODE}": lambda minute: 60 * (minute - 60)},
    )
    nodes = {"right": Node([program], instance="right"), "behind": replace(behind, instance="behind")}
    found = fired_on(nodes, 55, "instance", tmp_path, version)

    assert found == {("behind", "VramLedgerClockSkew", "")}


@pytest.mark.parametrize("version", EACH_VERSION)
def test_a_page_about_a_missing_gpu_stays(tmp_path: Path, version: str) -> None:
    """A GPU that did not come back from a reboot pages for days, over another reboot, until it is back."""
    minutes = 60 * 30
    up = {MISSING: lambda m: 1.0 if m < 20 or m >= minutes - 60 else None}
    node = Node(gpus=2, missing=lambda m: 20 <= m < 24 or 600 <= m < 620, extra=up)
    times = [30 * 60, 90 * 60, 599 * 60, 619 * 60, 640 * 60, (minutes - 61) * 60, (minutes - 40) * 60]
    promtool = require_version("promtool", version)
    manager = Manager(STEP, ALERTS, evaluation_order(), promtool, alerts=["GpuDeviceLost"])
    series = ((each["series"], each["values"]) for each in node.series(minutes))
    samples = ask('ALERTS{alertstate="firing"}', times, series, tmp_path, manager)
    [(labels, seen)] = samples.items()

    assert dict(labels)["uuid"] == uuid(1)
    assert seen == times[:-1]


@pytest.mark.parametrize("why", ["asleep", "reset_required"])
def test_what_explains_a_silent_gpu_counts_as_long_as_its_silence(why: str, tmp_path: Path) -> None:
    """Where Prometheus scrapes no more and no series gets its mark, no GPU is lost that only sleeps."""
    node = Node(extra={f"vramledger_device_{why}{{{DEVICE}}}": 1, f"vramledger_device_up{{{DEVICE}}}": 0})
    found = alerts_over_time({"gpu-1": (node, 20)}, range(40), tmp_path, VERSIONS[0])

    assert "GpuDeviceLost" not in {dict(key)["alertname"] for key in found}
