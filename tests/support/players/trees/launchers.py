"""Workers of programs that start workers: torchrun, mpirun, srun, Ray, multiprocessing, Jupyter."""

import os

from tests.support.players.parts import (
    IN_A_SHELL,
    at_a_prompt,
    children,
    forked,
    kernel,
    ranks,
    ray_workers,
    script,
    spawned,
    two_of,
    under_nohup,
)
from tests.support.players.stage import Player, Stage, parent_of
from tests.support.players.tree import LEADER_ENDED, Cast, abandoned, declared, healthy, launched, leftover
from tests.support.waiting import wait_until


@healthy
def rank_in_a_script(stage: Stage) -> Cast:
    """Play a rank of mpirun behind a wrapper script, whose shell the kernel calls by the script's name."""
    text = '#!/usr/bin/env bash\nexport CUDA_VISIBLE_DEVICES=0\n"$@"\ntrue\n'
    wrapper = [script(stage, "bind-gpu.sh", text)]
    return Cast([stage.start(wrapper=wrapper, env={"OMPI_COMM_WORLD_RANK": "3"})])


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


def _kernels(server: Player) -> list[Player]:
    return [kernel(server, number) for number in range(2)]


def _in_a_pipeline(stage: Stage) -> Player:
    return stage.start(("join_group", at_a_prompt(stage).pid), session=False)


def _under_a_manager(stage: Stage) -> Player:
    manager = stage.start(("adopt",), ("lead_session",), ("reap",), name="systemd")
    return manager.start(("lead_group",))


SHORT = declared(
    dataloader_forked=(healthy, "workers that a live program forked (PyTorch's DataLoader does)",
        lambda stage: Cast(forked(stage.start()))),
    dataloader_spawned=(healthy, "workers that a live program spawned",
        lambda stage: Cast(spawned(stage.start()))),
    dataloader_from_a_forkserver=(healthy, "workers of a live program that a fork server starts",
        lambda stage: Cast(stage.start().fork_workers("forkserver"))),
    rank_in_a_shell=(healthy, "srun with PMIx, which starts the user's shell, which starts the program",
        lambda stage: Cast([stage.start(wrapper=["bash", *IN_A_SHELL[1:]], env={"PMIX_RANK": "0"})])),
    ranks_that_run_a_shell=(healthy, 'ranks of torchrun that run ``os.system("program; true")``',
        lambda stage: Cast(ranks(stage.start(), wrapper=IN_A_SHELL))),
    ray_task_in_a_shell=(healthy, "a task of Ray that runs its program with ``shell=True``",
        lambda stage: Cast([stage.start(wrapper=IN_A_SHELL, env={"RAY_RAYLET_PID": str(os.getpid())})])),
    kernels=(healthy, "kernels of a live Jupyter server", lambda stage: Cast(_kernels(stage.start()))),
    orphaned_subprocesses=(leftover(late=LEADER_ENDED),
        "two children by ``subprocess`` of a program that is then killed", launched(at_a_prompt, children)),
    orphaned_spawned=(abandoned, "two ``multiprocessing`` workers (spawned) of a program that is then killed",
        launched(at_a_prompt, spawned)),
    orphaned_forked=(leftover(late=LEADER_ENDED),
        "two ``multiprocessing`` workers (forked) of a program that is then killed",
        launched(at_a_prompt, forked)),
    orphaned_ranks=(abandoned,
        "two ranks as torchrun starts them, each leading its own session; torchrun is then killed",
        launched(at_a_prompt, ranks)),
    orphaned_kernels=(leftover(late="it is a worker (jupyter) and its launcher has ended"),
        "kernels whose Jupyter server is killed", launched(at_a_prompt, _kernels)),
    orphaned_from_session_leader=(leftover(late=LEADER_ENDED),
        "children of a killed program that led its session (``setsid``, a container, an ssh command)",
        launched(Stage.start, children)),
    orphaned_under_subreaper=(leftover(late=LEADER_ENDED),
        "workers whose program is killed, and whom ``systemd --user`` adopts in place of pid 1",
        launched(_under_a_manager, children)),
    orphaned_mpi_ranks=(abandoned,
        "two ranks of Open MPI in the process group of an mpirun that is then killed",
        launched(at_a_prompt, two_of({"OMPI_COMM_WORLD_RANK": "RANK"}, "socket"))),
    orphaned_hydra_ranks=(abandoned, "two ranks of MPICH whose proxy, the leader of a session, is killed",
        launched(Stage.start, two_of({"PMI_RANK": "RANK"}, "socket"))),
    orphaned_ray_workers=(abandoned, "two workers of Ray whose raylet is killed",
        launched(at_a_prompt, ray_workers)),
    orphaned_ranks_of_a_nohup_job=(abandoned,
        "torchrun under nohup, which its ranks inherit, and which is then killed",
        launched(under_nohup, ranks)),
    orphaned_grandchildren=(leftover(late=LEADER_ENDED),
        "programs whose own starter is killed while the launcher above it lives",
        launched(lambda stage: stage.start(("reap",)).start(("lead_group",)), children)),
    orphaned_in_a_pipeline=(abandoned,
        "spawned workers of a program in a pipeline, whose group has another, live leader",
        launched(_in_a_pipeline, spawned)),
)  # fmt: skip
