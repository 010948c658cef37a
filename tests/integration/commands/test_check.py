"""``vramledger check``: what is clean, what is not, and what is not known."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from tests.support.builders import MIB, device, failed, holding, managed, process, reread, snapshot
from tests.support.exporter import run
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace, require_root
from tests.support.standin.library import GIB, Code, StandIn
from tests.support.sure import sure
from vramledger.model.reading import HiddenHolder, Owner, ParentFacts
from vramledger.model.snapshot import DeviceSnapshot, Holding, Snapshot, State, UndividedBytes
from vramledger.readers.hosts.hidden_holders import find_hidden_holders
from vramledger.readers.hosts.host import Host
from vramledger.readers.nvml.hardware import RECOVERY_ACTIONS
from vramledger.verdicts.cleanliness import (
    CANNOT_TELL,
    CLEAN,
    MAX_LEFTOVER,
    NOT_CLEAN,
    CheckTolerance,
    SearchExtent,
    check_devices,
    leftovers,
    overall_status,
)

NOBODY: frozenset[str] = frozenset()
SERVER, DAEMON = "nvidia-cuda-mps-server", "nvidia-cuda-mps-control"
NO_TOLERANCE, LIVE = CheckTolerance(), CheckTolerance(live=True)


class Case(NamedTuple):
    """The exit status for a host, what is allowed there, and what the line says."""

    expected: int
    shot: Snapshot
    tolerance: CheckTolerance = NO_TOLERANCE
    said: str = ""


def owners(*names: str, live: bool = False) -> CheckTolerance:
    """Allow the processes of some owners."""
    return CheckTolerance(live=live, owners=frozenset(names))


def empty(unattributed: int = 0, *holdings: Holding) -> DeviceSnapshot:
    """Make a device that was searched for hidden holders."""
    return device(0, holdings, unattributed=unattributed, hidden=())


def host(*holdings: Holding, unattributed: int = 0, **changes: Any) -> Snapshot:  # noqa: ANN401 as in replace
    """Make a host with one device, which was searched for hidden holders unless changed."""
    return snapshot(replace(empty(unattributed, *holdings), **changes), processes=[process(7)])


def held_by(size: int, **facts: Any) -> Snapshot:  # noqa: ANN401
    """Make a host with one holder of whom these facts are known."""
    return snapshot(empty(0, holding(7, size)), processes=[process(7, **facts)])


def mps(uid: int, user: str, size: int = 66 * MIB) -> Snapshot:
    """Make a host with alice's MPS server, which the control daemon of another user has started."""
    daemon = ParentFacts(6, 1, "nvidia-cuda-mps", "x", init=False, uid=uid, user=user, program=DAEMON)
    return held_by(size, command=SERVER, user="alice", parent=daemon)


def leftover(size: int, state: State) -> Snapshot:
    """Make a host with half of the limit unattributed, and a holder in this state."""
    return host(holding(7, size, state), unattributed=HALF)


def shared(state: State) -> Snapshot:
    """Make a host with bytes that an orphan shares with a holder in this state."""
    both = [holding(7, 16 * MIB, State.ORPHANED), holding(8, 16 * MIB, state)]
    divided = UndividedBytes(GIB, (7, 8), state, False, None)
    return snapshot(device(0, both, unattributed=0, undivided=divided, hidden=()))


HALF = MAX_LEFTOVER // 2
LEFT = (State.DEAD, State.ZOMBIE, State.ORPHANED)
ORPHAN = host(holding(7, 2 * GIB, State.ORPHANED, why="its parent has ended"))
POD = held_by(MIB, owner=Owner("pod", "train-1"))
GRAPHICS = replace(holding(7, 4 * MIB), kinds="G")
HIDDEN = HiddenHolder(9, 900, "cuda", "python", "ann", (0,))
CUDA, OPEN = host(hidden=(HIDDEN,)), host(hidden=(HIDDEN._replace(kind="unknown"),))
MANAGED = host(holding(7, uncharged=managed(8 * GIB)), unattributed=9 * MIB)
MANAGED_ORPHAN = host(holding(7, 16 * MIB, State.ORPHANED, uncharged=managed(GIB)))

