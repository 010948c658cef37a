"""What the simulated exporters said, read from the samples themselves and not through a query."""

import re
import struct
from bisect import bisect_right
from operator import itemgetter

from tests.support.dashboards.database import STALE, Labels, Samples

Values = dict[Labels, float]


def values(samples: Samples, name: str, at: float, **matching: str) -> Values:
    """Return the value that each matching series of a metric had at a Unix time; ended series have none."""
    found = {}
    for labels, points in samples.points.items():
        own = dict(labels)
        fits = (re.fullmatch(pattern, own.get(label, "")) for label, pattern in matching.items())
        if own["__name__"] != name or not all(fits):
            continue
        place = bisect_right(points, at, key=itemgetter(0)) - 1
        if place >= 0 and points[place][1] != STALE:
            found[labels] = float(struct.unpack("<d", points[place][1])[0])
    return found


def increases(samples: Samples, name: str, begin: float, end: float, **matching: str) -> Values:
    """Return how much each counter rose between two moments; one that began in between rose from 0."""
    before = values(samples, name, begin, **matching)
    after = values(samples, name, end, **matching)
    return {labels: value - before.get(labels, 0.0) for labels, value in after.items()}


def by_label(found: Values, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, value in found.items():
        key = dict(labels).get(label, "")
        sums[key] = sums.get(key, 0.0) + value
    return sums
