"""Keep the last 15 minutes: each device's ledger in steps of five seconds, and each holding's growth.

The memory is bounded: 181 packed steps of at most twelve integers for each device, 16 sizes for each holding.
Of the samples in one step we keep the whole sample with the most memory in use, so that every step balances
and shows short peaks. A step without a successful sample is empty.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from vramledger.model.public_ledger import HISTORY_PARTS, DeviceHistory, History, HistoryMemory
from vramledger.model.records import JSON_VERSION
from vramledger.model.snapshot import Ledger, Snapshot, State

SPAN = 900.0
"""Seconds that are remembered."""

STEP = 5.0
"""Seconds of one step: the span has 180 steps, as many as a small chart has pixels."""

_SIZE_INTERVAL = 60.0
"""Seconds from one remembered size of a holding to the next."""

Key = tuple[str, int, int | None]
"""A holding: UUID, pid, start ticks."""


class HoldingGrowth(NamedTuple):
    """The change of a holding's size: bytes (negative when it shrank) over at most 900 seconds."""

    bytes: int
    seconds: float


class SizeHistory(msgspec.Struct):
    """A holding's sizes, a minute apart: ``times`` and the newest ``seen`` in Unix seconds, bytes."""

    seen: float
    times: list[float] = []
    sizes: list[int] = []


class TimelineState(msgspec.Struct):
    """What is remembered of the last 15 minutes."""

    newest: int | None = None  # the number of the newest step, since 1970; None before the first
    devices: dict[str, dict[int, bytes]] = {}  # the packed parts of each step, by UUID and number of the step
    index: dict[str, int] = {}  # the NVML index of each device
    holdings: dict[str, SizeHistory] = {}  # the sizes of each holding, by :func:`_key_text`


class Timeline:
    """The samples of the last 15 minutes; one thread records while others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.state = TimelineState()

    def remembered(self) -> object:
        """Return all that is remembered as JSON values, which go on as they are."""
        with self._lock:
            return msgspec.to_builtins(self.state, str_keys=True)

    def recall(self, state: TimelineState) -> None:
        """Go on from what a timeline has remembered."""
        with self._lock:
            self.state = state

    def record(self, snapshot: Snapshot) -> None:
        """Record one sample; a failed one leaves a gap, and a clock that was set back removes everything."""
        if snapshot.time is None:
            return
        step = int(snapshot.time // STEP)
        with self._lock:
            if self.state.newest is not None and step < self.state.newest:
                self.state = TimelineState()
            new_step, self.state.newest = step != self.state.newest, step
            for device in snapshot.devices:
                uuid = device.reading.uuid
                if device.ledger is not None:
                    self.state.index[uuid] = device.reading.index
                    _keep_fullest(self.state.devices.setdefault(uuid, {}), step, device.ledger)
                for holding in device.holdings:
                    if holding.held is not None:
                        key = _key_text(uuid, holding.pid, holding.start)
                        self._record_size(key, snapshot.time, holding.held)
            if new_step:
                self._drop_older(step - int(SPAN / STEP), snapshot.time)

    def _drop_older(self, oldest: int, now: float) -> None:
        state = self.state
        for uuid, steps in list(state.devices.items()):
            for step in [each for each in steps if each < oldest]:
                del steps[step]
            if not steps:
                del state.devices[uuid], state.index[uuid]
        for key, history in list(state.holdings.items()):
            if now - history.seen > _SIZE_INTERVAL:
                del state.holdings[key]

    def _record_size(self, key: str, now: float, size: int) -> None:
        history = self.state.holdings.get(key)
        if history is None:
            history = self.state.holdings[key] = SizeHistory(now)
        history.seen = now
        times, sizes = history.times, history.sizes
        if not times or now - times[-1] >= _SIZE_INTERVAL:
            times.append(now)
            sizes.append(size)
        while now - times[0] > SPAN and len(times) > 1:
            del times[0], sizes[0]

    def growth(self, snapshot: Snapshot) -> Mapping[Key, HoldingGrowth]:
        """Return how each holding has changed; those seen for the first time are left out."""
        found: dict[Key, HoldingGrowth] = {}
        now = snapshot.time or 0.0
        with self._lock:
            for device in snapshot.devices:
                for holding in device.holdings:
                    key = (device.reading.uuid, holding.pid, holding.start)
                    history = self.state.holdings.get(_key_text(*key))
                    if history is not None and holding.held is not None and now > history.times[0]:
                        found[key] = HoldingGrowth(holding.held - history.sizes[0], now - history.times[0])
        return found

    def history(self) -> History:
        """Return the timeline in columns, one for each part; None where all samples of a step failed."""
        with self._lock:
            newest = self.state.newest
            devices = {uuid: dict(steps) for uuid, steps in self.state.devices.items()}
            index = dict(self.state.index)
        first = min((step for steps in devices.values() for step in steps), default=newest)
        steps = [] if newest is None or first is None else list(range(first, newest + 1))
        return History(
            JSON_VERSION,
            STEP,
            [step * STEP for step in steps],
            [
                DeviceHistory(index[uuid], uuid, _columns(kept, steps))
                for uuid, kept in sorted(devices.items(), key=lambda item: index[item[0]])
            ],
        )


def _key_text(uuid: str, pid: int, start: int | None) -> str:
    return f"{uuid} {pid} {start}"


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


def _columns(kept: Mapping[int, bytes], steps: list[int]) -> object:
    rows = [_unpacked(kept[step]) if step in kept else None for step in steps]
    columns = {"total": [None if row is None else sum(each for each in row if each > 0) for row in rows]}
    for place, part in enumerate(HISTORY_PARTS[1:]):
        columns[part] = [
            None if row is None or place >= len(row) or row[place] < 0 else row[place] for row in rows
        ]
    return HistoryMemory(**columns)
