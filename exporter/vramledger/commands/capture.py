"""Run ``vramledger capture``: write a masked recording of this host."""

from __future__ import annotations

import argparse
from pathlib import Path

from vramledger.commands.arguments import add_sampling, sampling_config
from vramledger.commands.interruption import run_until_interrupted
from vramledger.commands.output import write_output
from vramledger.commands.parser import Commands, add_log, duration
from vramledger.sampling.capture import capture
from vramledger.sampling.replay import encode_header
from vramledger.sampling.supervisor import Supervisor


def add_command(commands: Commands) -> None:
    """Declare the command."""
    record = commands.add_parser(
        "capture",
        help="write a masked recording of this host",
        description="Record what the sampler reads, masked.",
    )
    record.add_argument("output", type=Path, metavar="FILE", help="the recording, e.g. incident.jsonl.gz")
    record.add_argument(
        "--duration",
        dest="seconds",
        type=duration,
        default=60.0,
        metavar="DURATION",
        help="how long (default 1m)",
    )
    record.add_argument(
        "--no-mask", dest="mask", action="store_false", help="keep UUIDs, users and program names"
    )
    record.add_argument("--note", default="", help="a sentence for the recording's header")
    add_sampling(record, collectors=True)
    add_log(record)
    record.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the recording and say what it holds."""
    supervisor = Supervisor(sampling_config(args))
    count = run_until_interrupted(
        capture(
            supervisor.readings(),
            args.output,
            head=encode_header(args.note),
            seconds=args.seconds,
            mask=args.mask,
        )
    )
    kind = "masked" if args.mask else "NOT masked"
    write_output(
        f"{count} readings, {kind}, in {args.output}; "
        f"replay: vramledger serve --source=replay:{args.output}\n"
    )
    return 0
