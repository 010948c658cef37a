"""``vramledger check``: what is clean, what is not, and what is not known."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.builders import MIB, device, failed, holding, managed, process, snapshot
from tests.support.exporter import run
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace, require_root
from tests.support.standin.library import GIB, Code, StandIn
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
    known = replace(known, facts=structs.replace(known.facts, owner=Owner("pod", "train-1")))
    shot = snapshot(empty(0, holding(7)), processes=[known])

    assert status(shot, CheckTolerance(owners=frozenset({"pod:train-1"}))) == CLEAN
    assert status(shot, CheckTolerance(owners=frozenset({"ada"}))) == NOT_CLEAN


def test_welcome_processes_excuse_no_leftover() -> None:
    """An orphan of an allowed owner is still a leftover."""
    shot = snapshot(empty(0, holding(7, 2 * GIB, State.ORPHANED)))

    assert status(shot, CheckTolerance(live=True, owners=frozenset({"ada"}))) == NOT_CLEAN


@pytest.mark.parametrize(
    ("kinds", "memory", "expected"),
    [("G", 4 * MIB, CLEAN), ("G", 2 * GIB, NOT_CLEAN), ("CG", 4 * MIB, NOT_CLEAN), ("G", None, NOT_CLEAN)],
)
def test_a_display_server_is_no_holder(kinds: str, memory: int | None, expected: int) -> None:
    """Graphics alone with less than any CUDA context belongs to the node; its bytes are not shown as 0."""
    (verdict,) = check_devices(
        snapshot(empty(0, replace(holding(7, memory), kinds=kinds))), NOBODY, CheckTolerance()
    )

    assert verdict.status == expected
    assert "0.00 GiB" not in verdict.line


def test_a_gpu_that_sleeps_is_not_known() -> None:
    """What a sleeping GPU holds is not known: it is neither clean nor unclean, and the reason says so."""
    one = replace(empty(), up=False, ledger=None)
    asleep = replace(one, reading=one.reading.without_data("asleep"))
    (verdict,) = check_devices(snapshot(asleep), NOBODY, CheckTolerance())
    assert verdict.status == CANNOT_TELL
    assert "asleep: it was not asked" in verdict.line


@pytest.mark.parametrize("action", RECOVERY_ACTIONS)
def test_a_gpu_that_the_driver_wants_recovered_is_not_clean(action: str) -> None:
    """Whatever else the driver answers, only a GPU that needs nothing is clean; the reason names the step."""
    one = empty()
    one = replace(
        one, reading=structs.replace(one.reading, hardware={"device_recovery_action": {action: 1.0}})
    )
    (verdict,) = check_devices(snapshot(one), NOBODY, CheckTolerance(live=True))

    assert verdict.status == (CLEAN if action == "none" else NOT_CLEAN)
    assert (f"asks for {action}" in verdict.line) == (action != "none")


def test_an_instance_of_a_gpu_that_must_be_reset_is_not_clean() -> None:
    """MIG instances cannot be used either where their GPU must be reset."""
    whole, part = device(0, (), hidden=()), device(1, (), hidden=())
    refusing = structs.replace(whole.reading, divided=True, reset_required=True, words="GPU requires reset")
    instance = structs.replace(part.reading, parent=whole.reading.uuid)
    shot = snapshot(replace(whole, reading=refusing, ledger=None), replace(part, reading=instance))
    (verdict,) = check_devices(shot, NOBODY, CheckTolerance())

    assert (verdict.uuid, verdict.status) == (instance.uuid, NOT_CLEAN)
    assert "GPU requires reset" in verdict.line


@pytest.mark.parametrize(
    "refused", ["nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo_v2"]
)
def test_a_gpu_that_refuses_until_it_is_reset_is_not_clean(standin: StandIn, refused: str) -> None:
    """One query refused with "GPU requires reset" is enough, with memory and process lists or without."""
    standin.fail(refused, Code.RESET_REQUIRED)
    done = run("check", "--wait=100ms", driver=standin.env())

    assert done.returncode == NOT_CLEAN, done.stderr
    assert "refuses queries (GPU requires restart)" in done.stdout  # pynvml's words for code 16


def test_an_idle_mps_server_is_no_holder() -> None:
    """Root's MPS server with its 66 MiB belongs to the node; a user's program with that name does not."""
    server = process(7, user="root", command="nvidia-cuda-mps-server")
    assert server.facts is not None
    one = empty(0, holding(7, 66 * MIB))
    root = replace(server, facts=structs.replace(server.facts, uid=0))

    assert status(snapshot(one, processes=[root])) == CLEAN
    assert status(snapshot(one, processes=[server])) == NOT_CLEAN


def test_an_mps_server_belongs_to_whoever_runs_its_daemon() -> None:
    """A server has its client's user: the daemon's user decides whether it is the node's, or is allowed."""
    server = process(7, user="alice", command="nvidia-cuda-mps-server")
    assert server.facts is not None
    one = empty(0, holding(7, 66 * MIB))

    def started_by(uid: int, user: str, size: int = 66 * MIB) -> Snapshot:
        control = ParentFacts(
            6, 1, "nvidia-cuda-mps", "x", init=False, uid=uid, user=user, program="nvidia-cuda-mps-control"
        )
        assert server.facts is not None
        known = replace(server, facts=structs.replace(server.facts, parent=control))
        return snapshot(replace(one, holdings=(holding(7, size),)), processes=[known])

    assert status(started_by(0, "root")) == CLEAN
    assert status(started_by(0, "root", MAX_LEFTOVER + 1)) == NOT_CLEAN
    assert status(started_by(990, "mps")) == NOT_CLEAN
    assert status(started_by(990, "mps"), CheckTolerance(owners=frozenset({"mps"}))) == CLEAN


