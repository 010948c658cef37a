"""Sum up a sample in what tables, a timeline's marks and a report need: each holder's bytes and state.

A summary is sent whenever a holder came, went, changed its state or ran out of memory, and otherwise once a
minute. So a report over days is exact to the second in who and why, and to the minute in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vramledger.model.snapshot import Grade, Holding, Snapshot, State

MINUTE = 60

UNKNOWN = "unknown"


class HolderSummary(NamedTuple):
    """One holding in a summary; ``held`` and ``wasted`` are None where they are not known."""

    owner_type: str
    owner: str
    user: str
    command: str
    state: str
    grade: str
    held: int | None
    wasted: bool | None

    @property
    def marked_state(self) -> str:
        """Its state as an event: that it was left behind is none while it is only inferred."""
        unsure = self.state == State.ORPHANED.value and self.grade == Grade.INFERRED.value
        return State.ACTIVE.value if unsure else self.state


def summarise(snapshot: Snapshot, peaks: Mapping[str, int]) -> dict[str, Any]:
    """Return the summary of a sample as JSON values, with the most of each device since the one before."""
    return {
        "time": snapshot.time,
        "up": snapshot.up,
        "devices": {
            device.reading.uuid: {
                "gpu": device.reading.index,
                "total": device.ledger.total,
                "used": device.ledger.used,
                "peak": peaks.get(device.reading.uuid),
                "wasted": device.wasted,
                "unattributed": device.ledger.unattributed,
                "holders": {
                    f"{each.pid}/{each.start}": list(_holder(snapshot, each.pid, each))
                    for each in device.holdings
                },
            }
            for device in snapshot.devices
            if device.ledger is not None
        },
        "ooms": {f"{each.type}\n{each.name}\n{each.framework}": each.failures for each in snapshot.ooms},
    }


def _holder(snapshot: Snapshot, pid: int, holding: Holding) -> HolderSummary:
    facts = snapshot.facts_of(pid)
    owner = None if facts is None else facts.owner_or_user
    return HolderSummary(
        UNKNOWN if owner is None else owner.type,
        "" if owner is None else owner.name,
        "" if facts is None or facts.user is None else facts.user,
        "" if facts is None else facts.command,
        holding.state.value,
        holding.grade.value,
        holding.held,
        holding.wasted,
    )


def outline_of(snapshot: Snapshot) -> object:
    """Return what changes whenever more than bytes changes: who holds, in which state, and who ran out."""
    holders = [
        (device.reading.uuid, [_outline(each) for each in sorted_by_pid(device.holdings)])
        for device in snapshot.devices
    ]
    return snapshot.up, holders, snapshot.ooms


def _outline(holding: Holding) -> object:
    return holding.pid, holding.start, holding.state, holding.left_over


def sorted_by_pid(holdings: Iterable[Holding]) -> list[Holding]:
    """Return holdings in an order that does not depend on their bytes."""
    return sorted(holdings, key=lambda each: each.pid)


class TimelineMark(NamedTuple):
    """Something that happened on a device, or on the host where ``uuid`` is empty.

    ``kind`` is ``came``, ``went``, the name of the state that a holder got, ``oom``, ``lost`` (the GPUs gave
    no data any more), or ``back``.
    """

    time: float
    kind: str
    uuid: str = ""
    key: str = ""
    holder: HolderSummary | None = None
    before: str = ""
    owner: str = ""


def marks_between(time: float, before: dict[str, Any], after: dict[str, Any]) -> Iterator[TimelineMark]:
    """Yield what happened from one summary to the next."""
    if before["up"] != after["up"]:
        yield TimelineMark(time, "back" if after["up"] else "lost")
    if not after["up"] or not before["up"]:
        return
    for uuid, device in after["devices"].items():
        old = before["devices"].get(uuid, {}).get("holders", {})
        for key, raw in device["holders"].items():
            holder = HolderSummary(*raw)
            known = HolderSummary(*old[key]) if key in old else None
            state = holder.marked_state
            if known is None or known.marked_state != state:
                kind = "came" if known is None and state in ("active", UNKNOWN) else state
                yield TimelineMark(time, kind, uuid, key, holder, "" if known is None else known.marked_state)
        for key in old.keys() - device["holders"].keys():
            holder = HolderSummary(*old[key])
            yield TimelineMark(time, "went", uuid, key, holder, holder.marked_state)
    for key, count in after["ooms"].items():
        if count > before["ooms"].get(key, 0):
            kind, name, _ = key.split("\n")
            yield TimelineMark(time, "oom", owner=f"{kind} {name}")
