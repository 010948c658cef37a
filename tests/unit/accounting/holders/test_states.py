"""The states: their rules on relations that were measured, and how long they last."""

from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.support import builders
from tests.support.host.model import GIB, Fate, Process
from tests.support.host.one_holder import PID, SHELL, START, OneHolder
from tests.support.host.programs import Fixed
from tests.support.host.scrapes import SimulatedExporter
from tests.support.sure import sure
from vramledger.accounting.holders import states
from vramledger.accounting.tracker import TOLD_AFTER
from vramledger.model.holder_facts import Ties
from vramledger.model.reading import DriverWait, ParentFacts, ProcessEntry, ProcessFacts, ProcessRow, XidEvent
from vramledger.model.snapshot import DeviceSnapshot, Grade, Holding, Snapshot, State
from vramledger.storage.recorder import summarise
from vramledger.storage.tables import marks_between
from vramledger.views.ledger_json import snapshot_json

INIT = ParentFacts(1, 1, "systemd", "systemd", init=True)
PYTHON = ParentFacts(500, 50, "python3", "train.py", init=False)
ROW = ProcessRow(1000, 100, "S", 1, 1000, 400, 0, 3)
"""A process that leads its own group in a shell's session, adopted by pid 1."""
ADOPTED = Ties(1000, 100, adopted=True, worker=False)
WORKER = ADOPTED._replace(worker=True, severed=2)
"""What ties a process that was adopted: nothing is known of it, or it is a worker without a launcher."""
PLAIN = ROW._replace(pgrp=900)
"""A process that leads nothing."""


def judge(
    ties: Ties | None, row: ProcessRow = ROW, facts: ProcessFacts | None = None, first: ParentFacts = INIT
) -> tuple[Grade, str] | None:
    """Judge a process that is adopted now, and whose first parent was ``first``."""
    facts = facts or job()
    verdict = states.judge_orphan(row, replace(facts, parent=first), facts, ties)
    assert verdict is None or verdict.state is State.ORPHANED
    return None if verdict is None else (verdict.grade, verdict.why)


def job(parent: ParentFacts | None = INIT, **known: Any) -> ProcessFacts:  # noqa: ANN401 any field of the facts
    """Return the facts of that process; its group's leader is alive unless the test says otherwise."""
    return replace(ProcessFacts(1000, 100, parent=parent, leader_alive=True, nspid=(1000,)), **known)


@pytest.mark.parametrize("comm", ["python3", "bash", "sudo", "gdb", "watch", "monit", "systemd"])
def test_the_name_of_a_parent_decides_nothing(comm: str) -> None:
    """That a parent was seen alive and has ended is inferred, whatever it was called."""
    starter = ParentFacts(500, 50, comm, comm, init=False)
    why = f"its parent {comm} (pid 500) was seen alive and has ended; systemd (pid 1) has adopted it"
    assert judge(ADOPTED, PLAIN, first=starter) == (Grade.INFERRED, why)


@pytest.mark.parametrize("first", [INIT, PYTHON])
def test_who_was_not_looked_at_is_no_orphan(first: ParentFacts) -> None:
    """Before the first look, and where looking fails, what may excuse a process is not known."""
    assert judge(None, PLAIN, job(signs=("multiprocessing",)), first) is None


def test_a_live_parent_makes_no_orphan() -> None:
    """A DataLoader worker whose training lives is not an orphan, whatever its environment says."""
    assert judge(None, PLAIN, job(signs=("multiprocessing", "LOCAL_RANK"))) is None
    assert judge(WORKER._replace(adopted=False), PLAIN, job(signs=("multiprocessing",))) is None


@pytest.mark.parametrize("first", [INIT, PYTHON])
def test_a_worker_that_nobody_can_reach_is_proven(first: ParentFacts) -> None:
    """It is a worker by its own signs, its launcher has ended, and what connected them is dead: also late."""
    found = sure(judge(WORKER, PLAIN, job(signs=("multiprocessing",)), first))
    assert found[0] is Grade.PROVEN
    assert "what connected it to its launcher is dead" in found[1]