@pytest.mark.parametrize(("kind", "expected"), [("cuda", NOT_CLEAN), ("unknown", CLEAN)])
def test_a_hidden_holder_counts_when_cuda_is_loaded(kind: str, expected: int) -> None:
    """A program with CUDA loaded may take memory at any moment; an open file alone is only a remark."""
    hidden = HiddenHolder(9, 900, kind, "python", "ann", (0,))
    shot = snapshot(replace(empty(), hidden=(hidden,)))

    assert status(shot) == expected
    assert "pid 9 python of user ann" in check_devices(shot, NOBODY, CheckTolerance())[0].line
    assert status(shot, CheckTolerance(owners=frozenset({"ann"}))) == CLEAN


@pytest.mark.parametrize(
    ("extent", "found"),
    [
        (SearchExtent(complete=False, unreadable=0), None),  # cut short
        (SearchExtent(complete=True, unreadable=3), ()),
        (SearchExtent(complete=True, unreadable=0), None),  # no number of a device file
    ],
)
def test_what_was_not_searched_is_not_called_clean(
    extent: SearchExtent, found: tuple[HiddenHolder, ...] | None
) -> None:
    """Where a hidden holder was not looked for, nobody can tell, unless live processes are allowed."""
    shot = snapshot(replace(empty(), hidden=found))
    (verdict,) = check_devices(shot, NOBODY, CheckTolerance(), search=extent)
    (allowed,) = check_devices(shot, NOBODY, CheckTolerance(live=True), search=extent)

    assert (verdict.status, verdict.searched) == (CANNOT_TELL, False)
    assert "hidden holder" in verdict.line
    assert allowed.status == CLEAN
    dirty = replace(shot, devices=(replace(empty(0, holding(7)), hidden=found),))
    assert check_devices(dirty, NOBODY, CheckTolerance(), search=extent)[0].status == NOT_CLEAN


def divided(*instances: DeviceSnapshot, **changes: object) -> Snapshot:
    """Make a GPU that MIG divides into these."""
    whole = replace(device(0), ledger=None, holdings=())
    reading = structs.replace(whole.reading, divided=True, memory=None, processes=None, **changes)
    inside = [
        replace(
            each, reading=structs.replace(each.reading, uuid=f"MIG-{number}", index=0, parent=reading.uuid)
        )
        for number, each in enumerate(instances)
    ]
    return snapshot(replace(whole, reading=reading, up=reading.error is None), *inside)


