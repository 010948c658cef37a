"""What real programs do: build tools, servers, pools of workers, daemons, nested containers."""

import os
import shlex
from collections.abc import Callable

from tests.support.players.parts import (
    IN_A_SHELL,
    at_a_prompt,
    children,
    container,
    double_fork,
    forked,
    in_a_namespace,
    rank,
    ranks,
    ray_workers,
    script,
    spawned,
    started_by_shell,
    two_forks,
    two_of,
    under_nohup,
)
from tests.support.players.stage import Player, Stage, parent_of
from tests.support.players.tree import (
    LAUNCHER_ENDED,
    LEADER_ENDED,
    Cast,
    abandoned,
    declared,
    healthy,
    launched,
    leftover,
    seems_left,
)
from tests.support.requirements import require_tool
from tests.support.waiting import wait_until

SERVER_PORT = 20_000 + os.getpid() % 10_000
"""A port that somebody has chosen, another in each process of the tests; the kernel takes 32,768 and more."""


def _adopted(holder: Player, launcher: Player) -> None:
    wait_until(lambda: parent_of(holder.pid) != launcher.pid, "nobody adopts")


def _workers_without_fork_server(program: Player) -> tuple[Player, ...]:
    workers = program.fork_workers("forkserver")
    server = workers[0].process.parent()
    assert server is not None
    server.kill()
    wait_until(lambda: parent_of(workers[0].pid) != server.pid, "nobody adopts")
    return workers


def _make(stage: Stage) -> Cast:
    """Let make, which is the launcher, run two recipes."""
    require_tool("make")
    recipe = shlex.join(stage.command("holder")).replace("$", "$$")
    (stage.directory / "Makefile").write_text(f"all: a b\na b:\n\t@{recipe}\n", encoding="utf-8")
    make = stage.run(["make", "-j2", "-C", str(stage.directory)])
    return Cast(stage.hear("holder", 2), make)


# --- healthy -----------------------------------------------------------------------------------------


@healthy
def xargs_jobs(stage: Stage) -> Cast:
    """Play ``xargs -P2`` with two programs that run."""
    require_tool("xargs")
    holder = shlex.quote(shlex.join(stage.command("holder")))
    stage.run(["sh", "-c", f"echo 1 2 | xargs -P2 -n1 sh -c {holder}"])
    return Cast(stage.hear("holder", 2))


@healthy
def forking_service(stage: Stage) -> Cast:
    """Play a service of ``Type=forking``: the start script ends well, the daemon listens."""
    starter = stage.start()
    daemon = double_fork(starter)
    daemon.order("listen", SERVER_PORT)
    starter.end()
    return Cast([daemon])


@healthy
def daemonised_master(stage: Stage) -> Cast:
    """Play ``gunicorn --daemon``: a master that forked twice, and its two workers."""
    starter = stage.start()
    master = double_fork(starter)
    workers = [master.fork() for _ in range(2)]
    starter.end()
    return Cast([master, *workers])


@healthy
def started_by_start_stop_daemon(stage: Stage) -> Cast:
    """Play ``start-stop-daemon --background``."""
    require_tool("start-stop-daemon")
    command = stage.command("holder")
    wanted = ["start-stop-daemon", "--start", "--background", "--pidfile", str(stage.directory / "pid")]
    stage.run([*wanted, "--startas", command[0], "--", *command[1:]])
    return Cast(stage.hear("holder"))


@healthy
def jobs_of_a_nohup_script(stage: Stage) -> Cast:
    """Play a script under nohup with two jobs in the background; the script then ends."""
    holder = shlex.join(stage.command("holder"))
    night = script(stage, "night.sh", f"#!/bin/sh\n{holder} &\n{holder} &\nread _\n")
    cast = started_by_shell(stage, ["nohup", night])
    return Cast([*cast.holders, *stage.hear("holder")], cast.launcher, cast.end)


