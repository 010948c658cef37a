"""The last 15 minutes: each device's ledger in steps of five seconds, and how much each holding has grown.

Bounded in memory: 181 steps of ten integers a device, 16 marks a holding. Of the samples in one step the one
with the most memory in use is kept, whole, so that every step balances and a short peak is seen. Where no
sample succeeded there is nothing.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vramledger.jsonvalues import Json
from vramledger.snapshot import Book, Snapshot, State

SPAN = 900.0
"""Seconds that are remembered."""

STEP = 5.0
"""Seconds of one step: 180 make the span, as many as a small chart has pixels to show."""

_MARK = 60.0
# Seconds from one remembered size of a holding to the next.

Key = tuple[str, int, int | None]
"""A holding: UUID, pid, start ticks."""

_PARTS = ("free", "unattributed", *(state.value for state in State), "reserved")
# The driver's reserve is last: where it is not told apart from used, a step ends before it.


class Growth(NamedTuple):
    """How a holding's size has changed: bytes (negative when it shrank) over so many seconds, 900 at most."""

    bytes: int
    seconds: float


@dataclass(slots=True)
class _Marks:
    """Sizes of one holding, a minute apart."""

    seen: float
    sizes: deque[tuple[float, int]] = field(default_factory=deque)


class Timeline:
    """Remember; one thread notes while others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._newest: int | None = None
        self._devices: dict[str, dict[int, array[int]]] = {}
        self._index: dict[str, int] = {}
        self._holdings: dict[Key, _Marks] = {}

    def note(self, snapshot: Snapshot) -> None:
        """Take in one sample; a failed one leaves a gap, and a clock that went back a clean sheet."""
        if snapshot.time is None:
            return
        step = int(snapshot.time // STEP)
        with self._lock:
            if self._newest is not None and step < self._newest:
                self._clear()
            begins, self._newest = step != self._newest, step
            for device in snapshot.devices:
                uuid = device.reading.uuid
                if device.book is not None:
                    self._index[uuid] = device.reading.index
                    _keep(self._devices.setdefault(uuid, {}), step, device.book)
                for holding in device.holdings:
                    if holding.memory is not None:
                        self._mark((uuid, holding.pid, holding.start), snapshot.time, holding.memory)
            if begins:
                self._forget(step - int(SPAN / STEP), snapshot.time)

    def _forget(self, oldest: int, now: float) -> None:
        for uuid, steps in list(self._devices.items()):
            for step in [each for each in steps if each < oldest]:
                del steps[step]
            if not steps:
                del self._devices[uuid], self._index[uuid]
        for key, marks in list(self._holdings.items()):
            if now - marks.seen > _MARK:
                del self._holdings[key]

    def _mark(self, key: Key, now: float, size: int) -> None:
        marks = self._holdings.get(key)
        if marks is None:
            marks = self._holdings[key] = _Marks(now)
        marks.seen = now
        sizes = marks.sizes
        if not sizes or now - sizes[-1][0] >= _MARK:
            sizes.append((now, size))
        while now - sizes[0][0] > SPAN and len(sizes) > 1:
            sizes.popleft()

    def growth(self, snapshot: Snapshot) -> Mapping[Key, Growth]:
        """Return how each holding of a snapshot has changed; those seen for the first time are left out."""
        found: dict[Key, Growth] = {}
        now = snapshot.time or 0.0
        with self._lock:
            for device in snapshot.devices:
                for holding in device.holdings:
                    key = (device.reading.uuid, holding.pid, holding.start)
                    marks = self._holdings.get(key)
                    if marks is not None and holding.memory is not None and now > marks.sizes[0][0]:
                        since, size = marks.sizes[0]
                        found[key] = Growth(holding.memory - size, now - since)
        return found

    def document(self) -> dict[str, Json]:
        """Return it as JSON values, a column a part; null where no sample of a step succeeded."""
        with self._lock:
            newest = self._newest
            devices = {uuid: dict(steps) for uuid, steps in self._devices.items()}
            index = dict(self._index)
        first = min((step for steps in devices.values() for step in steps), default=newest)
        steps = [] if newest is None or first is None else list(range(first, newest + 1))
        return {
            "version": 1,
            "step": STEP,
            "times": [step * STEP for step in steps],
            "devices": [
                {"gpu": index[uuid], "uuid": uuid, "memory": _columns(kept, steps)}
                for uuid, kept in sorted(devices.items(), key=lambda item: index[item[0]])
            ],
        }


def _keep(steps: dict[int, array[int]], step: int, book: Book) -> None:
    before = steps.get(step)
    if before is not None and before[0] <= book.free:
        return
    values = array("q", (book.free, book.unattributed, *(book.states[state] for state in State)))
    if book.reserved is not None:
        values.append(book.reserved)
    steps[step] = values


def _columns(kept: Mapping[int, array[int]], steps: list[int]) -> dict[str, Json]:
    rows = [kept.get(step) for step in steps]
    columns: dict[str, Json] = {"total": [None if row is None else sum(row) for row in rows]}
    for place, part in enumerate(_PARTS):
        columns[part] = [None if row is None or place >= len(row) else row[place] for row in rows]
    return columns
