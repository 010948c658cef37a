"""Real process trees with a process in them that plays the GPU holder, and what is to be said of it.

Every builder sets its tree up to the moment *before*; :meth:`Scenario.orphan` takes the launcher away and
returns in the moment *after*. Everything that a scenario started is killed at its end: all of it carries
a marker in its environment, whatever sessions, groups and parents it moved to.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.requirements import require_namespaces, require_tool
from tests.support.waiting import PATIENCE, wait_until

ACTORS = str(Path(__file__).with_name("actors.py"))
_CREDENTIALS = struct.Struct("3i")


def status(pid: int) -> str:
    """Return the kernel's view of a process by psutil, ``gone`` when there is none."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def parent_of(pid: int) -> int:
    """Return the parent's pid, by psutil, and not by the code under test."""
    return int(psutil.Process(pid).ppid())


@contextmanager
def _signals_as_in_a_login() -> Iterator[None]:
    """Undo what a test run under nohup, or in the background of a script, would hand down."""
    ignored = [
        each
        for each in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
        if signal.getsignal(each) is signal.SIG_IGN
    ]
    for each in ignored:
        signal.signal(each, signal.SIG_DFL)
    try:
        yield
    finally:
        for each in ignored:
            signal.signal(each, signal.SIG_IGN)


class Stage:
    """Start the processes of one scenario, hear their reports, and kill them all at the end."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="stage-"))  # short: a socket's path has 107 bytes
        self.socket = str(self.directory / "reports")
        self._marker = f"VRAMLEDGER_SCENARIO={secrets.token_hex(8)}"
        self._heard: dict[str, list[int]] = {}
        self._known: list[psutil.Process] = []
        self._programs: list[subprocess.Popen[bytes]] = []
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._reports.bind(self.socket)

    def actor(self, role: str, argument: str = "", *, name: str = "") -> list[str]:
        """Return the command that plays a role, as a program with another name where one is given."""
        program = Path(sys.executable)
        if name:
            program = self.directory / name
            program.symlink_to(Path(sys.executable).resolve())
        return [str(program), "-I", ACTORS, self.socket, role, argument]

    def start(
        self,
        command: list[str],
        *,
        stdin: int = subprocess.DEVNULL,
        session: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program, in a session of its own unless told otherwise, as a login would."""
        name, _, token = self._marker.partition("=")
        with _signals_as_in_a_login():
            program = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=None if stdin == subprocess.DEVNULL else subprocess.DEVNULL,
                start_new_session=session,
                env={**os.environ, name: token, **(variables or {})},
            )
        self._programs.append(program)
        return program

    def hear(self, name: str, count: int = 1) -> tuple[int, ...]:
        """Wait until ``count`` processes have said that they play ``name``; return their pids."""
        deadline = time.monotonic() + PATIENCE
        while len(self._heard.get(name, ())) < count:
            if not select.select([self._reports], [], [], max(0.0, deadline - time.monotonic()))[0]:
                message = f"waited {PATIENCE:.0f} s for {count} {name!r}, heard {self._heard}"
                raise TimeoutError(message)
            data, ancillary, _, _ = self._reports.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
            pid, _, _ = _CREDENTIALS.unpack(ancillary[0][2])
            self._heard.setdefault(data.decode(), []).append(pid)
            with suppress(psutil.NoSuchProcess):
                self._known.append(psutil.Process(pid))
        return tuple(self._heard[name])

    def close(self) -> None:
        """Kill everything that carries the marker, until nothing does."""
        for process in self._known:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # a zombie leader shows no environment; psutil minds reused pids
        wait_until(self._killed, "the processes of a scenario do not die")
        for program in self._programs:
            program.wait()
            if program.stdin is not None:
                program.stdin.close()
        self._reports.close()
        shutil.rmtree(self.directory)

    def _killed(self) -> bool:
        marker = self._marker.encode()
        clean = True
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                if marker in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    clean = False
        return clean


@dataclass
class Scenario:
    """One process tree.

    Attributes:
        name: the builder's.
        holders: the processes that play GPU holder.
        verdict: what they are in the moment after, for who saw the moment before: ``orphaned``, ``alive``,
            ``zombie``, ``stopped``, ``dead``.
        launcher: who started them, None when it is not part of the play (gone already, or it stays).
        end: what takes the launcher away.
        late: the verdict for who sees the moment after only; None when it is the same.
    """

    name: str
    holders: tuple[int, ...]
    verdict: str
    launcher: int | None = None
    end: Callable[[], object] | None = None
    late: str | None = None

    def orphan(self) -> None:
        """Take the launcher away and wait until its children have been adopted.

        Without a launcher in the play there is nothing to do: the moment after is now.
        """
        if self.launcher is None or self.end is None:
            return
        launcher = self.launcher
        left_behind = [pid for pid in self.holders if parent_of(pid) == launcher]
        assert left_behind, "no holder has this launcher"
        self.end()
        wait_until(lambda: status(launcher) == "gone", f"{self.name}: the launcher does not go")
        wait_until(
            lambda: all(parent_of(pid) != launcher for pid in left_behind), f"{self.name}: nobody adopts"
        )


