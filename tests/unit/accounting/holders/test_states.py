"""The rules of the states, on relations that were measured on real processes."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.sure import sure
from vramledger.accounting.holders import states
from vramledger.model.holder_facts import Ties
from vramledger.model.reading import ParentFacts, ProcessFacts, ProcessRow
from vramledger.model.snapshot import Grade, State

INIT = ParentFacts(1, 1, "systemd", "systemd", init=True)
PYTHON = ParentFacts(500, 50, "python3", "train.py", init=False)
ROW = ProcessRow(1000, 100, "S", 1, 1000, 400, 0, 3)
"""A process that leads its own group in a shell's session, adopted by pid 1."""


ADOPTED = Ties(1000, 100, adopted=True, worker=False)
WORKER = ADOPTED._replace(worker=True, severed=2)
"""What ties a process that was adopted: nothing is known of it, or it is a worker without a launcher."""


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


PLAIN = ROW._replace(pgrp=900)
"""A process that leads nothing."""


@pytest.mark.parametrize("comm", ["python3", "bash", "sudo", "gdb", "watch", "monit", "systemd"])
def test_the_name_of_a_parent_decides_nothing(comm: str) -> None:
    """That a parent was seen alive and has ended is inferred, whatever it was called."""
    starter = ParentFacts(500, 50, comm, comm, init=False)
    assert judge(ADOPTED, PLAIN, first=starter) == (
        Grade.INFERRED,
        f"its parent {comm} (pid 500) was seen alive and has ended; systemd (pid 1) has adopted it",
    )


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
    found = judge(ADOPTED._replace(severed=severed), PLAIN, job(leader_alive=False))
    assert found == (
        Grade.INFERRED,
        "the leader of its process group (pid 900) has ended; systemd (pid 1) has adopted it",
    )


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


def test_what_could_never_be_read_was_not_left_on_purpose() -> None:
    """A rank under a title that leads its session is an orphan if its launcher was seen to end."""
    own = ROW._replace(session=1000)
    titled = job(denied=("environ",))
    assert (judge(ADOPTED, own, titled, PYTHON) or (None,))[0] is Grade.INFERRED
    assert judge(ADOPTED, own, titled) is None
    assert judge(ADOPTED, own, replace(titled, ignores=("HUP",)), PYTHON) is None


def test_a_daemon_that_forked_twice_is_alone() -> None:
    """It is alone in the group of a leader who made session and group; several of them were left behind."""
    twice = ROW._replace(pgrp=900, session=900)
    assert judge(ADOPTED, twice, job(leader_alive=False)) is None
    assert judge(ADOPTED._replace(fellows=1), twice, job(leader_alive=False)) is not None


def test_a_sign_that_people_set_by_hand_is_weak() -> None:
    """LOCAL_RANK makes a job inferred at most, and none that ``nohup`` has left running."""
    by_hand = job(signs=("LOCAL_RANK",))
    alone = ROW._replace(session=1000)
    severed = ADOPTED._replace(severed=2)
    assert (judge(severed, alone, by_hand) or (None,))[0] is Grade.INFERRED
    assert judge(severed, alone, replace(by_hand, ignores=("HUP",))) is None


@pytest.mark.parametrize(
    ("presence", "host", "state"),
    [
        ("gone", True, State.DEAD),
        ("gone", False, State.UNKNOWN),
        ("gone", None, State.UNKNOWN),
        ("denied", True, State.UNKNOWN),
        (None, True, State.UNKNOWN),
    ],
)
def test_dead_only_where_every_process_is_seen(presence: str, host: bool | None, state: State) -> None:
    """A pid without a process is dead only in the host's PID namespace, and only if it is really gone."""
    assert states.classify_unseen(presence, host_pid_namespace=host).state is state


def state_of(letter: str, orphan: Grade | None, threads: int = 1) -> states.StateVerdict:
    """Return the verdict on a process from the kernel's letter."""
    orphaned = None if orphan is None else states.StateVerdict(State.ORPHANED, "left", orphan)
    return sure(states.classify_process(ROW._replace(state=letter, threads=threads), orphaned))


def test_the_first_state_that_applies_wins() -> None:
    """A zombie is a zombie even when orphaned, an orphan even when stopped; what is inferred comes last."""
    assert state_of("Z", Grade.PROVEN)[0] is State.ZOMBIE
    assert state_of("T", Grade.PROVEN)[0] is State.ORPHANED
    assert state_of("T", Grade.INFERRED)[0] is State.STOPPED
    assert state_of("t", None)[0] is State.STOPPED
    assert states.classify_process(ROW._replace(state="D"), None) is None


def test_a_zombie_leader_with_live_threads_says_so() -> None:
    """The evidence of a zombie distinguishes live threads from a driver that has not freed memory."""
    assert "3 other thread(s) still run" in state_of("Z", None, threads=4)[1]
    assert "not reaped" in state_of("Z", None)[1]
