"""Run ``vramledger capture``: write a masked recording of this host, in a file that replays exactly."""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
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
from vramledger_agent.commands.parser import Commands, add_log, create_private, duration, write_output
from vramledger_agent.printable import span, write_plain


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


class _RecordingFile(gzip.GzipFile):
    """A compressed file that only its owner may read: its readings may name users and programs."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._raw = os.fdopen(descriptor, "wb")
        super().__init__(path.name, "wb", 9, self._raw)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._raw.close()


async def capture(
    readings: AsyncIterator[Reading | None], path: Path, *, head: bytes, seconds: float, mask: bool
) -> int:
    """Write a header and the readings of a span to a file; return the number of readings.

    The file is opened only when there is something to write, so a capture that fails does not delete an older
    file of that name. Raises DriverError if the first reading says that the driver does not work,
    StartupError if the file cannot be written.
    """
    masking = Mask()
    count = 0
    begun = 0.0
    out: gzip.GzipFile | None = None
    try:
        async with aclosing(readings) as stream:  # type: ignore[type-var]
            async for reading in stream:
                if reading is None:
                    break
                if out is None:
                    if reading.failure is not None:
                        raise DriverError(*reading.failure)
                    # Its readings may name users and programs.
                    # Opened first: Python 3.14 complains of an object whose file could not be opened.
                    out = _RecordingFile(path, create_private(path))
                    out.write(head)
                    begun = reading.monotonic
                out.write(encode(masking.mask_reading(reading) if mask else reading))
                count += 1
                if reading.monotonic - begun >= seconds:
                    break
        if out is not None:
            out.close()
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise StartupError(message) from error
    finally:
        if out is not None:
            # a disk that is full for the readings is also full for the end of the file
            with suppress(OSError):
                out.close()
    return count
