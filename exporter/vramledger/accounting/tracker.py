"""Turn a reading into a snapshot, step by step; this module keeps what is remembered between samples.

Each step has a module of its own: devices (which devices exist), processes (facts), agent_figures (what
agents report), holding_table (which holding is which), states (why each exists), ledger (the balance),
uncharged (who has what NVML charges to nobody), owner_usage (who is charged), reservations (what schedulers
have granted). Everything is keyed by identity: a device by UUID, a process by pid and start time. The clock
is the reading's own, so a recording gives the same snapshots whenever it is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vramledger.accounting import reservations, states
from vramledger.accounting.agent_figures import AgentJoiner
from vramledger.accounting.busy_without_work import BusyWithoutWorkWatch, who_keeps_busy
from vramledger.accounting.counted_launches import (
    COUNTED_SHARE,
    COUNTED_STATES,
    Candidate,
    choose_holders,
)
from vramledger.accounting.device_work import DeviceWorkTracker
from vramledger.accounting.devices import (
    DeviceTracker,
    failure_of_all,
    hidden_on,
    memory_sharers,
    without_partial_ledger,
)
from vramledger.accounting.ghost import GhostWatch
from vramledger.accounting.holding import HoldingState
from vramledger.accounting.holding_table import HoldingTable
from vramledger.accounting.kv_caches import join_kv_caches
from vramledger.accounting.ledger import balance, system_bytes
from vramledger.accounting.memory_limits import PlacedHolding, owner_limits
from vramledger.accounting.out_of_memory import OomCounter
from vramledger.accounting.owner_usage import UNKNOWN, Charge, Key, UsageTracker
from vramledger.accounting.pid_reuse import classify_reused
from vramledger.accounting.processes import ProcessTracker
from vramledger.accounting.sample import DeviceSample, Sample
from vramledger.accounting.states import Quiet, StateVerdict
from vramledger.accounting.uncharged import MemoryPool, PoolHolder, PoolMoment, PoolResult, UnchargedTracker
from vramledger.config import OWNERS_MAX
from vramledger.model.reading import (
    FAILURE_REASONS,
    RELEASED,
    DeviceReading,
    HiddenHolder,
    ProcessFacts,
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
    UndividedBytes,
)
from vramledger.readers.owners.cgroups import unified_path

GAP = 5.0
"""Seconds without a sample after which we no longer know that the quiet has lasted."""

BRIDGED = 180.0
"""Seconds that a restart may take. A holder that was quiet before, and whose bytes, rows and agent show no
work at the first sample afterwards, still counts as quiet, by inference: no counter proves it any more. The
rules of alerts bridge the same time."""

_REMEMBERED = (
    *(
        "_serial",
        "_failures",
        "_devices",
        "_ooms",
        "_holdings",
        "_processes",
        "_owners",
        "_agents",
        "_ghosts",
    ),
    *("_work", "_waits", "_uncharged", "_last", "_boot_time", "_watched_since"),
)


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
            interval: seconds between samples, to recognise a gap.
            source: ``nvml`` or ``replay``.
            recording: name of the recording that is replayed.
            owners_max: the number of owners of a device that get an entry of their own; 0 means all.
        """
        self._idle_after = idle_after
        self._interval = interval
        self._longest_gap = max(GAP, 3 * interval)
        self._owners_max = owners_max
        self._blank = Snapshot(source=source, recording=recording, failures=dict.fromkeys(FAILURE_REASONS, 0))
        self._serial = 0
        self._failures = Counter(dict.fromkeys(FAILURE_REASONS, 0))
        self._devices = DeviceTracker()
        self._ooms = OomCounter(owners_max)
        self._restarted = False
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._holdings = HoldingTable()
        self._processes = ProcessTracker()
        self._owners = UsageTracker(self._owners_max)
        self._agents = AgentJoiner()
        self._ghosts = GhostWatch()
        self._work = DeviceWorkTracker(self._idle_after)
        self._waits = BusyWithoutWorkWatch()
        self._uncharged = UnchargedTracker()
        self._last: float | None = None
        self._boot_time: float | None = None
        self._watched_since: float | None = None

    def reset(self) -> None:
        """Forget all but what is counted since the exporter started; the next reading is a new start."""
        self._devices.reset()
        self._start_afresh()

    @property
    def settings(self) -> dict[str, object]:
        """Return what it was started with, by the names of the steps' arguments; this is not remembered."""
        return {"idle_after": self._idle_after, "most": self._owners_max}

    def fresh(self) -> HoldingTracker:
        """Return one with the same settings that remembers nothing."""
        return HoldingTracker(
            idle_after=self._idle_after, interval=self._interval, owners_max=self._owners_max
        )

    def known_facts(self) -> tuple[ProcessFacts, ...]:
        """Return the first and the newest facts of every process, as a new sampler sends them."""
        return self._processes.known_facts()

    def remembered(self) -> dict[str, object]:
        """Return all that it knows beside its settings: its own objects, which go on changing."""
        return {name: getattr(self, name) for name in _REMEMBERED}

    def recall(self, remembered: Mapping[str, object]) -> None:
        """Go on from what a tracker of the same host and boot has remembered, maybe of an earlier version.

        The next sample follows the last one of that tracker, after the time in which nobody watched: see
        :data:`BRIDGED`.
        """
        for name in _REMEMBERED:
            if name in remembered:
                setattr(self, name, remembered[name])
        self._restarted = True

    @property
    def blank(self) -> Snapshot:
        """Return the snapshot before the first sample: nothing is known, nothing has failed."""
        return self._blank

    def update(self, reading: Reading) -> Snapshot:
        """Record one reading and return what it publishes."""
        self._serial += 1
        self._devices.count_xids(reading.events)
        failure = reading.failure or failure_of_all(reading)
        if failure is not None:
            self._ooms.update(reading, self._processes)
            return self._publish_failure(reading, failure)
        sample = self._begin_sample(reading)
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
        found = self._find_uncharged(known, holdings, sharers, sample)
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
            self._blank,
            serial=self._serial,
            up=True,
            time=reading.time,
            duration=reading.duration,
            host_pid_namespace=reading.host_pid_namespace,
            driver_version=reading.driver_version,
            cuda_version=reading.cuda_version,
            devices=devices,
            processes=self._holders(sample),
            rows=sample.rows,
            failures=dict(self._failures),
            collectors=reading.collectors,
            hidden_unreadable=reading.hidden_unreadable,
            pods=reading.pods,
            kv_caches=join_kv_caches(reading.kv_caches, sample.rows, devices, self._holdings.reused_pids()),
            agents=self._agents.agents,
            agent_socket=reading.agent_socket,
            ooms=self._ooms.totals(),
            to_count=self._holders_to_count(sample),
            launches=reading.launches if _counts_launches(reading) else None,
            watched_since=self._watched_since,
            unowned=tuple(sorted(reading.ended)),
        )

    def _publish_failure(self, reading: Reading, failure: tuple[str, str]) -> Snapshot:
        """Return a snapshot without data; no owner is charged for the time around it."""
        if failure[0] != RELEASED:
            self._failures[failure[0]] += 1
        self._owners.mark_failed_sample()
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

    def _begin_sample(self, reading: Reading) -> Sample:
        span = None if self._last is None else reading.monotonic - self._last
        watched = 0.0 if self._last is None or reading.unchanged is None else reading.unchanged - self._last
        longest_gap = self._longest_gap + max(0.0, watched)
        after_gap = span is None or span > longest_gap
        bridged = self._restarted and span is not None and span <= BRIDGED
        self._last, self._restarted = reading.monotonic, False
        if self._boot_time is not None and reading.boot_time != self._boot_time:
            self._follow_clock(reading.boot_time - self._boot_time)
        self._boot_time = reading.boot_time
        if self._watched_since is None:
            self._watched_since = reading.time
        rows = {row.pid: row for row in reading.rows}
        return Sample(reading, rows, longest_gap, after_gap, bridged=bridged, watched=max(0.0, watched))

    def _follow_clock(self, seconds: float) -> None:
        """Move what is remembered in Unix time along with a clock that was set, so that every span stays."""
        for state in self._holdings:
            state.shift_times(seconds)
        self._processes.shift_times(seconds)
        self._ghosts.shift_times(seconds)
        self._work.shift_times(seconds)
        self._waits.shift_times(seconds)
        self._uncharged.shift_times(seconds)
        if self._watched_since is not None:
            self._watched_since += seconds

    def _find_uncharged(
        self,
        devices: Sequence[DeviceReading],
        held: dict[str, tuple[Holding, ...] | None],
        sharers: Mapping[str, tuple[str, ...]],
        sample: Sample,
    ) -> dict[str, PoolResult]:
        """Find who has what NVML charges to nobody, and add it to the holdings in ``held``.

        Where NVML lists no process to us, the holders are not known, and nothing is added.
        """
        bounds = {(each.pid, each.start): each.bound for each in sample.reading.managed}
        pools = []
        found: dict[str, PoolResult] = {}
        for device in devices:
            group = sharers.get(device.uuid, (device.uuid,))
            lists = [held.get(uuid) for uuid in group]
            if device.uuid != group[0] or None in lists or sample.reading.host_pid_namespace is False:
                continue
            if device.memory_kind is not None:
                continue  # the operating system uses this memory too, so nobody is named for the rest
            everybody = [(uuid, each) for uuid, some in zip(group, lists, strict=True) for each in some or ()]
            ledger = _balanced(device, [each for _, each in everybody], blind=False)
            if ledger is None or device.error is not None:
                continue
            found[device.uuid] = PoolResult(device.uuid, ledger=ledger)
            if not self._uncharged.record_calm(device.uuid, ledger, everybody, sample.monotonic):
                holders = tuple(self._pool_holder(uuid, each, bounds, sample) for uuid, each in everybody)
                hidden = _hidden_users(device, sample.reading)
                pools.append(MemoryPool(device.uuid, ledger, holders, hidden))
        if not pools:
            return found
        listed = frozenset((each.pid, each.start) for some in held.values() for each in some or ())
        silent = {each.uuid for each in devices if not each.divided and held.get(each.uuid) is None}
        elsewhere = self._holdings.newest_holders(silent)
        found |= self._uncharged.update(
            pools,
            PoolMoment(
                sample.monotonic,
                sample.time,
                sample.longest_gap,
                sample.watched,
                listed | (elsewhere or frozenset()),
                complete=elsewhere is not None,
            ),
            lambda uuid, holding: self._pool_holder(uuid, holding, bounds, sample),
        )
        for pool in pools:
            for uuid in {holder.uuid for holder in pool.holders}:
                held[uuid] = _with_uncharged(uuid, held[uuid] or (), found[pool.key])
        return found

    def _pool_holder(
        self, uuid: str, holding: Holding, bounds: Mapping[tuple[int, int], int | None], sample: Sample
    ) -> PoolHolder:
        facts = self._processes.facts_of(holding.pid, holding.start)
        agent = self._agents.agents.get(holding.pid)
        return PoolHolder(
            uuid,
            holding,
            None if facts is None else facts.user,
            self._owner_of(holding, sample),
            None if holding.start is None else bounds.get((holding.pid, holding.start)),
            None if agent is None else agent.managed(uuid, holding.memory or 0),
        )

    def _account_device(
        self,
        device: DeviceReading,
        held: Mapping[str, tuple[Holding, ...] | None],
        sharers: tuple[str, ...],
        uncharged: PoolResult,
        sample: Sample,
    ) -> DeviceSnapshot:
        """Make a device's part of the snapshot: its holdings, its balance, its owners.

        Args:
            device: what the driver reported.
            held: the holdings of every device that answered, by UUID; None where they are not known.
            sharers: the UUIDs of the devices that have the same memory: this one, and where it is a compute
                instance, the others of its GPU instance.
            uncharged: who has what NVML charges to nobody.
            sample: the sample.
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
            ledger = ledger or _balanced(device, everybody, blind=blind, undivided=uncharged.undivided)
        elif len(sharers) == 1 and "processes" not in device.failed:
            # The driver has no list here: who holds the used bytes is unknown.
            ledger = _balanced(device, (), blind=True)
        if ledger is not None:
            used_peak = self._devices.record_used(device.uuid, sample.monotonic, ledger.used)
        hidden = hidden_on(device, sample.reading.hidden if sample.reading.host_pid_namespace else None)
        ghost, ghost_since = self._ghosts.update(device, hidden, sample)
        return DeviceSnapshot(
            device,
            up=True,
            blind=blind,
            ledger=ledger,
            used_peak=used_peak,
            holdings=holdings,
            hidden=hidden,
            xids=xids,
            ghost=ghost,
            ghost_since=ghost_since,
            owner_usage=self._charge_owners(device, holdings, ledger, uncharged, sample),
            undivided=uncharged.undivided,
            left=uncharged.left,
            limits=owner_limits(device.limits, map(self._place_of, holdings)) if device.limits else (),
            memory_counted_under=sharers[0] if sharers[0] != device.uuid else None,
        )

    def _place_of(self, holding: Holding) -> PlacedHolding:
        facts = self._processes.facts_of(holding.pid, holding.start)
        place = None if facts is None else unified_path(facts.cgroup or ())
        return PlacedHolding(self._processes.owner_of(holding.pid, holding.start), place)

    def _mps_servers(self, device: DeviceReading, sample: Sample) -> frozenset[int]:
        """Return the holders that are servers of MPS, also where only their name says so."""
        servers = set()
        for entry in device.processes or ():
            row = sample.rows.get(entry.pid)
            facts = None if row is None else self._processes.facts_of(row.pid, row.start)
            named = facts is not None and facts.command == reservations.MPS_SERVER
            if named or reservations.mps_user(facts) is not None:
                servers.add(entry.pid)
        return frozenset(servers)

    def _update_holdings(
        self, device: DeviceReading, sample: Sample, *, shared: bool
    ) -> tuple[Holding, ...] | None:
        """Match what NVML lists with the known holdings and classify each; the largest first.

        None where NVML did not give the list.
        """
        servers = self._mps_servers(device, sample)
        sample.mps_servers.update(servers)
        work = self._work.update(device, servers, sample, shared=shared)
        utilization = {each.pid: each for each in device.process_utilization or ()}
        on_device = DeviceSample(sample, device, utilization, work, self._agents.allocated_on(device.uuid))
        known = [(entry, self._holdings.match(entry, on_device)) for entry in device.processes or ()]
        for entry, state in known:
            row = sample.rows.get(entry.pid)
            state.mark_bystander(bystander=row is not None and self._processes.is_bystander(row, sample))
            state.record_sample(entry, on_device)
        busy = who_keeps_busy({entry.pid: state.share_of_time for entry, state in known})
        waits_since = self._waits.update(device, sample, in_turns=len(busy) > 1)
        if device.processes is None:
            return None
        holdings = []
        for entry, state in known:
            quiet = state.quiet(work, sample, self._idle_after)
            working = states.is_working(
                quiet,
                None if state.worked_at is None else sample.monotonic - state.worked_at,
                self._idle_after,
            )
            waits = waits_since if len(known) == 1 or entry.pid in busy else None
            verdict = self._classify(state, on_device, quiet, working=working)
            if waits is not None:
                verdict = states.with_busy_without_work(verdict, sample.time - waits)
            state.record_verdict(verdict, quiet, sample)
            held = state.holding(entry, verdict, working=working)
            holdings.append(replace(held, busy_without_work_since=waits) if waits is not None else held)
        holdings.sort(key=lambda holding: (-(holding.memory or 0), holding.pid))
        return tuple(holdings)

    def _holders_to_count(self, sample: Sample) -> tuple[tuple[int, int], ...]:
        """Choose the holders whose launches should be counted."""
        if "launches" not in sample.reading.collectors or sample.reading.host_pid_namespace is False:
            return ()
        candidates = [
            Candidate(
                (state.pid, state.start),
                state.memory or 0,
                sample.monotonic - state.workless_since[0],
                state.device_quiet >= COUNTED_SHARE * self._idle_after,
            )
            for state in self._holdings
            if state.state in COUNTED_STATES
            and state.start is not None
            and state.watched == sample.monotonic
            and state.pid in sample.rows
            and state.pid not in sample.mps_servers
        ]
        return choose_holders(candidates, sample.reading.launches, self._idle_after)

    def _classify(
        self, state: HoldingState, on_device: DeviceSample, quiet: Quiet | None, *, working: bool | None
    ) -> StateVerdict:
        """Say why a holding exists; the first rule that applies wins."""
        sample = on_device.sample
        reused = classify_reused(state, sample)
        if reused is not None:
            return reused
        if state.pid not in sample.rows:
            presence = sample.reading.unseen.get(state.pid)
            return states.classify_unseen(presence, host_pid_namespace=sample.reading.host_pid_namespace)
        verdict = sample.verdicts[state.pid]
        if verdict is None:
            return self._classify_work(state, quiet, on_device)
        if verdict.state is State.ORPHANED:
            return states.with_work(verdict, working=working, idle_after=self._idle_after)
        if verdict.state is State.STUCK and (xids := self._devices.xids(on_device.device.uuid)):
            numbers = ", ".join(map(str, sorted(xids)))
            return verdict._replace(why=f"{verdict.why}; this GPU has had XID {numbers}")
        return verdict

    def _classify_work(
        self, state: HoldingState, quiet: Quiet | None, on_device: DeviceSample
    ) -> StateVerdict:
        sample, device = on_device.sample, on_device.device
        if quiet is not None:
            return states.classify_idle(quiet, sample.monotonic)
        seconds = sample.monotonic - state.quiet_since[0]
        return states.classify_active(
            seconds,
            self._idle_after,
            worked=state.last_active is not None,
            evidence=state.evidence,
            uncounted=(
                device.parent is not None
                and device.gpu_instance is not None  # without its number nobody can ask for its counters
                and device.activity is None
                and "activity" not in device.failed
                and (state.pid, state.start) not in sample.launches
            ),
        )

    def _charge_owners(
        self,
        device: DeviceReading,
        holdings: Sequence[Holding],
        ledger: Ledger | None,
        uncharged: PoolResult,
        sample: Sample,
    ) -> OwnerUsageTotals | None:
        """Charge a device's holdings to their owners; return None if its holders are not known."""
        if device.divided:
            return None
        if device.processes is None:
            self._owners.mark_unanswered(device.uuid)
            return None
        charges = [
            Charge(
                each.pid,
                each.start,
                self._owner_of(each, sample),
                each.state,
                each.held,
                each.wasted,
            )
            for each in holdings
        ]
        shared = uncharged.undivided if device.uuid == uncharged.key else None
        left = sum(each.least for each in uncharged.left if each.pids)
        return self._owners.update(
            device.uuid,
            charges,
            ledger,
            sample,
            shared=shared,
            left=left,
            kept_by_system=device.memory_kind is not None,
        )

    def _owner_of(self, holding: Holding, sample: Sample) -> Key | None:
        """Return the owner of a holding, None while it is not known.

        A bystander did not hold the bytes under its pid, so its owner is not charged for them.
        """
        if holding.start is None and holding.pid in sample.rows:
            return UNKNOWN
        return self._processes.owner_of(holding.pid, holding.start)

    def _holders(self, sample: Sample) -> dict[int, ProcessSnapshot]:
        """Return the holders by pid, also the dead, but not a program that only got a dead holder's pid."""
        reused = self._holdings.reused_pids()
        holders = {
            row.pid: self._processes.snapshot_of(row, sample)
            for row in sample.rows.values()
            if row.pid not in reused
        }
        # Readers want to know to whom the bytes of the dead belonged: what was seen of them stays.
        listed = {entry.pid for device in sample.reading.devices for entry in device.processes or ()}
        unseen = listed - holders.keys()
        for state in self._holdings:
            known = self._processes.get(state.pid, state.start)
            if known is not None and state.pid in unseen and state.pid not in holders:
                holders[state.pid] = known.shown
        return holders

    def _drop_ended(self, sample: Sample) -> None:
        """Drop what no longer exists."""
        self._owners.keep_only(self._devices.uuids)
        self._ghosts.keep_only(frozenset(self._devices.uuids))
        self._work.keep_only(frozenset(self._devices.uuids))
        self._waits.keep_only(frozenset(self._devices.uuids))
        self._uncharged.keep_only(frozenset(self._devices.uuids))
        self._holdings.drop_unlisted(sample.reading.devices)
        self._processes.drop_ended(sample.rows.values(), self._holdings.pids())


