"""Remember one holding from sample to sample: its peak, its last work, its state; say why it exists.

A holding is (device, process). Signs of work are what the device's counters and rows say
(``device_work``), and a change of its bytes. What its agent counts does not show work: a program may report
anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vramledger.accounting.holders import states
from vramledger.accounting.holders.policies import MemoryPattern
from vramledger.accounting.holders.states import PASSING, Quiet, StateVerdict
from vramledger.accounting.sample import Clock, DeviceSample, Sample, WorkEvidence
from vramledger.accounting.work.thread_times import CpuBesideWork, quiet_by_threads
from vramledger.model.reading import DeviceReading, ProcessEntry, ProcessUtilization
from vramledger.model.snapshot import Grade, Holding, State, UnixTime

SAMPLE_LIFETIME = 2.5
"""Seconds for which a utilisation sample is shown; the driver makes one a second for a busy process."""


class HoldingState(msgspec.Struct, omit_defaults=True):
    pid: int  # as NVML lists it
    start: int | None  # start ticks of the holder, None when /proc never showed it
    seen: UnixTime  # Unix time of the first sample that listed it
    updated: UnixTime  # Unix time of the last sample that listed it
    watched: float  # monotonic time of the last sample that listed it
    quiet_since: Clock  # the moment since which every sample gave evidence of quiet
    workless_since: Clock  # the moment of the last sign of work, or of the first sample
    nothing_seconds: float = 0.0  # the device's ``nothing_seconds`` of that moment
    memory: int | None = None  # the last bytes that NVML reported
    peak: int | None = None  # highest bytes so far
    evidence: bool = False  # whether the newest sample gave evidence of work or of quiet
    last_active: UnixTime | None = None  # Unix time of the last sign of work
    worked_at: float | None = None  # monotonic time of the last sign of work
    utilization: ProcessUtilization | None = None  # newest utilisation row
    # monotonic time at which that row was new; its own stamp is of a clock that may be set
    utilization_at: float = 0.0
    state: State | None = None  # last published state
    grade: Grade | None = None  # how good the evidence for it was
    since: UnixTime = 0.0  # Unix time at which that state began
    pid_successor: int | None = None  # start ticks of a process that has got the pid while the bytes stayed
    outlived: bool = False  # that process certainly does not use a GPU, so the bytes are not its own
    # the process that has the pid now certainly does not use a GPU; the holder is not known
    bystander: bool = False
    from_start: bool = False  # the sample before did not list the holding, so we saw it appear
    # the memory pattern, a new object when the bytes change; None while not known
    pattern: MemoryPattern | None = None
    # its CPU time beside the work of others
    cpu: CpuBesideWork = msgspec.field(default_factory=CpuBesideWork)
    unrelated_since: Clock = (0.0, 0.0)  # since when that CPU time has shown no work
    unrelated_nothing: float = 0.0  # the device's ``nothing_seconds`` of that moment
    # since when it was idle, by better evidence than inferred, before a short restart of the exporter; None
    # after work
    before_restart: Clock | None = None
    program: int = 0  # the program that took it, as in its row; 0 when not known
    # the state of :data:`PASSING` that it seems to be in, but was not told yet, and since when
    turning: tuple[State, Clock] | None = None

    def mark_bystander(self, *, bystander: bool) -> None:
        """Record whether the pid is a bystander's; a holder seen before its pid was reused stays known."""
        self.outlived = bystander and self.pid_successor is not None
        self.bystander = bystander and self.pid_successor is None
        if self.bystander:
            self.start = None

    @property
    def share_of_time(self) -> float:
        """The share of the device's time that the process takes by the driver's newest row; 0 without one."""
        fresh = self.watched - self.utilization_at <= SAMPLE_LIFETIME
        return self.utilization.sm if self.utilization is not None and fresh else 0.0

    def record_sample(self, entry: ProcessEntry, on_device: DeviceSample) -> None:
        """Record a sample's bytes and work; after missing ones quiet is not known, unless by a restart."""
        sample, device, work = on_device.sample, on_device.device, on_device.work
        changed = None not in (self.memory, entry.memory) and entry.memory != self.memory
        missed = sample.monotonic - self.watched > sample.longest_gap
        gap = missed and not sample.bridged
        if missed and sample.bridged and self.state is State.IDLE and self.grade is not Grade.INFERRED:
            self.before_restart = (self.watched - (self.updated - self.since), self.since)
        utilization = on_device.utilization.get(self.pid)
        if utilization is not None:
            self.utilization, self.utilization_at = utilization, sample.monotonic
        worked = self.pid in work.workers or changed
        if worked or gap:
            self.workless_since = sample.clock
        if worked:
            self.last_active, self.worked_at = sample.time, sample.monotonic
        elapsed = sample.monotonic - self.watched
        self.cpu.update(sample.cpu.get(self.pid), elapsed, busy=work.busy, own=worked)
        if self.cpu.may_work:
            self.before_restart = None
        if self.cpu.may_work or not self.cpu.tells(elapsed):
            self.unrelated_since, self.unrelated_nothing = sample.clock, work.nothing_seconds
        self.evidence = worked or work.shows_quiet(self.pid)
        if worked or gap or not self.evidence:
            self.quiet_since, self.nothing_seconds = sample.clock, work.nothing_seconds
            self.before_restart = None
        if entry.memory is not None:
            self.memory = entry.memory
            self.peak = entry.memory if self.peak is None else max(self.peak, entry.memory)
            self._update_pattern(entry.memory, device)
        self.watched, self.updated = sample.clock

    def quiet(self, work: WorkEvidence, sample: Sample, idle_after: float) -> Quiet | None:
        """Return since when the holder has been quiet, by the best evidence that goes back far enough.

        What was quiet by good evidence before and after a short restart of the exporter was quiet all the
        time: for the time between, its bytes and its rows show no work. ``idle_after``: for how
        many seconds it must have been quiet; None is returned if it was not.
        """
        found = self._quiet_without_restart(work, sample, idle_after)
        if found is None or self.before_restart is None or found.grade is Grade.INFERRED:
            return found
        return Quiet(Grade.SEEN, self.before_restart, restarted=True)

    def _quiet_without_restart(self, work: WorkEvidence, sample: Sample, idle_after: float) -> Quiet | None:
        now = sample.monotonic
        if work.nothing_since is not None:
            since = max(self.quiet_since, work.nothing_since)
            if now - since[0] >= idle_after:
                return Quiet(Grade.PROVEN, since)
        by_threads = quiet_by_threads(
            None if self.start is None else sample.threads.get((self.pid, self.start)),
            work.signs_for(self.pid),
            self.workless_since,
            now,
            idle_after,
        )
        if by_threads is not None and not self.bystander:
            return by_threads
        if work.attributed_since is not None and self.pid not in work.clients:
            attributed_since, nothing_then = work.attributed_since
            begun = max(self.nothing_seconds, nothing_then, self.unrelated_nothing)
            if work.nothing_seconds - begun >= idle_after:
                return Quiet(Grade.SEEN, max(self.quiet_since, attributed_since, self.unrelated_since))
        if now - self.quiet_since[0] >= idle_after:
            return Quiet(Grade.INFERRED, self.quiet_since)
        return None

    def _update_pattern(self, memory: int, device: DeviceReading) -> None:
        if device.memory is None or (self.pattern is not None and self.pattern.memory == memory):
            return
        free = device.memory.free
        if self.pattern is not None:
            self.pattern = self.pattern.after_change(memory, free)
        elif self.from_start:
            self.pattern = MemoryPattern(memory, device.memory.total, watched=True, jump=memory, left=free)
        else:
            self.pattern = MemoryPattern(memory, device.memory.total)

    def follow(self, verdict: StateVerdict, sample: Sample) -> float | None:
        """Return a passing state's seconds, None if told at once; who works meanwhile is not stopped."""
        if verdict.state not in PASSING or verdict.state is self.state:
            self.turning = None
            return None
        worked = self.worked_at == sample.monotonic and verdict.state is State.STOPPED
        if self.turning is None or self.turning[0] is not verdict.state or worked:
            self.turning = verdict.state, sample.clock
        return sample.monotonic - self.turning[1][0]

    def record_verdict(self, verdict: StateVerdict, quiet: Quiet | None, sample: Sample) -> None:
        """Record the state of this sample, and keep the time at which the state began.

        A holding that was there before us, and is active, counts as active since its process started. One
        that we saw appear counts from then on: a program may run for hours, or execute another, before it
        takes memory. An idle holding counts as idle since the evidence of this grade begins.
        """
        self.grade = verdict.grade
        if verdict.state is State.IDLE and quiet is not None:
            self.since = quiet.since[1]
        elif verdict.state is self.state:
            return
        elif (
            self.state is None
            and verdict.state is State.ACTIVE
            and self.start is not None
            and not self.from_start
        ):
            self.since = min(sample.started_at(self.start), sample.time)
        elif self.turning is not None and self.turning[0] is verdict.state:
            self.since = self.turning[1][1]
        else:
            self.since = sample.time
        self.state = verdict.state

    def holding(self, entry: ProcessEntry, verdict: StateVerdict, *, working: bool | None) -> Holding:
        """Return the immutable holding of the sample that :meth:`record_sample` recorded."""
        utilization = self.utilization
        fresh = self.watched - self.utilization_at <= SAMPLE_LIFETIME
        return Holding(
            pid=self.pid, start=self.start, memory=entry.memory, peak=self.peak, kinds=entry.kinds,
            state=verdict.state, since=self.since, why=verdict.why,
            sm=utilization.sm if utilization is not None and fresh else None, last_active=self.last_active,
            quiet_since=self.quiet_since[1], evidence=self.evidence, working=working, grade=verdict.grade,
        )  # fmt: skip


