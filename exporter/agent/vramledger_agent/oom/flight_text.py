"""Write as text what a report says of the failing stack, the recorded lines and the last steps."""

from __future__ import annotations

from typing import Any

from vramledger_agent.oom.stacks import user_lines
from vramledger_agent.protocol.messages import CATEGORIES
from vramledger_agent.protocol.user_code import PHASES

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
UNIT_STEP = 1024

MAX_STACK_LINES = 12
"""The program's own lines of the failing stack that the text has; the JSON has all."""


def format_bytes(value: object) -> str:
    """Return a number of bytes as text."""
    if not isinstance(value, int):
        return "not known"
    size = float(value)
    for unit in UNITS:
        if abs(size) < UNIT_STEP or unit == UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:,.2f} {unit}"
        size /= UNIT_STEP
    return ""


def batch_lines(facts: dict[str, Any]) -> list[str]:
    """Say which batch would fit, where the recorded steps show it."""
    flight = facts.get("flight") or {}
    batch, fits = flight.get("batch"), flight.get("fitting_batch")
    if batch is None:
        return []
    if fits is None:
        return ["", f"The batch (the first dimension) was {batch}."]
    # Seen on an H200: right after the failure the same batch did not fit, as its tensors split the cached
    # blocks of the larger one, and what was left of each was too small for another.
    return [
        "",
        f"The batch (the first dimension) was {batch}. By the slope of the last steps {fits} fits,",
        "in a new process or after torch.cuda.empty_cache().",
    ]


def stack_lines(stack: dict[str, Any] | None) -> list[str]:
    """Show the program's own lines of the failing stack."""
    if not stack or not stack.get("frames"):
        return []
    found = user_lines(stack["frames"])
    head = "Where it failed (innermost line first):"
    if stack["phase"] == "backward":
        head = "Where it failed (in the backward pass, which these lines had started):"
    elif stack["phase"] == "optimizer":
        head = "Where it failed (in the optimizer, innermost line first):"
    lines = ["", head, *(f"  {format_line(line)}" for line in found[:MAX_STACK_LINES])]
    if len(found) > MAX_STACK_LINES:
        lines.append(f"  ({len(found) - MAX_STACK_LINES} more lines)")
    return lines


def format_line(line: dict[str, Any]) -> str:
    """Return a line of code as text."""
    return f"{line['file']}:{line['line']} {line['function']}" if line["line"] else str(line["file"])


def recorded_lines(facts: dict[str, Any]) -> list[str]:
    """Show what the recording knows: top lines, last steps, types of numbers, the snapshot's path."""
    lines: list[str] = []
    if facts.get("gradients_kept"):
        lines += [
            "",
            "Gradients are kept from step to step: zero_grad() is missing, is called with set_to_none=False,",
            "or gradients are accumulated on purpose.",
        ]
    if facts.get("autocast"):
        lines += ["", f"Autocast (mixed precision) where it failed: {facts['autocast']}"]
    if facts.get("message"):
        lines += [
            "",
            "What the framework said:",
            *(f"  {line}" for line in facts["message"].splitlines()[:5]),
        ]
    flight = facts.get("flight")
    if not flight and facts.get("framework") != "torch":
        return lines
    if not flight:
        return [
            *lines,
            "",
            "To see the lines that hold the memory, the last steps and a snapshot:",
            "'vramledger-agent run --snapshot-from-start'",
        ]
    lines += ["", "Lines with most live bytes:"]
    for entry in flight["lines"]:
        lines.append(f"{format_bytes(entry['bytes']):>14}  {entry['blocks']:>6,}  {format_line(entry)}")
        lines += [f"{'':>24}from {format_line(caller)}" for caller in entry["callers"]]
    lines += step_lines(flight["steps"])
    lines += type_lines(flight["types"], flight["forward_types"])
    if facts.get("snapshot"):
        lines += ["", f"Snapshot: vramledger-agent snapshot show {facts['snapshot']}"]
    return lines


def step_lines(steps: list[dict[str, Any]]) -> list[str]:
    """Show the peaks of the last steps, and what the last finished one's were for."""
    if not steps:
        return []
    lines = ["", "Peaks of the last steps:", f"  {'step':<10}" + "".join(f"{name:>14}" for name in PHASES)]
    for number, step in enumerate(steps, start=1 - len(steps)):
        name = "this one" if not step["finished"] else f"{number}"
        row = [
            format_bytes(step["phases"][phase]["bytes"]) if phase in step["phases"] else "-"
            for phase in PHASES
        ]
        batch = f"  batch {step['batch']}" if step["batch"] is not None else ""
        part = "" if step["whole"] or not step["finished"] else "  (its beginning was not recorded)"
        lines.append(f"  {name:<10}" + "".join(f"{cell:>14}" for cell in row) + batch + part)
    last = steps[-1]["phases"]
    if not any(peak["categories"] for peak in last.values()):
        return lines  # the tensors could not be read
    lines += ["", "What the peaks of the last of them were for:"]
    lines.append(f"  {'':<14}" + "".join(f"{name:>14}" for name in PHASES))
    for category in CATEGORIES:
        row = [format_bytes(last[name]["categories"][category]) if name in last else "-" for name in PHASES]
        lines.append(f"  {category:<14}" + "".join(f"{cell:>14}" for cell in row))
    return lines


def type_lines(types: dict[str, dict[str, int]], forward: dict[str, int]) -> list[str]:
    """Show bytes by type of number, which tell whether mixed precision is on."""
    lines = [
        f"  {category:<14}"
        + ", ".join(f"{format_bytes(size)} {name}" for name, size in sorted(found.items()))
        for category, found in types.items()
    ]
    total = sum(forward.values())
    if total:
        shares = sorted(forward.items(), key=lambda item: -item[1])
        lines.append(f"  {'forward':<14}" + ", ".join(f"{size / total:.0%} {name}" for name, size in shares))
    return ["", "By type of number:", *lines] if lines else []
