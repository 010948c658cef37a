"""The stage: start programs and recordings for a scenario, and clear everything away after it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.lab.recordings.recorder import PROGRAMS, Recorder, TroubleError
from tests.support import judging
from tests.support.judging import Entry

ROOT = Path(__file__).resolve().parents[3]
MARK = "VRAMLEDGER_RECORDINGS"
"""Environment variable that marks everything that we started, and its children."""

_NAMESPACE = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 /proc's links lead to no path


@dataclass
class Outcome:
    """The result of one recording, or of a scenario that made none."""

    name: str
    good: bool
    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    entry: Entry | None = None


class Program:
    """A started program and the roles that it, or a child of it, has announced on its stdout."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, **options: Any) -> None:  # noqa: ANN401
        self.command = list(command)
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                self.command,
                env=env,
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.PIPE,
                cwd=ROOT,
                **options,
            )
        self.pid = self.process.pid
        self.roles: dict[str, dict[str, Any]] = {}
        self.starts: dict[int, int] = {}
        self._changed = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        stream = self.process.stdout
        for line in stream or ():
            try:
                facts = json.loads(line)
                role = facts["role"]
            except (ValueError, TypeError, KeyError):
                continue  # a message of some library
            with self._changed:
                self.roles[role] = facts
                start = start_of(facts["pid"])
                # A pid of another namespace is another process's number here.
                if start is not None and facts["namespace"] == _NAMESPACE:
                    self.starts[facts["pid"]] = start
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, *roles: str, timeout: float = 60.0) -> dict[str, int]:
        """Wait until roles are ready; return their pids.

        Raises:
            TroubleError: they are not in time.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not set(roles) <= set(self.roles):
                left = deadline - time.monotonic()
                # At the end of the pipe it has ended, and so have all processes that inherited it.
                if left <= 0 or not self._listener.is_alive():
                    missing = sorted(set(roles) - set(self.roles))
                    tail = self.log.read_text(errors="replace").strip()[-1500:]
                    why = "is not ready" if left <= 0 else "has ended"
                    message = f"{missing} {why}: {' '.join(self.command[-6:])}\n{tail}"
                    raise TroubleError(message)
                self._changed.wait(min(left, 0.2))
        return {role: int(self.roles[role]["pid"]) for role in roles}

    def signal(self, number: int) -> None:
        """Send a signal; the process is not reaped."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill and reap it; its children live on."""
        self.process.kill()
        self.process.wait(timeout=10)


