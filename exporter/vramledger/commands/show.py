"""Run ``vramledger show``: who holds what, since when and why, in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.discovery import agent_joiner
from vramledger.commands.arguments import (
    add_control,
    add_sampling,
    add_source,
    control_socket,
    sampling_config,
)
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.commands.past import add_storage, ask_moment, ask_past, past_time
from vramledger.commands.samples import SAMPLES_MIN, follow_exporter
from vramledger.errors import StartupError, UsageError
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import Replay, read_recording
from vramledger.serving.source import (
    DEMO_SKIP,
    NO_DRIVER,
    attach_agents,
    idle_threshold,
    open_source,
    snapshots,
)
from vramledger.storage.protocol import SINCE
from vramledger.views.evidence import evidence_json, evidence_lines
from vramledger.views.ledger_json import ledger_text
from vramledger.views.table import aligned, table_parts
from vramledger.views.timeline import HoldingGrowth, Key
from vramledger_agent.commands.parser import Commands, add_agent_socket, add_log, pid, write_output
from vramledger_agent.printable import Control, printable, span, write_plain

_CLEAR = Control("\x1b[H\x1b[2J")


def add_command(commands: Commands) -> None:
    """Declare the command."""
    show = commands.add_parser(
        "show", help="show who holds what, since when and why", description="Show the ledger here."
    )
    show.add_argument("--watch", action="store_true", help="show every new sample until interrupted")
    show.add_argument(
        "--json", action="store_true", help="print JSON, one line a sample; with --why only the evidence"
    )
    show.add_argument(
        "--why", type=pid, default=None, metavar="PID", help="show the whole evidence for one holder's state"
    )
    show.add_argument(
        "--at", type=past_time, default=None, metavar="TIME",
        help="show the ledger as it was: 03:12, -6h, 2026-11-22T03:12; needs serve --storage.path",
    )  # fmt: skip
    show.add_argument(
        "--since", type=past_time, default=None, metavar="TIME",
        help="sum up the time since then, or with --at until then: who held how much for how long",
    )  # fmt: skip
    add_storage(show)
    add_source(show)
    add_agent_socket(show)
    add_control(show)
    add_sampling(show, idle=True)
    add_log(show)
    show.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one sample, or every sample until interrupted."""
    return run_until_interrupted(_show(args))


async def _show(args: argparse.Namespace) -> int:
    """Show what the exporter knows; where none answers, or other data is wanted, look ourselves."""
    if args.at is not None or args.since is not None:
        return await _show_past(args)
    if args.source.startswith("replay:") and not args.watch:
        return await _show_recording(args)
    why = "--idle-after is given" if args.idle_after is not None else ""
    if not args.source.startswith("replay:") and not why:
        try:
            return await _show_exporter(args)
        except StartupError as error:
            why = str(error)
    return await _show_own(args, why)


async def _show_past(args: argparse.Namespace) -> int:
    if args.watch:
        raise UsageError("--watch shows the present; leave it out with --at and --since")
    if args.since is not None:
        if args.why is not None:
            raise UsageError("--why is of one moment; use it with --at alone")
        question = {"ask": SINCE, "from": args.since, "to": args.at or time.time()}
        if question["from"] >= question["to"]:
            raise UsageError("--since must be before --at")
        _, content, _ = await ask_past(args, question)
        report = json.loads(content)
        write_output(json.dumps(report) + "\n" if args.json else render_report(report))
        return 0 if report["first"] is not None else 1
    head, answer, origin = await ask_moment(args, args.at)
    note = f"As it was at {_clock(answer.snapshot.time)}, {origin}."
    if head.get("gap_until") is not None:
        until = f"until {_clock(head['gap_until'])}" if head["gap_until"] else "since then"
        note = f"NOT KNOWN at {_clock(args.at)}: nothing was stored {until}. {note}"
        if args.json:
            write_plain(f"vramledger: {printable(note)}\n", error=True)
    return 0 if _print_sample(args, answer.snapshot, dict(answer.growth), note) else 1


