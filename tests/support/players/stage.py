"""The stage: starts players and other programs, tells players what to do, and kills them all at its end.

All that was started carries a marker in its environment, whatever sessions, groups and parents it moved to.
"""

import itertools
import json
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.support.players.player import LONGEST
from tests.support.waiting import PATIENCE, wait_until

PLAYER = str(Path(__file__).with_name("player.py"))
MARKER = "VRAMLEDGER_STAGE"
_CREDENTIALS = struct.Struct("3i")

Step = tuple[Any, ...]
"""The name of a function of ``player.py``, and its arguments."""


def status(pid: int) -> str:
    """Return the kernel's view of a process by psutil, ``gone`` when there is none."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def parent_of(pid: int) -> int:
    """Return the parent's pid, by psutil, and not by the code under test."""
    return int(psutil.Process(pid).ppid())


class PlayerError(Exception):
    """A player could not do what it was ordered."""


class Program:
    """A program that the stage has started itself, and so reaps."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.pid = popen.pid

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(PATIENCE)

    def close_input(self) -> None:
        """Close its standard input, and wait until it has ended of its own accord."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(PATIENCE)


class Player:
    """A process that obeys; ``program`` is it or its wrapper, None where another player has started it."""

    def __init__(self, stage: "Stage", connection: socket.socket, program: Program | None = None) -> None:
        self._stage = stage
        self._connection = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(credentials)[0]
        self.process = psutil.Process(self.pid)
        self.program = program

    def order(self, verb: str, *arguments: object) -> Any:  # noqa: ANN401 what it answers is JSON
        """Order a function of ``player.py``; return its answer when it is done, unless it fails."""
        try:
            self._connection.send(json.dumps([verb, *arguments]).encode())
            answer = json.loads(self._connection.recv(LONGEST) or b'{"error": "it has ended"}')
        except ConnectionError:
            answer = {"error": "it has ended"}
        if "error" in answer:
            raise PlayerError(f"player {self.pid}, {verb}: {answer['error']}")
        return answer["answer"]

    def start(  # noqa: PLR0913 what a process may be given
        self,
        *steps: Step,
        name: str = "",
        wrapper: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        session: bool = False,
        words: Sequence[str] = (),
        tie: Literal["", "pipe", "socket"] = "",
    ) -> "Player":
        """Let it start another player, which it may keep tied to itself; else as :meth:`Stage.start`."""
        role = self._stage.new_role()
        command = [*wrapper, *self._stage.command(role, *steps, name=name), *words]
        if tie:
            self.order("start_with_pipe", command, dict(env or {}), session, tie == "socket")
        else:
            self.order("start", command, dict(env or {}), session)
        return self._stage.hear(role)[0]

    def fork(self) -> "Player":
        role = self._stage.new_role()
        self.order("fork", self._stage.socket, role)
        return self._stage.hear(role)[0]

    def fork_workers(self, method: str, count: int = 2) -> tuple["Player", ...]:
        role = self._stage.new_role()
        self.order("fork_workers", self._stage.socket, role, method, count)
        return self._stage.hear(role, count)

    @property
    def running(self) -> bool:
        return status(self.pid) not in ("gone", psutil.STATUS_ZOMBIE)

    def signal(self, number: int) -> None:
        """Send it a signal; it is not reaped."""
        self.process.send_signal(number)

    def stop(self) -> None:
        """Stop it as a terminal's ^Z does, and wait until it is so."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: status(self.pid) == psutil.STATUS_STOPPED, f"player {self.pid} to stop")

    def wait(self) -> int:
        """Wait until what the stage has started ends, and return its status as ``subprocess`` does."""
        assert self.program is not None
        return self.program.popen.wait(PATIENCE)

    def end(self) -> None:
        """Kill it, and wait until it runs no more; a zombie stays where its parent does not reap."""
        with suppress(psutil.NoSuchProcess):
            self.signal(signal.SIGKILL)
        if self.program is not None:
            self.wait()
        wait_until(lambda: not self.running, f"the end of player {self.pid}")

    def close(self) -> None:
        """Forget it, which ends it unless it is stopped."""
        self._connection.close()


class Stage:
    """A place for processes, with a directory for what they need."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="stage-"))  # short: a socket's path has 107 bytes
        self.directory.chmod(0o755)
        self.socket = str(self.directory / "socket")
        self._token = secrets.token_hex(8)
        self._roles = itertools.count()
        self._heard: dict[str, list[Player]] = {}
        self._players: list[Player] = []
        self._programs: list[Program] = []
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(self.socket)
        Path(self.socket).chmod(0o666)
        self._door.listen(1024)

    def new_role(self) -> str:
        return f"player-{next(self._roles)}"

    def command(self, role: str, *steps: Step, name: str = "") -> list[str]:
        """Return the command of a player, whom :meth:`hear` calls by its role, for whatever starts it."""
        program = Path(sys.executable)
        if name:
            program = self.directory / name
            if not program.is_symlink():
                program.symlink_to(Path(sys.executable).resolve())
        return [str(program), "-I", "-S", PLAYER, self.socket, role, json.dumps(steps)]

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        session: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Program:
        """Start any program, in a session of its own unless told otherwise, as a login would."""
        with _signals_as_in_a_login():
            popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=None if stdin == subprocess.DEVNULL else subprocess.DEVNULL,
                start_new_session=session,
                env={**os.environ, MARKER: self._token, **(env or {})},
            )
        self._programs.append(Program(popen))
        return self._programs[-1]

    def start(  # noqa: PLR0913 what a process may be given
        self,
        *steps: Step,
        name: str = "",
        user: int | None = None,
        wrapper: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        session: bool = True,
        words: Sequence[str] = (),
    ) -> Player:
        """Start a player and return it when it is there.

        It does its steps before it is heard. ``name`` is what the kernel calls its program, ``wrapper`` the
        command before its own, ``words`` what else its command line says. It leads a session, as at a login,
        or a process group.
        """
        role = self.new_role()
        more: list[Step] = [] if session else [("lead_group",)]
        more += [] if user is None else [("be_user", user)]
        command = [*wrapper, *self.command(role, *more, *steps, name=name), *words]
        program = self.run(command, session=session, env=env)
        (player,) = self.hear(role, program=program)
        player.program = program
        return player

    def crowd(self, count: int, files: int = 10, library: str = "") -> list[int]:
        """Start that many sleeping processes with open files, which may map a library; return their pids."""
        found: list[int] = self.start().order("fork_sleepers", count, files, library)
        return found

    def hear(self, role: str, count: int = 1, program: Program | None = None) -> tuple[Player, ...]:
        """Wait for the next ``count`` players of a role, unless the program that is to bring them fails."""
        heard = self._heard.setdefault(role, [])

        def complete() -> bool:
            failed = None if program is None else program.popen.poll()
            if select.select([self._door], [], [], 0.05)[0]:
                self._let_in()
            elif failed:
                raise PlayerError(f"it ended with {failed}, and {count} {role!r} not heard")
            return len(heard) >= count

        wait_until(complete, f"{count} {role!r}")
        self._heard[role] = heard[count:]
        return tuple(heard[:count])

    def _let_in(self) -> None:
        connection, _ = self._door.accept()
        connection.settimeout(PATIENCE)
        player = Player(self, connection)
        self._players.append(player)
        self._heard.setdefault(connection.recv(LONGEST).decode(), []).append(player)

    def close(self) -> None:
        """Kill everything that carries the marker, until nothing does."""
        for player in self._players:
            with suppress(psutil.NoSuchProcess):
                player.signal(signal.SIGKILL)  # a zombie leader shows no environment
        wait_until(self._killed, "the processes of a stage do not die")
        for program in self._programs:
            program.popen.wait()
            if program.popen.stdin is not None:
                program.popen.stdin.close()
        for player in self._players:
            player.close()
        self._door.close()
        shutil.rmtree(self.directory)

    def _killed(self) -> bool:
        marker = f"{MARKER}={self._token}".encode()
        clean = True
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                if marker in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    clean = False
        return clean

    def __enter__(self) -> "Stage":  # noqa: PYI034 Self is of Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _signals_as_in_a_login() -> Iterator[None]:
    """Undo what a test run under nohup, or in the background of a script, would hand down."""
    usual = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    ignored = [each for each in usual if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        signal.signal(each, signal.SIG_DFL)
    try:
        yield
    finally:
        for each in ignored:
            signal.signal(each, signal.SIG_IGN)