def classify(  # noqa: PLR0913 one argument a fact
    state: HoldingState,
    on_device: DeviceSample,
    quiet: Quiet | None,
    idle_after: float,
    *,
    working: bool | None,
    xids: Iterable[int],
    told_after: float = 0.0,
) -> StateVerdict:
    """Say why a holding exists, once that has lasted: what passes in a moment is the end of a program.

    ``quiet``: that it was quiet for the idle threshold, and how well that is known. ``told_after``: seconds
    for which a state of :data:`states.PASSING` must last before it is told.
    """
    verdict = _classify_now(state, on_device, quiet, idle_after, working=working, xids=xids)
    seconds = state.follow(verdict, on_device.sample)
    if seconds is None or seconds >= told_after:
        return verdict
    so_far = f"for {seconds:.0f} s so far: {verdict.why}"
    if state.state not in (None, State.ACTIVE, State.IDLE):
        return StateVerdict(state.state, so_far, state.grade or Grade.INFERRED)
    if state.pid not in on_device.sample.rows:
        return StateVerdict(state.state or State.UNKNOWN, so_far)
    found = _classify_work(state, quiet, on_device, idle_after)
    return found._replace(why=f"{found.why}; {so_far}")


def _classify_now(  # noqa: PLR0911, PLR0913 one argument a fact, one result a rule
    state: HoldingState,
    on_device: DeviceSample,
    quiet: Quiet | None,
    idle_after: float,
    *,
    working: bool | None,
    xids: Iterable[int],
) -> StateVerdict:
    sample = on_device.sample
    reused = _classify_reused(state, sample)
    if reused is not None:
        return reused
    if state.pid not in sample.rows:
        presence = sample.reading.unseen.get(state.pid)
        return states.classify_unseen(presence, host_pid_namespace=sample.reading.host_pid_namespace)
    verdict = sample.verdicts[state.pid]
    if verdict is None:
        return _classify_work(state, quiet, on_device, idle_after)
    zombie = verdict.state is State.ZOMBIE
    if verdict.grade is Grade.INFERRED and zombie is not (working is False):
        # Its threads work, or may; or it does not work, which is certain, and that it was left behind is not.
        found = _classify_work(state, quiet, on_device, idle_after)
        return found._replace(why=f"{found.why}; {verdict.why}")
    if zombie and quiet is not None and verdict.grade is Grade.INFERRED:
        return verdict._replace(grade=quiet.grade)
    if verdict.state is State.ORPHANED:
        return states.with_work(verdict, working=working, idle_after=idle_after)
    if verdict.state is State.STUCK and xids:
        numbers = ", ".join(map(str, sorted(xids)))
        return verdict._replace(why=f"{verdict.why}; this GPU has had XID {numbers}")
    return verdict


