"""Run ``vramledger-agent attach``: start the agent in a running Python 3.14 process (PEP 768)."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

import vramledger_agent
from vramledger_agent.commands.parser import Commands, add_consents, add_log, agent_settings, pid
from vramledger_agent.errors import StartupError
from vramledger_agent.printable import write_plain
from vramledger_agent.protocol.messages import SOCKET_VARIABLE

WAIT = 5.0
"""Seconds within which the process must run the script; it does so between two of its own instructions."""

SCRIPT = """\
def begin():
    import os, sys, time
    try:
        os.environ.update({settings!r})
        sys.path.insert(0, {root!r})
        try:
            import vramledger_agent
        finally:
            sys.path.remove({root!r})
        vramledger_agent.start()
        result = "ok"
    except BaseException as error:
        result = type(error).__name__ + ": " + str(error)
    try:
        if time.monotonic() > {deadline!r}:
            os.unlink({directory!r} + "/start.py")
            os.rmdir({directory!r})
            return
        with open({directory!r} + "/new", "w") as file:
            file.write(result)
        os.rename({directory!r} + "/new", {directory!r} + "/answer")
    except Exception:
        pass
begin()
"""
"""It runs in the main thread, in a namespace of its own, and removes itself if nobody waits any more."""


def add_command(commands: Commands) -> None:
    attach = commands.add_parser(
        "attach",
        help="start the agent in a running Python 3.14 process",
        description="Start the agent in a process that is already running. The process and this "
        "interpreter must both be Python 3.14 or newer, of the same version. You must be the user of the "
        "process, or root.",
    )
    attach.add_argument("pid", type=pid, metavar="PID", help="the process")
    add_consents(attach)
    attach.add_argument("--agent.socket", dest="socket", metavar="PATH", help="the exporter's socket")
    add_log(attach)
    attach.set_defaults(run=run, prog=attach.prog)


def run(args: argparse.Namespace) -> int:
    """Send the process a script that starts the agent, and wait until it has run it."""
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        running = ".".join(map(str, sys.version_info[:3]))
        raise StartupError(
            f"attaching needs Python 3.14 or newer, and this is {running};"
            f" start the program with '{args.prog.split()[0]} run' instead"
        )
    user = effective_user(args.pid)
    if user is None:
        raise StartupError(f"there is no process {args.pid}")
    directory = Path(tempfile.mkdtemp(prefix="vramledger-attach-"))
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # it will be the other user's
    deadline = time.monotonic() + WAIT
    try:
        remote_exec(args.pid, str(write_script(directory, args, user, deadline)))
        result = await_answer(opened, deadline)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise StartupError(attach_error(args.pid, error)) from error
    finally:
        os.close(opened)
    if result is None:  # the script stays: Python would report an error to the program if it were gone
        raise StartupError(
            f"process {args.pid} did not run the script within {WAIT:g} s: it may be in a long call "
            "outside Python, and starts the agent after that, or it does not see our /tmp"
        )
    shutil.rmtree(directory, ignore_errors=True)
    if result != "ok":
        raise StartupError(
            f"process {args.pid} cannot load the agent: {' '.join(result.split())};"
            f" its user must be able to read {Path(vramledger_agent.__file__).parent}"
        )
    write_plain(f"The agent runs in process {args.pid}.\n")
    return 0


def effective_user(number: int) -> int | None:
    """Return the effective user of a process; None when there is none, or it is hidden from us."""
    try:
        status = Path(f"/proc/{number}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = dict(line.partition(":")[::2] for line in status.split("\n"))
    return int(fields["Uid"].split()[1]) if int(fields["Tgid"]) == number else None


def await_answer(directory: int, deadline: float) -> str | None:
    """Return what the process reports; None if it is late. Raises OSError if it is not a plain file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    while time.monotonic() < deadline:
        try:
            answer = os.open("answer", flags, dir_fd=directory)
        except FileNotFoundError:
            time.sleep(0.01)
            continue
        with open(answer, "rb") as file:
            if not stat.S_ISREG(os.fstat(answer).st_mode):
                raise OSError("its answer is not a plain file")
            return file.read(200).decode(errors="replace")
    return None


def write_script(directory: Path, args: argparse.Namespace, user: int, deadline: float) -> Path:
    """Write the script where the process can read it and write its answer, and return the path."""
    script = directory / "start.py"
    settings = agent_settings(args)
    if args.socket is not None:
        settings[SOCKET_VARIABLE] = args.socket
    root = str(Path(vramledger_agent.__file__).parents[1])
    script.write_text(
        SCRIPT.format(directory=str(directory), deadline=deadline, settings=settings, root=root),
        encoding="utf-8",
    )
    try:
        if user != os.geteuid():
            os.chown(script, user, -1)
            os.chown(directory, user, -1)
    except OSError:
        pass  # remote_exec explains it better
    return script


def attach_error(process: int, error: Exception) -> str:
    """Say in one line why we could not attach to a process, and what to do."""
    if isinstance(error, PermissionError):
        return f"process {process} belongs to another user; run this as that user or as root"
    return (
        f"process {process} accepts no script: {error}; it must be Python"
        f" {sys.version_info[0]}.{sys.version_info[1]} with remote debugging on"
    )
