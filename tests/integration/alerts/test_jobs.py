"""Distributed jobs that hang: one page that names the rank, and none for what only looks like it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.alerts.test_false_pages import in_cluster
from tests.support.alerts.nodes import Holder, Node, Values, changing_at, uuid
from tests.support.alerts.promtool import ALERTS, STEP, evaluation_order, firing
from tests.support.faults.evaluation import Manager, ask
from tests.support.requirements import EACH_VERSION, require_version
from vramledger.model.reading import Rank
from vramledger.model.snapshot import Grade

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

JOB = "n0:29500"
HUNG = 10
"""The minute at which the ranks begin to wait."""


def rank(number: int, state: str | Callable[[float], str] = "active", **more: object) -> Holder:
    """Return a rank of a job of four on a GPU of its own, with the pid 100 and its number."""
    known: dict[str, object] = {
        "pid": 100 + number, "gib": 30, "state": state, "rank": Rank(number, 4, JOB),
        "owner_type": "slurm", "owner": "17", "gpu": number % 2,
    }  # fmt: skip
    return Holder(**{**known, **more})  # type: ignore[arg-type]


SINCE = changing_at(HUNG, None, HUNG)


def waiting(number: int, since: Values = SINCE, **more: object) -> Holder:
    """Return a rank that waits for another one."""
    return rank(number, **{"waiting": since, **more})  # type: ignore[arg-type]


def ended(number: int, minute: float = HUNG) -> Holder:
    """Return a rank whose process is gone from a minute on."""
    return replace(rank(number), gib=changing_at(minute, 30, None))


def turning(state: str) -> Callable[[float], str]:
    """Return the states of a rank that stops working when the others begin to wait."""
    return lambda minute: state if minute >= HUNG else "active"


def idle(grade: Grade = Grade.PROVEN, **more: object) -> Holder:
    """Return rank 3, which does nothing."""
    return rank(3, turning("idle"), since=HUNG, grade=grade, sm=None, **more)


NEAR = Node([waiting(0), waiting(1)], gpus=2)
STOPPED = rank(3, turning("stopped"), since=HUNG)
PAGE, WARNING, INFO = "GpuJobHung-p", "GpuJobHung-w", "GpuBusyWithoutWork-i"
LOST = {f'vramledger_device_up{{NODE,gpu="1",uuid="{uuid(1)}"}}': changing_at(HUNG, 1, 0)}
UNREADABLE = {'vramledger_unreadable_processes{NODE,file="environ"}': 3}


class Case(NamedTuple):
    """Two nodes, and what fires on each at the end, with the pid and the severity's letter."""

    name: str
    far: Node
    fires: str
    near: Node = NEAR
    minutes: float = 38


def beside(*holders: Holder, **more: object) -> Node:
    """Return the second node of the job."""
    return Node(holders, gpus=2, **more)  # type: ignore[arg-type]


CASES = [
    Case("a stopped rank", beside(waiting(2), STOPPED), f"103 {PAGE}"),
    Case("a stuck rank", beside(waiting(2), rank(3, turning("stuck"))), f"103 {PAGE}, 103 GpuMemoryStuck-p"),
    Case("a rank that ended", beside(waiting(2), ended(3)), f"103 {PAGE}"),
    Case(
        "a rank that ended while scrapes are lost",
        beside(waiting(2), ended(3), missing=lambda m: round(m * 4) % 9 == 5), f"103 {PAGE}",
    ),
    Case(
        "two stopped ranks", beside(replace(STOPPED, pid=102, rank=Rank(2, 4, JOB), gpu=0), STOPPED),
        f"102 {PAGE}, 103 {PAGE}",
    ),
    Case("a rank that does nothing", beside(waiting(2), idle()), f"103 {WARNING}", minutes=53),
    Case(
        "a rank whose idleness is only inferred", beside(waiting(2), idle(Grade.INFERRED)),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}",
    ),
    # --- not yet, or over
    Case(
        "it went on after 24 minutes",
        beside(
            waiting(2, lambda m: HUNG if HUNG <= m < 34 else None),
            replace(STOPPED, state=lambda m: "stopped" if HUNG <= m < 34 else "active"),
        ),
        "", near=Node([waiting(0, lambda m: HUNG if HUNG <= m < 34 else None)]),
    ),
    # --- who else is busy without work
    Case(
        "all ranks wait, and no fault is seen", beside(waiting(2), waiting(3)),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}, 103 {INFO}",
    ),
    Case("one rank works", beside(waiting(2), rank(3)), f"100 {INFO}, 101 {INFO}, 102 {INFO}"),
    Case(
        "the first rank of a server waits for requests",
        beside(replace(idle(), framework="vllm", policy="preallocate", pid=103)), "", minutes=53,
        near=Node([waiting(0, framework="vllm", policy="preallocate")]),
    ),
    Case(
        "a helper of a rank is stopped", beside(waiting(2), waiting(3), rank(3, "stopped", pid=999, gib=0.6)),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}, 103 {INFO}",
    ),
    # --- ranks of another job, or of somebody who only says so
    Case(
        "a stopped rank of another job", beside(waiting(2), replace(STOPPED, rank=Rank(3, 4, "n0:29501"))),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}",
    ),
    Case(
        "a stopped rank of another user", beside(waiting(2), replace(STOPPED, user="eve")),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}",
    ),
    Case(
        "a stopped program without a rank", beside(waiting(2), replace(STOPPED, rank=None)),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}",
    ),
    Case(
        "a job that goes on with fewer ranks", beside(replace(ended(3), rank=Rank(3, 4, JOB))),
        f"100 {INFO}, 101 {INFO}",
        near=Node([waiting(0, rank=Rank(0, 2, JOB)), waiting(1, rank=Rank(1, 2, JOB))], gpus=2),
    ),
    Case(
        "a rank that was started again",
        beside(waiting(2), ended(3, 5), waiting(3, pid=203, gib=changing_at(6, None, 30))),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}, 203 {INFO}",
    ),
    # --- less is seen: no harsher verdict
    Case(
        "an exporter that is down", beside(waiting(2), STOPPED, missing=lambda m: m >= HUNG),
        f"100 {INFO}, 101 {INFO}, VramLedgerExporterDown-w",
    ),
    Case(
        "a driver that is lost", beside(waiting(2), rank(3), driver_up=changing_at(HUNG, 1, 0)),
        f"100 {INFO}, 101 {INFO}, GpuDriverLost-p",
    ),
    Case(
        "a GPU that is lost", beside(waiting(2), ended(3), extra=LOST),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}, GpuDeviceLost-p",
    ),
    Case(
        "environments that cannot be read any more", beside(waiting(2), ended(3), extra=UNREADABLE),
        f"100 {INFO}, 101 {INFO}, 102 {INFO}",
    ),
    # --- an exporter that starts again counts from its start
    Case(
        "a restarted exporter", beside(waiting(2), STOPPED), f"103 {PAGE}, 103 GpuMemoryStopped-w",
        minutes=43,
        near=Node(
            [waiting(0, lambda m: None if m < HUNG or 36 <= m < 38 else 36 if m >= 36 else HUNG)],
            extra={"process_start_time_seconds{NODE}": changing_at(36, 1, 2160)},
            missing=lambda m: 36 <= m < 36.5,
        ),
    ),
]  # fmt: skip


