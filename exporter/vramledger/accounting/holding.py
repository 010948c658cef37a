"""Remember one holding from sample to sample: its peak, its last work, its state.

A holding is (device, process). Signs of work are utilisation samples, a change of its bytes, and the
allocations that its agent counts. Measured on an H200: a program with small kernels has no utilisation sample
in 96 of 100 seconds. So one empty second proves nothing, and a change of bytes counts as work.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramledger.accounting.policies import MemoryPattern
from vramledger.accounting.sample import DeviceSample, Sample
from vramledger.accounting.states import StateVerdict
from vramledger.model.reading import DeviceReading, ProcessEntry, ProcessUtilization
from vramledger.model.snapshot import Holding, State

SAMPLE_LIFETIME = 2.5
"""Seconds for which a utilisation sample is shown; the driver makes one a second for a busy process."""


@dataclass(slots=True)
class HoldingState:
    """The state of one holding.

    Attributes:
        start: start ticks of the holder, None when /proc never showed it.
        pid: as NVML lists it.
        seen: Unix time of the first sample that listed it.
        updated: Unix time of the last sample that listed it.
        watched: monotonic time of the last sample that listed it.
        memory: the last bytes that NVML reported.
        peak: highest bytes so far.
        quiet_since: (monotonic, Unix) time since which every sample gave evidence of quiet.
        evidence: whether the newest sample gave evidence of work or of quiet.
        last_active: Unix time of the last sign of work.
        worked_at: monotonic time of the last sign of work.
        utilization: newest utilisation sample.
        utilization_at: monotonic time of that sample; its own timestamp is of the wall clock, which may be
            set.
        state: last published state.
        since: Unix time at which that state began.
        pid_successor: start ticks of a process that has got the pid while the bytes stayed.
        bystander: the process that has the pid now certainly does not use a GPU; the holder is not known.
        from_start: the sample before did not list the holding, so we saw it appear.
        pattern: the memory pattern, a new object when the bytes change; None while not known.
    """

    pid: int
    start: int | None
    seen: float
    updated: float
    watched: float
    quiet_since: tuple[float, float]
    memory: int | None = None
    peak: int | None = None
    evidence: bool = False
    last_active: float | None = None
    worked_at: float | None = None
    utilization: ProcessUtilization | None = None
    utilization_at: float = 0.0
    state: State | None = None
    since: float = 0.0
    pid_successor: int | None = None
    bystander: bool = False
    from_start: bool = False
    pattern: MemoryPattern | None = None

    def shift_times(self, seconds: float) -> None:
        """Move the Unix times along with a clock that was set."""
        self.seen += seconds
        self.updated += seconds
        self.since += seconds
        self.quiet_since = (self.quiet_since[0], self.quiet_since[1] + seconds)
        if self.last_active is not None:
            self.last_active += seconds

    def mark_bystander(self, *, bystander: bool) -> None:
        """Record whether the process that has the pid now is a bystander, and not the holder.

        A holder that we saw before the pid was reused stays known.
        """
        self.bystander = bystander and self.pid_successor is None
        if self.bystander:
            self.start = None

    def record_sample(self, entry: ProcessEntry, on_device: DeviceSample) -> None:
        """Record what one sample says: the bytes, and whether the holder worked.

        Where samples are missing before this one, we do not know that the quiet lasted.
        """
        sample, device = on_device.sample, on_device.device
        changed = None not in (self.memory, entry.memory) and entry.memory != self.memory
        gap = sample.monotonic - self.watched > sample.longest_gap
        utilization = on_device.utilization.get(self.pid)
        if utilization is not None:
            age = max(0.0, sample.time - utilization.time)
            self.utilization, self.utilization_at = utilization, sample.monotonic - age
        if _is_work(utilization) or changed or self.pid in on_device.allocated:
            self.last_active, self.worked_at = sample.time, sample.monotonic
            self.evidence = True
            self.quiet_since = sample.clock
        else:
            self.evidence = _quiet_is_known(entry, device)
            if gap or not self.evidence:
                self.quiet_since = sample.clock
        if entry.memory is not None:
            self.memory = entry.memory
            self.peak = entry.memory if self.peak is None else max(self.peak, entry.memory)
            self._update_pattern(entry.memory, device)
        self.watched, self.updated = sample.clock

    def _update_pattern(self, memory: int, device: DeviceReading) -> None:
        """Update the memory pattern; a sample without the device's total leaves it as it was."""
        if device.memory is None or (self.pattern is not None and self.pattern.memory == memory):
            return
        free = device.memory.free
        if self.pattern is not None:
            self.pattern = self.pattern.after_change(memory, free)
        elif self.from_start:
            self.pattern = MemoryPattern(memory, device.memory.total, watched=True, jump=memory, left=free)
        else:
            self.pattern = MemoryPattern(memory, device.memory.total)

    def record_verdict(self, verdict: StateVerdict, sample: Sample) -> None:
        """Record the state of this sample, and keep the time at which the state began.

        A holding that is active when first seen counts as active since its process started. A holding that is
        idle when first seen counts as idle since its last sign of work.
        """
        if verdict.state is self.state:
            return
        if verdict.state is State.IDLE:
            self.since = self.quiet_since[1]
        elif self.state is None and verdict.state is State.ACTIVE and self.start is not None:
            self.since = min(sample.started_at(self.start), sample.time)
        else:
            self.since = sample.time
        self.state = verdict.state

    def holding(self, entry: ProcessEntry, verdict: StateVerdict, *, working: bool | None) -> Holding:
        """Return the immutable holding of the sample that :meth:`record_sample` recorded."""
        utilization = self.utilization
        fresh = self.watched - self.utilization_at <= SAMPLE_LIFETIME
        return Holding(
            pid=self.pid,
            start=self.start,
            memory=entry.memory,
            peak=self.peak,
            kinds=entry.kinds,
            state=verdict.state,
            since=self.since,
            why=verdict.why,
            sm=utilization.sm if utilization is not None and fresh else None,
            last_active=self.last_active,
            quiet_since=self.quiet_since[1],
            evidence=self.evidence,
            working=working,
        )


def _is_work(utilization: ProcessUtilization | None) -> bool:
    return utilization is not None and (
        utilization.sm > 0 or utilization.memory > 0 or utilization.encoder > 0 or utilization.decoder > 0
    )


def _quiet_is_known(entry: ProcessEntry, device: DeviceReading) -> bool:
    """Tell whether a missing utilisation sample means something for this holder.

    A device that did nothing at all is evidence for all its holders. Otherwise the per-process query must
    have succeeded. A client of MPS gives no evidence, because the driver counts its work for the server's
    pid.
    """
    if device.utilization is not None and device.utilization.get("gpu") == 0:
        return True
    return device.process_utilization is not None and "M" not in entry.kinds
