"""What trees have in common: shells, terminals, containers, launchers and their workers."""

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tests.support.players.stage import Player, Program, Stage, Step, parent_of
from tests.support.players.tree import Cast
from tests.support.requirements import require_namespaces, require_tool
from tests.support.waiting import wait_until

IN_A_SHELL = ("sh", "-c", '"$@"; true', "sh")
"""A wrapper: a shell that starts the command, and does not become it."""

MAIN_PROCESS = ("sh", "-c", 'export SYSTEMD_EXEC_PID=$$; exec "$@"', "sh")
"""A wrapper that gives a service's main process the variable that systemd gives it."""


def rank(number: object, store: int = 0) -> dict[str, str]:
    """Return the variables that torchrun gives to a rank, with the port of its store."""
    job = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store)}
    return {"LOCAL_RANK": str(number), **job}


def ranks(launcher: Player, wrapper: Sequence[str] = ()) -> tuple[Player, ...]:
    """Let a player start two ranks as torchrun does, each in a session of its own and connected to its store.

    The ranks are connected to each other too, as by NCCL.
    """
    store = launcher.order("serve")
    found = tuple(
        launcher.start(env=rank(number, store), session=True, wrapper=wrapper) for number in range(2)
    )
    own = found[0].order("serve")
    for each in found:
        each.order("call", store)
    found[1].order("call", own)
    return found


def children(launcher: Player) -> tuple[Player, ...]:
    """Let a player start two programs as ``subprocess`` does."""
    return tuple(launcher.start() for _ in range(2))


def at_a_prompt(stage: Stage) -> Player:
    """Start a launcher as an interactive shell does: it leads its group, not its session."""
    return stage.start(session=False)


def spawned(launcher: Player) -> tuple[Player, ...]:
    """Let a player start two workers by ``multiprocessing``."""
    return launcher.fork_workers("spawn")


def forked(launcher: Player) -> tuple[Player, ...]:
    """Let a player fork two workers by ``multiprocessing``."""
    return launcher.fork_workers("fork")


def double_fork(starter: Player) -> Player:
    """Let a player make a classic daemon."""
    between = starter.fork()
    between.order("lead_session")
    daemon = between.fork()
    between.end()
    wait_until(lambda: parent_of(daemon.pid) != between.pid, "nobody adopts the daemon")
    return daemon


def two_forks(master: Player) -> list[Player]:
    return [master.fork() for _ in range(2)]


def two_of(
    variables: Mapping[str, str], tie: Literal["", "socket"] = "", session: bool = False
) -> Callable[[Player], list[Player]]:
    """Return what lets a player start two programs with these variables; RANK in a value is the number."""

    def work(launcher: Player) -> list[Player]:
        envs = [{name: value.replace("RANK", each) for name, value in variables.items()} for each in "01"]
        return [launcher.start(env=env, session=session, tie=tie) for env in envs]

    return work


def under_nohup(stage: Stage) -> Player:
    return stage.start(("ignore", "SIGHUP"), session=False)


def ray_workers(raylet: Player) -> list[Player]:
    return two_of({"RAY_RAYLET_PID": str(raylet.pid)}, "socket", session=True)(raylet)


def kernel(server: Player, number: int) -> Player:
    """Let a player start a kernel as a Jupyter server does."""
    words = ["-f", f"/run/kernel-{number}.json"]
    inside = (
        Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8").partition("NSpid:")[2].split("\n")[0]
    )
    return server.start(env={"JPY_PARENT_PID": inside.split()[-1]}, session=True, words=words)


def script(stage: Stage, name: str, text: str) -> str:
    """Write an executable script; return its path."""
    path = stage.directory / name
    path.write_text(text, encoding="ascii")
    path.chmod(0o755)
    return str(path)


class Terminal:
    """A terminal with an interactive bash, which leads its session."""

    def __init__(self, stage: Stage) -> None:
        require_tool("setsid")
        require_tool("bash")
        self._terminal, slave = os.openpty()
        command = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]
        self.bash: Program = stage.run(command, stdin=slave, session=False)
        os.close(slave)

    def type(self, line: str) -> None:
        os.write(self._terminal, line.encode() + b"\n")

    def exit(self) -> None:
        self.type("exit")
        self.bash.popen.wait()
        os.close(self._terminal)


def job(stage: Stage, before: str = "", after: str = "") -> str:
    """Return a holder as a shell's command, with what stands before and after it."""
    return f"{before} {shlex.join(stage.command('holder'))} {after}"


def in_a_namespace() -> list[str]:
    """Return the wrapper that makes a command pid 1 of a PID namespace, as a container's runtime does."""
    require_namespaces()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--pid", "--fork", "--mount-proc"]


def container(stage: Stage, *steps: Step, name: str = "", **variables: str) -> Player:
    """Start the main program of a container; it leads a session and reaps what it adopts."""
    steps = (("lead_session",), ("reap",), *steps)
    return stage.start(*steps, name=name, wrapper=in_a_namespace(), env=variables)


def started_by_shell(stage: Stage, command: Sequence[str]) -> Cast:
    """Start a holder by a shell that ends when its input does."""
    shell = stage.run([*command, *stage.command("holder")], stdin=subprocess.PIPE)
    return Cast(stage.hear("holder"), shell, shell.close_input)
