"""Write an out-of-memory report for its owner alone to read: JSON for programs, text for people.

Write as text what a report says of the failing stack, the recorded lines and the last steps. Of a stack only
texts are kept: a frame keeps its tensors.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import time
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

from vramledger_agent.oom.verdict import TOO_BIG, UNKNOWN
from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.messages import CATEGORIES
from vramledger_agent.protocol.user_code import BACKWARD_CALL, FRAMEWORK, PHASES, code_origin, phase_of

MAX_FRAMES = 60
Line = dict[str, object]
"""A frame as a report has it: ``file``, ``line`` and ``function``."""


def failing_stack(frame: FrameType | None) -> dict[str, object]:
    """Return where an allocation failed; for a thread of the backward pass, the stack of who waits for it."""
    lines = frame_lines(frame)
    phase = phase_of([(str(line["file"]), str(line["function"])) for line in lines])
    if not any(code_origin(str(line["file"])) != FRAMEWORK for line in lines):
        stacks = map(frame_lines, sys._current_frames().values())
        waiting = [found for found in stacks if any(line["function"] == BACKWARD_CALL for line in found)]
        lines = [*lines, *waiting[0]] if len(waiting) == 1 else lines
    return {"phase": phase, "frames": lines[:MAX_FRAMES]}


def frame_lines(frame: FrameType | None) -> list[Line]:
    found: list[Line] = []
    while frame is not None:
        found.append(_line(frame, frame.f_lineno))
        frame = frame.f_back
    return found


def traceback_lines(entry: TracebackType | None) -> list[Line]:
    """Return the frames of an exception, innermost first."""
    found: list[Line] = []
    while entry is not None:
        found.append(_line(entry.tb_frame, entry.tb_lineno))
        entry = entry.tb_next
    return found[::-1]


def _line(frame: FrameType, number: int | None) -> Line:
    return {"file": frame.f_code.co_filename, "line": number or 0, "function": frame.f_code.co_name}


def user_lines(lines: list[Line]) -> list[Line]:
    """Return the program's own lines; if it has none, those of the libraries; if none, the framework's."""
    origins = [code_origin(str(line["file"])) for line in lines]
    nearest = min(origins, default=FRAMEWORK)
    return [line for line, origin in zip(lines, origins, strict=True) if origin == nearest]


UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
UNIT_STEP = 1024

MAX_STACK_LINES = 12
"""The program's own lines of the failing stack that the text has; the JSON has all."""


def format_bytes(value: object) -> str:
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
    return ["", "By dtype:", *lines] if lines else []


MAX_KEPT = 20
ADVICE = {
    "too_big": """\
The program needs more memory than the device has. A smaller batch or model, mixed precision, activation
checkpointing or sharding over several devices reduces the need.""",
    "fragmented": """\
There is enough free memory, but in pieces that are too small.
Giving tensors the same sizes in every step avoids most of that.""",
    "hoarded": """\
Other processes hold the missing memory: see the holders below. 'vramledger show' says more about them.""",
    "leaking": """\
The minimum of the allocated memory has been growing all the time. Tensors that are kept with their graphs
(outputs of an evaluation without torch.no_grad(), for example) do that: 'vramledger-agent snapshot' names the
line that allocated them.""",
    "unknown": """\
Too little is known for a verdict. If this process can reach an exporter, what other processes hold
is known too.""",
}

TOO_BIG_FOR_LIMIT_ADVICE = """\
The program needs more memory than its limit. If the device has more, raise the limit. A smaller batch or
model, mixed precision, activation checkpointing or sharding over several devices reduces the need."""
"""For a program that has a limit of its own, below the device's size."""

UNKNOWN_FREE_ADVICE = """\
Too little is known for a verdict: the framework does not say what was free. 'vramledger show' says who holds
the device now."""
"""For a framework that tells nobody of a failed allocation: the exporter was not asked at that moment."""

EXPANDABLE_ADVICE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids it too."
"""For a program whose memory is fragmented, and that has not set this."""


