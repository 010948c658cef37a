"""One reading, and what every step of its accounting needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vramledger.accounting.states import StateVerdict
from vramledger.model.reading import ProcessRow, Reading


@dataclass(slots=True)
class Sample:
    """What the steps of the accounting hand on to each other.

    Attributes:
        reading: what was read.
        rows: the processes that /proc shows, by pid.
        longest_gap: seconds; where two samples are further apart, samples are missing between them.
        after_gap: samples are missing before this one, or it is the first.
        verdicts: what a process is on all its devices, by pid; None leaves it to its work on each device.
    """

    reading: Reading
    rows: Mapping[int, ProcessRow]
    longest_gap: float
    after_gap: bool
    verdicts: Mapping[int, StateVerdict | None] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """Unix time of the sample, seconds."""
        return self.reading.time

    @property
    def monotonic(self) -> float:
        """Monotonic time of the sample, seconds."""
        return self.reading.monotonic

    @property
    def clock(self) -> tuple[float, float]:
        """Both, the monotonic time first."""
        return self.reading.monotonic, self.reading.time

    def started_at(self, start: int) -> float:
        """Return the Unix time of a start in ticks since boot."""
        return started_at(self.reading, start)


def started_at(reading: Reading, start: int) -> float:
    """Return the Unix time of a process' start, given in ticks since boot."""
    return reading.boot_time + start / reading.ticks
