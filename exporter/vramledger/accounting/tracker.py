"""Turn a reading into a snapshot, step by step; this module keeps what is remembered between samples.

Each step has a module of its own: devices (which devices exist), processes (facts), agent_figures (what
agents report), matching (which holding is which), states (why each exists), ledger (the balance),
uncharged (who has what NVML charges to nobody), owner_usage (who is charged), reservations (what schedulers
have granted). Everything is keyed by identity: a device by UUID, a process by pid and start time. The clock
is the reading's own, so a recording gives the same snapshots whenever it is replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from vramledger.accounting.agent_figures import AgentJoiner
from vramledger.accounting.devices import (
    DeviceTracker,
    failure_of_all,
    hidden_on,
    memory_sharers,
    without_partial_ledger,
)
from vramledger.accounting.holders import states
from vramledger.accounting.holders.holding import HoldingState, classify
from vramledger.accounting.holders.matching import HoldingTable
from vramledger.accounting.holders.processes import ProcessTracker
from vramledger.accounting.ledger import balance_device
from vramledger.accounting.owners import reservations
from vramledger.accounting.owners.failed_allocations import OomCounter
from vramledger.accounting.owners.owner_usage import UsageTracker
from vramledger.accounting.owners.reservations import PlacedHolding, owner_limits
from vramledger.accounting.remembered import Remembered, follow_clock
from vramledger.accounting.sample import DeviceSample, Sample, forget_ended
from vramledger.accounting.uncharged.tracker import PoolResult, UnchargedTracker
from vramledger.accounting.work.busy_without_work import busy_without_work, ghost_since, who_keeps_busy
from vramledger.accounting.work.device_work import DeviceWorkTracker
from vramledger.accounting.work.thread_times import ThreadTimesTracker
from vramledger.config import OWNERS_MAX
from vramledger.logs import COLLECTOR_FAILED, FailureStreaks
from vramledger.model.holder_facts import HOLDER_FACTS, HolderFact
from vramledger.model.reading import (
    FAILURE_REASONS,
    RELEASED,
    DeviceReading,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    Reading,
)
from vramledger.model.snapshot import DeviceSnapshot, Holding, Snapshot
from vramledger.readers.owners.cgroups import unified_path

GAP = 5.0
"""Seconds without a sample after which we no longer know that the quiet has lasted."""

TOLD_AFTER = 5.0
"""Seconds for which a state must last that a program goes through when it ends normally, before the exporter
tells it: no report, counter, timeline or alert has an end as a leftover. Of ninety programs of a test suite
on an H100 four were zombies in a sample."""

BRIDGED = 180.0
"""Seconds that a restart may take. A holder that was quiet before, and whose bytes and rows show no
work at the first sample afterwards, still counts as quiet, by inference: no counter proves it any more. The
rules of alerts bridge the same time."""


class HoldingTracker:
    """Turn readings, in order, into snapshots."""

    def __init__(  # noqa: PLR0913 what an exporter may be told
        self,
        *,
        idle_after: float,
        interval: float = 1.0,
        source: str = "nvml",
        recording: str | None = None,
        owners_max: int = OWNERS_MAX,
        told_after: float = 0.0,
    ) -> None:
        """Start with nothing remembered.

        ``owners_max``: the number of owners of a device that get an entry of their own; 0 means all.
        ``told_after``: see :data:`TOLD_AFTER`; who looks only once tells at once.
        """
        self._told_after = told_after
        self._idle_after = idle_after
        self._interval = interval
        self._longest_gap = max(GAP, 3 * interval)
        self.owners_max = owners_max
        # before the first sample: nothing is known, nothing has failed
        self.blank = Snapshot(source=source, recording=recording, failures=dict.fromkeys(FAILURE_REASONS, 0))
        self._restarted = False
        self._go_on(Remembered(failures=dict.fromkeys(FAILURE_REASONS, 0)))

    def _go_on(self, state: Remembered) -> None:
        self.state = state
        self._devices = DeviceTracker(state.devices)
        self._ooms = OomCounter(self.owners_max, state.ooms)
        self._holdings = HoldingTable(state.holdings)
        self._processes = ProcessTracker(state.processes)
        self._owners = UsageTracker(self.owners_max, state.owners)
        self._agents = AgentJoiner(state.agents)
        self._work = DeviceWorkTracker(self._idle_after, state.work)
        self._threads = ThreadTimesTracker(state.threads)
        self._uncharged = UnchargedTracker(state.uncharged, self._holdings, self._processes, self._agents)

    def reset(self) -> None:
        """Forget all but what is counted since the exporter started; the next reading is a new start."""
        self._go_on(self.state.since_start())

    def fresh(self) -> HoldingTracker:
        return HoldingTracker(
            idle_after=self._idle_after,
            interval=self._interval,
            owners_max=self.owners_max,
            told_after=self._told_after,
        )

    def known_facts(self) -> tuple[ProcessFacts, ...]:
        """Return the first and the newest facts of every process, as a new sampler sends them."""
        return self._processes.known_facts()

    def recall(self, state: Remembered) -> None:
        """Go on from what a tracker of the same host and boot has remembered.

        The next sample follows the last one of that tracker, after the time in which nobody watched: see
        :data:`BRIDGED`.
        """
        self._go_on(state)
        self._restarted = True

    def update(self, reading: Reading) -> Snapshot:
        """Record one reading and return what it publishes."""
        self.state.serial += 1
        self._devices.count_xids(reading.events)
        failure = reading.failure or failure_of_all(reading)
        if failure is not None:
            self._ooms.update(reading, self._processes)
            return self._publish_failure(reading, failure)
        sample = self._begin_sample(reading)
        sample.threads = self._threads.update(reading, after_gap=sample.after_gap)
        self._processes.update_facts(sample)
        self._ooms.update(reading, self._processes)
        self._agents.join(sample, self._processes)
        sample.verdicts = self._processes.classify(sample)
        known, destroyed = self._devices.match(reading)
        for uuid in destroyed:
            self._holdings.drop_device(uuid)
        known = tuple(without_partial_ledger(device) for device in known)
        sharers = memory_sharers(known)
        holdings = {
            each.uuid: self._update_holdings(each, sample, shared=each.uuid in sharers)
            for each in known
            if each.error is None
        }
        found = self._uncharged.find(known, holdings, sharers, sample)
        devices = tuple(
            self._account_device(
                each,
                holdings,
                sharers.get(each.uuid, (each.uuid,)),
                found.get(sharers.get(each.uuid, (each.uuid,))[0], PoolResult()),
                sample,
            )
            for each in known
        )
        devices = reservations.join(reading, devices, self._processes.facts_of, self._processes.known_since)
        self._processes.update_policies(sample, self._holdings.patterns(), self._agents.policy)
        self._drop_ended(sample)
        return replace(
            self.blank,
            serial=self.state.serial,
            up=True,
            time=reading.time,
            ended=reading.monotonic + reading.duration,
            duration=reading.duration,
            host_pid_namespace=reading.host_pid_namespace,
            driver_version=reading.driver_version,
            cuda_version=reading.cuda_version,
            devices=devices,
            processes=self._processes.holders(
                sample, ((each.pid, each.start) for each in self._holdings), self._holdings.reused_pids()
            ),
            rows=sample.rows,
            failures=dict(self.state.failures),
            **join_holder_facts(reading, sample.rows, devices, self._holdings.reused_pids()),
            hidden_unreadable=reading.hidden_unreadable,
            pods=reading.pods,
            agents=self._agents.agents,
            agent_socket=reading.agent_socket,
            ooms=self._ooms.totals(),
            watched_since=self.state.watched_since,
            unowned=tuple(sorted(reading.ended)),
        )

    def _publish_failure(self, reading: Reading, failure: tuple[str, str]) -> Snapshot:
        if failure[0] != RELEASED:
            self.state.failures[failure[0]] = self.state.failures.get(failure[0], 0) + 1
        self._owners.mark_failed_sample()
        return replace(
            self.blank,
            serial=self.state.serial,
            failure=failure,
            released_until=reading.released_until,
            time=reading.time,
            ended=reading.monotonic + reading.duration,
            duration=reading.duration,
            host_pid_namespace=reading.host_pid_namespace,
            failures=dict(self.state.failures),
            collectors=reading.collectors,
            agent_socket=reading.agent_socket,
        )

    def _begin_sample(self, reading: Reading) -> Sample:
        last, boot_time = self.state.last, self.state.boot_time
        span = None if last is None else reading.monotonic - last
        watched = 0.0 if last is None or reading.unchanged is None else reading.unchanged - last
        longest_gap = self._longest_gap + max(0.0, watched)
        after_gap = span is None or span > longest_gap
        bridged = self._restarted and span is not None and span <= BRIDGED
        self._restarted = False
        if boot_time is not None and reading.boot_time != boot_time:
            self._go_on(follow_clock(self.state, reading.boot_time - boot_time))
        self.state.last, self.state.boot_time = reading.monotonic, reading.boot_time
        if self.state.watched_since is None:
            self.state.watched_since = reading.time
        rows = {row.pid: row for row in reading.rows}
        return Sample(reading, rows, longest_gap, after_gap, bridged=bridged, watched=max(0.0, watched))

    def _account_device(
        self,
        device: DeviceReading,
        held: Mapping[str, tuple[Holding, ...] | None],
        sharers: tuple[str, ...],
        uncharged: PoolResult,
        sample: Sample,
    ) -> DeviceSnapshot:
        """Make a device's part of the snapshot: its holdings, its balance, its owners.

        ``held``: the holdings of every device that answered, by UUID; None where they are not known.
        ``sharers``: the UUIDs of the devices that have the same memory: this one, and where it is a compute
        instance, the others of its GPU instance.
        """
        xids = self._devices.xids(device.uuid)
        if device.error is not None:
            self._owners.mark_unanswered(device.uuid)
            return DeviceSnapshot(device, up=False, xids=xids)
        holdings = held[device.uuid] or ()
        blind = sample.reading.host_pid_namespace is False
        ledger = used_peak = None
        lists = [held.get(uuid) for uuid in sharers]
        if None not in lists:
            everybody = [each for held_there in lists for each in held_there or ()]
            ledger = uncharged.ledger if uncharged.key == device.uuid else None
            ledger = ledger or balance_device(device, everybody, blind=blind, undivided=uncharged.undivided)
        elif len(sharers) == 1 and "processes" not in device.failed:
            # The driver has no list here: who holds the used bytes is unknown.
            ledger = balance_device(device, (), blind=True)
        if ledger is not None:
            used_peak = self._devices.record_used(device.uuid, sample.monotonic, ledger.used)
        hidden = hidden_on(device, sample.reading.hidden if sample.reading.host_pid_namespace else None)
        ghost, since = ghost_since(self.state.ghosts, device, hidden, sample)
        return DeviceSnapshot(
            device, up=True, blind=blind, ledger=ledger, used_peak=used_peak, holdings=holdings,
            hidden=hidden, xids=xids, ghost=ghost, ghost_since=since,
            owner_usage=self._owners.update(
                device,
                self._processes.charges(holdings, sample),
                ledger,
                sample,
                shared=uncharged.undivided if device.uuid == uncharged.key else None,
                left=sum(each.least for each in uncharged.left if each.pids),
            ),
            undivided=uncharged.undivided, left=uncharged.left,
            limits=owner_limits(device.limits, map(self._place_of, holdings)) if device.limits else (),
            memory_counted_under=sharers[0] if sharers[0] != device.uuid else None,
        )  # fmt: skip

    def _place_of(self, holding: Holding) -> PlacedHolding:
        facts = self._processes.facts_of(holding.pid, holding.start)
        place = None if facts is None else unified_path(facts.cgroup or ())
        return PlacedHolding(self._processes.owner_of(holding.pid, holding.start), place)

    def _update_holdings(
        self, device: DeviceReading, sample: Sample, *, shared: bool
    ) -> tuple[Holding, ...] | None:
        """Match what NVML lists with known holdings and classify each, largest first; None without a list."""
        clients = reservations.mps_clients(device, sample.rows, self._processes.facts_of)
        work = self._work.update(device, clients, sample, shared=shared)
        utilization = {each.pid: each for each in device.process_utilization or ()}
        on_device = DeviceSample(sample, device, utilization, work)
        known: list[tuple[ProcessEntry, HoldingState]] = []
        for entry in device.processes or ():
            row = sample.rows.get(entry.pid)
            facts = None if row is None else self._processes.facts_of(row.pid, row.start)
            uses_gpu = None if facts is None else facts.uses_gpu
            state = self._holdings.match(entry, on_device, uses_gpu=uses_gpu)
            known.append((entry, state))
            state.mark_bystander(bystander=row is not None and self._processes.is_bystander(row, sample))
            state.record_sample(entry, on_device)
        busy = who_keeps_busy({entry.pid: state.share_of_time for entry, state in known})
        waits_since = busy_without_work(self.state.waits, device, sample, in_turns=len(busy) > 1)
        if device.processes is None:
            return None
        xids = self._devices.xids(device.uuid)
        holdings = []
        for entry, state in known:
            quiet = state.quiet(work, sample, self._idle_after)
            working = states.is_working(
                quiet,
                None if state.worked_at is None else sample.monotonic - state.worked_at,
                self._idle_after,
            )
            waits = waits_since if len(known) == 1 or entry.pid in busy else None
            verdict = classify(
                state,
                on_device,
                quiet,
                self._idle_after,
                working=working,
                xids=xids,
                told_after=self._told_after,
            )
            if waits is not None:
                verdict = states.with_busy_without_work(verdict, sample.time - waits)
            state.record_verdict(verdict, quiet, sample)
            held = state.holding(entry, verdict, working=working)
            holdings.append(replace(held, busy_without_work_since=waits) if waits is not None else held)
        holdings.sort(key=lambda holding: (-(holding.memory or 0), holding.pid))
        return tuple(holdings)

    def _drop_ended(self, sample: Sample) -> None:
        state, uuids = self.state, frozenset(self._devices.uuids)
        for known in (state.owners, state.ghosts, state.work, state.waits, state.uncharged):
            for uuid in known.keys() - uuids:
                del known[uuid]
        alive = {(row.pid, row.start) for row in sample.rows.values()}
        forget_ended(state.threads, lambda pid, start: (pid, start) in alive)
        self._holdings.drop_unlisted(sample.reading.devices)
        self._processes.drop_ended(sample.rows.values(), self._holdings.pids())


_FAILING = FailureStreaks(COLLECTOR_FAILED)


def join_holder_facts(
    reading: Reading,
    rows: Mapping[int, ProcessRow],
    devices: Iterable[DeviceSnapshot],
    reused: Collection[int],
) -> dict[str, Any]:
    """Return the facts of holders by pid, and the collectors: one fails if its facts cannot be joined."""
    collectors = dict(reading.collectors)
    joined: dict[str, Any] = {"collectors": collectors}
    told = [(fact, values) for fact in HOLDER_FACTS if (values := getattr(reading, fact.field))]
    if not told:
        return joined
    held: dict[int, int] = {}
    for device in devices:
        for holding in device.holdings:
            held[holding.pid] = max(held.get(holding.pid, 0), holding.held or 0)
    present = {
        (pid, rows[pid].start): most for pid, most in held.items() if pid in rows and pid not in reused
    }
    for fact, values in told:
        try:
            joined[fact.field] = _join(fact, values, present)
        except Exception as error:  # noqa: BLE001 only this fact is not known
            _FAILING.failed(fact.collector, error)
            collectors[fact.collector] = False, collectors.get(fact.collector, (False, 0.0))[1]
        else:
            _FAILING.succeeded(fact.collector)
    return joined


def _join(fact: HolderFact, values: Sequence[Any], held: Mapping[tuple[int, int], int]) -> dict[int, Any]:
    within = getattr(fact.kind, "within", None)
    known = ((each, most) for each in values if (most := held.get((each.pid, each.start))) is not None)
    found = (each if within is None else within(each, most) for each, most in known)
    return {each.pid: each for each in found if each is not None}
