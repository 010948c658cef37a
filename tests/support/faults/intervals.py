"""95 % intervals of what was counted: shares, rates and medians; exact where that is simple."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z = 1.959964
_TAIL = 0.025


def share(found: int, of: int) -> tuple[float, float]:
    """Return Wilson's interval of a share."""
    if not of:
        return 0.0, 1.0
    part, more = found / of, _Z * _Z / of
    middle = (part + more / 2) / (1 + more)
    half = _Z * math.sqrt(part * (1 - part) / of + more / (4 * of)) / (1 + more)
    return (0.0 if found == 0 else max(0.0, middle - half)), (1.0 if found == of else min(1.0, middle + half))


def rate(events: int, hours: float) -> tuple[float, float]:
    """Return the exact interval of events in 1,000 hours, for events that are independent (Poisson)."""
    low = _mean_where(lambda mean: 1 - _at_most(events - 1, mean)) if events else 0.0
    high = _mean_where(lambda mean: 1 - _at_most(events, mean), 1 - _TAIL)
    return 1000 * low / hours, 1000 * high / hours


def median(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval of the median, from the order of the values; all of them where they are few."""
    ordered, count = sorted(values), len(values)
    below, cut = 0.0, 0
    for number in range(count // 2):
        below += math.comb(count, number) * 0.5**count
        if below > _TAIL:
            break
        cut = number
    return ordered[cut], ordered[-1 - cut]


def _at_most(events: int, mean: float) -> float:
    """Return the probability of at most so many events."""
    return sum(
        math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(events + 1)
    )


def _mean_where(probability: object, wanted: float = _TAIL) -> float:
    """Return the mean at which a probability that rises with it is as wanted."""
    low, high = 1e-9, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if probability(middle) < wanted:  # type: ignore[operator]
            low = middle
        else:
            high = middle
    return low
