"""``vramledger reclaim``: ask a program to give back the GPU memory that it has cached."""

from __future__ import annotations

import argparse
from typing import Any

from vramledger.allocations.report import amount
from vramledger.asking import ask
from vramledger.commands.answer import answer_with
from vramledger.commands.arguments import Commands, add_agent_socket, add_log, duration, pid


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
    answer = ask(args.agent_socket, args.pid, "reclaim", {"seconds": args.seconds})
    answer_with("".join(f"{line}\n" for line in _lines(answer)))
    return 0


def _lines(answer: dict[str, Any]) -> list[str]:
    """Write the answer; what is no number in it is left out, for another program wrote it."""
    lines = []
    devices = answer.get("devices")
    for device in devices if isinstance(devices, list) else []:
        if not isinstance(device, dict) or not all(isinstance(value, int) for value in device.values()):
            continue
        before, after = device.get("reserved_before", 0), device.get("reserved_after", 0)
        lines.append(
            f"device {device.get('ordinal')}: {amount(before - after)} given back; {amount(before)} reserved"
            f" before, {amount(after)} after, of which {amount(device.get('allocated_after', 0))} are live"
        )
    if isinstance(answer.get("paused"), int | float):
        lines.append(f"the program paused for {answer['paused'] * 1000:.0f} ms")
    return lines or ["PyTorch's allocator held nothing"]