def test_a_divided_gpu_is_its_instances() -> None:
    """By its UUID or index all of its instances are checked, by an instance's UUID that one alone."""
    shot = divided(empty(), empty(0, holding(7, 10 * GIB)))
    uuid = shot.devices[0].key[1]

    for wanted in (NOBODY, frozenset({uuid}), frozenset({"0"})):
        verdicts = check_devices(shot, wanted, CheckTolerance())
        assert [(each.uuid, each.status) for each in verdicts] == [("MIG-0", CLEAN), ("MIG-1", NOT_CLEAN)]
    (one,) = check_devices(shot, frozenset({"MIG-0"}), CheckTolerance())
    assert one.status == CLEAN


@pytest.mark.parametrize(
    "shot",
    [
        divided(),
        divided(error="timeout"),
        divided(empty(), error="lost"),
        divided(empty(), failed=("mig",)),
        snapshot(replace(empty(), reading=structs.replace(empty().reading, failed=("mig",)))),
    ],
)
def test_a_divided_gpu_whose_instances_are_not_known(shot: Snapshot) -> None:
    """Without an instance, or where the driver did not name all of them, nobody can tell."""
    for wanted in (NOBODY, frozenset({shot.devices[0].key[1]}), frozenset({"0"})):
        assert overall_status(check_devices(shot, wanted, CheckTolerance())) == CANNOT_TELL


def test_a_hidden_holder_of_a_divided_gpu_may_be_on_any_instance() -> None:
    """It uses the device file of the whole GPU: it makes no instance dirty, and none is called clean."""
    hidden = HiddenHolder(9, 900, "cuda", "python", "ann", (0,))
    shot = divided(replace(empty(), hidden=(hidden,)))
    extent = SearchExtent(complete=True, unreadable=0)

    (verdict,) = check_devices(shot, NOBODY, CheckTolerance(), search=extent)
    assert (verdict.status, "pid 9" in verdict.line) == (CANNOT_TELL, True)
    (welcome,) = check_devices(shot, NOBODY, CheckTolerance(owners=frozenset({"ann"})), search=extent)
    assert welcome.status == CLEAN


def test_no_device_is_no_answer() -> None:
    """Nothing that was checked is not a clean GPU, in the JSON neither."""
    assert overall_status([]) == CANNOT_TELL
    assert leftovers([]).verdict == "cannot-tell"


def test_an_old_driver_s_reserve_is_no_leftover() -> None:
    """Where the driver's reserve counts as unattributed, unattributed is not judged, and the line says so."""
    shot = snapshot(device(0, reserved=None, unattributed=700 * MIB, hidden=()))

    assert status(shot) == CLEAN
    assert "not judged" in check_devices(shot, NOBODY, CheckTolerance())[0].line


def test_managed_memory_of_a_live_owner_is_not_a_leftover() -> None:
    """8 GiB of managed memory count as their holder's: alone they refuse, an allowed owner is clean."""
    live = empty(9 * MIB, holding(7, uncharged=managed(8 * GIB)))

    (refused,) = check_devices(snapshot(live), NOBODY, CheckTolerance())
    assert refused.status == NOT_CLEAN
    assert "holds 8.50 GiB, 8.00 GiB of it uncharged" in refused.line
    assert "unattributed" not in refused.line
    assert status(snapshot(live), CheckTolerance(owners=frozenset({"ada"}))) == CLEAN


def test_managed_memory_of_the_dead_counts_as_theirs() -> None:
    """A small orphan with much managed memory is a leftover beyond the limit."""
    orphan = holding(7, 16 * MIB, State.ORPHANED, uncharged=managed(GIB))

    assert status(snapshot(empty(0, orphan)), CheckTolerance(live=True)) == NOT_CLEAN


