"""Facts of real processes, checked against psutil and the system calls, in every process tree."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.support.players.stage import parent_of
from tests.support.players.tree import Cast
from tests.support.players.trees import containers, states
from tests.support.players.trees.catalogue import HEALTHY, LEFTOVERS
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.model.reading import ProcessFacts, ProcessRow
from vramledger.readers.hosts.host import Host

ADOPTED = "whoever adopts"


class Seen(NamedTuple):
    """The expected facts of the first holder at one moment.

    ``group`` and ``session`` say who leads them: the holder (self), its parent, its launcher, or other.
    """

    parent: str
    group: str
    session: str
    leader_alive: bool = True
    ignores: str = ""
    signs: str = ""
    init: bool = False
    outside: bool = False


def both(seen: Seen) -> tuple[Seen, Seen]:
    """Return what is seen of a program while its launcher lives, and again after that."""
    return seen, seen


def left(seen: Seen, parent: str = ADOPTED, **changed: Any) -> tuple[Seen, Seen]:  # noqa: ANN401 any field
    """Return what is seen of a program while its launcher lives, and what another process adopts then."""
    return seen, seen._replace(parent=parent, **changed)


PLAYER, TORCH = "player.py", "LOCAL_RANK TORCHELASTIC_RUN_ID"
LED: dict[str, Any] = {"session": "parent", "leader_alive": False}
"""Who is adopted in its own session has a parent that leads it."""

EXPECTED: dict[str, tuple[Seen, Seen]] = {
    "double_fork_daemon": both(Seen(ADOPTED, "other", "other", leader_alive=False)),
    "ready_daemon": left(Seen(PLAYER, "self", "self")),
    "nohup_job": left(Seen("sh", "launcher", "launcher", ignores="HUP INT QUIT"), leader_alive=False),
    "disowned_job": left(Seen("bash", "self", "launcher")),
    "setsid_job": left(Seen("sh", "self", "self", ignores="INT QUIT")),
    "script_job": left(Seen("sh", "launcher", "launcher", ignores="INT QUIT"), leader_alive=False),
    "systemd_service": both(Seen("systemd", "self", "self")),
    "tmux_child": both(Seen("tmux", "self", "self")),
    "container_init": left(Seen("unshare", "self", "self", outside=True)),
    "dataloader_forked": both(Seen(PLAYER, "parent", "parent")),
    "dataloader_spawned": both(Seen(PLAYER, "parent", "parent", signs="multiprocessing")),
    "supervised": both(Seen(PLAYER, "parent", "parent")),
    "orphaned_subprocesses": left(Seen(PLAYER, "launcher", "other"), leader_alive=False),
    "orphaned_spawned": left(Seen(PLAYER, "launcher", "other", signs="multiprocessing"), leader_alive=False),
    "orphaned_forked": left(Seen(PLAYER, "launcher", "other"), leader_alive=False),
    "orphaned_ranks": left(Seen(PLAYER, "self", "self", signs=TORCH)),
    "orphaned_from_session_leader": left(Seen(PLAYER, "launcher", "launcher"), leader_alive=False),
    "orphaned_under_subreaper": left(Seen(PLAYER, "launcher", "other"), "systemd", **LED),
    "orphaned_in_container": left(Seen(PLAYER, "launcher", "other"), "tini", **LED, init=True),
    "pipeline": both(Seen("bash", "other", "parent", leader_alive=False)),
    "rank_in_a_shell": both(Seen("bash", "parent", "parent", signs="PMIX_RANK")),
    "rank_in_a_script": both(Seen("bash", "parent", "parent", signs="OMPI_COMM_WORLD_RANK")),
    "ranks_that_run_a_shell": both(Seen("sh", "parent", "parent", signs=TORCH)),
    "ray_task_in_a_shell": both(Seen("sh", "parent", "parent", signs="RAY_RAYLET_PID")),
    "in_a_pod": both(Seen("containerd-shim-runc-v2", "self", "self", signs=TORCH)),
    "executed_in_a_pod": both(Seen("nsenter", "parent", "parent", signs=TORCH, outside=True)),
    "docker_init": both(Seen("docker-init", "parent", "parent", signs="PMIX_RANK", init=True)),
    "catatonit": both(Seen("catatonit", "parent", "parent", signs="OMPI_COMM_WORLD_RANK", init=True)),
    "shell_as_init": both(Seen("bash", "other", "other", signs="LOCAL_RANK PMIX_RANK", init=True)),
    "launcher_as_init": both(Seen(PLAYER, "self", "self", signs=TORCH, init=True)),
    "debugged": left(Seen("gdb", "launcher", "launcher"), leader_alive=False),
    "profiled": left(Seen("nsys", "launcher", "launcher"), leader_alive=False),
    "terminal_closed": left(Seen("gnome-terminal-server", "launcher", "launcher"), leader_alive=False),
    "orphaned_ranks_in_container": left(Seen(PLAYER, "self", "self", signs=TORCH), "docker-init", init=True),
    "orphaned_ranks_under_sleep": left(Seen(PLAYER, "self", "self", signs=TORCH), "sleep", init=True),
    "orphaned_ranks_under_a_shell": left(Seen(PLAYER, "self", "self", signs=TORCH), "bash", init=True),
    "orphaned_workers_with_rank": left(
        Seen(PLAYER, "launcher", "other", signs="LOCAL_RANK multiprocessing"), "tini", **LED, init=True
    ),
    "orphaned_kernels": left(Seen(PLAYER, "self", "self", signs="jupyter")),
}


TREES = {tree.name: tree for tree in (*HEALTHY, *LEFTOVERS)}


def _row(host: Host, pid: int) -> ProcessRow:
    return sure(host.row(pid))


def _facts(host: Host, pid: int) -> ProcessFacts:
    return sure(host.facts(_row(host, pid)))


def _leads(leader: int, holder: int, parent: int, launcher: int | None) -> str:
    return {parent: "parent", launcher: "launcher", holder: "self"}.get(leader, "other")


WORKER_SIGNS = "LOCAL_RANK TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK RAY_RAYLET_PID".split()


def _has_variable(pid: int, name: str) -> bool:
    try:
        return name in psutil.Process(pid).environ()
    except psutil.AccessDenied:
        return False


def _check(host: Host, cast: Cast, expected: Seen) -> None:
    holder = cast.pids[0]
    launcher = None if cast.launcher is None else cast.launcher.pid
    row, facts = _row(host, holder), _facts(host, holder)
    parent = sure(facts.parent)
    adopted = expected.parent == ADOPTED
    assert expected == Seen(
        parent=ADOPTED if adopted else parent.command, group=_leads(row.pgrp, holder, row.ppid, launcher),
        session=_leads(row.session, holder, row.ppid, launcher), leader_alive=facts.leader_alive is True,
        ignores=" ".join(facts.ignores), signs=" ".join(facts.signs),
        init=expected.init if adopted else parent.init, outside=parent.outside,
    )  # fmt: skip
    assert parent_of(holder) == parent.pid
    assert _row(host, parent.pid).start == parent.start
    inherited = () if parent.signs is None else parent.signs
    assert set(inherited) == {sign for sign in WORKER_SIGNS if _has_variable(parent.pid, sign)}
    assert Path(f"/proc/{parent.pid}/comm").read_text(encoding="utf-8").rstrip("\n") == parent.comm
    if adopted:  # pid 1, or a subreaper above the test run
        assert parent.pid not in (launcher, os.getpid())
        assert parent.init is (parent.pid == 1 or _row(host, parent.pid).ppid == 0)


@pytest.mark.parametrize("name", EXPECTED)
def test_facts_tell_the_moments_before_and_after(host: Host, name: str) -> None:
    """All evidence for the states is read right, before the launcher ends and after."""
    before, after = EXPECTED[name]
    with TREES[name].play() as cast:
        _check(host, cast, before)
        _check_rows(host, cast)
        cast.lose_launcher()
        _check(host, cast, after)


def _check_rows(host: Host, cast: Cast) -> None:
    """Check that a row has the values of psutil and the system calls; its start time is psutil's."""
    for holder in cast.holders:
        pid = holder.pid
        process = psutil.Process(pid)
        wait_until(
            lambda process=process: process.status() == psutil.STATUS_SLEEPING,  # type: ignore[misc]
            "the holder does not come to rest",
        )
        row, facts = _row(host, pid), _facts(host, pid)
        pgrp, session, threads = os.getpgid(pid), os.getsid(pid), process.num_threads()
        kept = (row.tty, threads, row.program)
        assert row == ProcessRow(pid, row.start, "S", process.ppid(), pgrp, session, *kept)
        assert (row.tty != 0) == holder.order("has_terminal")
        assert host.boot_time + row.start / host.ticks == pytest.approx(process.create_time(), abs=0.1)
        assert (facts.uid, facts.user) == (process.uids().real, process.username())


def test_a_container_shows_its_own_pids(host: Host) -> None:
    """The init of a PID namespace is recognised; so is a parent that is one."""
    with containers.container_init.play() as cast:
        main, child = (_facts(host, pid) for pid in cast.pids)
    assert (main.nspid, child.nspid[0]) == ((main.pid, 1), child.pid)
    assert child.nspid[1] > 1
    assert (sure(child.parent).pid, sure(child.parent).init) == (main.pid, True)


def test_a_zombie_leader_still_has_its_name(host: Host) -> None:
    """The command of a process whose main thread has ended is read from a live thread."""
    with states.zombie_leader.play() as cast:
        assert _facts(host, cast.pids[0]).command == "player.py"
