"""Tell a leak from a program whose memory rises and falls: does the least that is allocated still grow?

A training step's memory rises and falls; what it falls back to stays. A leak raises that. So the minima of
the quarters of the time that we have seen are compared.
"""

from __future__ import annotations

from itertools import pairwise

MAX_MINIMA = 256
"""When there are more, two neighbours become one, the lesser of them."""

MIN_MINIMA = 8
"""With fewer nothing can be said."""

WARM_UP_SHARE = 0.1
"""Share of the time at the start that does not count: a program loads its model then."""

MIN_RISE_SHARE = 0.25
"""Every rise is at least this share of the mean rise: one jump is not a leak."""

QUARTERS = 4


class LeakDetector:
    """How much was allocated on one device, as time went on.

    Attributes:
        minima: the least bytes of each stretch of readings, all of one length.
    """

    __slots__ = ("_minimum", "_readings", "_readings_per_minimum", "minima")

    def __init__(self) -> None:
        self.minima: list[int] = []
        self._readings_per_minimum = 1
        self._readings = 0
        self._minimum: int | None = None

    def add(self, allocated: int) -> None:
        """Add a reading, in bytes; readings come at even distances."""
        self._minimum = allocated if self._minimum is None else min(self._minimum, allocated)
        self._readings += 1
        if self._readings < self._readings_per_minimum:
            return
        self.minima.append(self._minimum)
        self._minimum = None
        self._readings = 0
        if len(self.minima) > MAX_MINIMA:
            self.minima = [min(pair) for pair in zip(self.minima[::2], self.minima[1::2], strict=False)]
            self._readings_per_minimum *= 2

    def leaked_bytes(self) -> int | None:
        """Return by how much the least has risen: 0 if not steadily, None when it is too early to say."""
        return leaked_bytes(self.minima)


def leaked_bytes(minima: list[int]) -> int | None:
    """Return by how many bytes the minima of their quarters rise; see :meth:`LeakDetector.leaked_bytes`."""
    if len(minima) < MIN_MINIMA:
        return None
    settled = minima[int(len(minima) * WARM_UP_SHARE) :]
    size = len(settled) / QUARTERS
    least = [min(settled[int(quarter * size) : int((quarter + 1) * size)]) for quarter in range(QUARTERS)]
    rises = [after - before for before, after in pairwise(least)]
    total = least[-1] - least[0]
    if total <= 0 or min(rises) < MIN_RISE_SHARE * total / len(rises):
        return 0
    return total
