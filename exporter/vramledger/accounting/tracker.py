"""From reading to snapshot: the one place that remembers anything between samples.

What it remembers of processes, agents and owners is kept by processes.py, reported.py and accounts.py for
it. Everything is keyed by identity: a device by UUID, a process by pid and start time. The clock is the
reading's own, so a recording gives the same snapshots whenever it is replayed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from vramledger.accounting import reservations, states
from vramledger.accounting.agent_figures import AgentJoiner
from vramledger.accounting.holding import HoldingState
from vramledger.accounting.ledger import balance
from vramledger.accounting.owner_usage import Key, OwnerUsageAccounts
from vramledger.accounting.policies import MemoryPattern
from vramledger.accounting.processes import Processes, started_at
from vramledger.accounting.reservations import Reservations
from vramledger.accounting.states import StateVerdict
from vramledger.config import OWNERS_MAX
from vramledger.model.reading import (
    FAILURE_REASONS,
    RELEASED,
    DeviceReading,
    HiddenHolder,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    Reading,
)
from vramledger.model.snapshot import (
    DeviceSnapshot,
    Holding,
    Ledger,
    OwnerUsageTotals,
    ProcessSnapshot,
    Snapshot,
    State,
)

PEAK_WINDOW = 60.0
"""Seconds over which ``used_peak`` looks back."""

_LEDGER_QUESTIONS = frozenset({"memory", "processes"})
"""The questions without which there is no book."""

UNNAMED = "GPU-unknown-"
"""How the driver part calls a GPU that has not even told its UUID."""

GAP = 5.0
"""Seconds without a sample after which quiet is no longer known to have lasted."""


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


class HoldingTracker:
    """Turn readings, in order, into snapshots."""

    def __init__(
        self,
        *,
        idle_after: float,
        interval: float = 1.0,
        source: str = "nvml",
        recording: str | None = None,
        owners_max: int = OWNERS_MAX,
    ) -> None:
        """Start with nothing remembered.

        Args:
            idle_after: seconds without a sign of work after which a holding is idle.
            interval: seconds between samples, to know a gap.
            source: ``nvml`` or ``replay``.
            recording: name of the recording that is replayed.
            owners_max: owners of a device with accounts of their own; 0 means all.
        """
        self._idle_after = idle_after
        self._gap = max(GAP, 3 * interval)
        self._blank = Snapshot(source=source, recording=recording, failures=dict.fromkeys(FAILURE_REASONS, 0))
        self._serial = 0
        self._failures = Counter(dict.fromkeys(FAILURE_REASONS, 0))
        self._devices: dict[str, DeviceReading] = {}
        self._accounts: dict[tuple[str, int], HoldingState] = {}
        self._processes = Processes()
        self._owners = OwnerUsageAccounts(owners_max)
        self._reported = AgentJoiner()
        self._peaks: dict[str, _Peak] = {}
        self._xids: dict[str, Counter[int]] = {}
        self._answered: frozenset[str] = frozenset()
        self._last: float | None = None

    def afresh(self) -> HoldingTracker:
        """Return a history that knows nothing but what is counted since the exporter started."""
        fresh = HoldingTracker(
            idle_after=self._idle_after,
            source=self._blank.source,
            recording=self._blank.recording,
            owners_max=self._owners.most,
        )
        fresh._gap = self._gap
        fresh._serial = self._serial
        fresh._failures = self._failures
        fresh._xids = self._xids
        return fresh

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
            if failure[0] != RELEASED:
                self._failures[failure[0]] += 1
            self._owners.miss()
            return replace(
                self._blank,
                serial=self._serial,
                failure=failure,
                released_until=reading.released_until,
                time=reading.time,
                duration=reading.duration,
                host_pid_namespace=reading.host_pid_namespace,
                failures=dict(self._failures),
                collectors=reading.collectors,
                agent_socket=reading.agent_socket,
            )
        rows = {row.pid: row for row in reading.rows}
        self._processes.learn(reading)
        self._hear(reading, rows)
        verdicts = {pid: self._processes.verdict(row, reading) for pid, row in rows.items()}
        gap = self._last is None or reading.monotonic - self._last > self._gap
        self._last = reading.monotonic
        devices = tuple(
            self._device(device, reading, rows, verdicts, gap=gap) for device in self._known(reading)
        )
        if reserved := reservations.of(reading.schedulers, (device.reading for device in devices)):
            devices = tuple(self._reserved(device, reserved) for device in devices)
        self._processes.judge_policies(reading, rows.values(), self._shapes(), self._reported.policy)
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
            rows=rows,
            failures=dict(self._failures),
            collectors=reading.collectors,
            hidden_unreadable=reading.hidden_unreadable,
            agents=self._reported.agents,
            agent_socket=reading.agent_socket,
        )

    def _reserved(self, device: DeviceSnapshot, reserved: Reservations) -> DeviceSnapshot:
        """Add to a device how it stands between its reservations and its holders."""

        def facts_of(holding: Holding) -> ProcessFacts | None:
            known = self._processes.get(holding.pid, holding.start)
            return None if known is None else known.now

        if not device.up:
            return device
        blind = device.blind or device.reading.processes is None
        return replace(
            device,
            reservation_status=reserved.reservation_status(
                device.reading, device.holdings, facts_of, blind=blind
            ),
        )

    def _hear(self, reading: Reading, rows: Mapping[int, ProcessRow]) -> None:
        known = {pid: self._processes.get(pid, row.start) for pid, row in rows.items()}
        facts = {pid: each.now for pid, each in known.items() if each is not None}
        started = {pid: each.shown.start_time for pid, each in known.items() if each is not None}
        self._reported.take(reading, facts, started)

    def _shapes(self) -> dict[int, tuple[MemoryPattern, ...]]:
        """Return the courses of the bytes of each pid, but not of one that only got a dead holder's pid."""
        shapes: dict[int, tuple[MemoryPattern, ...]] = {}
        for (_, pid), account in self._accounts.items():
            if account.shape is not None and account.impostor is None:
                shapes[pid] = (*shapes.get(pid, ()), account.shape)
        return shapes

    def _known(self, reading: Reading) -> Iterator[DeviceReading]:
        """Yield the devices of this reading, then those that were there before and are missing.

        A MIG instance that is gone while its GPU answers was destroyed on purpose and is forgotten.
        """
        devices = [self._recognised(device, reading) for device in reading.devices]
        present = {device.uuid: device for device in devices}
        for uuid, device in list(self._devices.items()):
            parent = present.get(device.parent) if device.parent else None
            if uuid not in present and parent is not None and parent.error is None:
                self._destroyed(uuid)
        self._devices.update({uuid: device for uuid, device in present.items() if device.error is None})
        yield from devices
        for uuid, device in self._devices.items():
            if uuid not in present:
                yield device.without_data("missing")

    def _recognised(self, device: DeviceReading, reading: Reading) -> DeviceReading:
        """Give a GPU that is lost from the start the UUID that it had, by its index, if that is missing."""
        if not device.uuid.startswith(UNNAMED):
            return device
        present = {each.uuid for each in reading.devices}
        for known in self._devices.values():
            if known.index == device.index and known.parent is None and known.uuid not in present:
                return known.without_data(device.error or "lost")
        return device

    def _destroyed(self, uuid: str) -> None:
        del self._devices[uuid]
        self._peaks.pop(uuid, None)
        self._xids.pop(uuid, None)
        for key in [key for key in self._accounts if key[0] == uuid]:
            del self._accounts[key]

    def _device(
        self,
        device: DeviceReading,
        reading: Reading,
        rows: Mapping[int, ProcessRow],
        verdicts: Mapping[int, StateVerdict | None],
        *,
        gap: bool,
    ) -> DeviceSnapshot:
        xids = dict(self._xids.get(device.uuid, {}))
        device = _whole(device)
        if device.error is not None:
            self._owners.silent(device.uuid)
            return DeviceSnapshot(device, up=False, xids=xids)
        watched = not gap and device.uuid in self._answered
        samples = {sample.pid: sample for sample in device.process_utilization or ()}
        clock = (reading.monotonic, reading.time)
        holdings: list[Holding] = []
        for entry in device.processes or ():
            row = rows.get(entry.pid)
            account = self._account(device.uuid, entry, row, reading, watched=watched)
            allocated = self._reported.worked(device.uuid, entry.pid)
            account.note(entry, samples.get(entry.pid), device, clock, longest=self._gap, allocated=allocated)
            verdict = self._verdict(account, entry, rows, verdicts, reading)
            started = None if account.start is None else started_at(reading, account.start)
            account.judge(verdict, reading.time, started)
            holdings.append(account.holding(entry, verdict))
        holdings.sort(key=lambda holding: (-(holding.memory or 0), holding.pid))
        ledger = used_peak = None
        blind = reading.host_pid_namespace is False
        if device.memory is not None and device.processes is not None:
            ledger = balance(
                device.memory, ((each.state, each.memory or 0) for each in holdings), blind=blind
            )
        if ledger is not None:
            used_peak = self._peaks.setdefault(device.uuid, _Peak()).note(reading.monotonic, ledger.used)
        return DeviceSnapshot(
            device,
            up=True,
            blind=blind,
            ledger=ledger,
            used_peak=used_peak,
            holdings=tuple(holdings),
            hidden=hidden_on(device, reading.hidden) if reading.host_pid_namespace else None,
            xids=xids,
            owners=self._charge(device, holdings, ledger, reading.monotonic),
        )

    def _charge(
        self, device: DeviceReading, holdings: list[Holding], ledger: Ledger | None, now: float
    ) -> OwnerUsageTotals | None:
        """Enter a device's holdings into its owners' accounts."""
        if device.divided:
            return None
        if device.processes is None:
            self._owners.silent(device.uuid)
            return None
        owners: dict[int, Key | None] = {}
        for holding in holdings:
            known = self._processes.get(holding.pid, holding.start)
            owners[holding.pid] = None if known is None else known.owner
        return self._owners.note(device.uuid, holdings, owners, ledger, now, self._gap)

    def _account(
        self,
        uuid: str,
        entry: ProcessEntry,
        row: ProcessRow | None,
        reading: Reading,
        *,
        watched: bool,
    ) -> HoldingState:
        """Find the account of a holding, or open one.

        When the pid now names another process while the bytes stayed as they were, the bytes are the
        old process's: a process that starts with exactly what its predecessor held is not to be
        expected, a pid that was given out again over a driver's leak is. ``watched``: the device was
        read in the sample before.
        """
        key = (uuid, entry.pid)
        account = self._accounts.get(key)
        start = row.start if row is not None else None
        if account is not None and start is not None and start != account.start:
            begun = started_at(reading, start)
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
            account = HoldingState(
                entry.pid,
                start,
                seen=reading.time,
                updated=reading.time,
                watched=reading.monotonic,
                quiet_since=clock,
                from_start=watched,
            )
            self._accounts[key] = account
        return account

    def _verdict(
        self,
        account: HoldingState,
        entry: ProcessEntry,
        rows: Mapping[int, ProcessRow],
        verdicts: Mapping[int, StateVerdict | None],
        reading: Reading,
    ) -> StateVerdict:
        if account.impostor is not None and entry.pid in rows:
            return StateVerdict(
                State.DEAD, "its process has ended, and the pid now belongs to another program"
            )
        if entry.pid not in rows:
            presence = reading.unseen.get(entry.pid)
            return states.classify_unseen(presence, host_pid_namespace=reading.host_pid_namespace)
        verdict = verdicts[entry.pid]
        if verdict is not None:
            return verdict
        quiet = reading.monotonic - account.quiet_since[0]
        worked = account.last_active is not None
        return states.classify_work(quiet, self._idle_after, worked=worked, evidence=account.evidence)

    def _holders(self, reading: Reading, rows: Mapping[int, ProcessRow]) -> dict[int, ProcessSnapshot]:
        """Return the holders by pid, the dead as well, but no program that only got a dead holder's pid."""
        holders: dict[int, ProcessSnapshot] = {}
        innocent = {pid for (_, pid), account in self._accounts.items() if account.impostor is not None}
        for row in rows.values():
            if row.pid in innocent:
                continue
            known = self._processes.get(row.pid, row.start)
            holders[row.pid] = (
                known.shown
                if known is not None
                else ProcessSnapshot(row.pid, started_at(reading, row.start), None)
            )
        # Whose the bytes of the dead were is what everybody wants to know: what was seen of them stays.
        listed = {entry.pid for device in reading.devices for entry in device.processes or ()}
        for (_, pid), account in self._accounts.items():
            known = self._processes.get(pid, account.start)
            if known is not None and pid in listed - holders.keys():
                holders[pid] = known.shown
        return holders

    def _forget(self, reading: Reading, rows: Mapping[int, ProcessRow]) -> None:
        """Drop what no longer exists, but nothing of a device that did not answer this time."""
        self._owners.forget(self._devices)
        answered = {device.uuid for device in reading.devices if device.processes is not None}
        self._answered = frozenset(answered)
        listed = {(device.uuid, entry.pid) for device in reading.devices for entry in device.processes or ()}
        for key in [key for key in self._accounts if key not in listed and key[0] in answered]:
            del self._accounts[key]
        self._processes.forget(rows.values(), {pid for _, pid in self._accounts})


def _whole(device: DeviceReading) -> DeviceReading:
    """Return a device as read; with an error when a question that its book needs has failed."""
    if device.error is None and not _LEDGER_QUESTIONS.isdisjoint(device.failed):
        return device.without_data("failed")
    return device


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


def hidden_on(
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
