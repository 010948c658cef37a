"""``vramledger attach``: bring the agent into a Python 3.14 process that runs already (PEP 768)."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import vramledger
from vramledger.commands.arguments import Commands, add_log, pid
from vramledger.errors import StartupError

NEEDED = (3, 14)

WAIT = 5.0
"""Seconds for the process to come by: it runs the script between two of its own instructions."""

SCRIPT = """\
import os, sys
try:
    os.unlink({script!r})
    os.environ.update({settings!r})
    sys.path.insert(0, {root!r})
    try:
        import vramledger.agent
    finally:
        sys.path.remove({root!r})
    vramledger.agent.start()
except Exception:
    pass
"""


def add(commands: Commands) -> None:
    """Declare the command."""
    attach = commands.add_parser(
        "attach",
        help="bring the agent into a running Python 3.14 process",
        description="Bring the agent into a process that runs already. Both it and this interpreter must be"
        " Python 3.14 or newer, of the same version; you must be its user or root.",
    )
    attach.add_argument("pid", type=pid, metavar="PID", help="the process")
    attach.add_argument(
        "--allow-reclaim", action="store_true", help="root and you may ask it to give memory back"
    )
    attach.add_argument("--allow-snapshot", action="store_true", help="root and you may ask it for snapshots")
    attach.add_argument("--agent.socket", dest="socket", metavar="PATH", help="the exporter's socket")
    add_log(attach)
    attach.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the process a script that starts the agent, and wait until it has run it."""
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        running = ".".join(map(str, sys.version_info[:3]))
        message = (
            f"attaching takes Python 3.14 or newer, and this is {running};"
            " start the program with 'vramledger run' instead"
        )
        raise StartupError(message)
    place = Path(tempfile.mkdtemp(prefix="vramledger-attach-"))
    try:
        script = write(place, args)
        try:
            remote_exec(args.pid, str(script))
        except (OSError, RuntimeError) as error:
            raise StartupError(explain(args.pid, error)) from error
        deadline = time.monotonic() + WAIT
        while script.exists():
            if time.monotonic() > deadline:
                message = (
                    f"process {args.pid} did not come by within {WAIT:g} s: it may sit in a long call outside"
                    " Python, or not see our files; try again later"
                )
                raise StartupError(message)
            time.sleep(0.01)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"The agent is in process {args.pid}.")
    return 0


def write(place: Path, args: argparse.Namespace) -> Path:
    """Write the script where the process can read and remove it, and return its path."""
    script = place / "start.py"
    settings = {"VRAMLEDGER_AGENT": "1"}
    consents = [name for name in ("reclaim", "snapshot") if getattr(args, f"allow_{name}")]
    settings["VRAMLEDGER_AGENT_CONSENT"] = ",".join(consents)
    if args.socket is not None:
        settings["VRAMLEDGER_AGENT_SOCKET"] = args.socket
    root = str(Path(vramledger.__file__).parents[1])
    script.write_text(SCRIPT.format(script=str(script), settings=settings, root=root), encoding="utf-8")
    try:
        user = os.stat(f"/proc/{args.pid}").st_uid  # noqa: PTH116
        if user != os.geteuid():
            os.chown(script, user, -1)
            os.chown(place, user, -1)
    except OSError:
        pass  # remote_exec says it better
    return script


def explain(process: int, error: Exception) -> str:
    """Say in one line why a process could not be attached to, and what to do."""
    if isinstance(error, ProcessLookupError):
        return f"no process {process}"
    if isinstance(error, PermissionError):
        return f"process {process} is not yours to attach to; run it as its user or as root"
    return (
        f"process {process} takes no script: {error}; it must be Python"
        f" {sys.version_info[0]}.{sys.version_info[1]} with remote debugging on"
    )