@pytest.mark.parametrize(("state", "expected"), [(State.ACTIVE, CLEAN), (State.ORPHANED, NOT_CLEAN)])
def test_bytes_of_several_holders(state: State, expected: int) -> None:
    """Bytes that one of several holders has are a leftover only if every one of them is a leftover."""
    both = [holding(7, 16 * MIB, State.ORPHANED), holding(8, 16 * MIB, state)]
    shared = UndividedBytes(GIB, (7, 8), state, False, None)

    assert (
        status(
            snapshot(device(0, both, unattributed=0, undivided=shared, hidden=())), CheckTolerance(live=True)
        )
        == expected
    )


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
    """A device is chosen by index, UUID or device file; of several devices a certain result counts first."""
    dirty = device(1, [holding(7)], hidden=())
    dirty = replace(dirty, reading=structs.replace(dirty.reading, minor=5))
    shot = snapshot(empty(), dirty)

    by_file = check_devices(shot, frozenset({"/dev/nvidia5"}), CheckTolerance())
    assert [(each.gpu, each.status) for each in by_file] == [("1", NOT_CLEAN)]
    for name in ("/dev/nvidia1", "/dev/nvidiaNone", "nvidia5", "5"):
        (missing,) = check_devices(shot, frozenset({name}), CheckTolerance())
        assert missing.status == CANNOT_TELL

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


@pytest.mark.parametrize("genuine", [True, False])
def test_the_command_knows_an_mps_server_by_its_daemon(standin: StandIn, stage: Stage, genuine: bool) -> None:
    """A server of another user is allowed below root's daemon, and not below a program of that name."""
    require_host_pid_namespace()
    require_root()
    shell = Path("/bin/sh").resolve()
    daemon = stage.directory / "nvidia-cuda-mps-control"
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
    found = find_hidden_holders(Host(Path("/proc")), {os.getpid()}, set())
    assert found is not None
    searched = found[1] == 0
    clean = run("check", "--json", driver=standin.env())
    assert clean.returncode == (CLEAN if searched else CANNOT_TELL), clean.stdout
    assert json.loads(clean.stdout)["devices"][0]["searched_hidden"] == searched

    standin.device(0).set_processes([(2**22, GIB)])  # one above the largest pid of Linux
    dead = run("check", "--wait=100ms", driver=standin.env())
    assert dead.returncode == NOT_CLEAN
    assert "NOT CLEAN: dead pid" in dead.stdout
    assert len(dead.stdout.splitlines()) == 1


def test_the_command_checks_the_instances_of_a_divided_gpu(standin: StandIn, stage: Stage) -> None:
    """Given the GPU's own UUID, the command finds what is held on an instance, and an empty one is clean."""
    require_host_pid_namespace()
    first, second = standin.device(0).divide("3g.71gb", "3g.71gb")
    second.set_processes([(stage.start().pid, 10 * GIB)])
    uuid = standin.device(0).uuid
    done = run("check", "--wait=100ms", "--json", f"--gpu={uuid}", driver=standin.env())
    whole = run("check", "--wait=100ms", driver=standin.env())

    said = json.loads(done.stdout)
    assert done.returncode == said["exit_status"] == NOT_CLEAN
    verdicts = {each["uuid"]: each["verdict"] for each in said["devices"]}
    assert verdicts.keys() == {first.uuid, second.uuid}
    assert (verdicts[first.uuid], verdicts[second.uuid]) != ("clean", "clean")
    assert whole.returncode == NOT_CLEAN
    assert len(whole.stdout.splitlines()) == 2


def test_the_command_blames_a_compute_instance_for_its_own_holders(standin: StandIn, stage: Stage) -> None:
    """What a sibling holds in the memory that they share is not a leftover of an empty compute instance."""
    require_host_pid_namespace()
    full, empty_one = standin.device(0).divide("1c.3g.71gb", "2c.3g.71gb")
    for each in (full, empty_one):
        each.set_memory(used=10 * GIB)
    full.set_processes([(stage.start().pid, 10 * GIB)])
    done = run("check", "--wait=100ms", "--json", driver=standin.env())

    verdicts = {each["uuid"]: each for each in json.loads(done.stdout)["devices"]}
    assert verdicts[full.uuid]["verdict"] == "not-clean"
    assert verdicts[empty_one.uuid]["verdict"] != "not-clean"
    assert "unattributed" not in {each["kind"] for each in verdicts[empty_one.uuid]["reasons"]}


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
    found = find_hidden_holders(*arguments, set(), devices=str(tmp_path / "nvidia"))
    listed = find_hidden_holders(*arguments, {pid}, devices=str(tmp_path / "nvidia"))

    assert found is not None
    assert [(holder.pid, holder.minors) for holder in found[0]] == [(pid, (3,))]
    assert listed is not None
    assert listed[0] == ()


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
