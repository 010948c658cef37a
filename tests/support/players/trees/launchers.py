"""Workers of programs that start workers: torchrun, mpirun, srun, Ray, multiprocessing, Jupyter."""

import os

from tests.support.players.parts import IN_A_SHELL, children, kernel, ranks, script
from tests.support.players.stage import Player, Stage, parent_of
from tests.support.players.tree import LEADER_ENDED, Cast, abandoned, healthy, leftover
from tests.support.waiting import wait_until


@healthy
def dataloader_forked(stage: Stage) -> Cast:
    """Play workers that a live program forked (PyTorch's DataLoader does)."""
    return Cast(stage.start().fork_workers("fork"))


@healthy
def dataloader_spawned(stage: Stage) -> Cast:
    """Play workers that a live program spawned."""
    return Cast(stage.start().fork_workers("spawn"))


@healthy
def rank_in_a_shell(stage: Stage) -> Cast:
    """Play srun with PMIx, which starts the user's shell, which starts the program."""
    return Cast([stage.start(wrapper=["bash", *IN_A_SHELL[1:]], env={"PMIX_RANK": "0"})])


@healthy
def rank_in_a_script(stage: Stage) -> Cast:
    """Play a rank of mpirun behind a wrapper script, whose shell the kernel calls by the script's name."""
    text = '#!/usr/bin/env bash\nexport CUDA_VISIBLE_DEVICES=0\n"$@"\ntrue\n'
    wrapper = [script(stage, "bind-gpu.sh", text)]
    return Cast([stage.start(wrapper=wrapper, env={"OMPI_COMM_WORLD_RANK": "3"})])


@healthy
def ranks_that_run_a_shell(stage: Stage) -> Cast:
    """Play ranks of torchrun that run ``os.system("program; true")``."""
    return Cast(ranks(stage.start(), wrapper=IN_A_SHELL))


@healthy
def ray_task_in_a_shell(stage: Stage) -> Cast:
    """Play a task of Ray that runs its program with ``shell=True``."""
    return Cast([stage.start(wrapper=IN_A_SHELL, env={"RAY_RAYLET_PID": str(os.getpid())})])


@healthy
def dataloader_from_a_forkserver(stage: Stage) -> Cast:
    """Play workers of a live program that a fork server starts."""
    return Cast(stage.start().fork_workers("forkserver"))


@healthy
def kernels(stage: Stage) -> Cast:
    """Play kernels of a live Jupyter server."""
    server = stage.start()
    return Cast([kernel(server, number) for number in range(2)])


@healthy
def batch_script(stage: Stage) -> Cast:
    """Play a batch script of Slurm with variables of PMI: slurmstepd, the script's shell, the program."""
    step = stage.start(("adopt",), name="slurmstepd")
    wrapper = [script(stage, "slurm_script", '#!/bin/bash\n"$@"\ntrue\n')]
    return Cast([step.start(wrapper=wrapper, env={"PMI_RANK": "0"}, session=True)])


@healthy
def launcher_below_a_launcher(stage: Stage) -> Cast:
    """Play ranks whose torchrun lives, after the program that had started torchrun is killed."""
    top = stage.start()
    middle = top.start(("lead_group",))
    holders = ranks(middle)
    top.end()
    wait_until(lambda: parent_of(middle.pid) != top.pid, "nobody adopts the launcher")
    return Cast(holders)


@healthy
def hydra_proxy(stage: Stage) -> Cast:
    """Play ranks of MPICH below their live proxy, after the ssh that had started the proxy has ended."""
    ssh = stage.start(name="sshd-session")
    proxy = ssh.start(("lead_session",))
    holders = [proxy.start(env={"PMI_RANK": str(number)}) for number in range(2)]
    ssh.end()
    wait_until(lambda: parent_of(proxy.pid) != ssh.pid, "nobody adopts the proxy")
    return Cast(holders)


def _at_a_prompt(stage: Stage) -> Player:
    """Start a launcher as an interactive shell does: it leads its group, not its session."""
    return stage.start(session=False)


@leftover(late=LEADER_ENDED)
def orphaned_subprocesses(stage: Stage) -> Cast:
    """Play two children by ``subprocess`` of a program that is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(children(launcher), launcher)


@abandoned
def orphaned_spawned(stage: Stage) -> Cast:
    """Play two ``multiprocessing`` workers (spawned) of a program that is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(launcher.fork_workers("spawn"), launcher)


@leftover(late=LEADER_ENDED)
def orphaned_forked(stage: Stage) -> Cast:
    """Play two ``multiprocessing`` workers (forked) of a program that is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(launcher.fork_workers("fork"), launcher)


@abandoned
def orphaned_ranks(stage: Stage) -> Cast:
    """Play two ranks as torchrun starts them, each leading its own session; torchrun is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(ranks(launcher), launcher)


@leftover(late="it is a worker (jupyter) and its launcher has ended")
def orphaned_kernels(stage: Stage) -> Cast:
    """Play kernels whose Jupyter server is killed."""
    server = _at_a_prompt(stage)
    return Cast([kernel(server, number) for number in range(2)], server)


@leftover(late=LEADER_ENDED)
def orphaned_from_session_leader(stage: Stage) -> Cast:
    """Play children of a killed program that led its session (``setsid``, a container, an ssh command)."""
    launcher = stage.start()
    return Cast(children(launcher), launcher)


@leftover(late=LEADER_ENDED)
def orphaned_under_subreaper(stage: Stage) -> Cast:
    """Play workers whose program is killed, and whom ``systemd --user`` adopts in place of pid 1."""
    manager = stage.start(("adopt",), ("lead_session",), ("reap",), name="systemd")
    launcher = manager.start(("lead_group",))
    return Cast(children(launcher), launcher)


@abandoned
def orphaned_mpi_ranks(stage: Stage) -> Cast:
    """Play two ranks of Open MPI in the process group of an mpirun that is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(
        [launcher.start(env={"OMPI_COMM_WORLD_RANK": str(number)}, tie="socket") for number in range(2)],
        launcher,
    )


@abandoned
def orphaned_hydra_ranks(stage: Stage) -> Cast:
    """Play two ranks of MPICH whose proxy, the leader of a session, is killed."""
    proxy = stage.start()
    return Cast([proxy.start(env={"PMI_RANK": str(number)}, tie="socket") for number in range(2)], proxy)


@abandoned
def orphaned_ray_workers(stage: Stage) -> Cast:
    """Play two workers of Ray whose raylet is killed."""
    raylet = _at_a_prompt(stage)
    variables = {"RAY_RAYLET_PID": str(raylet.pid)}
    return Cast([raylet.start(env=variables, session=True, tie="socket") for _ in range(2)], raylet)


@abandoned
def orphaned_ranks_of_a_nohup_job(stage: Stage) -> Cast:
    """Play torchrun under nohup, which its ranks inherit, and which is then killed."""
    launcher = stage.start(("ignore", "SIGHUP"), session=False)
    return Cast(ranks(launcher), launcher)


@leftover(late=LEADER_ENDED)
def orphaned_grandchildren(stage: Stage) -> Cast:
    """Play programs whose own starter is killed while the launcher above it lives."""
    middle = stage.start(("reap",)).start(("lead_group",))
    return Cast(children(middle), middle)


@abandoned
def orphaned_in_a_pipeline(stage: Stage) -> Cast:
    """Play spawned workers of a program in a pipeline, whose group has another, live leader."""
    first = stage.start(session=False)
    launcher = stage.start(("join_group", first.pid), session=False)
    return Cast(launcher.fork_workers("spawn"), launcher)
