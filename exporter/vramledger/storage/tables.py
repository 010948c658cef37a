"""Keep the summary in tables that people query: a row a minute for each device and holder, and what happened.

A row says for how many seconds it was true. A holder gets another one when the minute is over, and when it
changes its state; a device with every summary. Rows that are not over yet are written again each 4 s, so a
reader, and who opens the file after a power cut, sees them up to the newest reading. Times and seconds are
whole, and follow on one another without a gap or an overlap.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from vramledger.model.snapshot import Grade, State
from vramledger.storage.protocol import MINUTE, HolderSummary

_IDS_MAX = 10_000
"""How many numbers of devices and holders are remembered; of others the file is asked."""

_FIND_HOLDER = (
    "SELECT id FROM holder WHERE pid = ? AND start IS ? AND owner_type = ? AND owner IS ? AND user IS ? "
    "AND command IS ?"
)
_INSERT_HOLDER = "INSERT INTO holder (pid, start, owner_type, owner, user, command) VALUES (?, ?, ?, ?, ?, ?)"


class _Open(NamedTuple):
    time: int
    key: tuple[int, ...]
    values: tuple[Any, ...]
    identity: tuple[Any, ...]

    def row(self, until: int) -> tuple[Any, ...]:
        return (self.time, *self.key, max(0, until - self.time), *self.values)


class SummaryTables:
    """What is written to the tables next; a new one is made after a failure of the disk."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        found = connection.execute("SELECT value FROM meta WHERE name = 'summary'").fetchone()
        self._before: dict[str, Any] | None = None
        with suppress(ValueError, TypeError):
            self._before = json.loads(found[0])
        self._waiting: list[dict[str, Any]] = []
        self._devices: dict[str, _Open] = {}
        self._holders: dict[tuple[str, str], _Open] = {}
        self._ids: dict[tuple[Any, ...], int] = {}
        self._watch: int | None = None
        self._up = True

    def add(self, summary: dict[str, Any]) -> None:
        """Take a summary; :meth:`write` writes it."""
        self._waiting.append(summary)

    def forget_numbers(self) -> None:
        """Ask the file again for the numbers of devices and holders: some were removed."""
        self._ids.clear()

    def interrupt(self) -> None:
        """Begin a new watch with the next summary: what was stored before it is not followed by it."""
        self._watch = None

    def write(self, until: float) -> None:
        """Write what was added, true up to the newest reading. Raises sqlite3.Error if it cannot."""
        for number, summary in enumerate(self._waiting):
            self._write_summary(summary, last=number == len(self._waiting) - 1)
        self._waiting.clear()
        self._write_rows("device_minute", 9, [each.row(int(until)) for each in self._devices.values()])
        self._write_rows("holder_minute", 9, [each.row(int(until)) for each in self._holders.values()])
        if self._watch is not None:
            self._connection.execute("UPDATE watch SET until = ? WHERE id = ?", (until, self._watch))

    def _write_rows(self, table: str, columns: int, rows: list[tuple[Any, ...]]) -> None:
        places = ",".join("?" * columns)
        self._connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({places})", rows)  # noqa: S608 ours

    def _write_summary(self, summary: dict[str, Any], *, last: bool) -> None:
        time = summary["time"]
        if self._watch is None or summary["up"] != self._up:
            self._begin_watch(time, up=summary["up"], follows=self._watch is not None)
        if self._before is not None:
            rows = [self._event(each) for each in marks_between(time, self._before, summary)]
            self._connection.executemany("INSERT INTO event VALUES (?,?,?,?,?,?)", rows)
        self._before = summary
        if last:
            text = json.dumps(summary, separators=(",", ":"))
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('summary', ?)", (text,))
        self._follow_devices(int(time), summary["devices"])
        self._follow_holders(int(time), summary["devices"])

    def _begin_watch(self, time: float, *, up: bool, follows: bool) -> None:
        if follows:
            self._connection.execute("UPDATE watch SET until = ? WHERE id = ?", (time, self._watch))
        else:  # until when the rows were true was written with the newest reading
            self._devices, self._holders = {}, {}
        self._up = up
        made = self._connection.execute(
            "INSERT INTO watch (begin, until, up) VALUES (?, ?, ?)", (time, time, int(up))
        )
        self._watch = made.lastrowid

    def _follow_devices(self, time: int, devices: dict[str, Any]) -> None:
        over = []
        for uuid, row in list(self._devices.items()):
            total, used, peak, *rest = row.values
            highest = devices.get(uuid, {}).get("peak")
            peak = max(peak, highest) if highest is not None else peak
            over.append(row._replace(values=(total, used, peak, *rest)).row(time))
            del self._devices[uuid]
        self._write_rows("device_minute", 9, over)
        for uuid, device in devices.items():
            key = self._device(uuid, device["gpu"]), self._watch or 0
            used = device["used"]
            values = device["total"], used, used, device["wasted"], device["unattributed"]
            self._devices[uuid] = _Open(time, key, values, ())

    def _follow_holders(self, time: int, devices: dict[str, Any]) -> None:
        now = {
            (uuid, key): HolderSummary(*raw)
            for uuid, device in devices.items()
            for key, raw in device["holders"].items()
        }
        over = []
        for key, row in list(self._holders.items()):
            each = now.get(key)
            if each is None or row.identity != _identity(each) or row.time // MINUTE != time // MINUTE:
                over.append(row.row(time))
                del self._holders[key]
        self._write_rows("holder_minute", 9, over)
        for key, each in now.items():
            if key not in self._holders:
                device = self._device(key[0], devices[key[0]]["gpu"])
                ids = device, self._holder(key[1], each), self._watch or 0
                values = each.state, each.grade, each.held, each.wasted
                self._holders[key] = _Open(time, ids, values, _identity(each))

    def _device(self, uuid: str, gpu: int | None = None) -> int:
        known = self._ids.get((uuid,))
        if known is None:
            self._connection.execute(
                "INSERT INTO device (uuid, gpu) VALUES (?, ?) ON CONFLICT (uuid) DO UPDATE SET gpu = "
                "coalesce(excluded.gpu, gpu)",
                (uuid, gpu),
            )
            (known,) = self._connection.execute("SELECT id FROM device WHERE uuid = ?", (uuid,)).fetchone()
            self._ids[uuid,] = known
        return known

    def _holder(self, key: str, holder: HolderSummary) -> int:
        pid, _, start = key.partition("/")
        values = (
            *(int(pid), int(start) if start.isdecimal() else None, holder.owner_type),
            *(each or None for each in (holder.owner, holder.user, holder.command)),
        )
        known = self._ids.get(values)
        if known is None:
            found = self._connection.execute(_FIND_HOLDER, values).fetchone()
            if not found and len(self._ids) > _IDS_MAX:
                self._ids.clear()
            known = found[0] if found else self._connection.execute(_INSERT_HOLDER, values).lastrowid or 0
            self._ids[values] = known
        return known

    def _event(self, mark: TimelineMark) -> tuple[Any, ...]:
        device = self._device(mark.uuid) if mark.uuid else None
        holder = None if mark.holder is None else self._holder(mark.key, mark.holder)
        return (
            mark.time,
            mark.kind,
            device,
            holder,
            mark.before or None,
            mark.owner if holder is None else None,
        )


def _identity(holder: HolderSummary) -> tuple[Any, ...]:
    """Return what must not change within a row: all but the bytes."""
    return holder._replace(held=None)


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
            state = _state(holder)
            if known is None or _state(known) != state:
                kind = "came" if known is None and state in ("active", "unknown") else state
                yield TimelineMark(time, kind, uuid, key, holder, "" if known is None else _state(known))
        for key in old.keys() - device["holders"].keys():
            holder = HolderSummary(*old[key])
            yield TimelineMark(time, "went", uuid, key, holder, _state(holder))
    for key, count in after["ooms"].items():
        if count > before["ooms"].get(key, 0):
            kind, name, _ = key.split("\n")
            yield TimelineMark(time, "oom", owner=f"{kind} {name}")


def _state(holder: HolderSummary) -> str:
    """Return its state as an event: that it was left behind is none while it is only inferred."""
    unsure = (holder.state, holder.grade) == (State.ORPHANED.value, Grade.INFERRED.value)
    return State.ACTIVE.value if unsure else holder.state