Builder = Callable[[Stage], Scenario]


@contextmanager
def play(build: Builder) -> Iterator[Scenario]:
    """Set a scenario up, and clean up behind it."""
    stage = Stage()
    try:
        yield build(stage)
    finally:
        stage.close()


def _kill(program: subprocess.Popen[bytes]) -> Callable[[], object]:
    def end() -> None:
        program.kill()
        program.wait()

    return end


def _close_input(program: subprocess.Popen[bytes]) -> Callable[[], object]:
    def end() -> None:
        assert program.stdin is not None
        program.stdin.close()
        program.wait()

    return end


def _signal(pid: int) -> Callable[[], object]:
    return lambda: os.kill(pid, signal.SIGKILL)


# --- no orphans ---------------------------------------------------------------------------------------


def double_fork_daemon(stage: Stage) -> Scenario:
    """Play a classic daemon: its ancestors ended within the moment that made it."""
    stage.start(stage.actor("daemon"))
    (between,) = stage.hear("launcher")
    holders = stage.hear("holder")
    wait_until(lambda: parent_of(holders[0]) != between, "the daemon's parent does not end")
    return Scenario("double_fork_daemon", holders, "alive")


def ready_daemon(stage: Stage) -> Scenario:
    """Play a daemon whose starter stays until it is ready, and can be seen as its parent."""
    starter = stage.start(stage.actor("ready-daemon"), stdin=subprocess.PIPE)
    stage.hear("launcher")
    return Scenario("ready_daemon", stage.hear("holder"), "alive", starter.pid, _close_input(starter))


def nohup_job(stage: Stage) -> Scenario:
    """Play ``nohup program &`` of a shell that then ends."""
    return _shell_job(stage, "nohup_job", ["sh", "-c", 'nohup "$@" & read _', "sh"])


def setsid_job(stage: Stage) -> Scenario:
    """Play ``setsid program &`` of a shell that then ends."""
    require_tool("setsid")
    return _shell_job(stage, "setsid_job", ["sh", "-c", 'setsid "$@" & read _', "sh"])


def script_job(stage: Stage) -> Scenario:
    """Play a job in the background of a shell script; the kernel calls the shell by the script's name."""
    script = stage.directory / "run-all.sh"
    script.write_text('#!/bin/sh\n"$@" &\nread _\n', encoding="ascii")
    script.chmod(0o755)
    return _shell_job(stage, "script_job", [str(script)])


def _shell_job(stage: Stage, name: str, command: list[str]) -> Scenario:
    shell = stage.start([*command, *stage.actor("holder")], stdin=subprocess.PIPE)
    return Scenario(name, stage.hear("holder"), "alive", shell.pid, _close_input(shell))


def disowned_job(stage: Stage) -> Scenario:
    """Play ``program & disown`` at an interactive bash on a terminal, then ``exit``."""
    require_tool("setsid")
    require_tool("bash")
    terminal, slave = os.openpty()
    command = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]
    shell = stage.start(command, stdin=slave, session=False)
    os.close(slave)
    job = " ".join(stage.actor("holder")[:-1])
    os.write(terminal, f"{job} </dev/null >/dev/null 2>&1 & disown\n".encode())

    def end() -> None:
        os.write(terminal, b"exit\n")
        shell.wait()
        os.close(terminal)

    return Scenario("disowned_job", stage.hear("holder"), "alive", shell.pid, end)


def systemd_service(stage: Stage) -> Scenario:
    """Play the main process of a service, whose live parent the kernel calls ``systemd``."""
    stage.start(stage.actor("manager", name="systemd"))
    return Scenario("systemd_service", stage.hear("holder"), "alive")


def tmux_child(stage: Stage) -> Scenario:
    """Play a program in a tmux window; the server lives, and so the program is nobody's orphan."""
    require_tool("tmux")
    command = " ".join(stage.actor("holder")[:-1])
    server = ["tmux", "-S", str(stage.directory / "tmux"), "-f", os.devnull]
    stage.start([*server, "new-session", "-d", "exec " + command])
    return Scenario("tmux_child", stage.hear("holder"), "alive")


