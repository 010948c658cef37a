"""What is remembered of one holding from sample to sample: its peak, its last work, its state.

A holding is (device, process); signs of work are utilisation samples, a change of its bytes, and
later the agent's counters. Measured on an H200: a program with small kernels has no utilisation
sample in 96 of 100 seconds, so one empty second proves nothing and a change of bytes counts as work.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramledger.policies import Shape
from vramledger.readings import DeviceReading, ProcessEntry, ProcessUtilization
from vramledger.snapshot import Holding, State
from vramledger.states import Verdict

SAMPLE_LIFETIME = 2.5
"""Seconds that a utilisation sample is shown; the driver makes one a second for a busy process."""


@dataclass(slots=True)
class Account:
    """The memory of one holding.

    Attributes:
        start: start ticks of the holder, None when never seen in /proc.
        pid: as NVML lists it.
        seen: Unix time of the first sample that listed it.
        updated: Unix time of the last sample that listed it.
        memory: bytes at that sample.
        peak: highest bytes so far.
        quiet_since: (monotonic, Unix) since when every sample gave evidence of quiet.
        evidence: whether the newest sample gave evidence, either way.
        last_active: Unix time of the last sign of work.
        sample: newest utilisation sample.
        state: last published state.
        since: Unix time since when.
        impostor: start ticks of a process that took the pid over while the bytes stayed.
        watched: the sample before did not list it, so we saw it come.
        shape: how it came to its bytes, a new object when they change; None while not known.
    """

    pid: int
    start: int | None
    seen: float
    updated: float
    quiet_since: tuple[float, float]
    memory: int | None = None
    peak: int | None = None
    evidence: bool = False
    last_active: float | None = None
    sample: ProcessUtilization | None = None
    state: State | None = None
    since: float = 0.0
    impostor: int | None = None
    watched: bool = False
    shape: Shape | None = None

    def note(
        self,
        entry: ProcessEntry,
        sample: ProcessUtilization | None,
        device: DeviceReading,
        clock: tuple[float, float],
        *,
        gap: bool,
    ) -> None:
        """Take in one sample.

        Args:
            entry: what NVML lists.
            sample: the holder's own utilisation sample, when the driver gave one.
            device: the device's reading.
            clock: (monotonic, Unix) of the sample.
            gap: samples are missing before this one, so the quiet is not known to have lasted.
        """
        changed = self.memory is not None and entry.memory != self.memory
        worked = sample is not None and (
            sample.sm > 0 or sample.memory > 0 or sample.encoder > 0 or sample.decoder > 0
        )
        if sample is not None:
            self.sample = sample
        if worked or changed:
            self.last_active = clock[1]
            self.evidence = True
            self.quiet_since = clock
        else:
            self.evidence = _quiet_is_known(entry, device)
            if gap or not self.evidence:
                self.quiet_since = clock
        self.memory = entry.memory
        if entry.memory is not None:
            self.peak = entry.memory if self.peak is None else max(self.peak, entry.memory)
            self._form(entry.memory, device)
        self.updated = clock[1]

    def _form(self, memory: int, device: DeviceReading) -> None:
        """Keep the shape; a sample without a device's total leaves it as it was."""
        if device.memory is None or (self.shape is not None and self.shape.memory == memory):
            return
        free = device.memory.free
        if self.shape is not None:
            self.shape = self.shape.risen(memory, free)
        elif self.watched:
            self.shape = Shape(memory, device.memory.total, watched=True, jump=memory, left=free)
        else:
            self.shape = Shape(memory, device.memory.total)

    def judge(self, verdict: Verdict, now: float, started: float | None) -> None:
        """Enter the state of this sample, keeping since when it lasts.

        A holding that is active at first sight has been so since its process started, as far as
        anybody knows; one that is idle, since its last sign of work.
        """
        if verdict.state is self.state:
            return
        if verdict.state is State.IDLE:
            self.since = self.quiet_since[1]
        elif self.state is None and verdict.state is State.ACTIVE and started is not None:
            self.since = min(started, now)
        else:
            self.since = now
        self.state = verdict.state

    def holding(self, entry: ProcessEntry, verdict: Verdict, now: float) -> Holding:
        """Return the immutable holding of this sample."""
        sample = self.sample
        fresh = sample is not None and now - sample.time <= SAMPLE_LIFETIME
        return Holding(
            pid=self.pid,
            start=self.start,
            memory=entry.memory,
            peak=self.peak,
            kinds=entry.kinds,
            state=verdict.state,
            since=self.since,
            why=verdict.why,
            sm=sample.sm if sample is not None and fresh else None,
            last_active=self.last_active,
        )


def _quiet_is_known(entry: ProcessEntry, device: DeviceReading) -> bool:
    """Tell whether the absence of a utilisation sample means something for this holder.

    A device that did nothing at all is evidence for all its holders. Otherwise the per-process
    question must have been answered, and not for a client of MPS, whose work the driver books on the
    server's pid.
    """
    if device.utilization is not None and device.utilization.get("gpu") == 0:
        return True
    return device.process_utilization is not None and "M" not in entry.kinds
