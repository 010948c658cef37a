"""Calculate with numbers of bytes that are known only within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from vramledger.model.uncharged_memory import LEAST_BYTES, MIB

TOLERANCE = 16 * MIB
"""Bytes by which two figures that mean the same memory differ, besides 1 % of them."""


def alike(one: int, other: int) -> bool:
    """Tell whether two figures mean the same memory."""
    return abs(one - other) <= max(TOLERANCE, max(one, other) // 100)


class Range(NamedTuple):
    """Bytes of one source: what it certainly has, and what it can have at most."""

    least: int
    most: int

    @property
    def exact(self) -> bool:
        """Whether the range is as narrow as the readings allow."""
        return self.least > 0 and alike(self.least, self.most)

    def within(self, other: Range) -> Range:
        """Return what both ranges allow, apart from noise; this one, if they contradict each other."""
        if other.least > self.most + LEAST_BYTES or self.least > other.most + LEAST_BYTES:
            return self
        least = max(self.least, min(other.least, self.most))
        return Range(least, max(least, min(self.most, other.most)))


NOTHING = Range(0, 0)

_S = TypeVar("_S")


def narrow(total: int, ranges: Mapping[_S, Range]) -> dict[_S, Range]:
    """Narrow the ranges of sources that together have a number of bytes.

    A source has at least what all others cannot have, and at most what no other certainly has. Where they
    certainly have more than there is, nothing is certain any more.
    """
    least, most = sum(each.least for each in ranges.values()), sum(each.most for each in ranges.values())
    if least > total and not alike(least, total):
        ranges, least = {source: Range(0, each.most) for source, each in ranges.items()}, 0
    narrowed = {}
    for source, each in ranges.items():
        low = max(each.least, total - (most - each.most))
        high = max(0, min(each.most, total - (least - each.least)))
        narrowed[source] = Range(min(low, high), high)
    return narrowed
