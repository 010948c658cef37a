"""``vramledger reclaim``: ask a program to give back the GPU memory that it has cached."""

from __future__ import annotations

import argparse
from typing import Any

from vramledger.agent_server.client import request_agent
from vramledger.commands.answer import answer_with
from vramledger.commands.arguments import Commands, add_agent_socket, add_log, duration, pid
from vramledger.torch_snapshots.text import amount


def add(commands: Commands) -> None:
    """Declare the command."""
    reclaim = commands.add_parser(
        "reclaim",
        help="ask a consenting program to give cached memory back",
        description="Ask a program to give cached GPU memory back: at its next training step (or where it"
        " calls vramledger.agent.safe_point()) it runs Python's collector, then empties PyTorch's cache."
        " It must run with 'vramledger run --allow-reclaim'; you are its user or root.",
    )
    reclaim.add_argument("pid", type=pid, metavar="PID")
    reclaim.add_argument(
        "--for", dest="seconds", type=duration, default=30.0, metavar="DURATION",
        help="how long to wait for a step (default 30s)",
    )  # fmt: skip
    add_agent_socket(reclaim)
    add_log(reclaim)
    reclaim.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, and print what came back."""
    answer = request_agent(args.agent_socket, args.pid, "reclaim", {"seconds": args.seconds})
    answer_with("".join(f"{line}\n" for line in account(answer)))
    return 0


_FIGURES = ("ordinal", "reserved_before", "reserved_after", "allocated_after")
_MOST = 2**60


def account(answer: dict[str, Any]) -> list[str]:
    """Write the answer; nothing in it is taken for granted, for another program wrote it."""
    lines = []
    devices = answer.get("devices")
    for device in devices if isinstance(devices, list) else []:
        told = [device.get(name) for name in _FIGURES] if isinstance(device, dict) else []
        figures = [value for value in told if isinstance(value, int) and 0 <= value < _MOST]
        if len(figures) < len(_FIGURES):
            lines.append("a device: the program did not say what it holds now")
            continue
        ordinal, before, after, live = figures
        lines.append(
            f"device {ordinal}: {amount(before - after)} given back; {amount(before)} reserved"
            f" before, {amount(after)} after, of which {amount(live)} are live"
        )
    paused = answer.get("paused")
    if isinstance(paused, int | float) and 0 <= paused < _MOST:
        lines.append(f"the program paused for {paused * 1000:.0f} ms")
    return lines or ["PyTorch's allocator held nothing"]