@pytest.fixture(scope="module", params=EACH_VERSION)
def fired(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """Return what fires at the end of each case; one Prometheus watches them all, a cluster for each."""
    folder = tmp_path_factory.mktemp("jobs")
    manager = Manager(STEP, ALERTS, evaluation_order(), require_version("promtool", request.param))
    series = (
        (each["series"], each["values"])
        for case in CASES
        for name, node in (("near", case.near), ("far", case.far))
        for each in replace(node, instance=name, relabel=in_cluster(case.name)).series(case.minutes)
    )
    times = sorted({round(case.minutes * 60) for case in CASES})
    found: dict[str, set[str]] = {case.name: set() for case in CASES}
    ends = {case.name: case.minutes * 60 for case in CASES}
    query = 'ALERTS{alertstate="firing",severity!="none"}'
    for key, seen in ask(query, times, series, folder, manager).items():
        labels = dict(key)
        name = labels.get("cluster", "")
        if name in ends and ends[name] in seen:
            said = f"{labels['alertname']}-{labels['severity'][0]}"
            found[name].add(f"{labels['pid']} {said}" if "pid" in labels else said)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hung_job_is_one_page_about_the_rank_that_it_waits_for(
    case: Case, fired: Mapping[str, set[str]]
) -> None:
    """The rank that cannot go on is named; where none is known, a list says who is busy without work."""
    assert fired[case.name] == {each.strip() for each in case.fires.split(",") if each.strip()}


def test_the_page_says_who_waits_for_whom(tmp_path: Path) -> None:
    """It names the stopped rank, its node, the ranks that wait, their GPUs, since when, and what to do."""
    nodes = {"n0": NEAR, "n7": beside(waiting(2), STOPPED)}
    series = [each for name, node in nodes.items() for each in replace(node, instance=name).series(40)]
    [alert] = [each for each in firing(tmp_path, series, 36) if each.name == "GpuJobHung"]
    text = alert.annotations["description"]

    assert text.startswith(f"n7: rank 3 of job {JOB}, pid 103 (train.py) of job 17, user ann, is stopped.")
    assert "without moving a byte since 1970-01-01 00:10:00" in text
    assert "rank 0 on n0 (GPU 0)" in text
    assert "kill -CONT 103" in text


def test_the_page_names_the_ranks_while_their_rules_are_evaluated(tmp_path: Path) -> None:
    """Groups are evaluated side by side: a page whose waiting ranks just have no sample still names them."""
    of = 'job="vramledger",instance="n0"'
    job = f'cluster="",{of},user="ann",namespace="",job_id="{JOB}"'
    jobs = f'job="vramledger",user="ann",namespace="",job_id="{JOB}"'
    given = {
        f"vramledger_job:waiting_seconds:max{{{jobs}}}": "1800x40",
        f'vramledger_job:rank_lost:state{{{job},pid="101",rank="1",ranks="2",rank_state="stopped"}}': "1x40",
        f'vramledger_process:waiting_seconds:last{{{of},gpu="0",uuid="U",pid="100"}}': "1800x35 stale",
        f'vramledger_process:rank_info:last{{{job},pid="100",rank="0",ranks="2"}}': "1x35 stale",
    }
    series = [{"series": name, "values": values} for name, values in given.items()]
    [alert] = firing(tmp_path, series, 9, [ALERTS / "jobs.rules.yml"])

    assert "rank 0 on n0 (GPU 0)" in alert.annotations["description"]


@pytest.mark.parametrize("ranks", [3, 4])
def test_who_is_busy_without_work_learns_how_many_ranks_are_seen(tmp_path: Path, ranks: int) -> None:
    """A rank that ended before its first sample has no name, but the alert says that one is missing."""
    far = beside(*(waiting(number) for number in range(2, ranks)))
    series = [
        each
        for name, node in {"n0": NEAR, "n7": far}.items()
        for each in replace(node, instance=name).series(40)
    ]
    alerts = [each for each in firing(tmp_path, series, 36) if each.name == "GpuBusyWithoutWork"]
    said = {"Of the 4 ranks of its job 3 are seen." in each.annotations["description"] for each in alerts}

    assert len(alerts) == ranks
    assert said == {ranks == 3}
