"""The rules of the states, on relations that were measured on real processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vramledger.accounting import states
from vramledger.model.reading import ParentFacts, ProcessFacts, ProcessRow
from vramledger.model.snapshot import State

INIT = ParentFacts(1, 1, "systemd", "systemd", init=True)
PYTHON = ParentFacts(500, 50, "python3", "train.py", init=False)
ROW = ProcessRow(1000, 100, "S", 1, 1000, 400, 0, 3)
"""A process that leads its own group in a shell's session, adopted by pid 1."""


def late(row: ProcessRow, facts: ProcessFacts) -> str | None:
    """Classify a process that was just seen for the first time."""
    return states.orphan_evidence(row, facts, facts, host_pid_namespace=True)


def job(parent: ParentFacts | None = INIT, **known: Any) -> ProcessFacts:  # noqa: ANN401 any field of the facts
    """Return the facts of that process; its group's leader is alive unless the test says otherwise."""
    return replace(ProcessFacts(1000, 100, parent=parent, leader_alive=True, nspid=(1000,)), **known)


def test_a_worker_whose_program_ended_is_an_orphan() -> None:
    """The parent was seen alive, was a program, and is no longer the parent."""
    why = states.orphan_evidence(ROW, job(PYTHON), job(INIT), host_pid_namespace=True)

    assert why is not None
    assert "train.py (pid 500) was seen alive and has ended; systemd (pid 1) has adopted it" in why


@pytest.mark.parametrize(
    "comm",
    [
        "bash",
        "zsh",
        "sshd",
        "tmux: server",
        "systemd",
        "(systemd)",
        "containerd-shim",
        "slurmstepd",
        "nohup",
        "sudo",
    ],
)
def test_a_job_whose_shell_or_manager_went_away_is_no_orphan(comm: str) -> None:
    """Shells, terminals, logins, service managers and wrappers start jobs and do not own workers."""
    starter = ParentFacts(500, 50, comm, comm, init=False)

    assert states.orphan_evidence(ROW, job(starter), job(INIT), host_pid_namespace=True) is None


def test_a_live_parent_makes_no_orphan() -> None:
    """A DataLoader worker whose training lives is not an orphan, whatever its environment says."""
    assert late(ROW._replace(ppid=500), job(PYTHON, signs=("multiprocessing", "LOCAL_RANK"))) is None


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        pytest.param(ROW._replace(session=1000), job(), id="setsid, or a service"),
        pytest.param(
            ROW._replace(pgrp=900, session=900), job(leader_alive=False), id="daemon that forked twice"
        ),
        pytest.param(
            ROW._replace(pgrp=900), job(leader_alive=False, ignores=("HUP",)), id="nohup in a script"
        ),
        pytest.param(
            ROW._replace(pgrp=900), job(leader_alive=False, ignores=("INT", "QUIT")), id="background job"
        ),
        pytest.param(ROW._replace(pgrp=900), job(leader_alive=None), id="not known is not gone"),
        pytest.param(
            ROW._replace(session=1000),
            job(service_main=True, signs=("TORCHELASTIC_RUN_ID",)),
            id="main of a service",
        ),
        pytest.param(
            ROW._replace(session=1000),
            job(nspid=(1000, 1), signs=("OMPI_COMM_WORLD_RANK",)),
            id="container's init",
        ),
        pytest.param(ROW, job(signs=("LOCAL_RANK",)), id="LOCAL_RANK set by hand"),
    ],
)
def test_jobs_seen_late_that_are_no_orphans(row: ProcessRow, facts: ProcessFacts) -> None:
    """Daemons, background jobs, services and a container's init are adopted too, and are not orphans."""
    assert late(row, facts) is None


@pytest.mark.parametrize(
    ("row", "facts", "said"),
    [
        (ROW._replace(pgrp=900), job(leader_alive=False), "leader of its process group (pid 900) has ended"),
        (ROW._replace(session=1000), job(signs=("LOCAL_RANK",)), "worker (LOCAL_RANK)"),
        (ROW._replace(session=1000), job(signs=("TORCHELASTIC_RUN_ID",)), "TORCHELASTIC_RUN_ID"),
        (
            ROW._replace(pgrp=900, session=900),
            job(leader_alive=False, signs=("multiprocessing",)),
            "multiprocessing",
        ),
        (ROW._replace(pgrp=400), job(signs=("multiprocessing",)), "multiprocessing"),
    ],
)
def test_orphans_seen_late(row: ProcessRow, facts: ProcessFacts, said: str) -> None:
    """A dead process group, or a worker's environment or command, shows an orphan that was seen late."""
    why = late(row, facts)

    assert why is not None
    assert said in why


