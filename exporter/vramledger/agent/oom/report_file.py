"""Write an out-of-memory report down: JSON for programs, text for people, and nobody else's to read."""

from __future__ import annotations

import json
import os
import time

KEEP = 20
"""Reports that stay in the directory, the newest ones."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
STEP = 1024

ADVICE = {
    "too_big": """\
The program needs more than the device has. A smaller batch or model, mixed precision, activation
checkpointing or sharding over several devices make it less.""",
    "fragmented": """\
There is enough memory, but in pieces. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids most of
that; so does giving tensors the same sizes in every step.""",
    "hoarded": """\
Other processes hold what is missing: see the holders below. 'vramledger show' tells more of them.""",
    "leaking": """\
What is allocated at the least has been growing all the time. Tensors that are kept with their graphs
(outputs of an evaluation without torch.no_grad(), for one) do that: 'vramledger snapshot' names the line
that allocated them.""",
    "unknown": """\
Too little is known for a verdict. With an exporter that this process can reach, what other processes hold
is known too.""",
}


def write(facts: dict[str, object], directory: str | None) -> str | None:
    """Write a report's two files and return the path of the JSON; None where they cannot be written."""
    for place in places(directory):
        try:
            prepare(place)
            moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            name = f"oom-{moment}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"
            path = os.path.join(place, name + ".json")
            put(path, json.dumps(facts, indent=1, default=str) + "\n")
            put(os.path.join(place, name + ".txt"), text(facts))
            tidy(place)
        except OSError:
            continue
        return path
    return None


def places(directory: str | None) -> list[str]:
    """Return the directories to try, the first that can be written is it."""
    if directory:
        return [directory]
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


def prepare(place: str) -> None:
    """Make the directory, ours alone.

    Where everybody may write, as in /tmp, another user may have put something under its name before us: a
    directory, in which he could read or replace what we write, or a link, with which he chose among our own
    where we write. A link of ours or of root's is followed, for that is how a directory is moved elsewhere.

    Raises:
        OSError: it cannot be made, or it or the link to it is another user's.
    """
    os.makedirs(place, mode=0o700, exist_ok=True)
    # Nobody but its owner can replace either where others may write and the sticky bit is set.
    owners = {os.lstat(place).st_uid, os.stat(place).st_uid}
    if not owners <= {0, os.geteuid()}:
        message = "the directory is another user's"
        raise PermissionError(message)


def put(path: str, content: str) -> None:
    """Write a new file that only its owner can read.

    Raises:
        OSError: it is there, or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        data = content.encode()
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def tidy(place: str) -> None:
    """Remove the oldest reports beyond those that are kept; their names sort by time."""
    reports = sorted(name for name in os.listdir(place) if name.startswith("oom-") and name.endswith(".json"))
    for name in reports[:-KEEP]:
        for ending in (".json", ".txt"):
            try:
                os.unlink(os.path.join(place, name.removesuffix(".json") + ending))
            except OSError:  # another process tidies too
                continue


def amount(value: object) -> str:
    """Return bytes as a person reads them."""
    if not isinstance(value, int):
        return "not known"
    size = float(value)
    for unit in UNITS:
        if abs(size) < STEP or unit == UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:,.2f} {unit}"
        size /= STEP
    return ""


def text(facts: dict[str, object]) -> str:
    """Return a report as a person reads it."""
    pool = facts.get("pool")
    figures = pool if isinstance(pool, dict) else {}
    verdict = str(facts.get("verdict"))
    rows = {
        "asked for": facts.get("requested"),
        "free on the device": facts.get("free"),
        "its limit" if facts.get("limited") else "the device has": facts.get("capacity"),
        "reserved by the allocator": figures.get("reserved"),
        "of these in use": figures.get("active"),
        "largest free block": facts.get("largest_free_block"),
        "held by other processes": facts.get("others"),
        "growth of the least used": facts.get("leaked"),
    }
    place = f"device {facts.get('ordinal')} as the program numbers them"
    lines = [
        f"Out of GPU memory: {verdict.replace('_', ' ')}",
        f"{facts.get('framework')} {facts.get('framework_version')}, process {facts.get('pid')}, {place}",
        "",
        ADVICE.get(verdict, ""),
        "",
        *(f"  {name:<25} {amount(value)}" for name, value in rows.items()),
    ]
    categories = facts.get("categories")
    if isinstance(categories, dict):
        lines += ["", "What is allocated, after the last optimizer step that was looked at:"]
        lines += [f"  {name:<25} {amount(value)}" for name, value in categories.items()]
    device = facts.get("device")
    holders = device.get("holders") if isinstance(device, dict) else None
    if isinstance(holders, list):
        lines += ["", "Who holds the device:"]
        lines += [f"  {holder_line(holder)}" for holder in holders if isinstance(holder, dict)]
    collector = facts.get("collector")
    if isinstance(collector, dict) and collector.get("enabled") is False:
        lines += ["", "Python's cyclic collector is off: tensors in reference cycles are never freed."]
    return "\n".join(lines) + "\n"


def holder_line(holder: dict[str, object]) -> str:
    """Return one holder of the device as a line."""
    who = holder.get("owner") or holder.get("owner_type") or "another user's process"
    pid = holder.get("pid")
    name = str(who) if pid is None else f"{who}, pid {pid}"
    return f"{amount(holder.get('bytes')):>14}  {name}, {holder.get('state')}"