def container_init(stage: Stage) -> Scenario:
    """Play a container's main program and its live child, after the runtime that made them has ended."""
    runtime = _unshare(stage, stage.actor("holding-init"))
    return Scenario("container_init", stage.hear("holder", 2), "alive", runtime.pid, _kill(runtime))


def _unshare(stage: Stage, actor: list[str], **variables: str) -> subprocess.Popen[bytes]:
    require_namespaces()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return stage.start(["unshare", *user, "--pid", "--fork", "--mount-proc", *actor], variables=variables)


def dataloader_forked(stage: Stage) -> Scenario:
    """Play workers that a live program forked (PyTorch's DataLoader does)."""
    stage.start(stage.actor("parent", "fork"))
    return Scenario("dataloader_forked", stage.hear("holder", 2), "alive")


def dataloader_spawned(stage: Stage) -> Scenario:
    """Play workers that a live program spawned."""
    stage.start(stage.actor("parent", "spawn"))
    return Scenario("dataloader_spawned", stage.hear("holder", 2), "alive")


def supervised(stage: Stage) -> Scenario:
    """Play the child of a live supervisor that is a subreaper as well."""
    stage.start(stage.actor("subreaper"))
    return Scenario("supervised", stage.hear("holder"), "alive")


def pipeline(stage: Stage) -> Scenario:
    """Play ``echo yes | program`` at a prompt: the leader of its group has ended, its parent lives."""
    require_tool("setsid")
    require_tool("bash")
    terminal, slave = os.openpty()
    command = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]
    stage.start(command, stdin=slave, session=False)
    os.close(slave)
    job = " ".join(stage.actor("holder")[:-1])
    os.write(terminal, f"echo yes | {job} >/dev/null 2>&1\n".encode())
    holders = stage.hear("holder")
    leader = os.getpgid(holders[0])
    wait_until(lambda: status(leader) in ("gone", psutil.STATUS_ZOMBIE), "echo does not end")
    return Scenario("pipeline", holders, "alive")


def rank_in_a_shell(stage: Stage) -> Scenario:
    """Play srun with PMIx, which starts the user's shell, which starts the program."""
    stage.start(["bash", "-c", '"$@"; true', "bash", *stage.actor("holder")], variables={"PMIX_RANK": "0"})
    return Scenario("rank_in_a_shell", stage.hear("holder"), "alive")


def rank_in_a_script(stage: Stage) -> Scenario:
    """Play a rank of mpirun behind a wrapper script, whose shell the kernel calls by the script's name."""
    script = stage.directory / "bind-gpu.sh"
    script.write_text('#!/usr/bin/env bash\nexport CUDA_VISIBLE_DEVICES=0\n"$@"\ntrue\n', encoding="ascii")
    script.chmod(0o755)
    stage.start([str(script), *stage.actor("holder")], variables={"OMPI_COMM_WORLD_RANK": "3"})
    return Scenario("rank_in_a_script", stage.hear("holder"), "alive")


def ranks_that_run_a_shell(stage: Stage) -> Scenario:
    """Play ranks of torchrun that run ``os.system("program; true")``."""
    stage.start(stage.actor("parent", "shells"))
    return Scenario("ranks_that_run_a_shell", stage.hear("holder", 2), "alive")


def ray_task_in_a_shell(stage: Stage) -> Scenario:
    """Play a task of Ray that runs its program with ``shell=True``."""
    shell = ["sh", "-c", '"$@"; true', "sh", *stage.actor("holder")]
    stage.start(shell, variables={"RAY_RAYLET_PID": str(os.getpid())})
    return Scenario("ray_task_in_a_shell", stage.hear("holder"), "alive")


def in_a_pod(stage: Stage) -> Scenario:
    """Play a program in a container with the host's PIDs, whose variables say rank, under its shim."""
    stage.start(stage.actor("shim", name="containerd-shim-runc-v2"))
    return Scenario("in_a_pod", stage.hear("holder"), "alive")


def executed_in_a_pod(stage: Stage) -> Scenario:
    """Play ``docker exec`` in a container whose variables say rank: its parent is outside."""
    require_tool("nsenter")
    runtime = _unshare(stage, stage.actor("holding-init"))
    main, child = stage.hear("holder", 2)
    wait_until(lambda: parent_of(child) == main, "the container is not up")
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    enter = ["nsenter", "--target", str(main), *user, "--pid", "--", *stage.actor("holder")]
    stage.start(enter, variables={"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"})
    holders = stage.hear("holder", 3)[2:]
    assert runtime.poll() is None
    return Scenario("executed_in_a_pod", holders, "alive")


