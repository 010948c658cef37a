"""Keep the known holdings, by device and pid; match what NVML lists now with what it listed before."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from vramledger.accounting.holding import HoldingState
from vramledger.accounting.pid_reuse import PidUse, pid_use
from vramledger.accounting.policies import MemoryPattern
from vramledger.accounting.sample import DeviceSample
from vramledger.model.reading import DeviceReading, ProcessEntry, ProcessRow


class HoldingTable:
    """Keep the state of each holding, from its first sample to its last."""

    def __init__(self) -> None:
        """Start without holdings."""
        self._states: dict[tuple[str, int], HoldingState] = {}
        self._answered: frozenset[str] = frozenset()
        self._ever_answered: set[str] = set()

    def __iter__(self) -> Iterator[HoldingState]:
        """Yield the state of every holding."""
        return iter(self._states.values())

    def match(self, entry: ProcessEntry, on_device: DeviceSample) -> HoldingState:
        """Return the state of the holding that NVML lists; make a new one for a new holding."""
        sample = on_device.sample
        key = (on_device.device.uuid, entry.pid)
        row = sample.rows.get(entry.pid)
        state = self._states.get(key)
        if state is None:
            return self._add(key, row, on_device)
        if row is None:
            return state
        if row.start == state.start:
            state.pid_successor = None
            return state
        use = pid_use(state, entry, row, sample)
        if use is PidUse.NEW_HOLDER:
            return self._add(key, row, on_device)
        if use is PidUse.SUCCESSOR:
            state.pid_successor = row.start
        else:
            state.start = row.start
        return state

    def _add(self, key: tuple[str, int], row: ProcessRow | None, on_device: DeviceSample) -> HoldingState:
        sample = on_device.sample
        # We know that the holding is new only where the sample before read the device.
        watched = not sample.after_gap and key[0] in self._answered
        state = self._states[key] = HoldingState(
            key[1],
            None if row is None else row.start,
            seen=sample.time,
            updated=sample.time,
            watched=sample.monotonic,
            quiet_since=sample.clock,
            workless_since=sample.clock,
            nothing_seconds=on_device.work.nothing_seconds,
            from_start=watched,
        )
        return state

    def patterns(self) -> dict[int, tuple[MemoryPattern, ...]]:
        """Return the memory patterns of each pid, except of a pid that was reused."""
        patterns: dict[int, tuple[MemoryPattern, ...]] = {}
        for (_, pid), state in self._states.items():
            if state.pattern is not None and state.pid_successor is None and not state.bystander:
                patterns[pid] = (*patterns.get(pid, ()), state.pattern)
        return patterns

    def reused_pids(self) -> set[int]:
        """Return the pids that now belong to another process than the one that owns the listed bytes."""
        return {state.pid for state in self if state.pid_successor is not None or state.bystander}

    def pids(self) -> set[int]:
        """Return the pids of all holdings."""
        return {pid for _, pid in self._states}

    def newest_holders(self, uuids: Collection[str]) -> frozenset[tuple[int, int | None]] | None:
        """Return who was in the newest lists of some devices, by pid and start.

        None if one of them has never given a list.
        """
        if not self._ever_answered.issuperset(uuids):
            return None
        return frozenset(
            (state.pid, state.start) for (uuid, _), state in self._states.items() if uuid in uuids
        )

    def drop_device(self, uuid: str) -> None:
        """Drop the holdings of a device that no longer exists."""
        self._ever_answered.discard(uuid)
        for key in [key for key in self._states if key[0] == uuid]:
            del self._states[key]

    def drop_unlisted(self, devices: Collection[DeviceReading]) -> None:
        """Drop what is no longer listed, but keep the holdings of a device that did not answer this time."""
        listed = {(device.uuid, entry.pid) for device in devices for entry in device.processes or ()}
        self._answered = frozenset(device.uuid for device in devices if device.processes is not None)
        # The holders of a divided GPU are in the lists of its instances.
        self._ever_answered.update(self._answered, (device.uuid for device in devices if device.divided))
        for key in [key for key in self._states if key not in listed and key[0] in self._answered]:
            del self._states[key]
