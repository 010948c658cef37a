"""Programs in containers, with the inits, shims and runtimes that start or adopt them."""

import os

from tests.support.players.parts import MAIN_PROCESS, children, container, in_a_namespace, kernel, rank, ranks
from tests.support.players.stage import Player, Stage
from tests.support.players.tree import LEADER_ENDED, Cast, Tree, abandoned, healthy, leftover
from tests.support.requirements import require_tool


@healthy
def container_init(stage: Stage) -> Cast:
    """Play a container's main program and its live child, after the runtime that made them has ended."""
    main = container(stage)
    return Cast([main, main.start()], main.program)


@healthy
def in_a_pod(stage: Stage) -> Cast:
    """Play a program in a container with the host's PIDs, whose variables say rank, under its shim."""
    shim = stage.start(("adopt",), name="containerd-shim-runc-v2")
    return Cast([shim.start(env=rank(0), session=True)])


@healthy
def executed_in_a_pod(stage: Stage) -> Cast:
    """Play ``docker exec`` in a container whose variables say rank: its parent is outside."""
    return _executed(stage, container(stage))


def _executed(stage: Stage, main: Player) -> Cast:
    require_tool("nsenter")
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    enter = ["nsenter", "--target", str(main.pid), *user, "--pid", "--"]
    return Cast([stage.start(wrapper=enter, env=rank(0))])


@healthy
def docker_init(stage: Stage) -> Cast:
    """Play ``docker run --init -e PMIX_RANK=0``: the container's variables are its init's, too."""
    return _program_of(stage, "docker-init", PMIX_RANK="0")


@healthy
def catatonit(stage: Stage) -> Cast:
    """Play podman's init in a container whose variables say rank."""
    return _program_of(stage, "catatonit", OMPI_COMM_WORLD_RANK="0")


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
def launcher_as_init(stage: Stage) -> Cast:
    """Play a container whose pid 1 is torchrun itself, with ranks that lead sessions of their own."""
    return Cast(ranks(stage.start(("lead_group",), wrapper=in_a_namespace())))


@healthy
def tini(stage: Stage) -> Cast:
    """Play ``tini -- program`` as the entrypoint of an image whose variables say rank."""
    return _program_of(stage, "tini", LOCAL_RANK="0", TORCHELASTIC_RUN_ID="none")


@healthy
def dumb_init(stage: Stage) -> Cast:
    """Play dumb-init as the entrypoint of an image whose variables say rank."""
    container(stage, ("start", stage.command("holder"), {}, True), name="dumb-init", PMI_RANK="0")
    return Cast(stage.hear("holder"))


@healthy
def under_conmon(stage: Stage) -> Cast:
    """Play Podman's container with the host's PIDs, whose variables say rank, under conmon."""
    monitor = stage.start(("adopt",), name="conmon")
    return Cast([monitor.start(env={"OMPI_COMM_WORLD_RANK": "0"}, session=True)])


@healthy
def executed_beside_sleep(stage: Stage) -> Cast:
    """Play ``docker exec`` in a container whose pid 1 only sleeps."""
    return _executed(stage, container(stage, name="sleep"))


@healthy
def service_in_a_container(stage: Stage) -> Cast:
    """Play a service in a container whose pid 1 is systemd."""
    manager = container(stage, name="systemd")
    return Cast([manager.start(session=True, wrapper=MAIN_PROCESS)])


@healthy
def shell_in_a_container(stage: Stage) -> Cast:
    """Play ``docker run -it image bash``, and a program started at that prompt."""
    shell = container(stage, name="bash")
    return Cast([shell.start(("lead_group",), env={"LOCAL_RANK": "0"})])


def _launcher_below(stage: Stage, init: str, **variables: str) -> Player:
    return container(stage, name=init, **variables).start(("lead_group",))


def _orphaned_ranks(name: str, init: str, what: str) -> Tree:
    """Declare torchrun's ranks in a container whose first process, of this name, adopts them."""

    def build(stage: Stage) -> Cast:
        launcher = _launcher_below(stage, init)
        return Cast(ranks(launcher), launcher)

    build.__name__, build.__doc__ = name, f"Play torchrun's ranks in a container {what}."
    return abandoned(build)


@leftover(late=LEADER_ENDED)
def orphaned_in_container(stage: Stage) -> Cast:
    """Play workers in a container whose launcher is killed; the container's init, a mere reaper, adopts."""
    launcher = _launcher_below(stage, "tini")
    return Cast(children(launcher), launcher)


orphaned_ranks_in_container = _orphaned_ranks(
    "orphaned_ranks_in_container", "docker-init", "whose init, a mere reaper, adopts them"
)


orphaned_ranks_under_sleep = _orphaned_ranks(
    "orphaned_ranks_under_sleep", "sleep", "that sleeps while its users work in it"
)


orphaned_ranks_under_a_shell = _orphaned_ranks(
    "orphaned_ranks_under_a_shell", "bash", "whose pid 1 is a shell, which makes nobody a session's leader"
)


@abandoned
def orphaned_workers_with_rank(stage: Stage) -> Cast:
    """Play spawned workers in a container whose variables say rank: their command line says worker."""
    launcher = _launcher_below(stage, "tini", LOCAL_RANK="0")
    return Cast(launcher.fork_workers("spawn"), launcher)


orphaned_ranks_under_dumb_init = _orphaned_ranks(
    "orphaned_ranks_under_dumb_init", "dumb-init", "whose dumb-init adopts them"
)


orphaned_ranks_under_systemd = _orphaned_ranks(
    "orphaned_ranks_under_systemd", "systemd", "whose pid 1 is systemd"
)


@leftover(late="it is a worker (jupyter) and its launcher has ended")
def orphaned_kernel_in_container(stage: Stage) -> Cast:
    """Play a kernel whose Jupyter server is killed in a container with tini; another has the same pids."""
    _launcher_below(stage, "tini")
    server = _launcher_below(stage, "tini")
    return Cast([kernel(server, 0)], server)


@healthy
def forkserver_of_a_containers_main_program(stage: Stage) -> Cast:
    """Play workers that the fork server of a container's first process has started."""
    return Cast(container(stage).fork_workers("forkserver"))


@leftover(late="it is a worker (multiprocessing) and its launcher has ended")
def orphaned_below_a_shell_that_is_init(stage: Stage) -> Cast:
    """Play spawned workers whose program is killed below ``sh -c "program; ..."`` as the first process."""
    program = container(stage, name="sh").start()
    return Cast(program.fork_workers("spawn"), program)