@healthy
def job_below_a_subreaper(stage: Stage) -> Cast:
    """Play a supervisor that adopts: the program between has ended, and a pipe leads to the supervisor."""
    supervisor = stage.start(("adopt",), ("reap",))
    between = supervisor.start(tie="pipe")
    return Cast([between.fork()], between)


@healthy
def setsid_chain(stage: Stage) -> Cast:
    """Play ``setsid setsid program`` of a program that then ends."""
    require_tool("setsid")
    starter = stage.start()
    return Cast([starter.start(wrapper=["setsid", "-w", "setsid", "-w"], session=True)], None)


@healthy
def server_with_a_containers_variables(stage: Stage) -> Cast:
    """Play a server in a container whose variables say rank, after the shell that started it has ended."""
    init = container(stage, PMI_RANK="0", TORCHELASTIC_RUN_ID="job")
    shell = init.start(("lead_group",), ("reap",))
    return Cast([shell.start(("listen", SERVER_PORT))], shell)


@healthy
def ranks_of_a_daemonised_launcher(stage: Stage) -> Cast:
    """Play torchrun as a daemon that forked twice, with its ranks."""
    starter = stage.start()
    launcher = double_fork(starter)
    starter.end()
    return Cast(ranks(launcher))


@healthy
def workers_below_a_ray_task(stage: Stage) -> Cast:
    """Play spawned workers of a live program that a Ray task has started, after its raylet has ended."""
    raylet = stage.start(session=False)
    program = raylet.start(env={"RAY_RAYLET_PID": str(raylet.pid)}, session=True)
    workers = program.fork_workers("spawn")
    raylet.end()
    return Cast(workers)


@healthy
def workers_of_a_program_that_leaves_its_session(stage: Stage) -> Cast:
    """Play spawned workers of a live program that has made a session for itself after their start."""
    program = stage.start().start()
    workers = program.fork_workers("spawn")
    program.order("lead_session")
    return Cast(workers)


@healthy
def rank_of_pid_1_with_a_helper(stage: Stage) -> Cast:
    """Play a rank of a container's launcher that is pid 1; its own helpers, by pipe and TCP, have ended."""
    launcher = container(stage)
    holder = launcher.start(env=rank(0), session=True)
    holder.start(tie="pipe").end()
    server = stage.start()
    holder.order("call", server.order("serve"))
    server.end()
    return Cast([holder])


@healthy
def nohup_of_a_rank(stage: Stage) -> Cast:
    """Play ``nohup program &`` of a rank that has ended with its torchrun: it has inherited their store."""
    launcher = stage.start(session=False)
    store = launcher.order("serve")
    first = launcher.start(env=rank(0), session=True)
    holder = first.start(("ignore", "SIGHUP"), ("call", store))
    first.end()
    _adopted(holder, first)
    launcher.end()
    return Cast([holder])


@seems_left(LAUNCHER_ENDED)
def program_with_a_rank_of_its_own(stage: Stage) -> Cast:
    """Play ``export PMI_RANK=0; nohup program &``; helpers with a pipe and a socket have ended."""
    shell = stage.start(session=False)
    holder = shell.start(("ignore", "SIGHUP"), env={"PMI_RANK": "0"})
    holder.start(tie="pipe").end()
    holder.start(tie="socket").end()
    return Cast([holder], shell)


@seems_left(LAUNCHER_ENDED, watched=LAUNCHER_ENDED)
def workers_of_a_program_after_the_logout(stage: Stage) -> Cast:
    """Play workers whose fork server is killed, of a live program that has lost its session by a logout."""
    leader = stage.start()
    program = leader.start()
    leader.end()
    _adopted(program, leader)
    return Cast(_workers_without_fork_server(program))


@seems_left(LAUNCHER_ENDED)
def server_of_a_rank(stage: Stage) -> Cast:
    """Play a server in a session of its own that a rank has started; the rank and its torchrun have ended."""
    launcher = stage.start(session=False)
    first, _ = ranks(launcher)
    holder = first.start(("listen", SERVER_PORT), session=True)
    launcher.end()
    return Cast([holder], first)


