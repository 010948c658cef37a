"""Tell a leak from a program that breathes: is what is allocated at its least still growing?

A training step's memory rises and falls; what it falls back to stays. A leak raises that. So the least of
every quarter of the time that we have seen is compared.
"""

from __future__ import annotations

from itertools import pairwise

KEEP = 256
"""Readings that are kept; when there are more, two neighbours become one, the lesser of them."""

ENOUGH = 8
"""Readings below which nothing can be said."""

WARM_UP = 0.1
"""Share of the time at the start that does not count: a program loads its model then."""

EVEN = 0.25
"""Every rise is at least this share of the mean rise: one jump is no leak."""

QUARTERS = 4


class LeakDetector:
    """How much was allocated on one device, as time went on; bytes."""

    __slots__ = ("_every", "_least", "_skipped", "values")

    def __init__(self) -> None:
        self.values: list[int] = []
        self._every = 1
        self._skipped = 0
        self._least: int | None = None

    def add(self, now: float, allocated: int) -> None:
        """Take a reading; they come at even distances."""
        del now
        self._least = allocated if self._least is None else min(self._least, allocated)
        self._skipped += 1
        if self._skipped < self._every:
            return
        self.values.append(self._least)
        self._least = None
        self._skipped = 0
        if len(self.values) > KEEP:
            self.values = [min(pair) for pair in zip(self.values[::2], self.values[1::2], strict=False)]
            self._every *= 2

    def leaked(self) -> int | None:
        """Return by how much the least has risen: 0 if not steadily, None when it is too early to say."""
        return leaked(self.values)


def leaked(values: list[int]) -> int | None:
    """Return by how many bytes the least of a reading's quarters rises; see :meth:`LeakDetector.leaked`."""
    if len(values) < ENOUGH:
        return None
    settled = values[int(len(values) * WARM_UP) :]
    size = len(settled) / QUARTERS
    least = [min(settled[int(place * size) : int((place + 1) * size)]) for place in range(QUARTERS)]
    rises = [after - before for before, after in pairwise(least)]
    total = least[-1] - least[0]
    if total <= 0 or min(rises) < EVEN * total / len(rises):
        return 0
    return total
