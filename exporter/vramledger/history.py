"""From reading to snapshot: the one place that remembers anything between samples.

Everything is keyed by identity: a device by UUID, a process by pid and start time. The clock is the
reading's own, so a recording gives the same snapshots whenever it is replayed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from vramledger import states
from vramledger.holdings import Account
from vramledger.ledger import balance
from vramledger.readings import (
    FAILURE_REASONS,
    DeviceReading,
    HiddenHolder,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    Reading,
)
from vramledger.snapshot import DeviceSnapshot, Holding, ProcessSnapshot, Snapshot, State
from vramledger.states import Verdict

PEAK_WINDOW = 60.0
"""Seconds over which ``used_peak`` looks back."""

GAP = 5.0
"""Seconds without a sample after which quiet is no longer known to have lasted."""


@dataclass(slots=True)
class _Process:
    """A process that NVML lists: its first facts (with the parent of that moment) and its newest."""

    first: ProcessFacts
    now: ProcessFacts
    shown: ProcessSnapshot
    judged: tuple[int, int, int] | None = None
    orphaned: str | None = None


@dataclass(slots=True)
class _Peak:
    """A sliding maximum: a deque whose values fall, so that the first is the highest."""

    values: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, now: float, value: int) -> int:
        while self.values and self.values[-1][1] <= value:
            self.values.pop()
        self.values.append((now, value))
        while self.values[0][0] < now - PEAK_WINDOW:
            self.values.popleft()
        return self.values[0][1]


class History:
    """Turn readings, in order, into snapshots."""

    def __init__(
        self, *, idle_after: float, interval: float = 1.0, source: str = "nvml", recording: str | None = None
    ) -> None:
        """Start with nothing remembered.

        Args:
            idle_after: seconds without a sign of work after which a holding is idle.
            interval: seconds between samples, to know a gap.
            source: ``nvml`` or ``replay``.
            recording: name of the recording that is replayed.
        """
        self._idle_after = idle_after
        self._gap = max(GAP, 3 * interval)
        self._blank = Snapshot(source=source, recording=recording, failures=dict.fromkeys(FAILURE_REASONS, 0))
        self._serial = 0
        self._failures = Counter(dict.fromkeys(FAILURE_REASONS, 0))
        self._devices: dict[str, DeviceReading] = {}
        self._accounts: dict[tuple[str, int], Account] = {}
        self._processes: dict[tuple[int, int], _Process] = {}
        self._peaks: dict[str, _Peak] = {}
        self._xids: dict[str, Counter[int]] = {}
        self._last: float | None = None

    @property
    def blank(self) -> Snapshot:
        """The snapshot before the first sample: nothing is known, nothing has failed."""
        return self._blank

    def advance(self, reading: Reading) -> Snapshot:
        """Take in one reading and return what it publishes."""
        self._serial += 1
        for event in reading.events:
            self._xids.setdefault(event.uuid, Counter())[event.xid] += 1
        failure = reading.failure or _all_failed(reading)
        if failure is not None:
            self._failures[failure[0]] += 1
            return replace(
                self._blank,
                serial=self._serial,
                failure=failure,
                time=reading.time,
                duration=reading.duration,
                host_pid_namespace=reading.host_pid_namespace,
                failures=dict(self._failures),
                collectors=reading.collectors,
            )
        gap = self._last is None or reading.monotonic - self._last > self._gap
        self._last = reading.monotonic
        rows = {row.pid: row for row in reading.rows}
        self._learn(reading)
        verdicts = {pid: self._of_process(row, reading) for pid, row in rows.items()}
        devices = tuple(
            self._device(device, reading, rows, verdicts, gap=gap) for device in self._known(reading)
        )
        self._forget(reading, rows)
        return replace(
            self._blank,
            serial=self._serial,
            up=True,
            time=reading.time,
            duration=reading.duration,
            host_pid_namespace=reading.host_pid_namespace,
            driver_version=reading.driver_version,
            cuda_version=reading.cuda_version,
            devices=devices,
            processes=self._holders(reading, rows),
            failures=dict(self._failures),
            collectors=reading.collectors,
        )

    def _learn(self, reading: Reading) -> None:
        for facts in reading.facts:
            identity = (facts.pid, facts.start)
            shown = ProcessSnapshot(facts.pid, _started(reading, facts.start), facts)
            known = self._processes.get(identity)
            first = known.first if known is not None else facts
            self._processes[identity] = _Process(first, facts, shown)

    def _of_process(self, row: ProcessRow, reading: Reading) -> Verdict | None:
        known = self._processes.get((row.pid, row.start))
        if known is None:
            return states.of_process(row, reading.ended.get(row.pid))
        relations = (row.ppid, row.pgrp, row.session)
        if known.judged != relations:  # the evidence changes only with these, or with new facts
            known.judged = relations
            known.orphaned = states.orphan_evidence(
                row, known.first, known.now, host_pid_namespace=reading.host_pid_namespace
            )
        return states.of_process(row, reading.ended.get(row.pid) or known.orphaned)

    def _known(self, reading: Reading) -> Iterator[DeviceReading]:
        """Yield the devices of this reading, then those that were there before and are missing.

        A MIG instance that is gone while its GPU answers was destroyed on purpose and is forgotten.
        """
        present = {device.uuid: device for device in reading.devices}
        for uuid, device in list(self._devices.items()):
            parent = present.get(device.parent) if device.parent else None
            if uuid not in present and parent is not None and parent.error is None:
                del self._devices[uuid]
        self._devices.update({uuid: device for uuid, device in present.items() if device.error is None})
        yield from reading.devices
        for uuid, device in self._devices.items():
            if uuid not in present:
                yield replace(device, error="missing")

    def _device(
        self,
        device: DeviceReading,
        reading: Reading,
        rows: Mapping[int, ProcessRow],
        verdicts: Mapping[int, Verdict | None],
        *,
        gap: bool,
    ) -> DeviceSnapshot:
        xids = dict(self._xids.get(device.uuid, {}))
        if device.error is not None:
            return DeviceSnapshot(device, up=False, xids=xids)
        samples = {sample.pid: sample for sample in device.process_utilization or ()}
        clock = (reading.monotonic, reading.time)
        holdings: list[Holding] = []
        for entry in device.processes or ():
            account = self._account(device.uuid, entry, rows.get(entry.pid), reading)
            account.note(entry, samples.get(entry.pid), device, clock, gap=gap)
            verdict = self._verdict(account, entry, rows, verdicts, reading)
            started = None if account.start is None else _started(reading, account.start)
            account.judge(verdict, reading.time, started)
            holdings.append(account.holding(entry, verdict, reading.time))
        holdings.sort(key=lambda holding: (-(holding.memory or 0), holding.pid))
        book = used_peak = None
        blind = reading.host_pid_namespace is False
        if device.memory is not None and device.processes is not None:
            book = balance(
                device.memory, ((each.state, each.memory or 0) for each in holdings), blind=blind
            )
        if book is not None:
            used_peak = self._peaks.setdefault(device.uuid, _Peak()).note(reading.monotonic, book.used)
        return DeviceSnapshot(
            device,
            up=True,
            blind=blind,
            book=book,
            used_peak=used_peak,
            holdings=tuple(holdings),
            hidden=_hidden_on(device, reading.hidden) if reading.host_pid_namespace else None,
            xids=xids,
        )

    def _account(self, uuid: str, entry: ProcessEntry, row: ProcessRow | None, reading: Reading) -> Account:
        """Find the account of a holding, or open one.

        When the pid now names another process while the bytes stayed as they were, the bytes are the
        old process's: a process that starts with exactly what its predecessor held is not to be
        expected, a pid that was given out again over a driver's leak is.
        """
        key = (uuid, entry.pid)
        account = self._accounts.get(key)
        start = row.start if row is not None else None
        if account is not None and start is not None and start != account.start:
            begun = _started(reading, start)
            if account.start is None and not (account.state is State.DEAD and begun > account.updated):
                account.start = start
            elif (
                entry.memory is not None
                and entry.memory == account.memory
                and (start == account.impostor or begun > account.updated - 1)
            ):
                account.impostor = start
            else:
                account = None
        elif account is not None and start is not None:
            account.impostor = None
        if account is None:
            clock = (reading.monotonic, reading.time)
            account = Account(entry.pid, start, seen=reading.time, updated=reading.time, quiet_since=clock)
            self._accounts[key] = account
        return account

    def _verdict(
        self,
        account: Account,
        entry: ProcessEntry,
        rows: Mapping[int, ProcessRow],
        verdicts: Mapping[int, Verdict | None],
        reading: Reading,
    ) -> Verdict:
        if account.impostor is not None and entry.pid in rows:
            return Verdict(State.DEAD, "its process has ended, and the pid now belongs to another program")
        if entry.pid not in rows:
            presence = reading.unseen.get(entry.pid)
            return states.without_row(presence, host_pid_namespace=reading.host_pid_namespace)
        verdict = verdicts[entry.pid]
        if verdict is not None:
            return verdict
        quiet = reading.monotonic - account.quiet_since[0]
        worked = account.last_active is not None
        return states.of_work(quiet, self._idle_after, worked=worked, evidence=account.evidence)

    def _holders(self, reading: Reading, rows: Mapping[int, ProcessRow]) -> dict[int, ProcessSnapshot]:
        """Return the holders by pid, but no program that only got a dead holder's pid: it holds nothing."""
        holders: dict[int, ProcessSnapshot] = {}
        innocent = {pid for (_, pid), account in self._accounts.items() if account.impostor is not None}
        for row in rows.values():
            if row.pid in innocent:
                continue
            known = self._processes.get((row.pid, row.start))
            holders[row.pid] = (
                known.shown
                if known is not None
                else ProcessSnapshot(row.pid, _started(reading, row.start), None)
            )
        return holders

    def _forget(self, reading: Reading, rows: Mapping[int, ProcessRow]) -> None:
        """Drop what no longer exists, but nothing of a device that did not answer this time."""
        answered = {device.uuid for device in reading.devices if device.processes is not None}
        booked = [device for device in self._devices.values() if not device.divided]
        listed = {(device.uuid, entry.pid) for device in reading.devices for entry in device.processes or ()}
        for key in [key for key in self._accounts if key not in listed and key[0] in answered]:
            del self._accounts[key]
        if len(answered) == len(booked):
            alive = {(row.pid, row.start) for row in rows.values()}
            for identity in [identity for identity in self._processes if identity not in alive]:
                del self._processes[identity]


def _started(reading: Reading, start: int) -> float:
    return reading.boot_time + start / reading.ticks


def _all_failed(reading: Reading) -> tuple[str, str] | None:
    """Say that no device answered, which leaves nothing to publish."""
    errors = {device.error for device in reading.devices}
    if None in errors:
        return None
    if not errors:
        return "no-devices", "the driver shows no GPU"
    if errors == {"timeout"}:
        return "timeout", "no GPU answered in time"
    return "driver-lost", f"no GPU answered ({', '.join(sorted(str(error) for error in errors))})"


def _hidden_on(
    device: DeviceReading, hidden: tuple[HiddenHolder, ...] | None
) -> tuple[HiddenHolder, ...] | None:
    """Return who has this device's file open and might hold memory of its own.

    An instance has no file of its own to look for.
    """
    if hidden is None or device.minor is None or device.parent is not None:
        return None
    return tuple(
        holder
        for holder in hidden
        if device.minor in holder.minors and holder.kind not in ("monitor", "inherited")
    )
