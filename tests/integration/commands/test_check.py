"""``vramledger check``: what is clean, what is not, and what is not known."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.builders import MIB, device, failed, holding, process, snapshot
from tests.support.exporter import run
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace
from tests.support.standin.library import GIB, Code, StandIn
from vramledger.commands.cleanliness import (
    CANNOT_TELL,
    CLEAN,
    MAX_LEFTOVER,
    NOT_CLEAN,
    CheckTolerance,
    check_devices,
    overall_status,
)
from vramledger.model.reading import HiddenHolder, Owner
from vramledger.model.snapshot import DeviceSnapshot, Holding, Snapshot, State
from vramledger.readers.hosts.hidden_holders import find_hidden_holders
from vramledger.readers.hosts.host import Host

NOBODY: frozenset[str] = frozenset()


def empty(unattributed: int = 0, *holdings: Holding) -> DeviceSnapshot:
    """Make a device that was searched for hidden holders."""
    return device(0, holdings, unattributed=unattributed, hidden=())


def status(shot: Snapshot, tolerance: CheckTolerance | None = None) -> int:
    """Return the exit status for all devices."""
    return overall_status(check_devices(shot, NOBODY, tolerance or CheckTolerance()))


def test_an_empty_device_is_clean() -> None:
    """A device without holders and leftovers is clean, and the line says no more."""
    (verdict,) = check_devices(snapshot(empty()), NOBODY, CheckTolerance())

    assert (verdict.status, verdict.line) == (CLEAN, f"GPU 0 {verdict.uuid}: clean")


@pytest.mark.parametrize(("more", "expected"), [(0, CLEAN), (1, NOT_CLEAN)])
def test_leftovers_count_beyond_the_limit_alone(more: int, expected: int) -> None:
    """Leftovers at the limit are accepted, one byte more is not, whatever its state."""
    half = MAX_LEFTOVER // 2

    assert status(snapshot(empty(MAX_LEFTOVER + more))) == expected
    for state in (State.DEAD, State.ZOMBIE, State.ORPHANED):
        assert status(snapshot(empty(half, holding(7, half + more, state)))) == expected


def test_a_leftover_is_named_with_its_evidence() -> None:
    """The line says who, how much and why."""
    orphan = holding(7, 2 * GIB, State.ORPHANED, why="its parent has ended")
    (verdict,) = check_devices(snapshot(empty(0, orphan)), NOBODY, CheckTolerance())

    said = "orphaned pid 7 train.py of user ada holds 2.00 GiB (its parent has ended)"
    assert verdict.line == f"GPU 0 {verdict.uuid}: NOT CLEAN: {said}"


@pytest.mark.parametrize("state", [State.ACTIVE, State.IDLE, State.STOPPED, State.UNKNOWN])
def test_a_live_process_counts_unless_it_is_welcome(state: State) -> None:
    """A live process fails the check, unless all are allowed or its owner is."""
    shot = snapshot(empty(0, holding(7, MIB, state)), processes=[process(7)])

    assert status(shot) == NOT_CLEAN
    assert status(shot, CheckTolerance(live=True)) == CLEAN
    assert status(shot, CheckTolerance(owners=frozenset({"ada"}))) == CLEAN
    assert status(shot, CheckTolerance(owners=frozenset({"user:ada"}))) == CLEAN
    assert status(shot, CheckTolerance(owners=frozenset({"pod:ada", "bob"}))) == NOT_CLEAN


def test_the_resolved_owner_is_the_one_that_counts() -> None:
    """A pod's process belongs to the pod, whoever its user is."""
    known = process(7)
    assert known.facts is not None
    known = replace(known, facts=replace(known.facts, owner=Owner("pod", "train-1")))
    shot = snapshot(empty(0, holding(7)), processes=[known])

    assert status(shot, CheckTolerance(owners=frozenset({"pod:train-1"}))) == CLEAN
    assert status(shot, CheckTolerance(owners=frozenset({"ada"}))) == NOT_CLEAN


def test_welcome_processes_excuse_no_leftover() -> None:
    """An orphan of an allowed owner is still a leftover."""
    shot = snapshot(empty(0, holding(7, 2 * GIB, State.ORPHANED)))

    assert status(shot, CheckTolerance(live=True, owners=frozenset({"ada"}))) == NOT_CLEAN


def test_an_idle_mps_server_is_no_holder() -> None:
    """Root's MPS server with its 66 MiB belongs to the node; a user's program with that name does not."""
    server = process(7, user="root", command="nvidia-cuda-mps-server")
    assert server.facts is not None
    one = empty(0, holding(7, 66 * MIB))
    root = replace(server, facts=replace(server.facts, uid=0))

    assert status(snapshot(one, processes=[root])) == CLEAN
    assert status(snapshot(one, processes=[server])) == NOT_CLEAN


@pytest.mark.parametrize(("kind", "expected"), [("cuda", NOT_CLEAN), ("unknown", CLEAN)])
def test_a_hidden_holder_counts_when_cuda_is_loaded(kind: str, expected: int) -> None:
    """A program with CUDA loaded may take memory at any moment; an open file alone is only a remark."""
    hidden = HiddenHolder(9, 900, kind, "python", "ann", (0,))
    shot = snapshot(replace(empty(), hidden=(hidden,)))

    assert status(shot) == expected
    assert "pid 9 python of user ann" in check_devices(shot, NOBODY, CheckTolerance())[0].line
    assert status(shot, CheckTolerance(owners=frozenset({"ann"}))) == CLEAN


