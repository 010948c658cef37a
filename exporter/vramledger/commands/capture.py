"""Run ``vramledger capture``: write a masked recording of this host."""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator
from pathlib import Path

from vramledger.commands.arguments import add_control, add_sampling, sampling_config
from vramledger.commands.interruption import run_until_interrupted
from vramledger.commands.output import write_output
from vramledger.commands.parser import Commands, add_log, duration
from vramledger.commands.past import add_storage, ask_past
from vramledger.errors import StartupError
from vramledger.model.reading import (
    Reading,
)
from vramledger.model.reading_json import decode
from vramledger.sampling.capture import capture
from vramledger.sampling.replay import encode_header
from vramledger.sampling.supervisor import Supervisor
from vramledger.storage.protocol import READINGS


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
        "--last", type=duration, default=None, metavar="DURATION",
        help="record what has already happened, for so long; needs serve --storage.path",
    )  # fmt: skip
    add_control(record)
    add_storage(record)
    record.add_argument(
        "--no-mask", dest="mask", action="store_false", help="keep UUIDs, users and program names"
    )
    record.add_argument("--note", default="", help="a sentence for the recording's header")
    add_sampling(record, collectors=True)
    add_log(record)
    record.set_defaults(run=run)


async def _capture(args: argparse.Namespace) -> int:
    if args.last is None:
        readings = Supervisor(sampling_config(args)).readings()
        head, seconds = encode_header(args.note), args.seconds
    else:
        now = time.time()
        _, content, _ = await ask_past(args, {"ask": READINGS, "from": now - args.last, "to": now})
        if not content:
            message = "nothing is stored of that time"
            raise StartupError(message)
        readings, head, seconds = _stored(content.split(b"\n")), encode_header(args.note), float("inf")
    return await capture(readings, args.output, head=head, seconds=seconds, mask=args.mask)


async def _stored(lines: list[bytes]) -> AsyncIterator[Reading | None]:
    """Yield readings of the storage."""
    for line in lines:
        yield decode(line)


def run(args: argparse.Namespace) -> int:
    """Write the recording and say what it holds."""
    count = run_until_interrupted(_capture(args))
    kind = "masked" if args.mask else "NOT masked"
    write_output(
        f"{count} readings, {kind}, in {args.output}; "
        f"replay: vramledger serve --source=replay:{args.output}\n"
    )
    return 0
