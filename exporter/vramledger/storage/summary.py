"""Sum up a sample in what a timeline, its marks and a report need: the bytes of each holder, and its state.

A summary is stored whenever a holder came, went, changed its state or ran out of memory, and otherwise once a
minute. It is kept when a segment is thinned, so a report over days is exact to the second in who and why, and
to the minute in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vramledger.model.snapshot import Holding, Snapshot

BYTES_INTERVAL = 60.0
"""Seconds from one summary to the next when only bytes have changed."""

UNKNOWN = "unknown"


class HolderSummary(NamedTuple):
    """One holding in a summary: who it is, its state, its bytes, and whether they are held without work."""

    owner_type: str
    owner: str
    user: str
    command: str
    state: str
    held: int
    wasted: bool


def summarise(snapshot: Snapshot) -> dict[str, Any]:
    """Return the summary of a sample as JSON values."""
    return {
        "up": snapshot.up,
        "devices": {
            device.reading.uuid: {
                "gpu": device.reading.index,
                "total": device.ledger.total,
                "used": device.ledger.used,
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
        holding.held or 0,
        holding.wasted,
    )


def outline_of(snapshot: Snapshot) -> object:
    """Return what changes whenever more than bytes changes: who holds, in which state, and who ran out."""
    holders = [
        (device.reading.uuid, [(each.pid, each.start, each.state) for each in sorted_by_pid(device.holdings)])
        for device in snapshot.devices
    ]
    return snapshot.up, holders, snapshot.ooms


def sorted_by_pid(holdings: Iterable[Holding]) -> list[Holding]:
    """Return holdings in an order that does not depend on their bytes."""
    return sorted(holdings, key=lambda each: each.pid)


class TimelineMark(NamedTuple):
    """Something that happened on a device, or on the host where ``uuid`` is empty.

    ``kind`` is ``came``, ``went``, the name of the state that a holder got, ``oom``, ``lost`` (the GPUs gave
    no data any more), ``back``, or ``stopped`` and ``started`` of the exporter.
    """

    time: float
    kind: str
    uuid: str = ""
    pid: int = 0
    owner: str = ""
    command: str = ""
    before: str = ""


def marks_between(time: float, before: dict[str, Any], after: dict[str, Any]) -> Iterator[TimelineMark]:
    """Yield what happened from one summary to the next."""
    if before.get("up", True) != after["up"]:
        yield TimelineMark(time, "back" if after["up"] else "lost")
    if not after["up"] or not before.get("up", True):
        return
    for uuid, device in after["devices"].items():
        old = before.get("devices", {}).get(uuid, {}).get("holders", {})
        for key, raw in device["holders"].items():
            holder = HolderSummary(*raw)
            known = HolderSummary(*old[key]) if key in old else None
            if known is None or known.state != holder.state:
                kind = "came" if known is None and holder.state in ("active", UNKNOWN) else holder.state
                yield _mark(time, kind, uuid, key, holder)._replace(
                    before="" if known is None else known.state
                )
        for key in old.keys() - device["holders"].keys():
            holder = HolderSummary(*old[key])
            yield _mark(time, "went", uuid, key, holder)._replace(before=holder.state)
    for key, count in after["ooms"].items():
        if count > before.get("ooms", {}).get(key, 0):
            kind, name, _ = key.split("\n")
            yield TimelineMark(time, "oom", owner=f"{kind} {name}")


def _mark(time: float, kind: str, uuid: str, key: str, holder: HolderSummary) -> TimelineMark:
    owner = f"{holder.owner_type} {holder.owner}".strip()
    return TimelineMark(time, kind, uuid, int(key.partition("/")[0]), owner, holder.command)


class Period(NamedTuple):
    """A span in which a summary was true; before a gap it ends with the last reading."""

    begin: float
    end: float
    summary: dict[str, Any]


def periods(summaries: Iterable[tuple[float, float, dict[str, Any]]]) -> Iterator[Period]:
    """Yield the spans of summaries, given their time and until when readings followed without a gap."""
    before: tuple[float, float, dict[str, Any]] | None = None
    for each in summaries:
        if before is not None:
            yield Period(before[0], min(before[1], each[0]), before[2])
        before = each
    if before is not None:
        yield Period(before[0], before[1], before[2])