@pytest.mark.parametrize("first", [INIT, PYTHON])
@pytest.mark.parametrize(
    "doubt", [{"live": 1}, {"listening": True}, {"unread": 1}, {"severed": 0}], ids=lambda each: str(*each)
)
def test_every_doubt_makes_it_inferred(doubt: dict[str, Any], first: ParentFacts) -> None:
    """Somebody may reach it, or not all could be read, or nothing was severed."""
    found = sure(judge(WORKER._replace(**doubt), PLAIN, job(signs=("multiprocessing",)), first))
    assert found[0] is Grade.INFERRED


@pytest.mark.parametrize("severed", [0, 3])
def test_without_signs_of_its_own_nothing_is_proven(severed: int) -> None:
    """A severed pipe alone says nothing: a server loses its clients."""
    why = "the leader of its process group (pid 900) has ended; systemd (pid 1) has adopted it"
    assert judge(ADOPTED._replace(severed=severed), PLAIN, job(leader_alive=False)) == (Grade.INFERRED, why)


@pytest.mark.parametrize(
    ("row", "facts", "ties"),
    [
        pytest.param(ROW._replace(session=1000), job(), ADOPTED, id="daemon"),
        pytest.param(ROW, job(), ADOPTED, id="job at a prompt"),
        pytest.param(PLAIN, job(ignores=("HUP",)), ADOPTED, id="nohup"),
        pytest.param(PLAIN, job(ignores=("INT", "QUIT")), ADOPTED, id="background of a script"),
        pytest.param(PLAIN._replace(tty=34816), job(), ADOPTED, id="terminal"),
        pytest.param(PLAIN, job(cgroup=("0::/system.slice/train.service",)), ADOPTED, id="service"),
        pytest.param(PLAIN, job(), ADOPTED._replace(listening=True), id="server"),
        pytest.param(PLAIN, job(), ADOPTED._replace(live=1), id="somebody at its pipe"),
        pytest.param(PLAIN, job(), ADOPTED._replace(mates=1), id="live group"),
    ],
)
@pytest.mark.parametrize("first", [INIT, PYTHON])
def test_wanted_is_no_orphan(row: ProcessRow, facts: ProcessFacts, ties: Ties, first: ParentFacts) -> None:
    """Nobody calls what was left running on purpose an orphan, whoever has ended."""
    assert judge(ties, row, facts, first) is None


def test_signs_that_are_weak_or_not_readable() -> None:
    """A daemon is alone in its group; LOCAL_RANK infers at most; what was never read excuses nobody."""
    twice = ROW._replace(pgrp=900, session=900)
    assert judge(ADOPTED, twice, job(leader_alive=False)) is None
    assert judge(ADOPTED._replace(fellows=1), twice, job(leader_alive=False)) is not None
    by_hand = job(signs=("LOCAL_RANK",))
    alone = ROW._replace(session=1000)
    severed = ADOPTED._replace(severed=2)
    assert (judge(severed, alone, by_hand) or (None,))[0] is Grade.INFERRED
    assert judge(severed, alone, replace(by_hand, ignores=("HUP",))) is None
    own = ROW._replace(session=1000)
    titled = job(denied=("environ",))
    assert (judge(ADOPTED, own, titled, PYTHON) or (None,))[0] is Grade.INFERRED
    assert judge(ADOPTED, own, titled) is None
    assert judge(ADOPTED, own, replace(titled, ignores=("HUP",)), PYTHON) is None


@pytest.mark.parametrize(
    ("presence", "host", "state"),
    [
        ("gone", True, State.DEAD), ("gone", False, State.UNKNOWN), ("gone", None, State.UNKNOWN),
        ("denied", True, State.UNKNOWN), (None, True, State.UNKNOWN),
    ],
)  # fmt: skip
def test_dead_only_where_every_process_is_seen(presence: str, host: bool | None, state: State) -> None:
    """A pid without a process is dead only in the host's PID namespace, and only if it is really gone."""
    assert states.classify_unseen(presence, host_pid_namespace=host).state is state


def state_of(letter: str, orphan: Grade | None, threads: int = 1) -> states.StateVerdict:
    """Return the verdict on a process from the kernel's letter."""
    orphaned = None if orphan is None else states.StateVerdict(State.ORPHANED, "left", orphan)
    return sure(states.classify_process(ROW._replace(state=letter, threads=threads), orphaned))


