"""Run ``vramledger end``: end holders by pid, state, owner or GPU, safely."""

from __future__ import annotations

import argparse

from vramledger.commands.arguments import add_control, add_sampling, control_socket, sampling_config
from vramledger.commands.interruption import run_until_interrupted
from vramledger.commands.parser import Commands, add_log, duration, pid
from vramledger.commands.sampling_loop import EndOptions, run_end
from vramledger.commands.termination import Selection
from vramledger.errors import UsageError
from vramledger.model.snapshot import State


def add_command(commands: Commands) -> None:
    """Declare the command."""
    end = commands.add_parser(
        "end",
        help="end holders by pid, state, owner or GPU, safely",
        description="End the holders that fit every kind of selector given. Without --yes, only list them. "
        "Exit status: 0 all ended or nothing to do, 1 some were refused or did not end, 2 wrong flag, 3 "
        "cannot tell.",
    )
    end.add_argument(
        "--pid", dest="pids", type=pid, action="append", default=[], metavar="PID", help="repeatable"
    )
    end.add_argument(
        "--state", dest="states", action="append", default=[], choices=[state.value for state in State],
        help="repeatable; who does not work is known only after watching for --idle-after",
    )  # fmt: skip
    end.add_argument(
        "--owner", dest="owners", action="append", default=[], metavar="OWNER",
        help="NAME or TYPE:NAME, repeatable",
    )  # fmt: skip
    end.add_argument(
        "--gpu", action="append", default=[], metavar="GPU",
        help="index, UUID or device file (/dev/nvidia0), repeatable; a GPU in MIG mode means all its "
        "instances",
    )  # fmt: skip
    end.add_argument(
        "--grace", type=duration, default=10.0, metavar="DURATION",
        help="time from SIGTERM to SIGKILL (default 10s)",
    )  # fmt: skip
    end.add_argument(
        "--working", action="store_true", help="also end orphaned holders that work on a GPU, or may do so"
    )
    end.add_argument("--yes", action="store_true", help="end the holders, instead of only listing them")
    add_control(end)
    add_sampling(end, idle=True)
    add_log(end)
    end.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """End the selected holders, or only list them."""
    selection = Selection(
        frozenset(args.pids),
        frozenset(map(State, args.states)),
        frozenset(args.owners),
        frozenset(args.gpu),
        args.working,
    )
    if selection == Selection():
        message = "select holders with --pid, --state, --owner or --gpu"
        raise UsageError(message)
    options = EndOptions(selection, args.grace, args.idle_after, args.yes, control_socket(args))
    return run_until_interrupted(run_end(sampling_config(args), options))