def _classify_work(
    state: HoldingState, quiet: Quiet | None, on_device: DeviceSample, idle_after: float
) -> StateVerdict:
    sample, device = on_device.sample, on_device.device
    if quiet is not None:
        return states.classify_idle(quiet, sample.monotonic)
    seconds = sample.monotonic - state.quiet_since[0]
    return states.classify_active(
        seconds,
        idle_after,
        worked=state.last_active is not None,
        evidence=state.evidence,
        uncounted=(
            device.parent is not None
            and device.gpu_instance is not None  # without its number nobody can ask for its counters
            and device.activity is None
            and "activity" not in device.failed
        ),
    )


def _classify_reused(state: HoldingState, sample: Sample) -> StateVerdict | None:
    if state.pid not in sample.rows:
        return None
    if state.pid_successor is not None:
        why = "its process has ended, and the pid now belongs to another program"
        if state.outlived:
            return StateVerdict(State.DEAD, f"{why}, which does not use the GPU", Grade.PROVEN)
        return StateVerdict(State.UNKNOWN, f"{why}; which of them has the bytes is not known")
    if not state.bystander:
        return None
    if sample.reading.host_pid_namespace is not True:
        return StateVerdict(
            State.UNKNOWN, "in our PID namespace, another program has this pid; it does not use the GPU"
        )
    return StateVerdict(
        State.DEAD,
        "its process has ended: the program that has the pid now does not use the GPU (it has no device file "
        "open and maps no library of the driver)",
        Grade.PROVEN,
    )
