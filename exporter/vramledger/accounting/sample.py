"""Hold one reading, and what every step of its accounting needs to know of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vramledger.accounting.states import StateVerdict
from vramledger.model.reading import DeviceReading, ProcessRow, ProcessUtilization, Reading


@dataclass(slots=True)
class Sample:
    """What the accounting steps pass on to each other.

    Attributes:
        reading: what was read.
        rows: the processes that /proc shows, by pid.
        longest_gap: seconds; if two samples are further apart, samples are missing between them.
        after_gap: samples are missing before this one, or it is the first.
        verdicts: the state that a process has on all its devices, by pid; None where each device's work
            decides.
        time: Unix time of the sample, seconds.
        monotonic: monotonic time of the sample, seconds.
        clock: both, the monotonic time first.
    """

    reading: Reading
    rows: Mapping[int, ProcessRow]
    longest_gap: float
    after_gap: bool
    verdicts: Mapping[int, StateVerdict | None] = field(default_factory=dict)
    time: float = field(init=False)
    monotonic: float = field(init=False)
    clock: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        # Plain attributes, not properties: every holding reads them, 512 on a host with 8 GPUs and 64 holders
        # each.
        self.time, self.monotonic = self.reading.time, self.reading.monotonic
        self.clock = (self.monotonic, self.time)

    def started_at(self, start: int) -> float:
        """Return the Unix time of a start in ticks since boot."""
        return started_at(self.reading, start)


class DeviceSample(NamedTuple):
    """One device in a sample.

    Attributes:
        sample: the sample.
        device: what the driver reported.
        utilization: the holders' own utilisation samples, as far as the driver gave any, by pid.
        allocated: pids whose agents report an allocation there since the previous report.
    """

    sample: Sample
    device: DeviceReading
    utilization: Mapping[int, ProcessUtilization]
    allocated: Collection[int] = ()


def started_at(reading: Reading, start: int) -> float:
    """Return the Unix time of a process' start, given in ticks since boot."""
    return reading.boot_time + start / reading.ticks
