"""Run ``vramledger run``: start a program with the agent inside, without changing its code."""

from __future__ import annotations

import argparse
import os
import sys

import vramledger
from vramledger.agent_protocol.messages import (
    FROM_START_VARIABLE,
    INTERVAL_VARIABLE,
    REPORTS_VARIABLE,
    SOCKET_VARIABLE,
)
from vramledger.commands.parser import Commands, add_consents, add_log, agent_settings, duration
from vramledger.errors import StartupError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import would delay each start of a program
    from collections.abc import Mapping
    from pathlib import Path

STARTUP = os.path.join(os.path.dirname(vramledger.__file__), "agent", "startup")  # noqa: PTH118, PTH120 as above
"""The directory whose sitecustomize starts the agent."""

HOOK = "vramledger-agent"
PTH = (
    'import os; exec("try:\\n import vramledger.agent\\n vramledger.agent.start_if_enabled()\\n'
    'except Exception:\\n pass\\n") if os.environ.get("VRAMLEDGER_AGENT") == "1" else None\n'
)
"""For Python up to 3.17: site executes it; a package that is missing by then causes no error."""

START = "vramledger.agent:start_if_enabled\n"
"""For Python 3.18 and newer, which ignores the other file's line (PEP 829).

Python 3.15 reads it as well, but would report an error at every start if the package is missing; the line
does not.
"""

START_FILES_SINCE = (3, 18)

NOT_FOUND, NOT_RUN = 127, 126
"""Exit statuses, as shells and env(1) have them."""


def add_command(commands: Commands) -> None:
    """Declare the command."""
    run_ = commands.add_parser(
        "run",
        help="start a program with the agent inside",
        description="Start a program, Python or one that starts Python, with the agent in every interpreter "
        "that uses a GPU framework. Nothing else about the program changes.",
        usage="vramledger run [OPTION...] -- COMMAND [ARGUMENT...]",
    )
    add_consents(run_)
    run_.add_argument(
        "--snapshot-from-start",
        action="store_true",
        help="record PyTorch's allocations from the first one on, so that snapshots and out-of-memory "
        "reports name the line of every tensor (2 microseconds an allocation); implies --allow-snapshot",
    )
    run_.add_argument("--agent.socket", dest="socket", metavar="PATH", help="the exporter's socket")
    run_.add_argument(
        "--agent.interval",
        dest="interval",
        type=duration,
        metavar="DURATION",
        help="time between reports (default 1s)",
    )
    run_.add_argument(
        "--agent.reports", dest="reports", metavar="DIR", help="directory for out-of-memory reports"
    )
    run_.add_argument(
        "--install", action="store_true",
        help=(
            "do not run a program; from now on VRAMLEDGER_AGENT=1 alone starts the agent in this Python "
            "environment"
        ),
    )  # fmt: skip
    run_.add_argument("--uninstall", action="store_true", help="undo --install")
    run_.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add_log(run_)
    run_.set_defaults(run=run, logs=False)


def run(args: argparse.Namespace) -> int:
    """Replace this process by the program; return only if it cannot be started."""
    if args.install or args.uninstall:
        import sysconfig  # noqa: PLC0415 a program's start does not wait for it
        from pathlib import Path  # noqa: PLC0415

        return change_startup_hook(Path(sysconfig.get_path("purelib")), remove=args.uninstall)
    args.allow_snapshot = args.allow_snapshot or args.snapshot_from_start
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        message = "nothing to run; write for example: vramledger run -- python train.py"
        raise UsageError(message)
    try:
        os.execvpe(command[0], command, agent_environment(args, os.environ))  # noqa: S606 it is what we are for
    except FileNotFoundError:
        print(f"vramledger: {command[0]}: there is no such program", file=sys.stderr)
        return NOT_FOUND
    except OSError as error:
        print(f"vramledger: {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_RUN


def agent_environment(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment: our directory first in its PYTHONPATH, and the agent's settings."""
    options = (
        (SOCKET_VARIABLE, args.socket),
        (INTERVAL_VARIABLE, args.interval),
        (REPORTS_VARIABLE, args.reports),
        (FROM_START_VARIABLE, "1" if args.snapshot_from_start else None),
    )
    return {
        **environ,
        **agent_settings(args),
        "PYTHONPATH": python_path(environ.get("PYTHONPATH", "")),
        **{name: str(value) for name, value in options if value is not None},
    }


def python_path(before: str) -> str:
    """Return PYTHONPATH with our directory first.

    An empty entry is the current directory and stays; a variable that is empty as a whole has no entry.
    """
    inherited = before.split(os.pathsep) if before else []
    return os.pathsep.join([STARTUP, *(entry for entry in inherited if entry != STARTUP)])


def change_startup_hook(packages: Path, *, remove: bool) -> int:
    """Put the start-up files into an environment's packages, or take them out.

    Raises:
        StartupError: they cannot be written there.
    """
    try:
        ending, content = (".pth", PTH) if sys.version_info < START_FILES_SINCE else (".start", START)
        if remove:
            for each in (".pth", ".start"):
                (packages / (HOOK + each)).unlink(missing_ok=True)
        else:
            (packages / (HOOK + ending)).write_text(content, encoding="ascii")
    except OSError as error:
        message = (
            f"cannot change {packages}: {error.strerror}; run it as the owner of this Python environment"
        )
        raise StartupError(message) from error
    if remove:
        print(f"Removed the start-up hook from {packages}.")
    else:
        print(f"Installed the start-up hook in {packages}: VRAMLEDGER_AGENT=1 starts the agent from now on.")
    return 0
