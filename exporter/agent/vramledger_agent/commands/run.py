"""Run ``vramledger-agent run``: start a program with the agent inside, without changing its code."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself loads enum
import argparse
import binascii
import errno
import os
import sys

from vramledger_agent.commands.parser import Commands, add_consents, add_log, agent_settings, duration
from vramledger_agent.errors import StartupError, UsageError
from vramledger_agent.printable import write_plain
from vramledger_agent.protocol.messages import (
    FROM_START_VARIABLE,
    INTERVAL_VARIABLE,
    REPORTS_VARIABLE,
    SOCKET_VARIABLE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import would delay each start of a program
    from collections.abc import Mapping
    from pathlib import Path
    from typing import NoReturn

STARTUP = os.path.join(os.path.dirname(os.path.dirname(__file__)), "startup")
"""The directory whose sitecustomize starts the agent."""

HOOK = "vramledger-agent"
PTH = (
    'import os; exec("try:\\n import vramledger_agent\\n vramledger_agent.start_if_enabled()\\n'
    'except Exception:\\n pass\\n") if os.environ.get("VRAMLEDGER_AGENT") == "1" else None\n'
)
"""For Python up to 3.17: site executes it; a package that is missing by then causes no error."""

START = "vramledger_agent:start_if_enabled\n"
"""For Python 3.18 and newer, which ignores the other file's line (PEP 829).

Python 3.15 reads it as well, but would report an error at every start if the package is missing; the line
does not.
"""

START_FILES_SINCE = (3, 18)

CALLER_ENVIRON, CALLER_IGNORES = "VRAMLEDGER_CALLER_ENVIRON", "VRAMLEDGER_CALLER_IGNORES"
"""What ``vramledger.sh`` was given, for us: the environment, in base64, and the ignored signals."""

NOT_FOUND, NOT_RUN = 127, 126
"""Exit statuses, as shells and env(1) have them."""


def add_command(commands: Commands) -> None:
    run_ = commands.add_parser(
        "run",
        help="start a program with the agent inside",
        description="Start a program, Python or one that starts Python, with the agent in every interpreter "
        "that uses a GPU framework. Nothing else about the program changes.",
        usage="%(prog)s [OPTION...] -- COMMAND [ARGUMENT...]",
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
    run_.set_defaults(run=run, logs=False, prog=run_.prog)


def run(args: argparse.Namespace) -> int:
    """Replace this process by the program; return only if it cannot be started."""
    if args.install or args.uninstall:
        import sysconfig
        from pathlib import Path

        return change_startup_hook(Path(sysconfig.get_path("purelib")), remove=args.uninstall)
    args.allow_snapshot = args.allow_snapshot or args.snapshot_from_start
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError(f"nothing to run; write for example: {args.prog} -- python train.py")
    environ = agent_environment(args, caller_environment())
    restore_signals()
    program = args.prog.split()[0]
    try:
        become(command, environ)
    except (FileNotFoundError, NotADirectoryError):
        write_plain(f"{program}: {command[0]}: there is no such program\n", error=True)
        return NOT_FOUND
    except OSError as error:
        write_plain(f"{program}: {command[0]}: {error.strerror}\n", error=True)
        return NOT_RUN


def become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Become a program that is found as shells find it: the first on PATH that may run.

    A script that does not name its interpreter is one for the shell. Raises OSError if there is none, or it
    cannot run.
    """
    directories = [""] if "/" in command[0] else os.get_exec_path(environ)
    refused: OSError | None = None
    for path in [os.path.join(each, command[0]) for each in directories]:
        try:
            os.execve(path, command, environ)  # noqa: S606 it is what we are for
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            refused = refused or error
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            os.execve("/bin/sh", ["/bin/sh", path, *command[1:]], environ)  # noqa: S606
    raise refused or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])


def caller_environment() -> dict[str, str]:
    """Return the environment that our caller gave us, in its order.

    The shell that starts us (``vramledger.sh``) hands it on, because it drops what it cannot name, and Python
    itself adds ``LC_CTYPE`` where the locale is C.
    """
    try:
        block = binascii.a2b_base64(os.environ[CALLER_ENVIRON])
    except (KeyError, ValueError):
        return {name: value for name, value in os.environ.items() if name != CALLER_IGNORES}
    found: dict[str, str] = {}
    for entry in block.split(b"\0"):
        name, equals, value = os.fsdecode(entry).partition("=")
        if equals:
            found.setdefault(name, value)
    return found


def restore_signals() -> None:
    """Give the signals that Python ignores from its start on what they had before.

    Without one (``python -m vramledger``) they get what Python's ``subprocess`` gives them.
    """
    try:
        ignored = int(os.environ.get(CALLER_IGNORES, ""), 16)
    except ValueError:
        ignored = 0
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        was_ignored = ignored >> number - 1 & 1
        _signal.signal(number, _signal.SIG_IGN if was_ignored else _signal.SIG_DFL)


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
    """Put the start-up files into an environment's packages, or out. Raises StartupError if that fails."""
    try:
        ending, content = (".pth", PTH) if sys.version_info < START_FILES_SINCE else (".start", START)
        if remove:
            for each in (".pth", ".start"):
                (packages / (HOOK + each)).unlink(missing_ok=True)
        else:
            (packages / (HOOK + ending)).write_text(content, encoding="ascii")
    except OSError as error:
        raise StartupError(
            f"cannot change {packages}: {error.strerror}; run it as the owner of this Python environment"
        ) from error
    if remove:
        write_plain(f"Removed the start-up hook from {packages}.\n")
    else:
        write_plain(
            f"Installed the start-up hook in {packages}: VRAMLEDGER_AGENT=1 starts the agent from now on.\n"
        )
    return 0
