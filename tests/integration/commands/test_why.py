"""``vramledger show --why``: all evidence for a holder's state."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.builders import MIB, device, holding, process, snapshot
from tests.support.exporter import run
from tests.support.players.stage import Stage
from tests.support.standin.library import GIB, StandIn
from vramledger.model.reading import Owner, ParentFacts, PodLabels, ProcessRow
from vramledger.model.snapshot import Holding, Snapshot, State
from vramledger.views.evidence import evidence_json, evidence_lines
from vramledger.views.hidden_names import public_view


def seen(held: Holding, **changes: Any) -> Snapshot:  # noqa: ANN401 as in replace
    """Make a host with a holder whose facts have changed since they were first read."""
    known = replace(process(7, **changes), first=process(7).facts)
    shot = snapshot(device(0, [held]), processes=[known])
    return replace(shot, rows={7: ProcessRow(7, 700, "S", 1, 6, 7, 0, 3)})


def test_every_fact_is_told() -> None:
    """Each fact that a verdict may depend on is in the text, with the parent now and the first parent."""
    shot = seen(
        holding(7, 512 * MIB, State.ORPHANED, why="its parent has ended"), owner=Owner("slurm", "job-42"),
        parent=ParentFacts(1, 0, "systemd", "systemd", init=True), signs=("LOCAL_RANK",), ignores=("HUP",),
        nspid=(7, 3), leader_alive=False, cgroup=("0::/system.slice/x.service",), denied=("environ",),
    )  # fmt: skip
    text = "\n".join(evidence_lines(shot, 7))

    for fact in (
        *("train.py", "orphaned", "its parent has ended", "0.50 GiB", "slurm job-42", "ada (uid 1000)"),
        *("state S (sleeping), 3 thread(s)", "group          6\n", "session        7 (it leads it)"),
        *("parent         pid 1 systemd", "init of its PID namespace", "first parent   pid 6 bash"),
        *("LOCAL_RANK", "HUP", "gone", "7 3", "/system.slice/x.service", "environ"),
        *("no sample for it", "last sign never seen", "main process of a service    no"),
    ):
        assert fact in text


def test_what_is_not_known_is_said_and_not_made_up() -> None:
    """A dead holder has its state and no facts; a pid that holds nothing has no evidence at all."""
    shot = snapshot(device(0, [holding(7, state=State.DEAD)]), processes=[])
    text = "\n".join(evidence_lines(shot, 7))
    assert "in /proc       nothing" in text
    assert "facts          none" in text
    assert evidence_lines(shot, 8) == []


def test_nothing_steers_the_terminal() -> None:
    """Control characters in a process's names do not reach the terminal."""
    shot = snapshot(device(0, [holding(7)]), processes=[process(7, command="a\x1b[2Jb\n")])
    assert all(line.isprintable() for line in evidence_lines(shot, 7))


def test_the_evidence_as_json_is_the_same_evidence() -> None:
    """The JSON has each fact of the holder under its own name, and null for what is not known."""
    orphan, settings = holding(7, None, State.ORPHANED), {"CUDA_VISIBLE_DEVICES": "0"}
    shot = seen(orphan, parent=None, signs=("LOCAL_RANK",), settings=tuple(settings.items()))
    said = json.loads(json.dumps(evidence_json(shot, 7)))
    (held,) = said["holdings"]
    assert (held["gpu"], held["state"], held["memory"]) == (0, "orphaned", None)
    assert (said["row"]["ppid"], said["row"]["threads"]) == (1, 3)
    assert (said["facts"]["parent"], said["first_parent"]["command"]) == (None, "bash")
    assert (said["facts"]["signs"], said["facts"]["settings"]) == (["LOCAL_RANK"], settings)
    dead = json.loads(json.dumps(evidence_json(snapshot(device(0, [holding(7, state=State.DEAD)])), 7)))
    assert (dead["row"], dead["facts"], dead["first_parent"]) == (None, None, None)
    assert evidence_json(shot, 8) is None


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_the_command_tells_why(standin: StandIn, stage: Stage, flags: tuple[str, ...]) -> None:
    """A holder's evidence is text or one JSON document; a pid that holds nothing is one line and status 1."""
    pid = stage.start().pid
    standin.device(0).set_processes([(pid, GIB)])
    done = run("show", f"--why={pid}", *flags, driver=standin.env())
    none = run("show", f"--why={os.getpid()}", *flags, driver=standin.env())
    assert done.returncode == 0, done.stderr
    if flags:
        said = json.loads(done.stdout)
        assert (said["pid"], said["facts"]["pid"], said["row"]["ppid"]) == (pid, pid, os.getpid())
    else:
        assert f"parent now     pid {os.getpid()}" in done.stdout
    assert (none.returncode, none.stdout, len(none.stderr.splitlines())) == (1, "", 1)


@pytest.mark.parametrize(
    ("labels", "told", "known"),
    [
        (
            (PodLabels("ml", "train-0", (("app", None), ("team", "a\x1b[1mb"), ("tier", ""))),),
            "  pod's labels   team=a?[1mb, tier=",
            {"team": "a\x1b[1mb", "tier": ""},
        ),
        ((PodLabels("ml", "train-0", (("app", None),)),), "none of those that --pods.labels names", {}),
        ((PodLabels("dev", "train-0", (("app", "x"),)),), None, None),
        ((), None, None),
    ],
)
def test_labels_of_its_pod_are_told(
    labels: tuple[PodLabels, ...], told: str | None, known: dict[str, str] | None
) -> None:
    """The labels of the holder's pod are shown to everybody; there is no line where they are not known."""
    shot = replace(seen(holding(7), owner=Owner("pod", "ml/train-0", "ml", "train-0")), pods=labels)
    for each in (shot, public_view(shot, 4711)):
        text = "\n".join(evidence_lines(each, 7))
        assert (told in text) if told else ("pod's labels" not in text)
        found: Any = evidence_json(each, 7)
        assert found["holdings"][0]["pod_labels"] == known
