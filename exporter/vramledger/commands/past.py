"""Ask for the past: from the running exporter, or where none answers, from the directory of its storage."""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import re
import time
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path
from typing import Any

from vramledger import __version__
from vramledger.commands.arguments import control_socket
from vramledger.errors import StartupError, UsageError
from vramledger.logs import settings
from vramledger.model.records import RecordError
from vramledger.sampling.sampler_process import ChildProcess
from vramledger.serving.control_client import NoExporterError, request_past
from vramledger.storage.protocol import ASK, AT, HEADER, READ, pack, process_command
from vramledger.views.ledger_json import LedgerAnswer, read_answer
from vramledger_agent.commands.parser import argparse_type, parse_duration

STORAGE = Path("/var/lib/vramledger")
"""Where the systemd unit has the storage."""

_SECONDS, _BYTES = 60.0, 2**27
"""For how long the directory is read, and the longest answer."""

_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Declare where the past is if no exporter answers."""
    parser.add_argument(
        "--storage.path", dest="storage_path", type=Path, default=STORAGE, metavar="DIR",
        help="where the exporter keeps the past, to read it if none runs (default %(default)s)",
    )  # fmt: skip


def _parse_time(text: str) -> float:
    """Read ``03:12``, ``-6h``, ``2026-11-22 03:12`` or Unix seconds of the past. Raises UsageError."""
    now = time.time()
    found = _read_time(text, now)
    if found is None:
        raise UsageError(f"{text!r} is not a time; write for example 03:12, -6h, or 2026-11-22T03:12")
    if found > now + 1:
        raise UsageError(f"{text!r} is in the future; only what was can be shown")
    return found


def _read_time(text: str, now: float) -> float | None:
    if text.startswith("-"):
        return now - parse_duration(text[1:])
    if text.isascii() and re.fullmatch(r"\d{9,11}(\.\d+)?", text):
        return float(text)
    clock = _CLOCK.fullmatch(text)
    try:
        if clock is None:
            return dt.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
        hour, minute, second = (int(part or 0) for part in clock.groups())
        at = dt.time(hour, minute, second)
        today = dt.datetime.combine(dt.datetime.fromtimestamp(now).date(), at)  # noqa: DTZ006 the local clock
        if today.timestamp() > now:
            today -= dt.timedelta(days=1)
        return today.timestamp()
    except (ValueError, OverflowError, OSError):
        return None


past_time = argparse_type(_parse_time, "time")


async def ask_moment(args: argparse.Namespace, at: float) -> tuple[dict[str, Any], LedgerAnswer, str]:
    """Return what was at a moment as :func:`ask_past` does. Raises StartupError if nobody can say it."""
    head, content, origin = await ask_past(args, {"ask": AT, "at": at})
    try:
        return head, read_answer(content), origin
    except RecordError as error:
        raise StartupError(f"the answer cannot be read: {error}") from error


async def ask_past(args: argparse.Namespace, question: dict[str, Any]) -> tuple[dict[str, Any], bytes, str]:
    """Return the head and content of an answer, and who gave it. Raises StartupError if nobody can answer."""
    try:
        program, head, content = await request_past(control_socket(args), question)
    except NoExporterError as error:
        path = args.storage_path
        return *await _read_directory(path, question, str(error)), f"read from {path}"
    if program != __version__:
        raise StartupError(f"the exporter is vramledger {program}, this is {__version__}")
    return head, content, "kept by the exporter"


async def _read_directory(path: Path, question: dict[str, Any], why: str) -> tuple[dict[str, Any], bytes]:
    """Have it read by the process that reads for the exporter, too: its files may be a stranger's."""
    command = process_command(READ, json.dumps({"path": str(path), "host": ""}), *settings())
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 they are pipes
    process.stdin.write(pack(ASK, json.dumps(question).encode()))
    try:
        head = await asyncio.wait_for(process.stdout.readexactly(HEADER.size), _SECONDS)
        if (size := HEADER.unpack(head)[1]) > _BYTES:
            raise StartupError(f"the answer has more than {_BYTES >> 20} MiB; ask for a shorter span")
        found = await asyncio.wait_for(process.stdout.readexactly(size), _SECONDS)
    except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        what = f"is not read in {_SECONDS:.0f} s, or the process that reads it has ended"
        raise StartupError(f"{path} {what}; ask for a shorter span") from error
    finally:
        ChildProcess(process).kill_now()
        with suppress(asyncio.TimeoutError):  # a file system that hangs may keep it
            await asyncio.wait_for(process.wait(), 1.0)
    first, _, content = found.partition(b"\n")
    said: dict[str, Any] = json.loads(first)
    if "error" in said:
        raise StartupError(f"{path}: {said['error']}; and {why}")
    return said, content