def _clock(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


async def _show_exporter(args: argparse.Namespace) -> int:
    up = False
    async with aclosing(follow_exporter(control_socket(args))) as ledgers:  # type: ignore[type-var]
        async for snapshot, growth, *_ in ledgers:
            up = snapshot.up
            note = f"Watched since {_clock(snapshot.watched_since)} by the exporter." if up else ""
            if not _print_sample(args, snapshot, growth, note):
                return 1
            if not args.watch:
                break
    return 0 if up else 1


async def _show_recording(args: argparse.Namespace) -> int:
    """Show the last moment of a recording: at its first one nothing has happened yet."""
    recording = Replay(Path(args.source.removeprefix("replay:")), args.replay_speed)
    tracker = HoldingTracker(
        idle_after=idle_threshold(args.idle_after, recording),
        interval=args.interval,
        source="replay",
        recording=recording.name,
    )
    snapshot = tracker.blank
    for reading in read_recording(recording.path):
        snapshot = tracker.update(reading)
        await asyncio.sleep(0)  # for an interrupt
    note = "This is the last moment of the recording; --watch plays it from its beginning."
    return 0 if _print_sample(args, snapshot, {}, note) and snapshot.up else 1


async def _show_own(args: argparse.Namespace, why: str) -> int:
    begun = time.time()
    source, kind, recording = await open_source(
        args.source, args.replay_speed, sampling_config(args), demo_skip=DEMO_SKIP
    )
    tracker = HoldingTracker(
        idle_after=idle_threshold(args.idle_after, source),
        interval=args.interval,
        source=kind,
        recording=recording,
    )
    attach = attach_agents(agent_joiner(args.agent_socket)) if kind == "nvml" else None
    up = False
    async with aclosing(snapshots(source, tracker, attach)) as published:  # type: ignore[type-var]
        async for snapshot in published:
            if kind == "replay" and (snapshot.time or begun) < begun:
                continue  # what the demo skips
            up = snapshot.up
            # The first sample of a process has no work to compare with, and may precede its facts.
            if up and snapshot.serial < SAMPLES_MIN and (kind == "nvml" or args.why is not None):
                continue
            note = ""
            if kind == "nvml" and up:
                watched = span((snapshot.time or 0.0) - (snapshot.watched_since or 0.0))
                note = f"Watched for {watched} by this command alone: what was before is not known. ({why})"
            elif kind == "nvml" and snapshot.failure is not None and snapshot.failure[0] in NO_DRIVER:
                note = "To see a simulated host: vramledger show --source=auto"
            if not _print_sample(args, snapshot, {}, note):
                return 1
            if not args.watch:
                break
    return 0 if up else 1


def _print_sample(
    args: argparse.Namespace, snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth], note: str
) -> bool:
    """Print a sample, and in the table a note; tell whether there was what was asked for."""
    if args.why is not None and snapshot.up:
        found = evidence_json(snapshot, args.why) if args.json else None
        lines = () if args.json else evidence_lines(snapshot, args.why)
        evidence = "".join(f"{line}\n" for line in lines) if found is None else json.dumps(found) + "\n"
        if not evidence:
            write_plain(f"vramledger: pid {args.why} holds no GPU memory that we can see here\n", error=True)
            return False
        write_output(evidence if args.json or not note else f"{evidence}{printable(note)}\n")
    elif args.json:
        write_output(ledger_text(snapshot, growth).decode())
    else:
        terminal = sys.stdout.isatty()
        clear = _CLEAR if args.watch and terminal else ""
        table = table_parts(snapshot, colour=terminal and "NO_COLOR" not in os.environ)
        write_output(clear, *table, f"{printable(note)}\n" if note else "")
    return True


_GIB_HOUR = 2**30 * 3600.0
_COLUMNS = ("OWNER", "USER", "GPUS", "HELD FOR", "HIGHEST", "GIB-HOURS", "IDLE", "WASTED", "PERHAPS")
_NO_SECONDS = 60.0


def render_report(report: Mapping[str, Any]) -> str:
    """Return the lines of a report."""
    return "".join(f"{printable(line)}\n" for line in _lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"From {_clock(report['from'])} to {_clock(report['to'])}"
    whole = report["to"] - report["from"]
    if report["first"] is None:
        yield "Nothing is stored of that time."
        return
    missing = whole - report["covered_seconds"]
    if missing > max(_NO_SECONDS, 0.01 * whole):
        yield f"Nothing is known of {span(missing)} of it; the figures are of the rest."
    rows = [_COLUMNS, *(_row(each) for each in report["owners"])]
    yield ""
    yield from ("  ".join(row.values()).rstrip() for row in aligned(rows, ("OWNER", "USER")))
    titles = {"leftovers": "Leftovers", "ooms": "Out of memory", "interruptions": "Interruptions"}
    for name, title in titles.items():
        if report[name]:
            yield from ("", f"{title}:", *(f"  {_mark(each)}" for each in report[name]))
    if report["marks_dropped"]:
        yield ""
        yield f"{report['marks_dropped']} events before these are not shown; ask for a shorter span."


def _row(owner: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"{owner['owner_type']} {owner['owner']}".strip()
    return (
        name[:60],
        ", ".join(owner["users"])[:30] or "-",
        str(len(owner["gpus"])),
        span(owner["seconds"]),
        f"{owner['highest'] / 2**30:.2f} GiB",
        *(
            f"{owner[f'{what}byte_seconds'] / _GIB_HOUR:.2f}"
            for what in ("", "idle_", "wasted_", "perhaps_wasted_")
        ),
    )


def _mark(mark: Mapping[str, Any]) -> str:
    words = {
        "lost": "the GPUs gave no data any more",
        "back": "the GPUs gave data again",
        "exporter-ended": "the exporter ended, or stored nothing any more",
        "exporter-began": "the exporter began",
        "oom": f"{mark['owner']} ran out of memory",
    }
    text = words.get(mark["kind"])
    if text is None:
        who = f"pid {mark['pid']} {mark['command']} of {mark['owner']}"
        text = f"{who} became {mark['kind']}" + (f" (it was {mark['before']})" if mark["before"] else "")
    return f"{_clock(mark['time'])}  {text}"
