"""When the labels of pods are asked for, what is kept, and what is forgotten."""

import logging
import threading
from collections.abc import Mapping

import pytest

from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.kubernetes.api_client import ClusterError
from vramledger.kubernetes.pods import KEEP, MAX_PODS, READ_INTERVAL, SPACING, HolderPods, Pod, PodLabelReader
from vramledger.model.reading import Grant, Owner, PodLabels, ProcessFacts, ProcessRow, Scheduler
from vramledger.model.records import LABEL_VALUE_MAX

TRAIN, SERVE = ("ml", "train-0"), ("ml", "serve-0")


class Cluster:
    """Answers as it is told, and counts the questions; the clock stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pods: Mapping[Pod, Mapping[str, str]] | None = {TRAIN: {"team": "vision"}}
        self.questions = 0
        self.reader = PodLabelReader(self.read, ("app", "team"), clock=lambda: self.now)

    def read(self) -> Mapping[Pod, Mapping[str, str]]:
        self.questions += 1
        if self.pods is None:
            raise ClusterError("403 Forbidden")
        return self.pods

    def after(self, seconds: float, *wanted: Pod) -> tuple[PodLabels, ...]:
        """Return what is known some time later, once every question has its answer."""
        self.now += seconds
        before = asking()
        self.reader.update(wanted)
        wait_until(lambda: asking() <= before, "the answer")
        return self.reader.update(wanted)


def asking() -> set[threading.Thread]:
    """Return the threads that ask; those of another test may hang."""
    return {thread for thread in threading.enumerate() if thread.name == "vramledger-facts"}


def known(pod: Pod, team: str | None) -> PodLabels:
    """Return the labels of a pod that has no label ``app``."""
    return PodLabels(*pod, (("app", None), ("team", team)))


def test_nobody_is_asked_without_a_pod() -> None:
    """A host on which no pod holds memory asks nobody, and has no health to report."""
    cluster = Cluster()
    for _ in range(3):
        assert cluster.after(READ_INTERVAL) == ()
    assert (cluster.questions, cluster.reader.health) == (0, None)


def test_only_pods_that_concern_us_are_kept() -> None:
    """Of all pods of the node only the wanted ones have labels, each with every label of the allow-list."""
    cluster = Cluster()
    cluster.pods = {TRAIN: {"team": "vision", "other": "x"}, SERVE: {"team": "web"}}
    assert cluster.after(0, TRAIN) == (known(TRAIN, "vision"),)
    assert cluster.reader.health == (True, 0.0)


def test_one_question_a_minute() -> None:
    """The same pods lead to one question a minute, and a change shows with the next answer."""
    cluster = Cluster()
    cluster.after(0, TRAIN)
    cluster.pods = {TRAIN: {"team": "speech"}}
    assert cluster.after(READ_INTERVAL - 1, TRAIN) == (known(TRAIN, "vision"),)
    assert cluster.questions == 1
    assert cluster.after(1, TRAIN) == (known(TRAIN, "speech"),)
    assert cluster.questions == 2


def test_a_new_pod_is_asked_for_soon() -> None:
    """A pod that is new since the last question waits no minute; one that nobody knows changes nothing."""
    cluster = Cluster()
    cluster.after(0, TRAIN)
    cluster.pods = {TRAIN: {}, SERVE: {"team": "web"}}
    cluster.after(SPACING / 2, TRAIN, SERVE)
    assert cluster.questions == 1
    assert cluster.after(SPACING / 2, TRAIN, SERVE) == (known(SERVE, "web"), known(TRAIN, None))
    unknown = ("ml", "nobody-knows")
    cluster.after(SPACING, TRAIN, unknown)
    cluster.after(SPACING, TRAIN, unknown)
    assert cluster.questions == 3


def test_an_ended_pod_keeps_its_labels() -> None:
    """A pod that Kubernetes has forgotten keeps its labels as long as it holds memory, and no longer."""
    cluster = Cluster()
    cluster.after(0, TRAIN)
    cluster.pods = {}
    for _ in range(20):
        assert cluster.after(READ_INTERVAL, TRAIN) == (known(TRAIN, "vision"),)
    assert cluster.after(1) == ()
    assert cluster.after(READ_INTERVAL, TRAIN) == ()


def test_what_nobody_tells_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Labels outlive a failed question for minutes, and are then not known; the failure is said once."""
    cluster = Cluster()
    cluster.after(0, TRAIN)
    cluster.pods = None
    with caplog.at_level(logging.INFO, "vramledger"):
        assert cluster.after(KEEP, TRAIN) == (known(TRAIN, "vision"),)
        assert not sure(cluster.reader.health)[0]
        assert cluster.after(READ_INTERVAL, TRAIN) == ()
        cluster.pods = {TRAIN: {"team": "vision"}}
        assert cluster.after(READ_INTERVAL, TRAIN) == (known(TRAIN, "vision"),)
    messages = [record.message for record in caplog.records]
    assert messages == ["Cannot read labels of pods", "Reading labels of pods again"]


def test_number_and_length_are_bounded() -> None:
    """More pods than a node has are left out, and a long value is cut."""
    cluster = Cluster()
    pods = [("ml", f"pod-{number:04}") for number in range(MAX_PODS + 5)]
    cluster.pods = {pod: {"team": "x" * 9999} for pod in pods}
    found = cluster.after(0, *pods)
    assert len(found) == MAX_PODS
    assert {len(value or "") for each in found for _, value in each.labels} == {0, LABEL_VALUE_MAX}


def row(pid: int, start: int) -> ProcessRow:
    return ProcessRow(pid, start, "S", 1, pid, pid, 0, 1)


def held_by(pid: int, start: int, owner: Owner | None) -> ProcessFacts:
    return ProcessFacts(pid, start, owner=owner)


def test_pods_of_holders_and_of_reservations() -> None:
    """Pods that hold memory or have a device reserved concern us; other owners and unnamed pods do not."""
    pods = HolderPods()
    facts = [
        held_by(1, 10, Owner("pod", "ml/train-0", *TRAIN)),
        held_by(2, 20, Owner("slurm", "41", *SERVE, slurm_job="41")),
        held_by(3, 30, Owner("pod", "8a1b", pod="8a1b")),
        held_by(4, 40, Owner("user", "ada")),
        held_by(5, 50, None),
    ]
    grants = (Grant("pod", "dev/note-0", ("GPU-1",)), Grant("slurm", "41", ("GPU-1",)))
    reserved = [Scheduler("kubelet", (), grants)]
    rows = [row(each.pid, each.start) for each in facts]
    assert pods.update(rows, (), facts, reserved) == {TRAIN, SERVE, ("dev", "note-0")}
    assert pods.update(rows, (), (), ()) == {TRAIN, SERVE}


def test_a_pid_without_a_process_keeps_its_pod() -> None:
    """Memory of a pid that is gone is still its pod's; a new process with this pid is not."""
    pods = HolderPods()
    pods.update([row(1, 10)], (), [held_by(1, 10, Owner("pod", "ml/train-0", *TRAIN))], ())
    assert pods.update((), {1: "gone"}, (), ()) == {TRAIN}
    assert pods.update([row(1, 99)], (), (), ()) == set()
