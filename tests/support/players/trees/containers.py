"""Programs in containers, with the inits, shims and runtimes that start or adopt them."""

import os
from collections.abc import Callable

from tests.support.players.parts import (
    MAIN_PROCESS,
    children,
    container,
    in_a_namespace,
    kernel,
    rank,
    ranks,
    spawned,
)
from tests.support.players.stage import Player, Stage
from tests.support.players.tree import LEADER_ENDED, Cast, abandoned, declared, healthy, launched, leftover
from tests.support.requirements import require_tool


@healthy
def container_init(stage: Stage) -> Cast:
    """Play a container's main program and its live child, after the runtime that made them has ended."""
    main = container(stage)
    return Cast([main, main.start()], main.program)


def _executed(stage: Stage, main: Player) -> Cast:
    require_tool("nsenter")
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    enter = ["nsenter", "--target", str(main.pid), *user, "--pid", "--"]
    return Cast([stage.start(wrapper=enter, env=rank(0))])


def _program_of(stage: Stage, init: str, **variables: str) -> Cast:
    # An init starts its program before it does anything else, and so before we hear it.
    container(stage, ("start", stage.command("holder"), {}), name=init, **variables)
    return Cast(stage.hear("holder"))


@healthy
def shell_as_init(stage: Stage) -> Cast:
    """Play a container whose pid 1 is a shell script that sets the rank and then starts the program."""
    text = 'export PMIX_RANK=0 LOCAL_RANK=0; "$@"; true'
    stage.run([*in_a_namespace(), "bash", "-c", text, "bash", *stage.command("holder")])
    return Cast(stage.hear("holder"))


@healthy
def dumb_init(stage: Stage) -> Cast:
    """Play dumb-init as the entrypoint of an image whose variables say rank."""
    container(stage, ("start", stage.command("holder"), {}, True), name="dumb-init", PMI_RANK="0")
    return Cast(stage.hear("holder"))


def _by(stage: Stage, monitor: str) -> Player:
    return stage.start(("adopt",), name=monitor)


def _launcher_below(stage: Stage, init: str, **variables: str) -> Player:
    return container(stage, name=init, **variables).start(("lead_group",))


def _below(init: str, **variables: str) -> Callable[[Stage], Player]:
    return lambda stage: _launcher_below(stage, init, **variables)


def _beside_its_like(stage: Stage) -> Player:
    _launcher_below(stage, "tini")
    return _launcher_below(stage, "tini")


SHORT = declared(
    in_a_pod=(healthy,
        "a program in a container with the host's PIDs, whose variables say rank, under its shim",
        lambda stage: Cast([_by(stage, "containerd-shim-runc-v2").start(env=rank(0), session=True)])),
    under_conmon=(healthy,
        "Podman's container with the host's PIDs, whose variables say rank, under conmon",
        lambda stage: Cast([_by(stage, "conmon").start(env={"OMPI_COMM_WORLD_RANK": "0"}, session=True)])),
    service_in_a_container=(healthy, "a service in a container whose pid 1 is systemd",
        lambda stage: Cast([container(stage, name="systemd").start(session=True, wrapper=MAIN_PROCESS)])),
    shell_in_a_container=(healthy, "``docker run -it image bash``, and a program started at that prompt",
        lambda stage: Cast([container(stage, name="bash").start(("lead_group",), env={"LOCAL_RANK": "0"})])),
    executed_in_a_pod=(healthy,
        "``docker exec`` in a container whose variables say rank: its parent is outside",
        lambda stage: _executed(stage, container(stage))),
    docker_init=(healthy,
        "``docker run --init -e PMIX_RANK=0``: the container's variables are its init's, too",
        lambda stage: _program_of(stage, "docker-init", PMIX_RANK="0")),
    catatonit=(healthy, "podman's init in a container whose variables say rank",
        lambda stage: _program_of(stage, "catatonit", OMPI_COMM_WORLD_RANK="0")),
    launcher_as_init=(healthy,
        "a container whose pid 1 is torchrun itself, with ranks that lead sessions of their own",
        lambda stage: Cast(ranks(stage.start(("lead_group",), wrapper=in_a_namespace())))),
    tini=(healthy, "``tini -- program`` as the entrypoint of an image whose variables say rank",
        lambda stage: _program_of(stage, "tini", LOCAL_RANK="0", TORCHELASTIC_RUN_ID="none")),
    executed_beside_sleep=(healthy, "``docker exec`` in a container whose pid 1 only sleeps",
        lambda stage: _executed(stage, container(stage, name="sleep"))),
    orphaned_in_container=(leftover(late=LEADER_ENDED),
        "workers in a container whose launcher is killed; the container's init, a mere reaper, adopts",
        launched(_below("tini"), children)),
    orphaned_kernel_in_container=(leftover(late="it is a worker (jupyter) and its launcher has ended"),
        "a kernel whose Jupyter server is killed in a container with tini; another has the same pids",
        launched(_beside_its_like, lambda server: [kernel(server, 0)])),
    orphaned_ranks_in_container=(abandoned,
        "torchrun's ranks in a container whose init, a mere reaper, adopts them",
        launched(_below("docker-init"), ranks)),
    orphaned_ranks_under_sleep=(abandoned,
        "torchrun's ranks in a container that sleeps while its users work in it",
        launched(_below("sleep"), ranks)),
    orphaned_ranks_under_a_shell=(abandoned,
        "torchrun's ranks in a container whose pid 1 is a shell, which makes nobody a session's leader",
        launched(_below("bash"), ranks)),
    orphaned_workers_with_rank=(abandoned,
        "spawned workers in a container whose variables say rank: their command line says worker",
        launched(_below("tini", LOCAL_RANK="0"), spawned)),
    orphaned_ranks_under_dumb_init=(abandoned, "torchrun's ranks in a container whose dumb-init adopts them",
        launched(_below("dumb-init"), ranks)),
    orphaned_ranks_under_systemd=(abandoned, "torchrun's ranks in a container whose pid 1 is systemd",
        launched(_below("systemd"), ranks)),
    forkserver_of_a_containers_main_program=(healthy,
        "workers that the fork server of a container's first process has started",
        lambda stage: Cast(container(stage).fork_workers("forkserver"))),
    orphaned_below_a_shell_that_is_init=(
        leftover(late="it is a worker (multiprocessing) and its launcher has ended"),
        'spawned workers whose program is killed below ``sh -c "program; ..."`` as the first process',
        launched(lambda stage: container(stage, name="sh").start(), spawned)),
)  # fmt: skip