CASES = {
    "nothing": Case(CLEAN, host(), said=": clean"),
    "as much as the limit": Case(CLEAN, host(unattributed=MAX_LEFTOVER)),
    "a byte above the limit": Case(NOT_CLEAN, host(unattributed=MAX_LEFTOVER + 1)),
    **{f"half of the limit {each}": Case(CLEAN, leftover(HALF, each)) for each in LEFT},
    **{f"a byte more {each}": Case(NOT_CLEAN, leftover(HALF + 1, each)) for each in LEFT},
    "an orphan": Case(
        NOT_CLEAN, ORPHAN, said="orphaned pid 7 train.py of user ada holds 2.00 GiB (its parent has ended)"
    ),
    "an orphan of an allowed owner": Case(NOT_CLEAN, ORPHAN, owners("ada", live=True)),
    "a pod's process is the pod's": Case(CLEAN, POD, owners("pod:train-1")),
    "a pod's process is not its user's": Case(NOT_CLEAN, POD, owners("ada")),
    "a display server": Case(CLEAN, host(GRAPHICS)),
    "graphics with much memory": Case(NOT_CLEAN, host(replace(GRAPHICS, memory=2 * GIB))),
    "graphics with CUDA": Case(NOT_CLEAN, host(replace(GRAPHICS, kinds="CG"))),
    "graphics of unknown size": Case(NOT_CLEAN, host(replace(GRAPHICS, memory=None))),
    "root's program with the name of a server": Case(
        NOT_CLEAN, held_by(66 * MIB, command=SERVER, user="root", uid=0)
    ),
    "a user's program of that name": Case(NOT_CLEAN, held_by(66 * MIB, command=SERVER, user="root")),
    "a server of root's daemon": Case(CLEAN, mps(0, "root")),
    "a server of root's daemon with much": Case(NOT_CLEAN, mps(0, "root", MAX_LEFTOVER + 1)),
    "a server of a user's daemon": Case(NOT_CLEAN, mps(990, "mps")),
    "a server of an allowed daemon": Case(CLEAN, mps(990, "mps"), owners("mps")),
    "a hidden program with CUDA": Case(NOT_CLEAN, CUDA, said="pid 9 python of user ann"),
    "a hidden program that is allowed": Case(CLEAN, CUDA, owners("ann")),
    "an open device file": Case(CLEAN, OPEN, said="pid 9 python of user ann"),
    "an old driver's reserve": Case(
        CLEAN, snapshot(device(0, reserved=None, unattributed=700 * MIB, hidden=())), said="not judged"
    ),
    "managed memory": Case(NOT_CLEAN, MANAGED, said="holds 8.50 GiB, 8.00 GiB of it uncharged"),
    "managed memory of an allowed owner": Case(CLEAN, MANAGED, owners("ada")),
    "managed memory of an orphan": Case(NOT_CLEAN, MANAGED_ORPHAN, LIVE),
    "bytes of an orphan and a live one": Case(CLEAN, shared(State.ACTIVE), LIVE),
    "bytes of two orphans": Case(NOT_CLEAN, shared(State.ORPHANED), LIVE),
    "no driver": Case(CANNOT_TELL, failed("no-driver", "there is no driver")),
    "another namespace": Case(CANNOT_TELL, replace(host(), host_pid_namespace=False)),
    "an unknown namespace": Case(CANNOT_TELL, replace(host(), host_pid_namespace=None)),
    "no answer": Case(CANNOT_TELL, host(up=False)),
    "no ledger": Case(CANNOT_TELL, host(ledger=None)),
    "a GPU that sleeps": Case(
        CANNOT_TELL,
        host(up=False, ledger=None, reading=empty().reading.without_data("asleep")),
        said="asleep: it was not asked",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_clean(case: Case) -> None:
    """Leftovers beyond the limit and holders who are not allowed are not clean; doubt is not called clean."""
    verdicts = check_devices(case.shot, NOBODY, case.tolerance)
    text = "\n".join(each.line for each in verdicts)
    assert overall_status(verdicts) == case.expected
    assert case.said in text
    assert ("0.00 GiB" in text, "NOT CLEAN" in text) == (False, case.expected == NOT_CLEAN)


@pytest.mark.parametrize("state", [State.ACTIVE, State.IDLE, State.STOPPED, State.UNKNOWN])
def test_a_live_process_counts_unless_it_is_welcome(state: State) -> None:
    """A live process fails the check, unless all are allowed or its owner is."""
    for tolerance in (LIVE, owners("ada"), owners("user:ada")):
        assert overall_status(check_devices(host(holding(7, MIB, state)), NOBODY, tolerance)) == CLEAN
    for tolerance in (NO_TOLERANCE, owners("pod:ada", "bob")):
        assert overall_status(check_devices(host(holding(7, MIB, state)), NOBODY, tolerance)) == NOT_CLEAN


@pytest.mark.parametrize("action", RECOVERY_ACTIONS)
def test_a_gpu_that_the_driver_wants_recovered_is_not_clean(action: str) -> None:
    """Whatever else the driver answers, only a GPU that needs nothing is clean; the reason names the step."""
    shot = snapshot(reread(empty(), hardware={"device_recovery_action": {action: 1.0}}))
    (verdict,) = check_devices(shot, NOBODY, LIVE)
    assert verdict.status == (CLEAN if action == "none" else NOT_CLEAN)
    assert (f"asks for {action}" in verdict.line) == (action != "none")


def test_an_instance_of_a_gpu_that_must_be_reset_is_not_clean() -> None:
    """MIG instances cannot be used either where their GPU must be reset."""
    whole = reread(empty(), divided=True, reset_required=True, words="GPU requires reset")
    part = reread(device(1, (), hidden=()), parent=whole.reading.uuid)
    (verdict,) = check_devices(snapshot(replace(whole, ledger=None), part), NOBODY, NO_TOLERANCE)
    assert (verdict.uuid, verdict.status) == (part.reading.uuid, NOT_CLEAN)
    assert "GPU requires reset" in verdict.line


@pytest.mark.parametrize("refused", ["Temperature", "UtilizationRates", "MemoryInfo_v2"])
def test_a_gpu_that_refuses_until_it_is_reset_is_not_clean(standin: StandIn, refused: str) -> None:
    """One query refused with "GPU requires reset" is enough, with memory and process lists or without."""
    standin.fail(f"nvmlDeviceGet{refused}", Code.RESET_REQUIRED)
    done = run("check", "--wait=100ms", driver=standin.env())
    assert done.returncode == NOT_CLEAN, done.stderr
    assert "refuses queries (GPU requires restart)" in done.stdout  # pynvml's words for code 16


@pytest.mark.parametrize(
    ("complete", "unreadable", "found"),
    [(False, 0, None), (True, 3, ()), (True, 0, None)],
    ids=["cut short", "unreadable", "no number of a device file"],
)
def test_what_was_not_searched_is_not_called_clean(
    complete: bool, unreadable: int, found: tuple[HiddenHolder, ...] | None
) -> None:
    """Where a hidden holder was not looked for, nobody can tell, unless live processes are allowed."""
    extent, shot = SearchExtent(complete, unreadable), snapshot(replace(empty(), hidden=found))
    (verdict,) = check_devices(shot, NOBODY, NO_TOLERANCE, search=extent)
    (allowed,) = check_devices(shot, NOBODY, LIVE, search=extent)
    assert (verdict.status, verdict.searched) == (CANNOT_TELL, False)
    assert "hidden holder" in verdict.line
    assert allowed.status == CLEAN
    dirty = replace(shot, devices=(replace(empty(0, holding(7)), hidden=found),))
    assert check_devices(dirty, NOBODY, NO_TOLERANCE, search=extent)[0].status == NOT_CLEAN


def divided(*instances: DeviceSnapshot, **changes: object) -> Snapshot:
    """Make a GPU that MIG divides into these."""
    whole = reread(device(0), divided=True, memory=None, processes=None, **changes)
    whole = replace(whole, ledger=None, holdings=(), up=whole.reading.error is None)
    inside = [
        reread(each, uuid=f"MIG-{number}", index=0, parent=whole.reading.uuid)
        for number, each in enumerate(instances)
    ]
    return snapshot(whole, *inside)


def test_a_divided_gpu_is_its_instances() -> None:
    """By its UUID or index all of its instances are checked, by an instance's UUID that one alone."""
    shot = divided(empty(), empty(0, holding(7, 10 * GIB)))
    uuid = shot.devices[0].key[1]
    for wanted in (NOBODY, frozenset({uuid}), frozenset({"0"})):
        verdicts = check_devices(shot, wanted, NO_TOLERANCE)
        assert [(each.uuid, each.status) for each in verdicts] == [("MIG-0", CLEAN), ("MIG-1", NOT_CLEAN)]
    (one,) = check_devices(shot, frozenset({"MIG-0"}), NO_TOLERANCE)
    assert one.status == CLEAN


@pytest.mark.parametrize(
    "shot",
    [
        divided(), divided(error="timeout"), divided(empty(), error="lost"),
        divided(empty(), failed=("mig",)), snapshot(reread(empty(), failed=("mig",))),
    ],
)  # fmt: skip
def test_a_divided_gpu_whose_instances_are_not_known(shot: Snapshot) -> None:
    """Without an instance, or where the driver did not name all of them, nobody can tell."""
    for wanted in (NOBODY, frozenset({shot.devices[0].key[1]}), frozenset({"0"})):
        assert overall_status(check_devices(shot, wanted, NO_TOLERANCE)) == CANNOT_TELL


def test_a_hidden_holder_of_a_divided_gpu_may_be_on_any_instance() -> None:
    """It uses the device file of the whole GPU: it makes no instance dirty, and none is called clean."""
    shot = divided(replace(empty(), hidden=(HIDDEN,)))
    extent = SearchExtent(complete=True, unreadable=0)
    (verdict,) = check_devices(shot, NOBODY, NO_TOLERANCE, search=extent)
    assert (verdict.status, "pid 9" in verdict.line) == (CANNOT_TELL, True)
    (welcome,) = check_devices(shot, NOBODY, owners("ann"), search=extent)
    assert welcome.status == CLEAN


def test_no_device_is_no_answer() -> None:
    """Nothing that was checked is not a clean GPU, in the JSON neither."""
    assert overall_status([]) == CANNOT_TELL
    assert leftovers([]).verdict == "cannot-tell"


def test_only_the_wanted_devices_are_judged() -> None:
    """A device is chosen by index, UUID or device file; of several devices a certain result counts first."""
    dirty = reread(device(1, [holding(7)], hidden=()), minor=5)
    shot = snapshot(empty(), dirty)

    by_file = check_devices(shot, frozenset({"/dev/nvidia5"}), NO_TOLERANCE)
    assert [(each.gpu, each.status) for each in by_file] == [("1", NOT_CLEAN)]
    for name in ("/dev/nvidia1", "/dev/nvidiaNone", "nvidia5", "5"):
        (missing,) = check_devices(shot, frozenset({name}), NO_TOLERANCE)
        assert missing.status == CANNOT_TELL

    assert [each.gpu for each in check_devices(shot, frozenset({"0"}), NO_TOLERANCE)] == ["0"]
    assert [each.gpu for each in check_devices(shot, frozenset({dirty.key[1]}), NO_TOLERANCE)] == ["1"]
    assert overall_status(check_devices(shot, frozenset({"0", "1", "9"}), NO_TOLERANCE)) == NOT_CLEAN
    assert overall_status(check_devices(shot, frozenset({"0", "9"}), NO_TOLERANCE)) == CANNOT_TELL


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


@pytest.mark.parametrize("genuine", [True, False])
def test_the_command_knows_an_mps_server_by_its_daemon(standin: StandIn, stage: Stage, genuine: bool) -> None:
    """A server of another user is allowed below root's daemon, and not below a program of that name."""
    require_host_pid_namespace()
    require_root()
    shell = Path("/bin/sh").resolve()
    daemon = stage.directory / DAEMON
    if genuine:
        shutil.copy(shell, daemon)
    else:
        daemon.symlink_to(shell)
    server = stage.start(user=65534, wrapper=[str(daemon), "-c", '"$@"; true', "sh"])
    standin.device(0).set_processes([(server.pid, 66 * MIB)])
    done = run("check", "--wait=100ms", driver=standin.env())

    assert (done.returncode == NOT_CLEAN) is not genuine, done.stdout


def test_the_command_finds_an_empty_device_clean(standin: StandIn) -> None:
    """Without holders it ends with 0, after a search of the host; with a dead pid it ends with 1."""
    require_host_pid_namespace()
    searched = sure(find_hidden_holders(Host(Path("/proc")), {os.getpid()}, set()))[1] == 0
    clean = run("check", "--json", driver=standin.env())
    assert clean.returncode == (CLEAN if searched else CANNOT_TELL), clean.stdout
    assert json.loads(clean.stdout)["devices"][0]["searched_hidden"] == searched

    standin.device(0).set_processes([(2**22, GIB)])  # one above the largest pid of Linux
    dead = run("check", "--wait=100ms", driver=standin.env())
    assert dead.returncode == NOT_CLEAN
    assert "NOT CLEAN: dead pid" in dead.stdout
    assert len(dead.stdout.splitlines()) == 1


def test_a_clean_gpu_beside_a_dirty_one_was_searched(standin: StandIn, stage: Stage) -> None:
    """Each GPU that is called clean was searched for hidden holders, whatever is found on another one."""
    require_host_pid_namespace()
    standin.device_count = 2
    standin.device(0).set_processes([(stage.start().pid, GIB)])
    done = run("check", "--wait=100ms", "--json", driver=standin.env())
    dirty, other = json.loads(done.stdout)["devices"]
    assert dirty["verdict"] == "not-clean"
    assert (other["verdict"], other["searched_hidden"]) in {("clean", True), ("cannot-tell", False)}


def test_the_command_cannot_tell_without_a_driver(standin: StandIn) -> None:
    """If the driver does not work it prints one line and ends with 3."""
    standin.driver_error = Code.DRIVER_NOT_LOADED
    done = run("check", driver=standin.env())
    assert done.returncode == CANNOT_TELL
    assert len(done.stdout.splitlines()) == 1
    assert "cannot tell" in done.stdout


def test_a_search_without_patience_is_cut_short() -> None:
    """A search that ends before it has read every process gives nothing, and not "none found"."""
    assert find_hidden_holders(Host(Path("/proc")), {os.getpid()}, set(), patience=0.0) is None


def test_one_search_finds_who_has_the_device_open(tmp_path: Path, stage: Stage) -> None:
    """A complete search names a process with the device file open, and leaves out our own processes."""
    (tmp_path / "nvidia3").touch()
    pid = stage.start(("open_file", str(tmp_path / "nvidia3"))).pid
    arguments = (Host(Path("/proc")), {os.getpid()})
    found, listed = (
        sure(find_hidden_holders(*arguments, known, devices=str(tmp_path / "nvidia")))[0]
        for known in (set[int](), {pid})
    )
    assert [(holder.pid, holder.minors) for holder in found] == [(pid, (3,))]
    assert listed == ()


def test_a_slow_sample_is_not_the_last_one(standin: StandIn) -> None:
    """A driver that takes longer than one sample waits is asked again until ``--wait`` is over."""
    require_host_pid_namespace()
    standin.hang("nvmlDeviceGetMemoryInfo_v2")
    command = [sys.executable, "-m", "vramledger", "check", "--wait=8s", "--sample.timeout=500ms"]
    with subprocess.Popen(command, env={**os.environ, **standin.env()}, stdout=subprocess.PIPE) as process:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3)
        finally:
            standin.release()
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output[:6]) == (0, b"GPU 0 ")
