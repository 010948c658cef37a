"""Decide when NVML's expensive queries, and samples as a whole, can give an answer that is new.

With 25 holders on an H200 (driver 580), the list of compute processes takes 1.03 ms of CPU time, the rows of
utilisation 1.49, the used bytes 0.07 and a sample of GPM's counters 0.19. The last two are read in every
sample, and show when the first two must be read as well. They also show that a whole sample would say what
the last one said; then they are all that is read.
"""

from __future__ import annotations

from collections.abc import Collection

from vramledger.model.device_signs import CountedActivity
from vramledger.model.reading import MemoryReading, ProcessEntry, ProcessUtilization

LIST_INTERVAL = 5.0
"""Seconds after which the list is read, whatever the used bytes are: changes in one second may balance."""

ROWS_INTERVAL = 2.5
"""Seconds after which the rows are read in any case; so long is a row shown as a process' utilisation."""

ATTENTION = 5.0
"""Seconds for which every sample reads the list after anything has changed."""

STEADY_AFTER = 10.0
"""Seconds of sameness before rows are read at :data:`ROWS_INTERVAL`: a burst needs readings after it."""


class ListPace:
    """Whether the list of processes can have changed: all that changes it changes the used bytes."""

    def __init__(self) -> None:
        self._used: MemoryReading | None = None
        self._read_at = self._changed_at = float("-inf")
        self._list: tuple[ProcessEntry, ...] | None = None
        self._asked_for = True

    def expect_changes(self) -> None:
        """Have the next samples read the list; may be called from another thread."""
        self._asked_for = True

    def known(self, memory: MemoryReading | None, now: float) -> tuple[ProcessEntry, ...] | None:
        """Return the list if ``memory``, the used bytes of this sample, shows it unchanged; else None."""
        if self._asked_for or memory is None or memory != self._used:
            self._asked_for = False
            self._changed_at = now
        self._used = memory
        if now - self._changed_at < ATTENTION or now - self._read_at >= LIST_INTERVAL:
            return None
        return self._list

    def is_calm(self, now: float) -> bool:
        """Tell whether the list is known and nothing has changed for some time."""
        return self._list is not None and not self._asked_for and now - self._changed_at >= ATTENTION

    def is_unchanged(self, memory: MemoryReading | None) -> bool:
        """Tell whether the used bytes are those of the last sample."""
        return memory is not None and memory == self._used

    def remember(self, processes: tuple[ProcessEntry, ...] | None, now: float) -> None:
        """Remember the list as it was read, None if that failed."""
        if processes is None or processes != self._list:
            self._changed_at = now
        self._list, self._read_at = processes, now


class RowPace:
    """Whether rows of utilisation that are new can say what the counters and the last rows have not said.

    No row is lost by this: a query covers the time since the one before. Where the counters have shown for a
    while that kernels ran in every sample, or that nothing did in any, the rows of some seconds together say
    the same as those of each second. Without counters they are read each time.
    """

    def __init__(self) -> None:
        self._doing: CountedActivity | None = None
        self._since = self._read_at = float("-inf")
        self._none_known = False
        self._incomplete = True

    def are_due(self, counted: CountedActivity | None, now: float) -> bool:
        """Tell whether a sample needs the rows; ``counted``: what the counters say since the last one."""
        doing = _doing(counted)
        if doing != self._doing:
            self._doing, self._since = doing, now
        return not self.is_steady(now) or now - self._read_at >= ROWS_INTERVAL

    def is_steady(self, now: float) -> bool:
        """Tell whether the device has done the same in every sample for some time, by its counters."""
        return self._doing is not None and now - self._since >= STEADY_AFTER and not self._incomplete

    def is_unchanged(self, counted: CountedActivity | None) -> bool:
        """Tell whether the device does what it did in the last sample, by its counters."""
        return _doing(counted) == self._doing

    def remember(
        self,
        rows: Collection[ProcessUtilization] | None,
        listed: Collection[int],
        now: float,
        *,
        failed: bool,
    ) -> None:
        """Remember a query's new ``rows``, None where the driver has none, or that it ``failed``."""
        busy = self._doing is not None and any(self._doing)
        named = {row.pid for row in rows or ()}
        stranger = not named.issubset(listed)
        self._incomplete = failed or stranger or (busy and not named)
        self._none_known = rows is None
        self._read_at = now

    @property
    def between(self) -> tuple[ProcessUtilization, ...] | None:
        """What a sample says that has not read them: no new row, or that the driver has none."""
        return None if self._none_known else ()


def _doing(counted: CountedActivity | None) -> CountedActivity | None:
    """Return what the counters say, without what they say of the memory while kernels run: it may vary."""
    if counted is not None and counted.kernels:
        return CountedActivity(kernels=True, other=True)
    return counted
