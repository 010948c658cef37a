"""Record since when threads of holders have slept in the driver, and which processes are stuck by that.

A thread that sleeps without interruption cannot even be killed. That is usual for milliseconds, for example
while the driver frees memory. If a thread's count of context switches stays the same, it has not woken in
between. A thread that sleeps so for more than a minute is stuck, even if samples are missing.
"""

from __future__ import annotations

from vramledger.accounting.sample import Sample
from vramledger.model.reading import DriverWait

STUCK_AFTER = 60.0
"""Seconds in the driver after which a thread is stuck."""

StuckThread = tuple[DriverWait, float]
"""A wait, and for how many seconds we have seen it."""


class DriverWaitTracker:
    """Remember each wait from its first sample on."""

    def __init__(self) -> None:
        """Start without waits."""
        self._since: dict[DriverWait, float] = {}

    def update(self, sample: Sample) -> dict[tuple[int, int], StuckThread]:
        """Record the waits of a sample; return the longest of each stuck process, by pid and start time."""
        self._since = {wait: self._since.get(wait, sample.monotonic) for wait in sample.reading.waits}
        stuck: dict[tuple[int, int], StuckThread] = {}
        for wait, since in self._since.items():
            seconds = sample.monotonic - since
            known = stuck.get((wait.pid, wait.start))
            if seconds > STUCK_AFTER and (known is None or seconds > known[1]):
                stuck[wait.pid, wait.start] = (wait, seconds)
        return stuck
