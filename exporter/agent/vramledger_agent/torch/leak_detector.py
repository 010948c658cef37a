"""Tell a leak from memory that rises and falls: does the minimum of the allocated bytes still grow?

Without a leak, memory rises and falls within each training step, and its minimum stays the same. A leak
raises this minimum. So we compare the minima of the quarters of the time that we have seen.
"""

from __future__ import annotations

from itertools import pairwise

MAX_MINIMA = 256
"""When there are more minima than this, each pair of neighbours is replaced by the smaller of the two."""

MIN_MINIMA = 8
"""When there are fewer minima than this, there is no answer."""

WARM_UP_SHARE = 0.1
"""The share of the time at the start that does not count: a program loads its model then."""

MIN_RISE_SHARE = 0.25
"""Every rise must be at least this share of the mean rise: one jump is not a leak."""

QUARTERS = 4


class LeakDetector:
    """The history of the allocated bytes on one device."""

    __slots__ = ("_minimum", "_readings", "_readings_per_minimum", "minima")

    def __init__(self) -> None:
        self.minima: list[int] = []  # the minimum of each stretch of readings; all stretches have one length
        self._readings_per_minimum = 1
        self._readings = 0
        self._minimum: int | None = None

    def add(self, allocated: int) -> None:
        """Add a reading, in bytes; readings come at even intervals."""
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
        """Return by how much the minimum has risen: 0 if not steadily, None when it is too early to say."""
        return latest_rise(self.minima)


def latest_rise(minima: list[int]) -> int | None:
    """Return by how many bytes the minima rise, over the whole time or since a later moment.

    A leak may begin after hours. So the second half of the minima is looked at as well, the last quarter, and
    so on. Later parts count only if they end above everything before them: what rises and falls again reaches
    the same height.
    """
    whole = leaked_bytes(minima)
    if whole is None:
        return None
    rises = [whole]
    length = len(minima) // 2
    while length >= MIN_MINIMA:
        before, last = minima[:-length], minima[-length:]
        rise = leaked_bytes(last) or 0
        if min(last[-length // QUARTERS :]) > max(before):
            rises.append(rise)
        length //= 2
    return max(rises)


def leaked_bytes(minima: list[int]) -> int | None:
    """Return by how many bytes the minima of their quarters rise; see :func:`latest_rise`."""
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
