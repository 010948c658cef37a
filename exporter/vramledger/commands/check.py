"""Run ``vramledger check``: is this GPU clean for the next job?"""

from __future__ import annotations

import argparse

from vramledger.commands.arguments import add_control, add_sampling, control_socket, sampling_config, size
from vramledger.commands.interruption import run_until_interrupted
from vramledger.commands.parser import Commands, add_log, duration
from vramledger.commands.sampling_loop import CheckOptions, run_check
from vramledger.views.cleanliness import MAX_LEFTOVER, CheckTolerance


def add_command(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add_parser(
        "check",
        help="say by exit status whether this GPU is clean for the next job",
        description="Say whether GPUs are clean for the next job. Exit status: 0 clean, 1 not clean,"
        " 2 wrong flag, 3 cannot tell (no driver, no such GPU, a GPU without data, not in the host's PID "
        "namespace, processes that could not be searched for CUDA).",
    )
    command.add_argument(
        "--gpu", action="append", default=[], metavar="GPU",
        help="index, UUID or device file (/dev/nvidia0), repeatable (default all); a GPU in MIG mode means "
        "all its instances",
    )  # fmt: skip
    command.add_argument(
        "--max-leftover", dest="leftover", type=size, default=MAX_LEFTOVER, metavar="SIZE",
        help="ignore this much dead, zombie, stuck, orphaned and unattributed memory (default 128MiB)",
    )  # fmt: skip
    command.add_argument("--allow-live", dest="live", action="store_true", help="allow live processes")
    command.add_argument(
        "--owner", dest="owners", action="append", default=[], metavar="OWNER",
        help="allow live processes of this owner, NAME or TYPE:NAME; repeatable",
    )  # fmt: skip
    command.add_argument(
        "--wait", type=duration, default=5.0, metavar="DURATION",
        help="how long a GPU may take to become clean (default 5s)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON")
    add_control(command)
    add_sampling(command)
    add_log(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the result; the exit status says the same."""
    options = CheckOptions(
        gpus=frozenset(args.gpu),
        tolerance=CheckTolerance(args.leftover, args.live, frozenset(args.owners)),
        wait=args.wait,
        as_json=args.json,
        control_socket=control_socket(args),
    )
    return run_until_interrupted(run_check(sampling_config(args), options))
