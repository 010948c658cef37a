"""Workers of programs that start workers: torchrun, mpirun, srun, Ray, multiprocessing, Jupyter."""

from __future__ import annotations

import os

from tests.support.players.parts import IN_A_SHELL, children, ranks, script
from tests.support.players.stage import Player, Stage
from tests.support.players.tree import LEADER_ENDED, Cast, healthy, leftover


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


def _at_a_prompt(stage: Stage) -> Player:
    """Start a launcher as an interactive shell does: it leads its group, not its session."""
    return stage.start(session=False)


@leftover(late=LEADER_ENDED)
def orphaned_subprocesses(stage: Stage) -> Cast:
    """Play two children by ``subprocess`` of a program that is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(children(launcher), launcher)


@leftover(late="it is a worker (multiprocessing) and its launcher has ended")
def orphaned_spawned(stage: Stage) -> Cast:
    """Play two ``multiprocessing`` workers (spawned) of a program that is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(launcher.fork_workers("spawn"), launcher)


@leftover(late=LEADER_ENDED)
def orphaned_forked(stage: Stage) -> Cast:
    """Play two ``multiprocessing`` workers (forked) of a program that is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(launcher.fork_workers("fork"), launcher)


@leftover(late="it is a worker (LOCAL_RANK, TORCHELASTIC_RUN_ID) and its launcher has ended")
def orphaned_ranks(stage: Stage) -> Cast:
    """Play two ranks as torchrun starts them, each leading its own session; torchrun is then killed."""
    launcher = _at_a_prompt(stage)
    return Cast(ranks(launcher), launcher)


@leftover(late="it is a worker (jupyter) and its launcher has ended")
def orphaned_kernels(stage: Stage) -> Cast:
    """Play kernels whose Jupyter server is killed."""
    server = _at_a_prompt(stage)
    kernels = [
        server.start(
            env={"JPY_PARENT_PID": str(server.pid)},
            session=True,
            words=["-f", f"/run/kernel-{number}.json"],
        )
        for number in range(2)
    ]
    return Cast(kernels, server)


@leftover(late=None)
def orphaned_from_session_leader(stage: Stage) -> Cast:
    """Play children of a killed program that led its session (``setsid``, a container, an ssh command).

    Seen late they look as a daemon does that forked twice, and have to pass for one.
    """
    launcher = stage.start()
    return Cast(children(launcher), launcher)


@leftover(late=LEADER_ENDED)
def orphaned_under_subreaper(stage: Stage) -> Cast:
    """Play workers whose program is killed, and whom ``systemd --user`` adopts in place of pid 1."""
    manager = stage.start(("adopt",), ("lead_session",), ("reap",), name="systemd")
    launcher = manager.start(("lead_group",))
    return Cast(children(launcher), launcher)
