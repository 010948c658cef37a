"""Keep the known holdings, by device and pid; match what NVML lists now with what it listed before.

A process is (pid, start time), and NVML knows only the pid. A driver that leaks memory goes on listing the
pid of a process that has ended, and the kernel may give this pid to a program that holds nothing at all. We
know that in two ways: we saw the holder before, or the program does not use a GPU.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from itertools import chain

import msgspec

from vramledger.accounting.holders.holding import HoldingState
from vramledger.accounting.holders.policies import MemoryPattern
from vramledger.accounting.sample import DeviceSample, Sample
from vramledger.model.reading import DeviceReading, ProcessEntry, ProcessRow
from vramledger.model.snapshot import State

CLOCK_SLACK = 1.0
"""Seconds by which a start time, in ticks since a boot time of whole seconds, may seem too early."""


class PidUse(enum.Enum):
    """Which process has the pid of a known holding now, when the start time differs from the one before."""

    HOLDER = "its holder, which /proc did not show so far"
    SUCCESSOR = "another process, while the bytes still belong to the holder"
    NEW_HOLDER = "another process, with bytes of its own"


def pid_use(state: HoldingState, entry: ProcessEntry, row: ProcessRow, sample: Sample) -> PidUse:
    """Tell which process has the pid of a holding whose start time differs from that of the row.

    If the pid now names another process and the bytes are unchanged, they belong to the first process. A
    process that starts with exactly what its predecessor held is unlikely; a pid that is reused while the
    driver leaks its bytes is not.
    """
    started = sample.started_at(row.start)
    if state.start is None and not (state.state is State.DEAD and started > state.updated):
        return PidUse.HOLDER
    same_bytes = entry.memory is not None and entry.memory == state.memory
    if same_bytes and (row.start == state.pid_successor or started > state.updated - CLOCK_SLACK):
        return PidUse.SUCCESSOR
    return PidUse.NEW_HOLDER


def has_other_program(program: int, row: ProcessRow) -> bool:
    """Tell whether a process certainly has executed another program than the one that was known."""
    return 0 not in (program, row.program) and row.program != program


class HoldingTableState(msgspec.Struct):
    known: dict[str, dict[int, HoldingState]] = {}  # the state of each, by UUID and pid
    answered: frozenset[str] = frozenset()  # the devices that gave a list of processes in the newest sample
    ever_answered: set[str] = set()  # those that ever gave one, a divided GPU included


class HoldingTable:
    def __init__(self, state: HoldingTableState) -> None:
        self.state = state

    def __iter__(self) -> Iterator[HoldingState]:
        return chain.from_iterable(map(dict.values, self.state.known.values()))

    def match(self, entry: ProcessEntry, on_device: DeviceSample, *, uses_gpu: bool | None) -> HoldingState:
        """Return the state of the holding that NVML lists; make a new one for a new holding.

        ``uses_gpu`` is of the process that has the pid now. One that does has the bytes, although they are as
        many as before: a program that is started again takes as many.
        """
        sample = on_device.sample
        row = sample.rows.get(entry.pid)
        state = self.state.known.get(on_device.device.uuid, _NOTHING).get(entry.pid)
        if state is None:
            return self._add(entry.pid, row, on_device)
        if row is None:
            return state
        if row.start == state.start:
            state.pid_successor = None
            # The kernel frees what a process holds when it executes another program; bytes that did not
            # change are still those of the old one.
            if has_other_program(state.program, row) and entry.memory != state.memory:
                return self._add(entry.pid, row, on_device)
            state.program = state.program or row.program
            return state
        use = pid_use(state, entry, row, sample)
        if use is PidUse.NEW_HOLDER or (use is PidUse.SUCCESSOR and uses_gpu):
            return self._add(entry.pid, row, on_device)
        if use is PidUse.SUCCESSOR:
            state.pid_successor = row.start
        else:
            state.start = row.start
        return state

    def _add(self, pid: int, row: ProcessRow | None, on_device: DeviceSample) -> HoldingState:
        sample, uuid = on_device.sample, on_device.device.uuid
        # We know that the holding is new only where the sample before read the device.
        watched = not sample.after_gap and uuid in self.state.answered
        state = self.state.known.setdefault(uuid, {})[pid] = HoldingState(
            pid,
            None if row is None else row.start,
            seen=sample.time,
            updated=sample.time,
            watched=sample.monotonic,
            quiet_since=sample.clock,
            workless_since=sample.clock,
            nothing_seconds=on_device.work.nothing_seconds,
            from_start=watched,
            program=0 if row is None else row.program,
        )
        return state

    def patterns(self) -> dict[int, tuple[MemoryPattern, ...]]:
        """Return the memory patterns of each pid, except of a pid that was reused."""
        patterns: dict[int, tuple[MemoryPattern, ...]] = {}
        for state in self:
            if state.pattern is not None and state.pid_successor is None and not state.bystander:
                patterns[state.pid] = (*patterns.get(state.pid, ()), state.pattern)
        return patterns

    def reused_pids(self) -> set[int]:
        """Return the pids that now belong to another process than the one that owns the listed bytes."""
        return {state.pid for state in self if state.pid_successor is not None or state.bystander}

    def pids(self) -> set[int]:
        return set(chain.from_iterable(self.state.known.values()))

    def newest_holders(self, uuids: Collection[str]) -> frozenset[tuple[int, int | None]] | None:
        """Return who was in the newest lists of devices, by pid and start; None if one never gave a list."""
        if not self.state.ever_answered.issuperset(uuids):
            return None
        return frozenset(
            (state.pid, state.start)
            for uuid in uuids
            for state in self.state.known.get(uuid, _NOTHING).values()
        )

    def drop_device(self, uuid: str) -> None:
        self.state.ever_answered.discard(uuid)
        self.state.known.pop(uuid, None)

    def drop_unlisted(self, devices: Collection[DeviceReading]) -> None:
        """Drop what is no longer listed, but keep the holdings of a device that did not answer this time."""
        listed: dict[str, set[int]] = {}
        for device in devices:
            if device.processes is not None:
                pids = listed.setdefault(device.uuid, set())
                pids.update(entry.pid for entry in device.processes)
        self.state.answered = frozenset(listed)
        # The holders of a divided GPU are in the lists of its instances.
        self.state.ever_answered.update(listed, (device.uuid for device in devices if device.divided))
        for uuid, pids in listed.items():
            known = self.state.known.get(uuid, _NOTHING)
            for pid in known.keys() - pids:
                del known[pid]
            if not known:
                self.state.known.pop(uuid, None)


_NOTHING: dict[int, HoldingState] = {}