OWN_NAME = re.compile(r"oom-\d{8}T\d{6}-\d+-\d{6,20}\.(json|txt|pickle)")
"""Our names: a program's own file is never removed."""

_MOST_ENTRIES = 100_000
"""Files that are looked at: where others may write, they may have made millions."""

MAX_KEPT_SNAPSHOTS = 5
"""The number of snapshots that the directory keeps: one has some megabytes."""


def write_report(
    facts: dict[str, object], chosen: str | None, snapshot: dict[str, object] | None = None
) -> str | None:
    """Write a report's files and return the path of the JSON; None where they cannot be written.

    A snapshot that does not fit on the disk is left out, and the report says nothing of it.
    """
    for directory in candidate_directories(chosen):
        try:
            make_private_directory(directory)
            moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            # Nobody can guess it, and take it before us.
            name = f"oom-{moment}-{os.getpid()}-{int.from_bytes(os.urandom(8), 'little'):020d}"
            path = os.path.join(directory, name + ".json")
            if snapshot is not None:
                facts = {**facts, "snapshot": write_snapshot(os.path.join(directory, name), snapshot)}
            write_private_file(path, json.dumps(facts, indent=1, default=str) + "\n")
            write_private_file(os.path.join(directory, name + ".txt"), format_report(facts))
            remove_old_reports(directory, name)
        except OSError as error:
            if belongs_to_program(error):
                raise
            continue
        return path
    return None


def write_snapshot(stem: str, snapshot: dict[str, object]) -> str | None:
    """Write a snapshot in PyTorch's format beside its report, and return its path; None if that fails."""
    path = stem + ".pickle"
    try:
        write_private_file(path, pickle.dumps(snapshot, protocol=4))
    except (OSError, MemoryError) as error:
        if belongs_to_program(error):
            raise
        try:
            os.unlink(path)  # a part of a pickle is of no use
        except OSError as error:
            if belongs_to_program(error):
                raise
        return None
    return path


def candidate_directories(chosen: str | None) -> list[str]:
    """Return the directories to try; the first writable one gets the report."""
    if chosen:
        return [chosen]
    found = []
    state = os.environ.get("XDG_STATE_HOME")
    home = os.path.expanduser("~")
    if state:
        found.append(os.path.join(state, "vramledger"))
    elif home.startswith("/"):
        found.append(os.path.join(home, ".local", "state", "vramledger"))
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        found.append(os.path.join(runtime, "vramledger"))
    found.append(os.path.join(os.environ.get("TMPDIR") or "/tmp", f"vramledger-{os.geteuid()}"))  # noqa: S108
    return found


def make_private_directory(directory: str) -> None:
    """Make the directory, ours alone.

    In a directory that everybody may write to, such as /tmp, another user may have created its name before
    us. It could be a directory in which this user can read or replace what we write. It could be a link with
    which this user chooses where we write. We follow a link that belongs to us or to root, because that is
    how a directory is moved elsewhere. Raises OSError if it cannot be made, or it or the link to it belongs
    to another user.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    # Where others may write and the sticky bit is set, only the owner can replace the directory or the link.
    owners = {os.lstat(directory).st_uid, os.stat(directory).st_uid}
    if not owners <= {0, os.geteuid()}:
        raise PermissionError("the directory belongs to another user")


def write_private_file(path: str, content: str | bytes) -> None:
    """Write a new file that only its owner can read. Raises OSError if it exists, or cannot be written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def remove_old_reports(directory: str, newest: str) -> None:
    """Remove our oldest reports and snapshots beyond those that are kept; their names sort by time."""
    # The file system of a network may give our files to another user.
    user = os.lstat(os.path.join(directory, newest + ".json")).st_uid
    with os.scandir(directory) as entries:
        names = [each.name for each in islice(entries, _MOST_ENTRIES) if _is_report(each, user)]
    names.sort(key=lambda name: (name.startswith(newest), name))  # the clock may have been set back
    # By their stems, because a signal handler of the program may leave one of a report's two files.
    stems = list(dict.fromkeys(name.partition(".")[0] for name in names if not name.endswith(".pickle")))
    old = [stem + ending for stem in stems[:-MAX_KEPT] for ending in (".json", ".txt")]
    old += [name for name in names if name.endswith(".pickle")][:-MAX_KEPT_SNAPSHOTS]
    for name in old:
        try:
            os.unlink(os.path.join(directory, name))
        except OSError as error:  # another process removes them too
            if belongs_to_program(error):
                raise
            continue