def test_what_was_not_searched_is_said() -> None:
    """The line of a clean device says if the search for hidden holders was not complete."""
    whole = check_devices(snapshot(empty()), NOBODY, CheckTolerance(), unreadable=3)

    for (verdict,) in (whole, check_devices(snapshot(device(0)), NOBODY, CheckTolerance())):
        assert not verdict.searched
        assert "hidden holders" in verdict.line


def test_an_old_driver_s_reserve_is_no_leftover() -> None:
    """Where the driver's reserve counts as unattributed, unattributed is not judged, and the line says so."""
    shot = snapshot(device(0, reserved=None, unattributed=700 * MIB, hidden=()))

    assert status(shot) == CLEAN
    assert "not judged" in check_devices(shot, NOBODY, CheckTolerance())[0].line


def test_what_cannot_be_told() -> None:
    """No driver, another namespace, no answer, no ledger, no such GPU: neither clean nor not clean."""
    fine = snapshot(empty())
    lost = replace(empty(), up=False)
    for shot in (
        failed("no-driver", "there is no driver"),
        replace(fine, host_pid_namespace=False),
        replace(fine, host_pid_namespace=None),
        snapshot(lost),
        snapshot(replace(empty(), ledger=None)),
    ):
        assert status(shot) == CANNOT_TELL
    (verdict,) = check_devices(fine, frozenset({"7"}), CheckTolerance())
    assert (verdict.status, verdict.line) == (CANNOT_TELL, "GPU 7: cannot tell: the driver lists no such GPU")


def test_only_the_wanted_devices_are_judged() -> None:
    """A device is chosen by index or UUID; with several devices a certain result has precedence."""
    dirty = device(1, [holding(7)], hidden=())
    shot = snapshot(empty(), dirty)

    assert [each.gpu for each in check_devices(shot, frozenset({"0"}), CheckTolerance())] == ["0"]
    assert [each.gpu for each in check_devices(shot, frozenset({dirty.key[1]}), CheckTolerance())] == ["1"]
    assert overall_status(check_devices(shot, frozenset({"0", "1", "9"}), CheckTolerance())) == NOT_CLEAN
    assert overall_status(check_devices(shot, frozenset({"0", "9"}), CheckTolerance())) == CANNOT_TELL


# --- the command -------------------------------------------------------------------------------------


def test_the_command_finds_a_live_process(standin: StandIn, stage: Stage) -> None:
    """The command prints in JSON who holds the GPU, and ends with 1; with ``--allow-live`` it ends with 0."""
    require_host_pid_namespace()
    pid = stage.start().pid
    standin.device(0).set_processes([(pid, GIB)])

    done = run("check", "--wait=100ms", "--json", driver=standin.env())
    welcome = run("check", "--wait=100ms", "--allow-live", driver=standin.env())

    said = json.loads(done.stdout)
    assert (done.returncode, said["verdict"], said["exit_status"]) == (NOT_CLEAN, "not-clean", NOT_CLEAN)
    (reason,) = said["devices"][0]["reasons"]
    assert (reason["kind"], reason["pid"], reason["memory"]) == ("active", pid, GIB)
    assert welcome.returncode == CLEAN, welcome.stdout


def test_the_command_finds_an_empty_device_clean(standin: StandIn) -> None:
    """Without holders it ends with 0, after a search of the host; with a dead pid it ends with 1."""
    require_host_pid_namespace()
    clean = run("check", "--json", driver=standin.env())
    assert clean.returncode == CLEAN, clean.stdout
    found = find_hidden_holders(Host(Path("/proc")), {os.getpid()}, set())
    assert found is not None
    assert json.loads(clean.stdout)["devices"][0]["searched_hidden"] == (found[1] == 0)

    standin.device(0).set_processes([(2**22, GIB)])  # one above the largest pid of Linux
    dead = run("check", "--wait=100ms", driver=standin.env())
    assert dead.returncode == NOT_CLEAN
    assert "NOT CLEAN: dead pid" in dead.stdout
    assert len(dead.stdout.splitlines()) == 1


def test_the_command_cannot_tell_without_a_driver(standin: StandIn) -> None:
    """If the driver does not work it prints one line and ends with 3."""
    standin.driver_error = Code.DRIVER_NOT_LOADED
    done = run("check", driver=standin.env())

    assert done.returncode == CANNOT_TELL
    assert len(done.stdout.splitlines()) == 1
    assert "cannot tell" in done.stdout


@pytest.mark.parametrize("flag", ["--max-leftover=much", "--wait=never", "--gpus=1"])
def test_a_wrong_flag_is_2(standin: StandIn, flag: str) -> None:
    """An invalid flag ends it with 2."""
    assert run("check", flag, driver=standin.env()).returncode == 2


def test_one_search_finds_who_has_the_device_open(tmp_path: Path, stage: Stage) -> None:
    """A complete search names a process with the device file open, and leaves out our own processes."""
    (tmp_path / "nvidia3").touch()
    pid = stage.start(("open_file", str(tmp_path / "nvidia3"))).pid
    arguments = (Host(Path("/proc")), {os.getpid()})
    found = find_hidden_holders(*arguments, set(), devices=str(tmp_path / "nvidia"))
    listed = find_hidden_holders(*arguments, {pid}, devices=str(tmp_path / "nvidia"))

    assert found is not None
    assert [(holder.pid, holder.minors) for holder in found[0]] == [(pid, (3,))]
    assert listed is not None
    assert listed[0] == ()
