"""Run ``vramledger capture``: write a masked recording of this host, in a file that replays exactly."""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from pathlib import Path

from vramledger.commands.arguments import add_control, add_sampling, sampling_config
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.commands.past import add_storage, ask_past
from vramledger.errors import DriverError, StartupError
from vramledger.model.reading import Reading, decode, encode
from vramledger.sampling.masking import Mask
from vramledger.sampling.replay import encode_header
from vramledger.sampling.supervisor import Supervisor
from vramledger.storage.protocol import READINGS
from vramledger_agent.commands.parser import Commands, add_log, duration, write_output
from vramledger_agent.printable import span, write_plain
from vramledger_agent.private_files import create_private


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
        if sys.stderr.isatty():  # a script has nobody who waits
            write_plain(f"Recording for {span(args.seconds)}.\n", error=True)
        readings = Supervisor(sampling_config(args)).readings()
        head, seconds = encode_header(args.note), args.seconds
    else:
        now = time.time()
        _, content, _ = await ask_past(args, {"ask": READINGS, "from": now - args.last, "to": now})
        if not content:
            raise StartupError("nothing is stored of that time")
        readings, head, seconds = _stored(content.split(b"\n")), encode_header(args.note), float("inf")
    return await capture(readings, args.output, head=head, seconds=seconds, mask=args.mask)


async def _stored(lines: list[bytes]) -> AsyncIterator[Reading | None]:
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


async def capture(
    readings: AsyncIterator[Reading | None], path: Path, *, head: bytes, seconds: float, mask: bool
) -> int:
    """Write a header and the readings of a span to a file; return the number of readings.

    A capture that fails deletes no older file. Raises DriverError without a driver, StartupError without a
    file.
    """
    masking = Mask()
    count = 0
    begun = 0.0
    out: gzip.GzipFile | None = None
    try:
        with ExitStack() as opened:
            async with aclosing(readings) as stream:  # type: ignore[type-var]
                async for reading in stream:
                    if reading is None:
                        break
                    if out is None:
                        if reading.failure is not None:
                            raise DriverError(*reading.failure)
                        # Only its owner may read it: its readings may name users and programs.
                        raw = opened.enter_context(os.fdopen(create_private(path), "wb"))
                        out = opened.enter_context(gzip.GzipFile(path.name, "wb", 9, raw))
                        out.write(head)
                        begun = reading.monotonic
                    out.write(encode(masking.mask_reading(reading) if mask else reading))
                    count += 1
                    if reading.monotonic - begun >= seconds:
                        break
    except OSError as error:  # a disk that is full for the readings is also full for the end of the file
        raise StartupError(f"cannot write {path}: {error.strerror or error}") from error
    return count
