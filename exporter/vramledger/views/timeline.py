"""Keep the last 15 minutes: each device's ledger in steps of five seconds, and each holding's growth.

The memory is bounded: 181 steps of at most twelve integers for each device, 16 sizes for each holding, all
in packed arrays. As Python objects they took 0.9 MiB more with 8 GPUs and 64 holders on each. Of the samples
in one step we keep the whole sample with the most memory in use, so that every step balances and shows short
peaks. A step without a successful sample is empty.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vramledger.model.json_values import JSON_VERSION, Json
from vramledger.model.snapshot import Ledger, Snapshot, State

SPAN = 900.0
"""Seconds that are remembered."""

STEP = 5.0
"""Seconds of one step: the span has 180 steps, as many as a small chart has pixels."""

_SIZE_INTERVAL = 60.0
"""Seconds from one remembered size of a holding to the next."""

Key = tuple[str, int, int | None]
"""A holding: UUID, pid, start ticks."""

_PARTS = ("free", "unattributed", *(state.value for state in State), "driver_reserved", "operating_system")
"""The parts that not every device has are last: a step ends before those that it lacks, or has -1."""


class HoldingGrowth(NamedTuple):
    """The change of a holding's size: bytes (negative when it shrank) over at most 900 seconds."""

    bytes: int
    seconds: float


@dataclass(slots=True)
class _SizeHistory:
    """Sizes of one holding, a minute apart: ``times`` in Unix seconds, ``sizes`` in bytes."""

    seen: float
    times: array[float] = field(default_factory=lambda: array("d"))
    sizes: array[int] = field(default_factory=lambda: array("q"))


class Timeline:
    """The samples of the last 15 minutes; one thread records while others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._newest: int | None = None
        self._devices: dict[str, dict[int, bytes]] = {}
        self._index: dict[str, int] = {}
        self._holdings: dict[Key, _SizeHistory] = {}

    def remembered(self) -> dict[str, object]:
        """Return all that is remembered, for a storage."""
        with self._lock:
            return {
                "_newest": self._newest,
                "_devices": {uuid: dict(steps) for uuid, steps in self._devices.items()},
                "_index": dict(self._index),
                "_holdings": {
                    key: _SizeHistory(each.seen, each.times[:], each.sizes[:])
                    for key, each in self._holdings.items()
                },
            }

    def recall(self, remembered: Mapping[str, object]) -> None:
        """Go on from what a timeline has remembered."""
        with self._lock:
            for name in ("_newest", "_devices", "_index", "_holdings"):
                if name in remembered:
                    setattr(self, name, remembered[name])

    def record(self, snapshot: Snapshot) -> None:
        """Record one sample; a failed one leaves a gap, and a clock that was set back removes everything."""
        if snapshot.time is None:
            return
        step = int(snapshot.time // STEP)
        with self._lock:
            if self._newest is not None and step < self._newest:
                self._clear()
            new_step, self._newest = step != self._newest, step
            for device in snapshot.devices:
                uuid = device.reading.uuid
                if device.ledger is not None:
                    self._index[uuid] = device.reading.index
                    _keep_fullest(self._devices.setdefault(uuid, {}), step, device.ledger)
                for holding in device.holdings:
                    if holding.held is not None:
                        self._record_size((uuid, holding.pid, holding.start), snapshot.time, holding.held)
            if new_step:
                self._drop_older(step - int(SPAN / STEP), snapshot.time)

    def _drop_older(self, oldest: int, now: float) -> None:
        for uuid, steps in list(self._devices.items()):
            for step in [each for each in steps if each < oldest]:
                del steps[step]
            if not steps:
                del self._devices[uuid], self._index[uuid]
        for key, history in list(self._holdings.items()):
            if now - history.seen > _SIZE_INTERVAL:
                del self._holdings[key]

    def _record_size(self, key: Key, now: float, size: int) -> None:
        history = self._holdings.get(key)
        if history is None:
            history = self._holdings[key] = _SizeHistory(now)
        history.seen = now
        times, sizes = history.times, history.sizes
        if not times or now - times[-1] >= _SIZE_INTERVAL:
            times.append(now)
            sizes.append(size)
        while now - times[0] > SPAN and len(times) > 1:
            del times[0], sizes[0]

    def growth(self, snapshot: Snapshot) -> Mapping[Key, HoldingGrowth]:
        """Return how each holding of a snapshot has changed.

        Holdings seen for the first time are left out.
        """
        found: dict[Key, HoldingGrowth] = {}
        now = snapshot.time or 0.0
        with self._lock:
            for device in snapshot.devices:
                for holding in device.holdings:
                    key = (device.reading.uuid, holding.pid, holding.start)
                    history = self._holdings.get(key)
                    if history is not None and holding.held is not None and now > history.times[0]:
                        found[key] = HoldingGrowth(holding.held - history.sizes[0], now - history.times[0])
        return found

    def as_json(self) -> dict[str, Json]:
        """Return the timeline as JSON values, one column for each part.

        Null where all samples of a step failed.
        """
        with self._lock:
            newest = self._newest
            devices = {uuid: dict(steps) for uuid, steps in self._devices.items()}
            index = dict(self._index)
        first = min((step for steps in devices.values() for step in steps), default=newest)
        steps = [] if newest is None or first is None else list(range(first, newest + 1))
        return {
            "version": JSON_VERSION,
            "step": STEP,
            "times": [step * STEP for step in steps],
            "devices": [
                {"gpu": index[uuid], "uuid": uuid, "memory": _columns(kept, steps)}
                for uuid, kept in sorted(devices.items(), key=lambda item: index[item[0]])
            ],
        }


def _keep_fullest(steps: dict[int, bytes], step: int, ledger: Ledger) -> None:
    before = steps.get(step)
    if before is not None and _unpacked(before)[0] <= ledger.free:
        return
    values = array("q", (ledger.free, ledger.unattributed, *(ledger.states[state] for state in State)))
    optional = [ledger.driver_reserved, ledger.operating_system]
    while optional and optional[-1] is None:
        optional.pop()
    values.extend(-1 if each is None else each for each in optional)
    steps[step] = values.tobytes()


def _unpacked(values: bytes) -> memoryview[int]:
    return memoryview(values).cast("q")


def _columns(kept: Mapping[int, bytes], steps: list[int]) -> dict[str, Json]:
    rows = [_unpacked(kept[step]) if step in kept else None for step in steps]
    columns: dict[str, Json] = {
        "total": [None if row is None else sum(each for each in row if each > 0) for row in rows]
    }
    for place, part in enumerate(_PARTS):
        columns[part] = [
            None if row is None or place >= len(row) or row[place] < 0 else row[place] for row in rows
        ]
    return columns
