"""Show a snapshot as a table for the terminal: who holds what, since when and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

from vramledger.model.reading import UNIFIED, DeviceReading, ProcessFacts
from vramledger.model.snapshot import (
    UNKNOWN,
    DeviceSnapshot,
    Holding,
    Policy,
    Snapshot,
    State,
    UndividedBytes,
)
from vramledger.verdicts.remedies import (
    PIDS_SHOWN,
    SHOWN_MIN,
    about_operating_system,
    left_text,
    remedy,
    why_unusable,
    words_of_error,
)
from vramledger_agent.printable import Control, gib, printable, span

_LONGEST_OWNER = 60
_REMEDIES_MAX = 3
"""The maximum number of holders of a device for which the table says what to do."""
_RED, _GREEN, _YELLOW, _PURPLE, _PLAIN = (Control(f"\x1b[{each}m") for each in (31, 32, 33, 35, 0))
_COLOURS = {
    None: _PLAIN,  # the names of the columns
    State.DEAD: _RED,
    State.ZOMBIE: _RED,
    State.STUCK: _RED,
    State.ORPHANED: _RED,
    State.STOPPED: _YELLOW,
    State.IDLE: _YELLOW,
    State.ACTIVE: _GREEN,
    State.UNKNOWN: _PURPLE,
}
_COLUMNS = ("PID", "OWNER", "COMMAND", "FRAMEWORK", "MEMORY", "SM", "STATE", "FOR", "WHY")


def memory_text(holding: Holding) -> str:
    """Write what a holder has, and how much of it NVML does not charge to it."""
    uncharged = holding.uncharged
    if uncharged is None:
        return gib(holding.memory)
    if uncharged.least and uncharged.most - uncharged.least < SHOWN_MIN:
        return f"{gib(holding.held)} ({gib(uncharged.least)} uncharged)"
    return f"{gib(holding.held)} (up to {gib(uncharged.most - uncharged.least)} more)"


def framework_text(policy: Policy) -> str:
    """Write ``torch/caching``; one part if the other is not known, a dash for neither."""
    return "/".join(part for part in policy[:2] if part != UNKNOWN) or "-"


_Line: TypeAlias = "str | tuple[str, ...]"
"""A line, or its parts, of which our own control sequences alone stay as they are."""


def render_table(snapshot: Snapshot) -> str:
    """Return the whole snapshot as text, one block for each device."""
    return "".join(table_parts(snapshot, colour=False))


def table_parts(snapshot: Snapshot, *, colour: bool) -> Iterator[str]:
    """Yield the parts of the text: nothing in what others have written begins a line or controls anything."""
    for line in _lines(snapshot):
        for part in (line,) if isinstance(line, str) else line:
            if not isinstance(part, Control):
                yield printable(part)
            elif colour:
                yield part
        yield "\n"


def _lines(snapshot: Snapshot) -> Iterator[_Line]:
    if snapshot.source == "replay":
        yield f"RECORDING {snapshot.recording}: this is not the data of this host."
    if not snapshot.up:
        reason, message = snapshot.failure or ("starting", "no sample has finished yet")
        yield f"No data ({reason}): {message}"
        return
    if snapshot.host_pid_namespace is False:
        yield (
            "Not in the host's PID namespace: the holders of memory are not visible here. "
            "See 'vramledger doctor'."
        )
    for device in snapshot.devices:
        yield from _device(device, snapshot)


def _device(device: DeviceSnapshot, snapshot: Snapshot) -> Iterator[_Line]:
    reading = device.reading
    yield f"GPU {reading.index}  {_title(reading)}  {reading.uuid}"
    if (unusable := why_unusable(reading)) is not None:
        yield f"  UNUSABLE: {unusable}"
    if not device.up:
        yield f"  {words_of_error(reading)}"
        return
    if reading.divided:
        yield "  divided into MIG instances, which follow"
        return
    yield from _ledger_lines(device)
    rows = [_row(holding, snapshot) for holding in device.holdings]
    if rows:
        yield from _holdings(rows, [holding.state for holding in device.holdings])
        yield from _remedies(device, snapshot)
    elif not device.blind:
        yield "  no process holds memory here"
    yield from _limit_lines(device)
    yield from _reservation_lines(device)
    if device.ghost:
        busy = (reading.utilization or {}).get("gpu", 0.0)
        yield f"  GHOST: {busy:.0%} busy for minutes at idle power, and no process uses it"
        yield "    On some GPUs the counter sticks until the next CUDA program; if not on this, reset it"
    for hidden in device.hidden or ():
        what = "has initialised CUDA" if hidden.kind == "cuda" else "has the device open"
        who = f"pid {hidden.pid} {hidden.command} ({hidden.user or '?'})"
        yield f"  hidden: {who} {what}, and NVML does not list it"


def _title(reading: DeviceReading) -> str:
    """Name a device; a MIG instance by its profile and its place: ``NVIDIA H200 MIG 3g.71gb at 4:4``."""
    name, profile = reading.name or "", reading.mig_profile
    parts = [name, profile or ""] if profile and not name.endswith(profile) else [name]
    if reading.mig_placement is not None:
        parts.append(f"at {reading.mig_placement}")
    return " ".join(filter(None, parts))


def _ledger_lines(device: DeviceSnapshot) -> Iterator[str]:
    ledger = device.ledger
    if ledger is None:
        yield "  the driver does not report enough for a ledger"
        return
    parts = [f"used {gib(ledger.used)} of {gib(ledger.total)}", f"free {gib(ledger.free)}"]
    if ledger.driver_reserved is not None:
        parts.append(f"driver {gib(ledger.driver_reserved)}")
    if ledger.operating_system is not None:
        parts.append(f"operating system {gib(ledger.operating_system)}")
    if device.blind:
        parts.append(f"unknown {gib(ledger.states[State.UNKNOWN])}")
    else:
        parts.append(f"unattributed {gib(ledger.unattributed)}")
    if ledger.overlap:
        parts.append(f"overlap {gib(ledger.overlap)}")
    yield "  " + " · ".join(parts)
    if (about := about_operating_system(device)) is not None:
        yield f"  operating system: {about}"
    if device.undivided is not None:
        yield f"  undivided: {undivided_text(device.undivided)}"
    for each in device.left:
        yield f"  left behind: {left_text(each)}"
    if device.memory_counted_under is not None:
        whose = "the host's" if device.reading.memory_kind == UNIFIED else "that of its GPU instance"
        yield f"  this memory is {whose}, shared with {device.memory_counted_under}"


def undivided_text(undivided: UndividedBytes) -> str:
    """Say who can have the bytes that one of several holders has."""
    pids = ", ".join(map(str, undivided.pids[:PIDS_SHOWN]))
    more = f" and {len(undivided.pids) - PIDS_SHOWN} more" if len(undivided.pids) > PIDS_SHOWN else ""
    return f"{gib(undivided.bytes)} that NVML charges to nobody are in one or several of pid {pids}{more}"


def _remedies(device: DeviceSnapshot, snapshot: Snapshot) -> Iterator[str]:
    """Say what to do for the few largest; ``--why PID`` says it for every holder."""
    shown = 0
    for holding in device.holdings:
        advice = remedy(holding, snapshot.processes.get(holding.pid), device)
        if advice is not None and shown < _REMEDIES_MAX:
            yield f"  {holding.state.value} {holding.pid}: {advice}"
            shown += 1


def _limit_lines(device: DeviceSnapshot) -> Iterator[str]:
    for each in device.limits:
        if each.maximum is not None:
            taken = "an unknown part" if each.used is None else gib(each.used)
            who = f"{each.type} {each.name}"
            yield f"  limit: {who} may take {gib(each.maximum)}, {taken} is taken ({each.cgroup or ''})"
    if device.reading.partition is not None:
        yield f"  PARTITION: NVML shows us only the {gib(device.reading.partition)} of our own cgroup's limit"


def _reservation_lines(device: DeviceSnapshot) -> Iterator[str]:
    """Say for whom a device is reserved, and who holds without; no lines without a scheduler."""
    if device.reservation_status is None:
        return
    words = {True: "which holds memory here", False: "which HOLDS NOTHING here", None: "held or not: unknown"}
    for each in device.reservation_status.reservations:
        yield f"  reservation: for {each.type} {each.name}, {words[each.held]}"
    for pid in device.reservation_status.unreserved_pids or ():
        schedulers = " and ".join(device.reservation_status.schedulers)
        yield f"  UNRESERVED: pid {pid} holds memory without a reservation; {schedulers} assigns this GPU"


def _row(holding: Holding, snapshot: Snapshot) -> tuple[str, ...]:
    process = snapshot.processes.get(holding.pid)
    facts = snapshot.facts_of(holding.pid)
    return (
        str(holding.pid),
        _owner(facts) or "-",
        (facts.command if facts is not None else "") or "-",
        "-" if process is None else framework_text(process.policy),
        memory_text(holding),
        "-" if holding.sm is None else f"{holding.sm:.0%}",
        holding.state.value,
        span((snapshot.time or 0) - holding.since),
        holding.why,
    )


def _owner(facts: ProcessFacts | None) -> str:
    """Write the owner of a process, with the user behind it: ``pod ml/train-0 (ada)``, or just ``ada``."""
    if facts is None:
        return ""
    owner, user = facts.owner, facts.user or ""
    if owner is None or (owner.type == "user" and not owner.notebook):
        return user
    kind, name = ("notebook", owner.notebook) if owner.type == "user" else (owner.type, owner.name)
    name = f"{kind} {name}"[:_LONGEST_OWNER]
    return f"{name} ({user})" if user else name


def aligned(rows: Iterable[Sequence[str]], left: Collection[str]) -> list[dict[str, str]]:
    """Return the cells of a table by column, as wide as their column is; the first row names the columns."""
    columns = list(zip(*rows, strict=True))
    wide = [
        [text.ljust(width) if column[0] in left else text.rjust(width) for text in column]
        for column, width in ((column, max(map(len, column))) for column in columns)
    ]
    return [dict(zip((column[0] for column in columns), row, strict=True)) for row in zip(*wide, strict=True)]


def _holdings(rows: list[tuple[str, ...]], states: list[State]) -> Iterator[_Line]:
    cells = aligned([_COLUMNS, *rows], ("OWNER", "COMMAND", "FRAMEWORK", "STATE", "WHY"))
    framed = any(each["FRAMEWORK"].strip() != "-" for each in cells[1:])
    for row, state in zip(cells, [None, *states], strict=True):
        if not framed:
            del row["FRAMEWORK"]  # lines are long enough
        row["WHY"] = row["WHY"].rstrip()
        coloured = {"STATE": (_COLOURS[state], row["STATE"], _PLAIN)}
        yield tuple(part for name, cell in row.items() for part in ("  ", *coloured.get(name, (cell,))))