def test_the_first_state_that_applies_wins() -> None:
    """Zombie before orphan before stopped, inferred ones last; a zombie's evidence tells of live threads."""
    assert state_of("Z", Grade.PROVEN)[0] is State.ZOMBIE
    assert state_of("T", Grade.PROVEN)[0] is State.ORPHANED
    assert state_of("T", Grade.INFERRED)[0] is State.STOPPED
    assert state_of("t", None)[0] is State.STOPPED
    assert states.classify_process(ROW._replace(state="D"), None) is None
    assert "3 other thread(s) still run" in state_of("Z", None, threads=4)[1]
    assert "not reaped" in state_of("Z", None)[1]


def meeting(*fates: Fate) -> OneHolder:
    """Return a host whose holder meets these fates at its next sample."""
    host = OneHolder()
    host.sample()
    host.holder.fates = dict.fromkeys(fates, host.now + 1)
    return host


def test_a_thread_that_sleeps_in_the_driver_for_a_minute_is_stuck() -> None:
    """Stuck is who sleeps there for more than a minute, with the function as evidence, until it wakes."""
    host = meeting("stuck")
    assert host.watch(61).state is not State.STUCK
    holding = host.watch(1)
    assert holding.state is State.STUCK
    assert holding.why.startswith(f"thread {PID + 1} has slept in the driver (os_acquire_mutex)")
    assert holding.wasted
    host = meeting("stuck")
    assert host.watch(70).state is State.STUCK
    host.holder.fates = {}
    assert host.watch(1).state is not State.STUCK


def test_the_longest_wait_of_a_process_counts() -> None:
    """The longest sleep is the evidence; a wait of an earlier process with the pid is none."""
    waits = tuple(
        DriverWait(PID, START, thread, "os_acquire_mutex", seconds)
        for thread, seconds in ((1, 61.0), (2, 90.0), (3, 70.0))
    )
    (device,) = OneHolder().sample(waits=waits).devices
    assert device.holdings[0].why.startswith("thread 2 has slept in the driver (os_acquire_mutex)")
    host = OneHolder()
    for _ in range(100):
        host.sample(waits=(DriverWait(PID, START - 1, PID, "os_acquire_mutex", 100.0),))
    assert host.sample().devices[0].holdings[0].state is not State.STUCK


def test_the_xid_errors_of_the_gpu_are_part_of_the_evidence() -> None:
    """XID errors stand beside the wait; a zombie with a thread that sleeps in the driver says that too."""
    host = meeting("stuck")
    host.sample(events=(XidEvent(host.gpu.uuid(host.now), 79, 0.0),))
    assert host.watch(70).why.endswith("this GPU has had XID 79")
    holding = meeting("headless", "stuck").watch(70)
    assert holding.state is State.ZOMBIE
    assert "has slept in the driver (os_acquire_mutex)" in holding.why


def sample(host: OneHolder, *, uses_gpu: bool | None, **changes: Any) -> DeviceSnapshot:  # noqa: ANN401 any field
    """Take a sample in which the facts of the process with the pid say whether it uses a GPU."""
    facts: ProcessFacts = replace(host.holder.facts(host.now + 1), uses_gpu=uses_gpu)
    (device,) = host.sample(**{"facts": (facts,), "device_files": True, **changes}).devices
    return device


def test_bytes_under_the_pid_of_a_program_without_a_gpu_are_dead() -> None:
    """The holder has ended, also at the first sample; nobody else is blamed or shown, in no later sample."""
    device = sample(OneHolder(), uses_gpu=False)
    (holding,) = device.holdings
    assert holding.state is State.DEAD
    assert "does not use the GPU" in holding.why
    assert holding.start is None
    assert [(each.type, each.name) for each in sure(device.owner_usage).owners] == [("unknown", "")]
    host = OneHolder()
    sample(host, uses_gpu=False)
    shot = host.sample(device_files=True)
    assert shot.devices[0].holdings[0].state is State.DEAD
    assert shot.facts_of(host.holder.pid) is None


@pytest.mark.parametrize("uses_gpu", [True, None])
def test_a_program_that_may_use_a_gpu_is_the_holder(uses_gpu: bool | None) -> None:
    """Where its files cannot be read, nothing speaks against it."""
    (holding,) = sample(OneHolder(), uses_gpu=uses_gpu).holdings
    assert holding.state is State.ACTIVE