def _is_report(entry: os.DirEntry[str], user: int) -> bool:
    """Tell whether a file is a report of a user; of a second name, somebody else may have made it."""
    try:
        found = os.lstat(entry.path) if OWN_NAME.fullmatch(entry.name) else None
    except OSError as error:  # another process has removed it
        if belongs_to_program(error):
            raise
        return False
    return found is not None and found.st_uid == user and found.st_nlink == 1


OPTIONAL_ROWS = ("more than it could get",)
"""The rows that are left out where nothing is known."""


def format_report(facts: dict[str, Any]) -> str:
    pool = facts.get("pool")
    figures = pool if isinstance(pool, dict) else {}
    verdict = str(facts.get("verdict"))
    rows = {
        "asked for": facts.get("requested"),
        "more than it could get": facts.get("missing") or None,
        "free on the device": facts.get("free"),
        "its limit" if facts.get("limited") else "the device has": facts.get("capacity"),
        "reserved by the allocator": figures.get("reserved"),
        "of these in use": figures.get("active"),
        "largest free block": facts.get("largest_free_block"),
        "held by other processes": facts.get("others"),
        "growth of the minimum": facts.get("leaked"),
    }
    program = f"{facts.get('framework')} {facts.get('framework_version')}, process {facts.get('pid')}"
    lines = [
        f"Out of GPU memory: {verdict.replace('_', ' ')}",
        f"{program}, device {facts.get('ordinal')} as the program numbers them",
        "",
        advice_for(facts),
        *([EXPANDABLE_ADVICE] if verdict == "fragmented" and not facts.get("expandable_segments") else []),
        "",
        *(
            f"  {name:<25} {format_bytes(value)}"
            for name, value in rows.items()
            if value is not None or name not in OPTIONAL_ROWS
        ),
        *batch_lines(facts),
        *stack_lines(facts.get("stack")),
    ]
    categories = facts.get("categories")
    if isinstance(categories, dict):
        lines += ["", "What is allocated, after the last optimizer step that was measured:"]
        lines += [f"  {name:<25} {format_bytes(value)}" for name, value in categories.items()]
    lines += recorded_lines(facts)
    device = facts.get("device")
    holders = device.get("holders") if isinstance(device, dict) else None
    if isinstance(holders, list):
        lines += ["", "Who holds the device:"]
        lines += [f"  {format_holder(holder)}" for holder in holders if isinstance(holder, dict)]
    collector = facts.get("collector")
    if isinstance(collector, dict) and collector.get("enabled") is False:
        lines += ["", "Python's cyclic collector is off: tensors in reference cycles are never freed."]
    return "\n".join(lines) + "\n"


def advice_for(facts: dict[str, Any]) -> str:
    """Return what a program's user can do, from what the report knows."""
    verdict = str(facts.get("verdict"))
    if verdict == TOO_BIG and facts.get("limited"):
        return TOO_BIG_FOR_LIMIT_ADVICE
    if verdict == UNKNOWN and "free" not in facts:
        return UNKNOWN_FREE_ADVICE
    return ADVICE.get(verdict, "")


def format_holder(holder: dict[str, object]) -> str:
    who = holder.get("owner") or holder.get("owner_type") or "another user's process"
    pid = holder.get("pid")
    name = str(who) if pid is None else f"{who}, pid {pid}"
    managed = holder.get("managed")
    more = f", and {format_bytes(managed)} of managed memory, which gives way" if managed else ""
    return f"{format_bytes(holder.get('bytes')):>14}  {name}, {holder.get('state')}{more}"