def docker_init(stage: Stage) -> Scenario:
    """Play ``docker run --init -e PMIX_RANK=0``: the container's variables are its init's, too."""
    _unshare(stage, stage.actor("init", name="docker-init"), PMIX_RANK="0")
    return Scenario("docker_init", stage.hear("holder"), "alive")


def catatonit(stage: Stage) -> Scenario:
    """Play podman's init in a container whose variables say rank."""
    _unshare(stage, stage.actor("init", name="catatonit"), OMPI_COMM_WORLD_RANK="0")
    return Scenario("catatonit", stage.hear("holder"), "alive")


def shell_as_init(stage: Stage) -> Scenario:
    """Play a container whose pid 1 is a shell script that sets the rank and then starts the program."""
    script = 'export PMIX_RANK=0 LOCAL_RANK=0; "$@"; true'
    _unshare(stage, ["bash", "-c", script, "bash", *stage.actor("holder")])
    return Scenario("shell_as_init", stage.hear("holder"), "alive")


def launcher_as_init(stage: Stage) -> Scenario:
    """Play a container whose pid 1 is torchrun itself, with ranks that lead sessions of their own."""
    _unshare(stage, stage.actor("parent", "torchrun"))
    return Scenario("launcher_as_init", stage.hear("holder", 2), "alive")


def debugged(stage: Stage) -> Scenario:
    """Play a program that outlives the debugger that started it."""
    return _outlived(stage, "debugged", "gdb")


def profiled(stage: Stage) -> Scenario:
    """Play a program that outlives the profiler that started it."""
    return _outlived(stage, "profiled", "nsys")


def terminal_closed(stage: Stage) -> Scenario:
    """Play a program whose terminal's server, of which the kernel keeps 15 letters, has ended."""
    return _outlived(stage, "terminal_closed", "gnome-terminal-server")


def _outlived(stage: Stage, name: str, program: str) -> Scenario:
    starter = stage.start(stage.actor("parent", "subprocess", name=program))
    return Scenario(name, stage.hear("holder", 2), "alive", starter.pid, _kill(starter))


# --- orphans ------------------------------------------------------------------------------------------


def orphaned_subprocesses(stage: Stage) -> Scenario:
    """Play two children by ``subprocess`` of a program that is then killed."""
    return _killed_parent(stage, "orphaned_subprocesses", "subprocess")


def orphaned_spawned(stage: Stage) -> Scenario:
    """Play two ``multiprocessing`` workers (spawned) of a program that is then killed."""
    return _killed_parent(stage, "orphaned_spawned", "spawn")


def orphaned_forked(stage: Stage) -> Scenario:
    """Play two ``multiprocessing`` workers (forked) of a program that is then killed."""
    return _killed_parent(stage, "orphaned_forked", "fork")


def orphaned_ranks(stage: Stage) -> Scenario:
    """Play two ranks as torchrun starts them, each leading its own session; torchrun is then killed."""
    return _killed_parent(stage, "orphaned_ranks", "torchrun")


def _killed_parent(stage: Stage, name: str, kind: str) -> Scenario:
    # Not in a session of its own: a program started at a prompt leads its group, not its session.
    launcher = stage.start(stage.actor("parent", kind), session=False)
    return Scenario(name, stage.hear("holder", 2), "orphaned", launcher.pid, _kill(launcher))


def orphaned_from_session_leader(stage: Stage) -> Scenario:
    """Play children of a killed program that led its session (``setsid``, a container, an ssh command).

    Seen late they look as a daemon does that forked twice, and have to pass for one.
    """
    launcher = stage.start(stage.actor("parent", "subprocess"))
    holders = stage.hear("holder", 2)
    name = "orphaned_from_session_leader"
    return Scenario(name, holders, "orphaned", launcher.pid, _kill(launcher), late="alive")


def orphaned_under_subreaper(stage: Stage) -> Scenario:
    """Play workers whose program is killed, and whom ``systemd --user`` adopts in place of pid 1."""
    stage.start(stage.actor("subreaper", "subprocess", name="systemd"))
    (launcher,) = stage.hear("launcher")
    holders = stage.hear("holder", 2)
    return Scenario("orphaned_under_subreaper", holders, "orphaned", launcher, _signal(launcher))