class Stage:
    """Where scenarios run.

    Attributes:
        rehearsal: the stand-in GPUs, None on a real host.
        python: the interpreter that runs programs.
        outcomes: what the recordings have come to so far.
    """

    def __init__(self, home: Path, scratch: Path, python: str, rehearsal: Any = None) -> None:  # noqa: ANN401
        self.home = home
        self.scratch = scratch
        self.python = python
        self.rehearsal = rehearsal
        self.outcomes: list[Outcome] = []
        self.gpu = ""
        self.scenario = ""
        self._token = f"{os.getpid()}-{time.time_ns()}"
        self._programs: list[Program] = []
        self._recorders: list[Recorder] = []

    @property
    def rehearsing(self) -> bool:
        """Whether the GPUs are stand-ins."""
        return self.rehearsal is not None

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of every program that is started here."""
        return {**os.environ, MARK: self._token, "PYTHONUNBUFFERED": "1", **(more or {})}

    def start(
        self,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        **options: Any,  # noqa: ANN401
    ) -> Program:
        """Start a program of ours, or with a first argument of ``-m`` or ``-c`` any other Python program."""
        first, *rest = [str(argument) for argument in arguments]
        script = [first] if first.startswith("-") else [str(PROGRAMS / first)]
        return self.run([*before, self.python, *script, *rest], env=env, **options)

    def run(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> Program:  # noqa: ANN401
        """Start any command."""
        log = self.scratch / f"{self.scenario or 'stage'}.stderr"
        program = Program(command, self.env(env), log, **options)
        self._programs.append(program)
        return program

    def hold(self, role: str, gib: float, *more: object, **options: Any) -> Program:  # noqa: ANN401
        """Start a plain holder."""
        return self.start("holder.py", "--role", role, "--gib", gib, *more, **options)

    def record(self, name: str, note: str, **more: Any) -> Recorder:  # noqa: ANN401
        """Start a recording and wait for its first reading."""
        entry = Entry(name=name, file=f"{name}.jsonl.gz", note=note, **more)
        recorder = Recorder(self.home, entry)
        self._recorders.append(recorder)
        recorder.begun()
        return recorder

    def finish(
        self,
        recorder: Recorder,
        roles: Mapping[str, int],
        expected: Mapping[str, str],
        timeout: float = 20.0,
        **more: Any,  # noqa: ANN401
    ) -> None:
        """Wait until every role is in its state and no other is listed; end the recording and judge it.

        A missing verdict does not discard the recording: it is judged, and fails.
        """
        wanted = {roles[role]: state for role, state in expected.items()}
        entry = replace(
            recorder.entry,
            expected=wanted,
            roles={pid: role for role, pid in roles.items()},
            gpu=self.gpu,
            **more,
        )
        late = []
        try:
            recorder.until(
                f"states {wanted}, hidden {entry.hidden}",
                lambda shot: (
                    judging.states(shot) == wanted
                    and entry.policies.items() <= judging.policies(shot).items()
                    and (entry.hidden is None or judging.hidden(shot) == sorted(entry.hidden))
                ),
                timeout,
            )
            recorder.more(2)
        except TroubleError as error:
            late = [str(error)]
        recorder.end()
        self._recorders.remove(recorder)
        self.judge(entry, late)

    def judge(self, entry: Entry, late: Sequence[str] = ()) -> None:
        """Replay a finished recording and record its result."""
        snapshots = judging.replay(self.home, entry)
        entry = replace(entry, settling=len(judging.above(entry, snapshots)))
        problems = judging.problems(entry, snapshots)
        lines = judging.figures(entry, snapshots) if snapshots else []
        if entry.settling:
            serials = judging.above(entry, snapshots)
            lines.append(
                f"  NOTE: unattributed above the bound in readings {serials}, while something came or went"
            )
        size = (self.home / entry.file).stat().st_size
        lines.append(f"  {entry.file}: {size / 1000:.1f} kB")
        if problems and late:
            problems = [*late, *problems]
        self.outcomes.append(Outcome(entry.name, not problems, problems, lines, entry))

    def clear(self) -> None:
        """End every recording and every process of the scenario, in any state."""
        for recorder in self._recorders:
            with contextlib.suppress(TroubleError):
                recorder.end()
        self._recorders.clear()
        known = {(pid, start) for program in self._programs for pid, start in program.starts.items()}
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            left = [pid for pid, start in known if start_of(pid) == start and _can_run(pid)]
            left += self.marked()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            self._reap()
            time.sleep(0.05)
        self._reap()
        self._programs.clear()

    def marked(self) -> list[int]:
        """Return every living process that carries our mark."""
        mark = f"{MARK}={self._token}".encode()
        found = []
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                        found.append(int(name))
        return found

    def _reap(self) -> None:
        for program in self._programs:
            for stream in (program.process.stdin,):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
            program.process.poll()


def stat_of(pid: int) -> list[str] | None:
    """Return what follows the name in ``/proc/PID/stat``, None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def start_of(pid: int) -> int | None:
    """Return the start time of a process in ticks."""
    row = stat_of(pid)
    return None if row is None else int(row[19])


def _can_run(pid: int) -> bool:
    row = stat_of(pid)
    return row is not None and (row[0] not in "ZX" or int(row[17]) > 1)


def child_of(pid: int, timeout: float = 20.0) -> int:
    """Wait for the first child of a process and return its pid.

    Raises:
        TroubleError: none came in time.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for name in os.listdir("/proc"):  # noqa: PTH208
            row = stat_of(int(name)) if name.isdigit() else None
            if row is not None and int(row[1]) == pid:
                return int(name)
        time.sleep(0.05)
    message = f"process {pid} started no child"
    raise TroubleError(message)


def python_with_torch() -> str:
    """Return an interpreter that has torch: this one, otherwise the first ``python3`` on PATH."""
    for python in (sys.executable, "python3"):
        probe = [
            python,
            "-c",
            "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)",
        ]
        with contextlib.suppress(OSError):
            if subprocess.run(probe, check=False, capture_output=True, env=os.environ).returncode == 0:
                return python
    return sys.executable
