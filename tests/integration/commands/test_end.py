"""``vramledger end``: which holders it selects and refuses, and that it never signals others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.support.builders import MIB, device, holding, process, snapshot
from tests.support.exporter import run
from tests.support.players.listed import listed_while_alive
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace
from tests.support.standin.library import GIB, Code, StandIn
from tests.support.sure import sure
from vramledger.commands.end import _confirm
from vramledger.commands.termination import EndTarget, Selection, end_targets, select_targets
from vramledger.errors import VramledgerError
from vramledger.model.reading import HiddenHolder, ProcessRow, ProcessUtilization, Reading
from vramledger.model.snapshot import DeviceSnapshot, Grade, Snapshot, State
from vramledger.readers.hosts.host import Host
from vramledger.verdicts.cleanliness import CANNOT_TELL

HOST = Host(Path("/proc"))

STUBBORN = ("ignore", "SIGTERM")


def start_of(pid: int) -> int | None:
    """Return the start time of a real process."""
    row = HOST.row(pid)
    return None if row is None else row.start


def target(pid: int, start: int | None, *states: State) -> EndTarget:
    """Make a target that may be ended."""
    return EndTarget(pid, start, "it", {("0", "GPU-0"): MIB}, frozenset(states), "why", Grade.PROVEN, None)


def crowd() -> Snapshot:
    """Make a holder in every state on GPU 0, its pid 10 and up, and one of bob beside an orphan on GPU 1."""
    pids = {state: 10 + number for number, state in enumerate(State)}
    one = device(0, [replace(holding(pid, MIB, state), working=False) for state, pid in pids.items()])
    orphan = replace(holding(pids[State.ORPHANED], GIB, State.ORPHANED), working=False)
    two = device(1, [holding(20, MIB, State.IDLE), orphan])
    present = [pid for state, pid in pids.items() if state not in (State.DEAD, State.UNKNOWN)]
    rows = {pid: ProcessRow(pid, pid * 100, "S", 5, pid, pid, 0, 2) for pid in (*present, 20)}
    known = [process(pid) for pid in present] + [process(20, user="bob")]
    return replace(snapshot(one, two, processes=known), rows=rows)


def selecting(**several: set[Any]) -> Selection:
    """Select by several values of each selector."""
    wanted: dict[str, Any] = {name: frozenset(values) for name, values in several.items()}
    return Selection(**wanted)


def holder_of(pid: int, row: str, *devices: DeviceSnapshot, parent: int = 1, threads: int = 1) -> Snapshot:
    """Make a host where the kernel has this state for a process."""
    shot = snapshot(*devices, processes=[process(pid)])
    return replace(shot, rows={pid: ProcessRow(pid, pid * 100, row, parent, pid, pid, 0, threads)})


def chosen(shot: Snapshot, selection: Selection, own: Iterable[int] = ()) -> dict[int, str | None]:
    """Return the refusals of the selected holders by pid."""
    return {each.pid: each.refusal for each in select_targets(shot, selection, set(own))}


def test_selectors_narrow_each_other() -> None:
    """One of several values of a selector is enough; with several selectors all must match."""
    shot = crowd()
    idle, left, first, second = {State.IDLE}, {State.IDLE, State.ORPHANED}, {"0"}, {"1"}
    assert set(chosen(shot, selecting(states=idle))) == {15, 20}
    assert set(chosen(shot, selecting(states=left))) == {13, 15, 20}
    assert set(chosen(shot, selecting(states=left, gpus=second))) == {13, 20}
    assert set(chosen(shot, selecting(states=idle, owners={"user:bob"}))) == {20}
    assert set(chosen(shot, selecting(owners={"bob"}, gpus=first))) == set()
    assert set(chosen(shot, selecting(pids={13, 15}, states=idle))) == {15}


def test_who_is_refused() -> None:
    """Dead, stuck and unknown holders are never ended, and active ones only if they are named by pid."""
    refused = {pid: why for pid, why in chosen(crowd(), selecting(gpus={"0"})).items() if why is not None}
    assert set(refused) == {10, 12, 16, 17}
    assert "reset" in refused[10]
    assert "no signal ends it" in refused[12]
    assert "--pid" in refused[16]
    assert "may not see" in refused[17]
    assert chosen(crowd(), selecting(pids={16})) == {16: None}
    assert chosen(crowd(), selecting(pids={12}))[12] is not None


@pytest.mark.parametrize("working", [True, False, None])
def test_an_orphan_that_still_works_is_left_alone_unless_told_otherwise(working: bool | None) -> None:
    """Nor is one ended of which that is not known on every GPU; its pid or --working ends each of them."""
    one, two = (replace(holding(7, MIB, State.ORPHANED), working=each) for each in (False, working))
    shot = holder_of(7, "S", device(0, [one]), device(1, [two]))
    orphaned = selecting(states={State.ORPHANED})
    (refusal,) = chosen(shot, orphaned).values()
    assert (refusal is None) is (working is False)
    assert refusal is None or "--working" in refusal
    assert chosen(shot, replace(orphaned, working=True)) == {7: None}
    assert chosen(shot, selecting(pids={7})) == {7: None}


def test_an_orphan_that_is_only_inferred_is_left_alone_unless_it_is_named() -> None:
    """Somebody may want it, whatever it does; --working does not mean it either."""
    orphan = replace(holding(7, MIB, State.ORPHANED), working=None, grade=Grade.INFERRED)
    shot = holder_of(7, "S", device(0, [orphan]))
    for selected in ({"states": {State.ORPHANED}}, {"owners": {"ada"}}, {"gpus": {"0"}}):
        assert "only inferred" in str(chosen(shot, replace(selecting(**selected), working=True))[7])
    assert chosen(shot, selecting(pids={7})) == {7: None}


@pytest.mark.parametrize("state", [State.ZOMBIE, State.DEAD])
def test_who_keeps_the_bytes_of_the_dead_is_named_and_can_be_ended(state: State) -> None:
    """No signal reaches who has exited, and its parent keeps nothing: a child that it had forked does."""
    heir = HiddenHolder(33, 3300, "cuda", "worker.py", "ann", (0,))
    shot = snapshot(device(0, [holding(7, GIB, state)], hidden=(heir,)), processes=[process(7)])
    shot = replace(shot, rows={7: ProcessRow(7, 700, "Z", 1, 7, 7, 0, 1)} if state is State.ZOMBIE else {})
    assert "hidden pid 33 has the GPU open" in str(chosen(shot, selecting(pids={7}))[7])
    assert chosen(shot, selecting(pids={33})) == {33: None}
    assert chosen(shot, selecting(pids={33}), own=[33])[33] is not None
    (named,) = select_targets(shot, selecting(pids={33}), ())
    assert "would end pid 33 worker.py of user ann: hidden, an unknown amount on GPU 0" in named.line


def test_a_divided_gpu_means_its_instances() -> None:
    """Who is on an instance is selected by the instance, by its GPU's UUID and by its GPU's index."""
    one = device(3, [holding(7, MIB, State.IDLE)], uuid="MIG-7")
    shot = snapshot(replace(one, reading=structs.replace(one.reading, parent="GPU-whole")))
    for name in ("MIG-7", "GPU-whole", "3"):
        assert set(chosen(shot, selecting(gpus={name}))) == {7}
    assert set(chosen(shot, selecting(gpus={"GPU-other"}))) == set()


def test_a_holder_that_is_active_on_another_gpu_is_active() -> None:
    """A holder that is idle on this device and active on another is not ended for being idle."""
    shot = holder_of(7, "S", device(0, [holding(7, MIB, State.IDLE)]), device(1, [holding(7, MIB)]))
    (refusal,) = chosen(shot, selecting(gpus={"0"}, states={State.IDLE})).values()
    assert "active" in str(refusal)


def test_init_and_ourselves_are_refused() -> None:
    """Neither pid 1 nor this program or the processes that started it are ended, not even by pid."""
    shot = snapshot(device(0, [holding(1), holding(50)]))
    shot = replace(shot, rows={pid: ProcessRow(pid, pid * 100, "S", 0, 1, 1, 0, 1) for pid in (1, 50)})
    assert all(chosen(shot, selecting(pids={1, 50}), own={50}).values())


def test_what_has_exited_cannot_be_ended() -> None:
    """A zombie without threads waits for its parent, which keeps nothing; one with live threads can end."""
    zombie = device(0, [holding(7, MIB, State.ZOMBIE)])
    gone, threads = (holder_of(7, "Z", zombie, parent=5, threads=each) for each in (1, 2))
    assert "(pid 5) has not reaped it keeps no memory" in str(chosen(gone, selecting(pids={7}))[7])
    assert chosen(threads, selecting(pids={7})) == {7: None}


# --- real processes ----------------------------------------------------------------------------------


def test_another_process_under_the_pid_is_not_hit(stage: Stage) -> None:
    """If the start time is not that of the holder, no signal is sent."""
    bystander = stage.start()
    (ending,) = end_targets([target(bystander.pid, sure(start_of(bystander.pid)) - 1)], start_of, 5.0)
    assert "another process" in str(ending.outcome)
    assert bystander.running


def test_a_pid_that_changes_hands_while_we_look_is_not_hit(stage: Stage) -> None:
    """The identity is checked after the pidfd is open: a later process with the pid is never signalled."""
    bystander = stage.start()
    opened: list[int] = []

    def replaced(pid: int) -> int | None:
        opened.append(pid)
        return None  # between the pidfd and this check its process has ended

    (ending,) = end_targets([target(bystander.pid, start_of(bystander.pid))], replaced, 5.0)
    assert opened == [bystander.pid]
    assert ending.ended
    assert bystander.running


def test_a_stopped_process_may_act_on_sigterm(stage: Stage) -> None:
    """A stopped process is continued, and ends by SIGTERM and not by SIGKILL."""
    stopped = stage.start()
    stopped.stop()
    (ending,) = end_targets([target(stopped.pid, start_of(stopped.pid), State.STOPPED)], start_of, 30.0)
    assert ending.outcome == "ended by SIGTERM"
    assert stopped.wait() == -signal.SIGTERM


def test_who_is_gone_already_is_ended(stage: Stage) -> None:
    """A process that has ended by itself is not a failure."""
    holder = stage.start()
    start = start_of(holder.pid)
    holder.end()
    (ending,) = end_targets([target(holder.pid, start)], start_of, 5.0)
    assert (ending.ended, ending.outcome) == (True, "it has ended by itself")


def test_what_is_not_permitted_is_one_line(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """A signal that the kernel refuses is reported with the remedy, and the command does not wait for it."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    holder = stage.start()
    (ending,) = end_targets([target(holder.pid, start_of(holder.pid))], start_of, 60.0)
    assert not ending.ended
    assert str(ending.outcome).startswith("not permitted")