def orphaned_in_container(stage: Stage) -> Scenario:
    """Play workers in a container whose launcher is killed; the container's init, a mere reaper, adopts."""
    _unshare(stage, stage.actor("init", "subprocess", name="tini"))
    (launcher,) = stage.hear("launcher")
    holders = stage.hear("holder", 2)
    return Scenario("orphaned_in_container", holders, "orphaned", launcher, _signal(launcher))


def orphaned_ranks_in_container(stage: Stage) -> Scenario:
    """Play torchrun's ranks in a container whose init, a mere reaper, adopts them."""
    return _orphaned_in(stage, "orphaned_ranks_in_container", "docker-init", "torchrun")


def orphaned_ranks_under_sleep(stage: Stage) -> Scenario:
    """Play torchrun's ranks in a container that sleeps while its users work in it."""
    return _orphaned_in(stage, "orphaned_ranks_under_sleep", "sleep", "torchrun")


def orphaned_ranks_under_a_shell(stage: Stage) -> Scenario:
    """Play torchrun's ranks in a container whose pid 1 is a shell, which makes nobody a session's leader."""
    return _orphaned_in(stage, "orphaned_ranks_under_a_shell", "bash", "torchrun")


def orphaned_workers_with_rank(stage: Stage) -> Scenario:
    """Play spawned workers in a container whose variables say rank: their command line says worker."""
    return _orphaned_in(stage, "orphaned_workers_with_rank", "tini", "spawn", LOCAL_RANK="0")


def _orphaned_in(stage: Stage, name: str, init: str, kind: str, **variables: str) -> Scenario:
    _unshare(stage, stage.actor("init", kind, name=init), **variables)
    (launcher,) = stage.hear("launcher")
    holders = stage.hear("holder", 2)
    return Scenario(name, holders, "orphaned", launcher, _signal(launcher))


def orphaned_kernels(stage: Stage) -> Scenario:
    """Play kernels whose Jupyter server is killed."""
    return _killed_parent(stage, "orphaned_kernels", "jupyter")


# --- other states -------------------------------------------------------------------------------------


def zombie_leader(stage: Stage) -> Scenario:
    """Play a process whose main thread has ended while another thread lives on."""
    stage.start(stage.actor("zombie-leader"))
    holders = stage.hear("holder")
    wait_until(lambda: status(holders[0]) == psutil.STATUS_ZOMBIE, "the leader does not end")
    return Scenario("zombie_leader", holders, "zombie")


def zombie(stage: Stage) -> Scenario:
    """Play a process that has ended and that its live parent does not reap."""
    stage.start(stage.actor("negligent"))
    holders = stage.hear("holder")
    wait_until(lambda: status(holders[0]) == psutil.STATUS_ZOMBIE, "the child does not end")
    return Scenario("zombie", holders, "zombie")


def stopped(stage: Stage) -> Scenario:
    """Play a process that somebody has stopped."""
    stage.start(stage.actor("holder"))
    holders = stage.hear("holder")
    os.kill(holders[0], signal.SIGSTOP)
    wait_until(lambda: status(holders[0]) == psutil.STATUS_STOPPED, "the holder does not stop")
    return Scenario("stopped", holders, "stopped")


def dead(stage: Stage) -> Scenario:
    """Play a process that has ended and was reaped."""
    program = stage.start(stage.actor("holder"))
    holders = stage.hear("holder")
    _kill(program)()
    return Scenario("dead", holders, "dead")


NOT_ORPHANS: tuple[Builder, ...] = (
    double_fork_daemon,
    ready_daemon,
    nohup_job,
    disowned_job,
    setsid_job,
    script_job,
    systemd_service,
    tmux_child,
    container_init,
    dataloader_forked,
    dataloader_spawned,
    supervised,
    pipeline,
    rank_in_a_shell,
    rank_in_a_script,
    ranks_that_run_a_shell,
    ray_task_in_a_shell,
    in_a_pod,
    executed_in_a_pod,
    docker_init,
    catatonit,
    shell_as_init,
    launcher_as_init,
    debugged,
    profiled,
    terminal_closed,
)
ORPHANS: tuple[Builder, ...] = (
    orphaned_subprocesses,
    orphaned_spawned,
    orphaned_forked,
    orphaned_ranks,
    orphaned_from_session_leader,
    orphaned_under_subreaper,
    orphaned_in_container,
    orphaned_ranks_in_container,
    orphaned_ranks_under_sleep,
    orphaned_ranks_under_a_shell,
    orphaned_workers_with_rank,
    orphaned_kernels,
)
OTHERS: tuple[Builder, ...] = (zombie_leader, zombie, stopped, dead)