def test_the_child_of_a_containers_program_is_no_orphan() -> None:
    """Torchrun as pid 1 of a container is an init and the live launcher of its ranks."""
    launcher = ParentFacts(800, 50, "torchrun", "torchrun", init=True)

    assert late(ROW._replace(ppid=800, session=1000), job(launcher, signs=("TORCHELASTIC_RUN_ID",))) is None


def test_a_pure_init_in_a_container_adopts_orphans() -> None:
    """The child of tini whose environment says rank has lost its launcher, unless tini's says so too."""
    tini = ParentFacts(800, 50, "tini", "tini", init=True, signs=())
    row, rank = ROW._replace(ppid=800, session=1000), ("TORCHELASTIC_RUN_ID",)

    assert late(row, job(tini, signs=rank)) is not None
    assert late(row, job(tini._replace(signs=rank), signs=rank)) is None
    assert late(row._replace(start=tini.start + 1), job(tini, signs=rank)) is not None, (
        "tini leads no session"
    )


def test_the_program_of_a_minimal_init_is_its_own() -> None:
    """A program that tini starts at once, as a group leader, has a live parent, whatever started it."""
    tini = ParentFacts(800, 98, "tini", "tini", init=True, signs=())
    dumb = tini._replace(comm="dumb-init", command="dumb-init")
    rank = ("PMIX_RANK",)

    assert late(ROW._replace(ppid=800, session=800), job(tini, signs=rank)) is None
    assert late(ROW._replace(ppid=800, session=1000), job(dumb, signs=rank)) is None
    assert late(ROW._replace(ppid=800, session=800, start=200), job(tini, signs=rank)) is not None


def test_less_to_see_makes_no_orphan() -> None:
    """If the environment of a process or its parent is not readable, the verdict is the milder one."""
    tini = ParentFacts(800, 50, "tini", "tini", init=True, signs=None)
    row = ROW._replace(ppid=800, session=1000)
    assert late(row, job(tini, signs=("TORCHELASTIC_RUN_ID",))) is None

    daemon = job(PYTHON, denied=("environ",))
    leads_session = ROW._replace(session=1000)
    assert states.orphan_evidence(leads_session, daemon, job(INIT), host_pid_namespace=True) is None


@pytest.mark.parametrize(
    "comm", ["gdb", "nsys", "ncu", "strace", "py-spy", "gnome-terminal-", "nsys-launcher"]
)
def test_a_program_may_outlive_who_watches_it(comm: str) -> None:
    """A debugger, a profiler or a terminal ends, and the program that it started continues."""
    watcher = ParentFacts(500, 50, comm, comm, init=False)

    assert states.orphan_evidence(ROW, job(watcher), job(INIT), host_pid_namespace=True) is None


def test_the_child_of_a_supervisor_that_is_a_subreaper_is_no_orphan() -> None:
    """A live parent that is not a known reaper is a supervisor, even if the child leads its session."""
    supervisor = ParentFacts(800, 50, "python3", "supervise.py", init=False)

    assert late(ROW._replace(ppid=800, session=1000), job(supervisor, signs=("LOCAL_RANK",))) is None


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
def test_dead_is_said_only_where_every_process_can_be_seen(
    presence: str, host: bool | None, state: State
) -> None:
    """A pid without a process is dead only in the host's PID namespace, and only if it is really gone."""
    assert states.classify_unseen(presence, host_pid_namespace=host).state is state


def state_of(letter: str, orphaned: str | None, threads: int = 1) -> states.StateVerdict:
    """Return the verdict on a process from the kernel's letter."""
    verdict = states.classify_process(ROW._replace(state=letter, threads=threads), orphaned)
    assert verdict is not None
    return verdict


def test_the_first_state_that_applies_wins() -> None:
    """A zombie is a zombie even when orphaned, an orphan even when stopped."""
    assert state_of("Z", "orphaned")[0] is State.ZOMBIE
    assert state_of("T", "orphaned")[0] is State.ORPHANED
    assert state_of("t", None)[0] is State.STOPPED
    assert states.classify_process(ROW._replace(state="D"), None) is None


def test_a_zombie_leader_with_live_threads_says_so() -> None:
    """The evidence of a zombie distinguishes live threads from a driver that has not freed memory."""
    assert "3 other thread(s) still run" in state_of("Z", None, threads=4)[1]
    assert "not reaped" in state_of("Z", None)[1]