def test_a_program_that_begins_to_use_a_gpu_is_a_holder_from_then_on() -> None:
    """The next facts say that it has the device open, so it is alive and not a dead holder."""
    host = OneHolder()
    assert sample(host, uses_gpu=False).holdings[0].state is State.DEAD
    device = sample(host, uses_gpu=True)
    assert device.holdings[0].state is State.ACTIVE
    assert "ann" in [each.name for each in sure(device.owner_usage).owners if each.held]


def test_who_is_no_bystander() -> None:
    """Nobody is, where pids are not the host's, or we see no device file, and no zombie."""
    (holding,) = sample(OneHolder(), uses_gpu=False, host_pid_namespace=None).holdings
    assert holding.state is State.UNKNOWN
    host = OneHolder()
    host.holder.fates = {"zombie": host.now}
    (holding,) = sample(host, uses_gpu=False).holdings
    assert holding.state is State.ZOMBIE
    (holding,) = sample(OneHolder(), uses_gpu=False, device_files=False).holdings
    assert holding.state is State.ACTIVE


def test_another_holder_that_is_recognised_is_enough() -> None:
    """One holder with a device file open shows that we can distinguish holders from bystanders here."""
    host = OneHolder()
    other = Process(8, {0: Fixed(GIB)}, begin=-900.0, user="ben", framework="", starter=SHELL)
    host.host.processes = [*host.host.processes, other]
    facts = (replace(other.facts(1.0), uses_gpu=True), replace(host.holder.facts(1.0), uses_gpu=False))
    (device,) = host.sample(facts=facts).devices
    assert {each.pid: each.state for each in device.holdings} == {PID: State.DEAD, 8: State.ACTIVE}


def watched(fate: Fate) -> OneHolder:
    """Return a host of an exporter, whose holder meets its fate at the next sample."""
    host = OneHolder()
    host.exporter = SimulatedExporter(host.host, idle_after=600.0, told_after=TOLD_AFTER)
    host.watch(3)
    host.holder.fates = {fate: host.now + 1}
    return host


@pytest.mark.parametrize("fate", ["zombie", "orphaned", "stopped", "dead", "unowned"])
def test_what_lasts_less_than_five_seconds_is_told_nowhere(fate: Fate) -> None:
    """State, waste and timeline are as before, and the evidence says what is seen so far."""
    host = watched(fate)
    before = summarise(host.sample(after=0.0), {})
    for shot in [host.sample() for _ in range(5)]:
        (holding,) = shot.devices[0].holdings
        assert holding.state is State.ACTIVE
        assert "so far: " in holding.why
        assert not holding.wasted
        assert list(marks_between(shot.time or 0.0, before, summarise(shot, {}))) == []


@pytest.mark.parametrize(
    ("fate", "state"),
    [
        ("zombie", State.ZOMBIE), ("orphaned", State.ORPHANED), ("stopped", State.STOPPED),
        ("dead", State.DEAD), ("unowned", State.ORPHANED),
    ],
)  # fmt: skip
def test_what_lasts_is_told_with_its_own_beginning(fate: Fate, state: State) -> None:
    """After five seconds the state is told, and it has been so since it began."""
    host = watched(fate)
    first = host.sample().time
    holding = host.watch(5)
    assert holding.state is state
    assert holding.since == first
    assert "so far" not in holding.why


def test_an_end_that_goes_through_several_states_is_none_of_them() -> None:
    """Neither an end through several states nor stops with work between them is told as a state."""
    host = watched("orphaned")
    now = host.now + 1
    host.holder.fates = {"orphaned": now, "zombie": now + 3, "dead": now + 5}
    assert {host.holding().state for _ in range(9)} == {State.ACTIVE}
    host = watched("stopped")
    host.sample()
    for second in range(30):
        host.driver_says(processes=(ProcessEntry(PID, GIB + second, "C"),))  # it allocates
        assert host.holding().state is State.ACTIVE, second


