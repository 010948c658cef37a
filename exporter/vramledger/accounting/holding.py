"""What is remembered of one holding from sample to sample: its peak, its last work, its state.

A holding is (device, process); signs of work are utilisation samples, a change of its bytes, and
the allocations that its agent counts. Measured on an H200: a program with small kernels has no utilisation
sample in 96 of 100 seconds, so one empty second proves nothing and a change of bytes counts as work.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramledger.accounting.policies import MemoryPattern
from vramledger.accounting.states import StateVerdict
from vramledger.model.reading import DeviceReading, ProcessEntry, ProcessUtilization
from vramledger.model.snapshot import Holding, State

SAMPLE_LIFETIME = 2.5
"""Seconds that a utilisation sample is shown; the driver makes one a second for a busy process."""


@dataclass(slots=True)
class HoldingState:
    """The memory of one holding.

    Attributes:
        start: start ticks of the holder, None when never seen in /proc.
        pid: as NVML lists it.
        seen: Unix time of the first sample that listed it.
        updated: Unix time of the last sample that listed it.
        watched: monotonic time of that sample.
        memory: the last bytes that NVML told.
        peak: highest bytes so far.
        quiet_since: (monotonic, Unix) since when every sample gave evidence of quiet.
        evidence: whether the newest sample gave evidence, either way.
        last_active: Unix time of the last sign of work.
        sample: newest utilisation sample.
        sampled: monotonic time of it; its own stamp is of the wall clock, which may step afterwards.
        state: last published state.
        since: Unix time since when.
        impostor: start ticks of a process that took the pid over while the bytes stayed.
        from_start: the sample before did not list it, so we saw it come.
        shape: how it came to its bytes, a new object when they change; None while not known.
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
    sample: ProcessUtilization | None = None
    sampled: float = 0.0
    state: State | None = None
    since: float = 0.0
    impostor: int | None = None
    from_start: bool = False
    shape: MemoryPattern | None = None

    def note(  # noqa: PLR0913 every sign of work that there is
        self,
        entry: ProcessEntry,
        sample: ProcessUtilization | None,
        device: DeviceReading,
        clock: tuple[float, float],
        *,
        longest: float,
        allocated: bool = False,
    ) -> None:
        """Take in one sample.

        Args:
            entry: what NVML lists.
            sample: the holder's own utilisation sample, when the driver gave one.
            device: the device's reading.
            clock: (monotonic, Unix) of the sample.
            longest: seconds after the previous sample from which on samples are missing between the two,
                so that the quiet is not known to have lasted.
            allocated: its agent says that it has allocated there since.
        """
        changed = None not in (self.memory, entry.memory) and entry.memory != self.memory
        gap = clock[0] - self.watched > longest
        worked = sample is not None and (
            sample.sm > 0 or sample.memory > 0 or sample.encoder > 0 or sample.decoder > 0
        )
        if sample is not None:
            self.sample, self.sampled = sample, clock[0] - max(0.0, clock[1] - sample.time)
        if worked or changed or allocated:
            self.last_active = clock[1]
            self.evidence = True
            self.quiet_since = clock
        else:
            self.evidence = _quiet_is_known(entry, device)
            if gap or not self.evidence:
                self.quiet_since = clock
        if entry.memory is not None:
            self.memory = entry.memory
            self.peak = entry.memory if self.peak is None else max(self.peak, entry.memory)
            self._form(entry.memory, device)
        self.watched, self.updated = clock

    def _form(self, memory: int, device: DeviceReading) -> None:
        """Keep the shape; a sample without a device's total leaves it as it was."""
        if device.memory is None or (self.shape is not None and self.shape.memory == memory):
            return
        free = device.memory.free
        if self.shape is not None:
            self.shape = self.shape.risen(memory, free)
        elif self.from_start:
            self.shape = MemoryPattern(memory, device.memory.total, watched=True, jump=memory, left=free)
        else:
            self.shape = MemoryPattern(memory, device.memory.total)

    def judge(self, verdict: StateVerdict, now: float, started: float | None) -> None:
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

    def holding(self, entry: ProcessEntry, verdict: StateVerdict) -> Holding:
        """Return the immutable holding of the sample that :meth:`note` took in."""
        sample = self.sample
        fresh = self.watched - self.sampled <= SAMPLE_LIFETIME
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
            quiet_since=self.quiet_since[1],
            evidence=self.evidence,
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