@seems_left(LAUNCHER_ENDED)
def server_of_a_ray_task(stage: Stage) -> Cast:
    """Play ``nohup server &`` of a task of Ray whose worker has ended while its raylet lives."""
    raylet = stage.start(("reap",))
    variables = {"RAY_RAYLET_PID": str(raylet.pid)}
    worker = raylet.start(env=variables, session=True, tie="socket")
    holder = worker.start(("ignore", "SIGHUP"), ("listen", SERVER_PORT))
    return Cast([holder], worker)


@healthy
def daemon_of_a_worker(stage: Stage) -> Cast:
    """Play a daemon that a spawned worker has forked twice, after the worker and its program have ended."""
    program = stage.start(session=False)
    (worker,) = program.fork_workers("spawn", 1)
    daemon = double_fork(worker)
    worker.end()
    program.end()
    return Cast([daemon])


# --- leftovers ---------------------------------------------------------------------------------------


@abandoned
def workers_of_a_forkserver(stage: Stage) -> Cast:
    """Play workers that a fork server has started for a program, after both are killed."""
    program = stage.start(session=False)
    workers = program.fork_workers("forkserver")
    server = workers[0].process.parent()
    assert server is not None

    def end() -> None:
        server.kill()
        program.end()

    return Cast(workers, server, end)


@abandoned
def ranks_below_wrappers(stage: Stage) -> Cast:
    """Play ranks of torchrun below wrapper scripts, which live on when torchrun is killed."""
    launcher = stage.start(session=False)
    holders = ranks(launcher, IN_A_SHELL)
    wrapper = holders[0].process.parent()
    assert wrapper is not None
    launcher.end()
    wait_until(lambda: parent_of(wrapper.pid) != launcher.pid, "nobody adopts")
    return Cast(holders)


@leftover(late=LAUNCHER_ENDED)
def ranks_whose_connection_was_reset(stage: Stage) -> Cast:
    """Play ranks of a launcher that was killed before it read what they sent."""
    launcher = stage.start(session=False)
    store = launcher.order("serve")
    holders = [launcher.start(env=rank(number), session=True) for number in range(2)]
    for each in holders:
        each.order("call", store)
        each.order("send")
    return Cast(holders, launcher)


@abandoned
def spawned_by_a_zombie(stage: Stage) -> Cast:
    """Play spawned workers of a killed program that its own parent does not reap."""
    parent = stage.start()
    launcher = parent.start(("lead_group",))
    workers = launcher.fork_workers("spawn")
    launcher.end()
    _adopted(workers[0], launcher)
    return Cast(workers)


@leftover(late=LAUNCHER_ENDED)
def ranks_of_a_store_elsewhere(stage: Stage) -> Cast:
    """Play ranks whose launcher is killed, while a store that is not its own lives."""
    store = stage.start()
    port = store.order("serve")
    launcher = stage.start(session=False)
    holders = ranks(launcher)
    for each in holders:
        each.order("call", port)
    return Cast(holders, launcher)


@leftover(late=LAUNCHER_ENDED)
def workers_with_a_live_reader(stage: Stage) -> Cast:
    """Play spawned workers of a killed program whose output somebody still reads."""
    launcher = stage.start(session=False)
    reader = stage.start()
    workers = launcher.fork_workers("spawn")
    port = reader.order("serve")
    for each in workers:
        each.order("call", port)
    return Cast(workers, launcher)


@leftover(late=LEADER_ENDED)
def workers_of_a_restarted_server(stage: Stage) -> Cast:
    """Play workers of a server that was killed and started again: the successor has workers of its own."""
    old = stage.start(session=False)
    workers = children(old)
    successor = stage.start(session=False)
    children(successor)
    return Cast(workers, old)


def _nested(stage: Stage) -> Player:
    return container(stage).start(("lead_session",), ("reap",), wrapper=in_a_namespace())


def _under_conmon(stage: Stage) -> Player:
    conmon = stage.start(name="conmon")
    return conmon.start(("lead_session",), ("reap",), wrapper=in_a_namespace())