def test_a_main_thread_that_has_ended_makes_no_zombie_of_threads_that_work() -> None:
    """It works, and nothing is wasted; it is a zombie once none of its threads works."""
    host = watched("headless")
    host.exporter = SimulatedExporter(host.host, idle_after=10.0)
    host.program.work = 0.5
    holding = host.watch(20)
    assert (holding.state, holding.grade, holding.wasted) == (State.ACTIVE, Grade.PROVEN, False)
    assert "its main thread has exited, 3 other thread(s) still run" in holding.why
    host.program.work = 0.0
    holding = host.watch(15)
    assert (holding.state, holding.wasted) == (State.ZOMBIE, True)
    assert holding.grade is not Grade.INFERRED


def test_an_idle_program_whose_launcher_has_ended_is_idle() -> None:
    """What is proven is told before what is only inferred, and the evidence has both."""
    host = meeting("orphaned")
    ties = Ties(PID, host.holder.start, adopted=True, worker=True)
    for _ in range(15):
        shot = host.sample(ties=(ties,))
    (holding,) = shot.devices[0].holdings
    assert holding.state is State.IDLE
    assert holding.grade is not Grade.INFERRED
    assert "was seen alive and has ended" in holding.why


def wasted_seconds(shot: Snapshot) -> list[float | None]:
    """Return what each owner of the device has wasted."""
    (device,) = shot.devices
    return [each.wasted_byte_seconds for each in sure(device.owner_usage).owners]


def watch_at_work(host: OneHolder, seconds: int) -> Holding:
    """Sample once a second while the holder works."""
    host.program.work = 0.4
    return host.watch(seconds)


def test_an_orphan_that_works_or_may_work_wastes_nothing() -> None:
    """Whether it works, or that this is not known, is said, also long after its work."""
    host = meeting("unowned")
    holding = watch_at_work(host, 60)
    assert holding.state is State.ORPHANED
    assert holding.why.endswith("; it still works on the GPU")
    assert holding.working is True
    assert not holding.wasted
    assert wasted_seconds(host.sample()) == [None]
    host = meeting("unowned")
    host.say_nothing_of_work()
    holding = host.watch(60)
    assert (holding.state, holding.working) == (State.ORPHANED, None)
    assert not holding.wasted
    assert holding.why.endswith("; whether it works on the GPU is not known")
    host = meeting("unowned")
    watch_at_work(host, 5)
    host.say_nothing_of_work()
    holding = host.watch(30)
    assert holding.working is None
    assert not holding.wasted


def test_an_orphan_that_stops_working_wastes_its_memory_from_the_idle_threshold_on() -> None:
    """Quiet by every sample for the threshold, its bytes are wasted, and its owner is charged for that."""
    host = meeting("unowned")
    watch_at_work(host, 5)
    host.program.work = 0.0
    assert host.watch(9).working is True
    holding = host.watch(1)
    assert holding.working is False
    assert holding.wasted
    assert "it has not worked on the GPU for 10 s" in holding.why
    assert wasted_seconds(host.sample(after=2.0)) == [2.0 * (holding.memory or 0)]


@pytest.mark.parametrize(
    ("state", "working", "wasted", "perhaps"),
    [
        (State.IDLE, None, 0, 10 * GIB), (State.IDLE, False, 10 * GIB, 0),
        (State.ORPHANED, None, 0, 10 * GIB), (State.ORPHANED, True, 0, 0),
        (State.ORPHANED, False, 10 * GIB, 0), (State.ZOMBIE, None, 10 * GIB, 0), (State.ACTIVE, None, 0, 0),
    ],
)  # fmt: skip
def test_what_is_not_known_is_no_zero(state: State, working: bool | None, wasted: int, perhaps: int) -> None:
    """Memory that is perhaps wasted, perhaps not, has a figure of its own."""
    one = builders.device(0, [structs.replace(builders.holding(7, 10 * GIB, state), working=working)])
    known = [True] if wasted else [None] if perhaps else [False]
    assert (one.wasted, one.perhaps_wasted) == (wasted, perhaps)
    assert [each.wasted for each in one.holdings] == known
    document: Any = snapshot_json(builders.snapshot(one))
    [device] = document["devices"]
    assert (device["memory"]["wasted"], device["memory"]["perhaps_wasted"]) == (wasted, perhaps)
    assert [each["wasted"] for each in device["holdings"]] == known
