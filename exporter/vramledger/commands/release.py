"""Run ``vramledger release``: make the exporter release the GPUs, for a reset, a MIG change or an update."""

from __future__ import annotations

import argparse
import time

from vramledger.commands.arguments import add_control, control_socket
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.errors import UsageError
from vramledger.serving.control_client import request_release
from vramledger.serving.control_messages import MAX_RELEASE_SECONDS
from vramledger_agent.commands.parser import Commands, add_log, duration, write_output

_DEFAULT_SECONDS = 600.0


def add_command(commands: Commands) -> None:
    """Declare the command."""
    release = commands.add_parser(
        "release",
        help="release the GPUs for a reset",
        description="Make the exporter of this host close every handle of the driver, so that a GPU reset, a "
        "MIG change or a driver update is possible. The exporter stays up, reports this, and reopens the "
        "GPUs by itself.",
    )
    how = release.add_mutually_exclusive_group()
    how.add_argument(
        "--for", dest="seconds", type=duration, default=_DEFAULT_SECONDS, metavar="DURATION",
        help="for how long, at most 30d (default 10m)",
    )  # fmt: skip
    how.add_argument("--resume", action="store_true", help="reopen the GPUs now")
    add_control(release)
    add_log(release)
    release.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the request to the exporter; return 0 when it has done it."""
    if args.seconds > MAX_RELEASE_SECONDS:
        raise UsageError(
            f"--for is at most {MAX_RELEASE_SECONDS / 86400:.0f}d; a longer release would be forgotten"
        )
    seconds = None if args.resume else args.seconds
    until = run_until_interrupted(request_release(control_socket(args), seconds))
    if until is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until))
        back = "'vramledger release --resume' reopens them"
        write_output(f"The exporter has released the GPUs until {clock}; {back}.\n")
    else:
        write_output("The exporter reopens the GPUs.\n")
    return 0