def _and_its_child(main: Player) -> Cast:
    return Cast([main, main.start()])


def _below_a_subreaper(step: str) -> Callable[[Stage], Player]:
    return lambda stage: stage.start(("adopt",), ("reap",)).start((step,))


SHORT = declared(
    make_jobs=(healthy, "``make -j2`` with two recipes that run", lambda stage: Cast(_make(stage).holders)),
    make_jobs_without_make=(leftover(late=LEADER_ENDED), "the recipes of a ``make -j2`` that was killed",
        _make),
    started_by_a_script=(seems_left(LEADER_ENDED),
        "programs of a start script that ends well, and did not say that they stay",
        launched(at_a_prompt, children)),
    workers_of_a_dead_forkserver=(seems_left(LAUNCHER_ENDED, watched=LAUNCHER_ENDED),
        "workers of a live program whose fork server is killed: the program still has their pipes",
        lambda stage: Cast(_workers_without_fork_server(at_a_prompt(stage)))),
    prefork_pool=(leftover(late=LEADER_ENDED),
        "forked workers of celery, whose master is killed, with pipes to it", launched(at_a_prompt, forked)),
    server_in_a_dead_group=(leftover(late=None, watched=None),
        "a server in the group of a killed program: somebody may still connect to it",
        launched(at_a_prompt, lambda launcher: [launcher.start(("listen", SERVER_PORT))])),
    job_of_parallel=(healthy,
        "GNU parallel, which makes each job the leader of a group, and which is then killed",
        launched(Stage.start, lambda launcher: [launcher.start(("lead_group",)) for _ in range(2)])),
    container_without_its_monitor=(healthy, "podman's container without an init, after its conmon is killed",
        lambda stage: _and_its_child(_under_conmon(stage))),
    nested_container=(healthy, "the main program of a container in a container, and a child of it",
        lambda stage: _and_its_child(_nested(stage))),
    uvicorn_workers_without_their_master=(healthy,
        "forked workers of a server that listen for anybody, after their master is killed",
        launched(lambda stage: stage.start(("listen", SERVER_PORT)), two_forks)),
    ranks_below_timeout=(healthy, "``timeout 1d torchrun`` with its ranks",
        lambda stage: Cast(ranks(stage.start(wrapper=[str(require_tool("timeout")), "1d"])))),
    ranks_of_a_launcher_without_a_store=(healthy,
        "ranks of a container's torchrun that is pid 1, and to which nothing connects them",
        lambda stage: Cast(two_of(rank("RANK"), session=True)(container(stage)))),
    workers_below_a_live_forkserver=(abandoned,
        "workers whose program is killed: they keep their fork server alive, and nobody wants it",
        launched(at_a_prompt, lambda program: program.fork_workers("forkserver"))),
    helper_of_an_orphan=(abandoned,
        "a helper that a spawned worker has forked, after their program is killed",
        launched(at_a_prompt, lambda program: [program.fork_workers("spawn", 1)[0].fork()])),
    workers_of_a_session_leader=(abandoned,
        "spawned workers of a program that ``ssh HOST program`` started, after it is killed",
        launched(Stage.start, spawned)),
    workers_under_an_unknown_subreaper=(abandoned,
        "spawned workers that slurmstepd, or another subreaper, adopts",
        launched(_below_a_subreaper("lead_session"), spawned)),
    ray_workers_under_an_unknown_subreaper=(abandoned,
        "workers of Ray that a subreaper adopts: a variable names the raylet, which is gone",
        launched(_below_a_subreaper("lead_group"), ray_workers)),
    ranks_of_a_nested_container=(abandoned,
        "torchrun's ranks in a container in a container, whose launcher is killed",
        launched(lambda stage: _nested(stage).start(("lead_group",)), ranks)),
    spawned_under_nohup=(abandoned, "spawned workers of a program under nohup, which is then killed",
        launched(under_nohup, spawned)),
)  # fmt: skip
