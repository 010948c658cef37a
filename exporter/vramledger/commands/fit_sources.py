"""Get the samples that ``vramledger fit`` judges: of this host, now or as stored, or of a file."""

from __future__ import annotations

import argparse
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.discovery import agent_joiner
from vramledger.commands.arguments import control_socket, sampling_config
from vramledger.commands.exporter_ledger import exporter_snapshots
from vramledger.commands.fit_input import DeviceUse, LedgerSample, Program, read_ledger, read_oom_report
from vramledger.commands.own_samples import SAMPLES_MIN
from vramledger.commands.past import ask_past
from vramledger.config import IDLE_AFTER
from vramledger.errors import RecordingError, StartupError, UsageError
from vramledger.model.records import RecordError
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import FORMAT, read_recording
from vramledger.sampling.supervisor import Supervisor
from vramledger.serving.source import snapshots
from vramledger.storage.protocol import AT
from vramledger.views.ledger_json import read_answer, snapshot_json

_MAX_FILE_BYTES = 256 * 2**20
_MAX_HEAD_BYTES = 2**16
_MAX_VALUES = 2_000_000
"""JSON values of a file. However short they are there, each takes up to 180 bytes here and 3 microseconds."""

_PIDS_SHOWN = 8


class Seen(NamedTuple):
    """What was seen of a program."""

    program: Program  # the program
    # for each device that it holds memory on, what was seen in each sample
    uses: tuple[tuple[DeviceUse, ...], ...]
    ledger: LedgerSample | None  # the newest sample; None for a report, which has none
    origin: str  # where this comes from, a sentence


async def watch_host(args: argparse.Namespace, seconds: float) -> tuple[list[LedgerSample], str]:
    """Return the samples of this host over a time, and who took them."""
    try:
        return await _collect(
            exporter_snapshots(control_socket(args)), seconds
        ), "by the exporter of this host"
    except StartupError as error:
        return await _collect(_own_snapshots(args), seconds), f"by this command alone ({error})"


async def _collect(samples: AsyncIterator[Snapshot], seconds: float) -> list[LedgerSample]:
    found: list[LedgerSample] = []
    end = time.monotonic() + seconds
    async with aclosing(samples) as published:  # type: ignore[type-var]
        async for snapshot in published:
            found.append(_ledger(snapshot))
            if not snapshot.up or time.monotonic() >= end:
                break
    return found


async def _own_snapshots(args: argparse.Namespace) -> AsyncIterator[Snapshot]:
    """Sample, and leave out the first samples, which precede the facts of the processes."""
    source = Supervisor(sampling_config(args))
    tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=args.interval)
    attach = agent_joiner(args.agent_socket)
    async with aclosing(snapshots(source, tracker, attach)) as published:  # type: ignore[type-var]
        async for snapshot in published:
            if not snapshot.up or snapshot.serial >= SAMPLES_MIN:
                yield snapshot


def _ledger(snapshot: Snapshot) -> LedgerSample:
    return read_ledger(snapshot_json(snapshot), "the sample")


def choose_program(ledgers: list[LedgerSample], pid: int | None, origin: str) -> Seen:
    """Return what was seen of a program, or of the only one. Raises StartupError if none, or several."""
    holders = {holder for ledger in ledgers for holder in ledger.programs}
    if pid is None:
        if len(holders) != 1:
            shown = ", ".join(map(str, sorted(holders)[:_PIDS_SHOWN]))
            message = (
                f"{origin}: {len(holders)} programs hold GPU memory ({shown}); choose one with --pid"
                if holders
                else f"{origin}: no program holds GPU memory"
            )
            raise StartupError(message)
        (pid,) = holders
    having = [ledger for ledger in ledgers if pid in ledger.programs]
    if not having:
        failure = next((ledger.failure for ledger in ledgers if ledger.failure), "")
        message = f"pid {pid} holds no GPU memory that we can see ({failure or origin})"
        raise StartupError(message)
    program = having[-1].programs[pid]
    same = [each for each in having if _is_same(each.programs[pid], program)]
    by_device: dict[str, list[DeviceUse]] = {}
    for ledger in same:
        for use in ledger.uses[pid]:
            by_device.setdefault(use.uuid, []).append(use)
    newest = {use.uuid for use in same[-1].uses[pid]}
    uses = tuple(tuple(found) for uuid, found in by_device.items() if uuid in newest)
    return Seen(program, uses, having[-1], origin)


def _is_same(one: Program, other: Program) -> bool:
    """Tell whether two samples show the same program under a pid, and not a later one."""
    if one.started is None or other.started is None:
        return True
    return abs(one.started - other.started) < 1.0


async def past_sample(args: argparse.Namespace, at: float) -> list[LedgerSample]:
    """Return a stored moment. Raises StartupError if nothing is stored of it."""
    _, content, _ = await ask_past(args, {"ask": AT, "at": at})
    try:
        return [_ledger(read_answer(content).snapshot)]
    except RecordError as error:
        message = f"the answer cannot be read: {error}"
        raise StartupError(message) from error


def read_file(path: Path, pid: int | None) -> Seen:
    """Return what a file says. Raises RecordingError if unreadable, StartupError without the program."""
    content = _read_content(path)
    documents = _documents(path, content)
    first = documents[0]
    origin = f"from {path.name}"
    if isinstance(first, dict) and first.get("format") == FORMAT:
        tracker = HoldingTracker(idle_after=IDLE_AFTER, source="replay", recording=path.name)
        ledgers = [_ledger(tracker.update(reading)) for reading in read_recording(path)]
        return choose_program(ledgers, pid, origin)
    if isinstance(first, dict) and "requested" in first and "pool" in first:
        program, uses = read_oom_report(first, str(path))
        if pid is not None and pid != program.pid:
            message = f"{path} is the report of pid {program.pid}, not of pid {pid}"
            raise UsageError(message)
        return Seen(program, (uses,), None, f"{origin}, written as an allocation failed")
    ledgers = [read_ledger(each, f"{path}, document {number}") for number, each in enumerate(documents, 1)]
    return choose_program(ledgers, pid, origin)


def _read_content(path: Path) -> bytes:
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if compressed else path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"cannot read {path}: {reason}"
        raise RecordingError(message) from error
    if len(content) > _MAX_FILE_BYTES:
        message = f"{path} is longer than {_MAX_FILE_BYTES // 2**20} MiB; keep a part of it"
        raise RecordingError(message)
    return content


def _documents(path: Path, content: bytes) -> list[Any]:
    """Return a file's JSON documents: one in all, or one a line; of a recording only the header."""
    head = _parse([content[:_MAX_HEAD_BYTES].lstrip().partition(b"\n")[0]])
    if head and isinstance(head[0], dict) and head[0].get("format") == FORMAT:
        return head
    if sum(map(content.count, (b",", b"[", b"{", b"\n"))) > _MAX_VALUES:
        message = f"{path} has more than {_MAX_VALUES:,} values; keep a part of it"
        raise RecordingError(message)
    lines = [line for line in content.split(b"\n") if line.strip()]
    found = _parse(lines) or _parse([content])
    if not found:
        message = (
            f"{path} is neither a recording, nor what 'vramledger show --json' prints, nor an out-of-memory "
            "report (oom-*.json)"
        )
        raise RecordingError(message)
    return found


def _parse(texts: Sequence[bytes]) -> list[Any]:
    """Return the values of JSON texts; an empty list if one of them is not JSON."""
    try:
        return [json.loads(each) for each in texts]
    except (ValueError, RecursionError):
        return []
