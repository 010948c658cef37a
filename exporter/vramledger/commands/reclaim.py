"""Run ``vramledger reclaim``: make a program free the GPU memory that it has cached."""

from __future__ import annotations

import argparse
from typing import Any

from vramledger_agent.client import request_agent
from vramledger_agent.commands.parser import Commands, add_agent_socket, add_log, duration, pid, write_output
from vramledger_agent.torch_snapshots.text import size_text


def add_command(commands: Commands) -> None:
    """Declare the command."""
    reclaim = commands.add_parser(
        "reclaim",
        help="make a consenting program free cached memory",
        description="Make a program free cached GPU memory. At its next training step, or where it calls "
        "vramledger_agent.safe_point(), it runs Python's collector, then empties PyTorch's cache. It "
        "must run with 'vramledger run --allow-reclaim'. You must be its user, or root.",
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
    """Send the request, and print what was freed."""
    answer = request_agent(args.agent_socket, args.pid, "reclaim", {"seconds": args.seconds})
    write_output("".join(f"{line}\n" for line in reclaim_lines(answer)))
    return 0


_FIGURES = ("ordinal", "reserved_before", "reserved_after", "allocated_after")
_FIGURE_MAX = 2**60


def reclaim_lines(answer: dict[str, Any]) -> list[str]:
    """Write the answer; nothing in it is trusted, because another program wrote it."""
    lines = []
    devices = answer.get("devices")
    for device in devices if isinstance(devices, list) else []:
        values = [device.get(name) for name in _FIGURES] if isinstance(device, dict) else []
        figures = [value for value in values if isinstance(value, int) and 0 <= value < _FIGURE_MAX]
        if len(figures) < len(_FIGURES):
            lines.append("a device: the program did not report what it holds now")
            continue
        ordinal, before, after, live = figures
        lines.append(
            f"device {ordinal}: {size_text(before - after)} freed; {size_text(before)} reserved"
            f" before, {size_text(after)} after; {size_text(live)} of that are live"
        )
    paused = answer.get("paused")
    if isinstance(paused, int | float) and 0 <= paused < _FIGURE_MAX:
        lines.append(f"the program paused for {paused * 1000:.0f} ms")
    return lines or ["PyTorch's allocator held nothing"]
