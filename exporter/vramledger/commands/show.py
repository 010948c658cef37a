"""``vramledger show``: who holds what, since when and why, in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import aclosing

from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.discovery import agent_joiner
from vramledger.commands.answer import answer_with
from vramledger.commands.arguments import (
    Commands,
    add_agent_socket,
    add_log,
    add_sampling,
    add_source,
    pid,
    sampling,
)
from vramledger.commands.interruption import run_until_interrupted
from vramledger.commands.sampling_loop import ALIKE
from vramledger.serving.source import as_it_is, idle_after, open_source, snapshots
from vramledger.views.evidence import evidence
from vramledger.views.ledger_json import document
from vramledger.views.table import table


def add(commands: Commands) -> None:
    """Declare the command."""
    show = commands.add_parser(
        "show", help="who holds what, since when and why", description="Show the ledger here."
    )
    show.add_argument("--watch", action="store_true", help="show every new sample until interrupted")
    show.add_argument("--json", action="store_true", help="print JSON, a line a sample")
    show.add_argument(
        "--why", type=pid, default=None, metavar="PID", help="tell the whole evidence for one holder's state"
    )
    add_source(show)
    add_agent_socket(show)
    add_sampling(show, idle=True)
    add_log(show)
    show.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one sample, or every sample until interrupted."""

    async def answer() -> int:
        source, kind, recording = await open_source(args.source, args.replay_speed, sampling(args))
        history = HoldingTracker(
            idle_after=idle_after(args.idle_after, source),
            interval=args.interval,
            source=kind,
            recording=recording,
        )
        attach = agent_joiner(args.agent_socket) if kind == "nvml" else as_it_is
        up = False
        terminal = sys.stdout.isatty()
        async with aclosing(snapshots(source, history, attach)) as published:  # type: ignore[type-var]
            async for snapshot in published:
                up = snapshot.up
                if args.why is not None and up:
                    lines = evidence(snapshot, args.why)
                    # The first sample of a process has no work to compare, and may come before its facts.
                    if snapshot.serial < ALIKE:
                        continue
                    if not lines:
                        print(
                            f"vramledger: pid {args.why} holds no GPU memory that is seen here",
                            file=sys.stderr,
                        )
                        return 1
                    answer_with("\n".join(lines) + "\n")
                elif args.json:
                    answer_with(json.dumps(document(snapshot)) + "\n")
                else:
                    clear = "\x1b[H\x1b[2J" if args.watch and terminal else ""
                    answer_with(clear + table(snapshot, colour=terminal and "NO_COLOR" not in os.environ))
                if not args.watch:
                    break
        return 0 if up else 1

    return run_until_interrupted(answer())