def _counts_launches(reading: Reading) -> bool:
    """Tell whether launches are counted on this host now."""
    alive, _ = reading.collectors.get("launches", (False, 0.0))
    return alive


def _balanced(
    device: DeviceReading,
    holdings: Sequence[Holding],
    *,
    blind: bool,
    undivided: UndividedBytes | None = None,
) -> Ledger | None:
    """Balance a device over its holdings, with what is known of bytes that NVML charges to nobody."""
    if device.memory is None:
        return None
    uncharged = [(each.state, each.uncharged.least) for each in holdings if each.uncharged is not None]
    if undivided is not None:
        uncharged.append((undivided.state, undivided.bytes))
    charged = ((each.state, each.memory or 0) for each in holdings)
    system = system_bytes(device)
    return balance(device.memory, charged, blind=blind, uncharged=uncharged, system=system)


def _with_uncharged(uuid: str, holdings: Sequence[Holding], found: PoolResult) -> tuple[Holding, ...]:
    """Return the holdings of a device with what they have uncharged, the largest first."""
    if not found.held:
        return tuple(holdings)
    added = [replace(each, uncharged=found.held.get((uuid, each.pid))) for each in holdings]
    return tuple(sorted(added, key=lambda each: (-(each.held or 0), each.pid)))


def _hidden_users(device: DeviceReading, reading: Reading) -> tuple[HiddenHolder, ...] | None:
    """Return the processes that have a device open and that NVML does not list, forked children too.

    A child that outlives its parent may have the parent's memory.
    """
    if reading.hidden is None or device.minor is None:
        return None
    listed = {entry.pid for each in reading.devices for entry in each.processes or ()}
    return tuple(
        each
        for each in reading.hidden
        if device.minor in each.minors and each.kind != "monitor" and each.pid not in listed
    )