def test_an_old_kernel_is_said(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """Without pidfd_open no signal is sent, and the message names the kernel that has it."""
    monkeypatch.delattr(os, "pidfd_open")
    holder = stage.start()
    with pytest.raises(VramledgerError, match=r"5\.3"):
        end_targets([target(holder.pid, start_of(holder.pid))], start_of, 5.0)


# --- the command -------------------------------------------------------------------------------------


def test_the_command_ends_only_when_told_to(standin: StandIn, stage: Stage) -> None:
    """Without --yes it lists; with it the holders end, and it reports the freed memory."""
    require_host_pid_namespace()
    meek, stubborn = stage.start(), stage.start(STUBBORN)
    with listed_while_alive(standin, meek, stubborn):
        pids = [f"--pid={meek.pid}", f"--pid={stubborn.pid}"]
        dry = run("end", *pids, driver=standin.env())
        assert (meek.running, stubborn.running) == (True, True)

        done = run("end", *pids, "--grace=500ms", "--yes", driver=standin.env())

    assert dry.returncode == 0, dry.stdout + dry.stderr
    assert f"would end pid {meek.pid}" in dry.stdout
    assert dry.stdout.endswith("dry run; add --yes to do it\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended by SIGTERM; 1.00 GiB on GPU 0 freed after" in done.stdout
    assert "ended by SIGKILL; 1.00 GiB on GPU 0 freed after" in done.stdout
    assert "used 2.00 GiB before, 0.00 GiB now" in done.stdout


def test_the_command_has_nothing_to_do(standin: StandIn) -> None:
    """If no holder matches, this is not a failure; a named pid that holds nothing is one."""
    require_host_pid_namespace()
    nobody = run("end", "--state=orphaned", "--yes", driver=standin.env())
    wrong = run("end", f"--pid={os.getpid()}", "--yes", driver=standin.env())
    assert (nobody.returncode, nobody.stdout) == (0, "no holder is selected, there is nothing to end\n")
    assert wrong.returncode == 1
    assert f"pid {os.getpid()} is not selected" in wrong.stdout


def test_a_gpu_that_does_not_exist(standin: StandIn, stage: Stage) -> None:
    """A name that the driver does not know ends no process, not even on other GPUs, and is an error."""
    require_host_pid_namespace()
    holder = stage.start()
    with listed_while_alive(standin, holder):
        for gpu in ("9", "GPU-no-such", ""):
            selectors = [f"--pid={holder.pid}", "--gpu=0", f"--gpu={gpu}"]
            done = run("end", *selectors, "--yes", driver=standin.env())
            assert done.returncode == CANNOT_TELL, done.stdout
            assert done.stdout == f"GPU {gpu}: the driver lists no such GPU; nothing was ended\n"
        assert holder.running


@pytest.mark.parametrize("selector", ["--gpu=1", "--state=orphaned"])
def test_a_gpu_without_data_is_not_free_of_holders(standin: StandIn, selector: str) -> None:
    """What a GPU that does not answer holds is not known: the command reports that and fails."""
    require_host_pid_namespace()
    standin.device_count = 2
    standin.device(1).lost = True
    done = run("end", selector, "--yes", driver=standin.env())
    assert done.returncode == CANNOT_TELL, done.stdout
    assert "its holders are not known" in done.stdout


VERSIONS = {"MemoryInfo": ("", "_v2"), "ComputeRunningProcesses": ("", "_v2", "_v3")}


@pytest.mark.parametrize(("name", "status"), [("MemoryInfo", 0), ("ComputeRunningProcesses", CANNOT_TELL)])
def test_a_gpu_without_a_ledger_may_have_known_holders(standin: StandIn, name: str, status: int) -> None:
    """Where NVML gives no memory (unified memory) the holders are known; without a list they are not."""
    require_host_pid_namespace()
    for version in VERSIONS[name]:
        standin.fail(f"nvmlDeviceGet{name}{version}", Code.NOT_SUPPORTED)
    done = run("end", "--state=orphaned", "--yes", "--working", driver=standin.env())
    assert done.returncode == status, done.stdout
    assert ("its holders are not known" in done.stdout) == (status != 0)


def test_the_command_ends_who_holds_unknown_bytes(standin: StandIn, stage: Stage) -> None:
    """A holder on an instance of a divided GPU, with bytes that NVML does not report, ends; nothing is 0."""
    require_host_pid_namespace()
    (instance,) = standin.device(0).divide("7g.141gb")
    holder = stage.start()
    with listed_while_alive(instance, holder, memory=None):
        selectors = [f"--gpu={standin.device(0).uuid}", f"--pid={holder.pid}"]
        done = run("end", *selectors, "--yes", driver=standin.env())

    assert done.returncode == 0, done.stdout + done.stderr
    assert "an unknown amount on GPU 0 freed after" in done.stdout
    assert f"would end pid {holder.pid}" in done.stdout


def test_the_command_never_ends_who_got_a_holders_pid(standin: StandIn, stage: Stage, tmp_path: Path) -> None:
    """A program without a GPU is never ended, named by pid or not; a dead process held the bytes."""
    require_host_pid_namespace()
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(bytes(4096))
    holder, bystander = stage.start(("map_file", str(library))), stage.start()
    standin.device(0).set_processes([(holder.pid, GIB), (bystander.pid, GIB)])

    for selector in (f"--pid={bystander.pid}", "--gpu=0"):
        done = run("end", selector, "--yes", driver=standin.env())
        assert f"would not end pid {bystander.pid}" in done.stdout
        assert "its process has ended" in done.stdout
    assert (holder.running, bystander.running) == (True, True)

    check = run("check", "--wait=100ms", "--allow-live", driver=standin.env())
    assert f"dead pid {bystander.pid}" in check.stdout
    assert check.returncode == 1


def test_what_an_exporter_says_is_checked_by_what_the_command_sees(stage: Stage) -> None:
    """Who is said to be stopped, idle or orphaned, and runs or works as we see it, is ended only by pid."""
    player = stage.start()
    shown = device(0, [holding(player.pid)]).reading

    def refusal(*states: State, selection: Selection, sm: float = 0.0) -> str | None:
        row = ProcessUtilization(player.pid, 1.0, sm, 0.0, 0.0, 0.0)
        reading = Reading(1.0, 1.0, devices=(structs.replace(shown, process_utilization=(row,)),))
        asked = target(player.pid, start_of(player.pid), *states)
        return _confirm(asked, reading, HOST, selection).refusal

    by_state, by_pid = Selection(states=frozenset(State)), selecting(pids={player.pid})
    assert refusal(State.IDLE, selection=by_state) is None
    assert "it is not stopped now" in str(refusal(State.STOPPED, selection=by_state))
    assert "it works on the GPU now" in str(refusal(State.ORPHANED, selection=by_state, sm=0.5))
    assert refusal(State.STOPPED, selection=by_pid, sm=0.5) is None
    working = replace(by_state, working=True)
    assert refusal(State.ORPHANED, selection=working, sm=0.5) is None
    assert "it works on the GPU now" in str(refusal(State.IDLE, selection=working, sm=0.5))
    assert "it is not stopped now" in str(refusal(State.STOPPED, selection=working))
    player.stop()
    assert refusal(State.STOPPED, selection=by_state) is None
