"""Run ``vramledger-agent attach``: start the agent in a running Python 3.14 process (PEP 768)."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

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
            os.unlink({directory!r} + "/answer")
            os.rmdir({directory!r})
            return
        with open({directory!r} + "/answer", "w") as file:
            file.write(result + "\\n")
    except Exception:
        pass
begin()
"""
"""It runs in the main thread, in a namespace of its own. If nobody waits any more it removes itself, where it
may."""


def add_command(commands: Commands) -> None:
    attach = commands.add_parser(
        "attach",
        help="start the agent in a running process of Python 3.14 or newer",
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
    deadline = time.monotonic() + WAIT
    try:
        with write_files(directory, args, user, deadline) as answer:
            remote_exec(args.pid, str(directory / "start.py"))
            result = await_answer(answer, deadline)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise StartupError(attach_error(args.pid, error)) from error
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


def await_answer(answer: BinaryIO, deadline: float) -> str | None:
    """Return what the process reports; None if it is late."""
    while time.monotonic() < deadline:
        answer.seek(0)
        found = answer.read(200)
        if found.endswith(b"\n") or len(found) == 200:  # noqa: PLR2004 the same
            return found.decode(errors="replace").rstrip()
        time.sleep(0.01)
    return None


def write_files(directory: Path, args: argparse.Namespace, user: int, deadline: float) -> BinaryIO:
    """Write the script and an empty file for the process' answer, and return that, open.

    Only the answer is the other user's. The script stays ours: the pid may have become another program, and
    root's would run what its former user has written there.
    """
    settings = agent_settings(args)
    if args.socket is not None:
        settings[SOCKET_VARIABLE] = args.socket
    root = str(Path(vramledger_agent.__file__).parents[1])
    (directory / "start.py").write_text(
        SCRIPT.format(directory=str(directory), deadline=deadline, settings=settings, root=root),
        encoding="utf-8",
    )
    (directory / "answer").touch(0o600)
    if user != os.geteuid():
        directory.chmod(0o711)
        (directory / "start.py").chmod(0o644)
        with contextlib.suppress(OSError):  # remote_exec explains it better
            os.chown(directory / "answer", user, -1)
    return (directory / "answer").open("rb", buffering=0)


def attach_error(process: int, error: Exception) -> str:
    """Say in one line why we could not attach to a process, and what to do."""
    if isinstance(error, PermissionError):
        return f"process {process} belongs to another user; run this as that user or as root"
    return (
        f"process {process} accepts no script: {error}; it must be Python"
        f" {sys.version_info[0]}.{sys.version_info[1]} with remote debugging on"
    )
