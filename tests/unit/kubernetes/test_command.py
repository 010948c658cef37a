"""How a Kubernetes node is marked, from answers of the exporter and the marks that it has."""

from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.support.builders import device, holding, process, snapshot
from tests.support.sure import sure
from vramledger.kubernetes.command import (
    MAX_ANNOTATED,
    NodeJudge,
    NodeMarks,
    Recorded,
    read_answer,
    read_recorded,
)
from vramledger.model.reading import Owner
from vramledger.model.snapshot import DeviceSnapshot, ReservationStatus, Snapshot, State
from vramledger.verdicts.cleanliness import find_leftovers, overall_status

NOW = 1_800_000_000.0
CLEAN = NodeMarks(tainted=False)
POD = Owner("pod", "team/job", namespace="team", pod="job")


def answer(verdict: str = "not-clean", *reasons: tuple[str, bool, int], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return an answer of the exporter with reasons of one GPU: kind, whether it counts, and pid."""
    said = [
        {"kind": kind, "counts": counts, "pid": pid, "start": 7, "memory": 1, "said": f"{kind} pid {pid}"}
        for kind, counts, pid in reasons
    ]
    devices = [{"gpu": "0", "uuid": "GPU-0", "verdict": verdict, "searched_hidden": True, "reasons": said}]
    told = {"version": 1, "verdict": verdict, "exit_status": 1, "time": NOW, "watched_since": 0}
    return {**told, "devices": devices, **more}


LEFT = answer("not-clean", ("orphaned", True, 4711))
GONE = answer("clean")
ACTIVE = answer("clean", ("active", False, 4711))
UNKNOWN = answer("cannot-tell", ("no-data", False, 0))


def follow(marks: NodeMarks, *answers: Any, judge: NodeJudge | None = None, begin: float = 0.0) -> NodeMarks:  # noqa: ANN401
    """Return the marks after answers 10 s apart, with one minute in which all must agree."""
    judge = judge or NodeJudge(60.0, 30.0, "boot")
    for number, each in enumerate(answers):
        now = begin + 10.0 * number
        judge.observe(read_answer(each, NOW), now)
        marks = judge.marks(marks, now)
    return marks


def test_a_leftover_taints_after_the_whole_span() -> None:
    """Six answers in 50 s set no taint, the seventh at 60 s does; it names the process."""
    assert not follow(CLEAN, *[LEFT] * 6).tainted
    marks = follow(CLEAN, *[LEFT] * 7)
    assert (marks.tainted, marks.status) == (True, "True")
    assert "orphaned pid 4711" in marks.message
    assert read_recorded(marks.annotation) == Recorded("boot", frozenset({(4711, 7)}))


@pytest.mark.parametrize(
    "between", [GONE, UNKNOWN, None, {}, [], "text", {**LEFT, "time": NOW - 61}, {**LEFT, "\udcff": 1}]
)
def test_one_other_answer_begins_the_span_again(between: Any) -> None:  # noqa: ANN401
    """A leftover that one answer in between does not confirm sets no taint."""
    assert not follow(CLEAN, *[LEFT] * 6, between, *[LEFT] * 6).tainted


def test_what_lasts_less_than_the_span_taints_nothing() -> None:
    """Others in each answer, a reused pid, and two answers five minutes apart."""
    answers = [answer("not-clean", ("orphaned", True, pid)) for pid in range(100, 130)]
    assert not follow(CLEAN, *answers).tainted
    later = answer("not-clean", ("orphaned", True, 4711))
    later["devices"][0]["reasons"][0]["start"] = 8
    assert not follow(CLEAN, *[LEFT] * 5, *[later] * 5).tainted
    judge = NodeJudge(60.0, 30.0, "boot")
    follow(CLEAN, LEFT, judge=judge)
    assert not follow(CLEAN, LEFT, judge=judge, begin=300.0).tainted


@pytest.mark.parametrize(
    "unusable",
    [UNKNOWN, None, 7, {}, {**GONE, "version": 2}, {**GONE, "time": None}, {**GONE, "time": NOW - 61},
     {**GONE, "time": NOW + 61}, {**GONE, "devices": []}, {**GONE, "verdict": "fine"},
     {**GONE, "devices": [{}]}, {**GONE, "time": "now"}],
)  # fmt: skip
@pytest.mark.parametrize("tainted", [True, False])
def test_no_usable_answer_changes_no_taint(unusable: Any, tainted: bool) -> None:  # noqa: ANN401
    """It fails closed: the taint stays, none is set, and the condition says Unknown and never False."""
    before = NodeMarks(tainted, "" if not tainted else Recorded("boot", frozenset()).to_text(), "True", "x")
    marks = follow(before, *[unusable] * 20)
    assert (marks.tainted, marks.annotation, marks.status) == (tainted, before.annotation, "Unknown")


def test_a_clean_node_loses_its_taint_after_the_whole_span() -> None:
    """The process is gone in every answer of a minute, counted from the first without it."""
    assert follow(CLEAN, *[LEFT] * 7, *[GONE] * 6).tainted
    assert not follow(CLEAN, *[LEFT] * 7, *[GONE] * 7).tainted
    tainted = follow(CLEAN, *[LEFT] * 7)
    assert follow(tainted, *[GONE] * 6).tainted
    assert follow(tainted, *[GONE] * 7) == NodeMarks(False, "", "False", "no GPU holds leftovers")


def test_a_restart_frees_nobody() -> None:
    """The taint stays after that of exporter or loop, not over a boot, and with a broken annotation."""
    tainted = follow(CLEAN, *[LEFT] * 7)
    kept = follow(tainted, *[ACTIVE] * 30)
    assert (kept.tainted, kept.annotation, kept.status) == (True, tainted.annotation, "True")
    assert "pid 4711" in kept.message
    assert not follow(kept, *[GONE] * 7).tainted
    tainted = follow(CLEAN, *[LEFT] * 7)
    assert follow(tainted, *[ACTIVE] * 30, judge=NodeJudge(60.0, 30.0, "boot")).tainted
    assert not follow(tainted, *[ACTIVE] * 30, judge=NodeJudge(60.0, 30.0, "next boot")).tainted
    assert follow(NodeMarks(True, "{", "True", ""), *[GONE] * 20).tainted
    assert not follow(NodeMarks(True, "", "True", ""), *[GONE] * 20).tainted


def test_a_guilty_process_stays_recorded_beside_a_new_one() -> None:
    """An orphan that is called active later stays recorded; an annotation holds a limited number."""
    tainted = follow(CLEAN, *[LEFT] * 7)
    marks = follow(tainted, *[answer("not-clean", ("active", False, 4711), ("zombie", True, 12))] * 7)
    assert read_recorded(marks.annotation) == Recorded("boot", frozenset({(4711, 7), (12, 7)}))
    text = Recorded("boot", frozenset((pid, pid) for pid in range(10_000))).to_text()
    assert len(sure(read_recorded(text)).processes) == MAX_ANNOTATED


def host(owner: Owner | None, place: DeviceSnapshot, **more: Any) -> Snapshot:  # noqa: ANN401
    """Return a host with one orphan, pid 1, of an owner."""
    known = process(1)
    shown = replace(known, facts=structs.replace(sure(known.facts), owner=owner))
    return replace(snapshot(place, processes=[shown]), **more)


def orphan(status: ReservationStatus | None = None) -> DeviceSnapshot:
    """Return a device with one orphan, and what schedulers say of it."""
    return replace(device(0, (holding(1, state=State.ORPHANED),), hidden=()), reservation_status=status)


@pytest.mark.parametrize(
    ("owner", "status", "unowned", "expected"),
    [
        (POD, None, (), 0),  # nothing is known of reservations
        (POD, ReservationStatus((), None, ("kubelet",)), (), 0),
        (POD, ReservationStatus((), (), ("kubelet",)), (), 0),  # it has the device
        (POD, ReservationStatus((), (1,), ("kubelet",)), (), 1),  # it certainly has not
        (POD, None, (1,), 1),  # it has ended
        (Owner("slurm", "7", slurm_job="7"), None, (), 0),
        (Owner("user", "ann"), None, (), 1),
        (None, None, (), 1),
    ],
)
def test_what_a_running_pod_may_have_is_its_own_business(
    owner: Owner | None, status: ReservationStatus | None, unowned: tuple[int, ...], expected: int
) -> None:
    """An orphan in a pod that may have the GPU blocks nobody else; of an ended pod, or of a user, it does."""
    results = find_leftovers(host(owner, orphan(status), unowned=unowned))
    assert overall_status(results) == expected
    assert [reason.pid for result in results for reason in result.reasons if reason.pid] == [1]


def test_a_recording_says_nothing_of_this_host() -> None:
    """An exporter that plays the demo taints no node."""
    assert overall_status(find_leftovers(host(None, orphan(), source="replay"))) == 3
