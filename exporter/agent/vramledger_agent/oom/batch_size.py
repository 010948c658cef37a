"""Say how much memory was missing, and which batch would fit: pure functions over what was known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vramledger_agent.oom.verdict import AllocationFailure
from vramledger_agent.torch.step_peaks import OPTIMIZER

MAX_FILL = 0.98
"""The share of the memory that a suggested batch may take; pieces of the cache remain unused."""


def missing_bytes(failure: AllocationFailure) -> int | None:
    """Return how many bytes the allocation lacked; 0 if there were enough in pieces, None if not known."""
    usable = usable_bytes(failure)
    if usable is None or failure.active is None:
        return None
    return max(0, failure.active + failure.requested - usable)


def usable_bytes(failure: AllocationFailure) -> int | None:
    """Return the most that the process could have in use, given what others hold now."""
    if failure.reserved is None:
        return None
    return failure.reserved + max(0, min(failure.free, failure.capacity - failure.reserved))


SAME_SHARE = 0.01
"""Bytes are the same if they differ by no more than this share."""


class PartPeak(NamedTuple):
    """The peak of a part of a step: bytes, and how many of them were activations."""

    bytes: int
    activations: int


class Step(NamedTuple):
    """A step that succeeded."""

    batch: int  # its size
    peak: int  # its highest bytes
    # the peaks of its forward pass, its backward pass and its optimizer; empty where they are not known
    parts: Mapping[str, PartPeak]


def fitting_batch(steps: Sequence[Step], failed: int, usable: int) -> int | None:
    """Return the largest batch that fits by the slope of the last steps; None where they do not show it.

    Each part of a step has a slope of its own: a small batch has its peak in the optimizer, which needs the
    same for any batch, and a large one in the backward pass. Within a part the peak moves too: a small batch
    has that of its backward pass at the end, beside all gradients, and a large one at the beginning. So only
    steps with the same bytes beside the activations are on one line. Where they had several sizes, the slope
    is that of the line of least squares. With one size it is the activations at the peak, for each element of
    the batch; at an optimizer's peak these do not follow the batch.
    """
    fits = []
    if all(step.parts for step in steps):
        for name in {name for step in steps for name in step.parts}:
            peaks = _beside_the_same([(step.batch, step.parts[name]) for step in steps if name in step.parts])
            if name != OPTIMIZER or _has_several_sizes(peaks):
                fits.append(_fits(peaks, usable))
    else:
        peaks = [(step.batch, PartPeak(step.peak, 0)) for step in steps]
        if _has_several_sizes(peaks):
            fits.append(_fits(peaks, usable))
    fitting = min((size for size in fits if size is not None), default=0)
    return fitting if 1 <= fitting < failed else None


Peaks = Sequence[tuple[int, PartPeak]]
"""Batches, each with a part's peak."""


def _has_several_sizes(peaks: Peaks) -> bool:
    return len({batch for batch, _ in peaks}) > 1


def _beside_the_same(peaks: Peaks) -> Peaks:
    """Return the peaks that have the same bytes beside the activations as that of the largest batch."""
    _, largest = max(peaks, key=lambda one: (one[0], one[1].bytes))
    others = largest.bytes - largest.activations
    return [
        (batch, peak)
        for batch, peak in peaks
        if math.isclose(peak.bytes - peak.activations, others, rel_tol=SAME_SHARE)
    ]


def _fits(peaks: Peaks, usable: int) -> int | None:
    """Return the largest batch by one part's peaks; 0 if none fits, None if they do not rise with it."""
    base, slope = _line_through(peaks) if _has_several_sizes(peaks) else _line_of_one(peaks)
    if slope > 0 and base < 0:  # they rise faster than the batch
        base, slope = _line_of_one(peaks)
        if slope <= 0:
            return 0
    if slope <= 0:
        return None
    return int((MAX_FILL * usable - base) / slope)


def _line_through(peaks: Peaks) -> tuple[float, float]:
    """Return where the line of least squares begins, and its slope."""
    mean = sum(batch for batch, _ in peaks) / len(peaks)
    mean_peak = sum(peak.bytes for _, peak in peaks) / len(peaks)
    spread = sum((batch - mean) ** 2 for batch, _ in peaks)
    slope = sum((batch - mean) * (peak.bytes - mean_peak) for batch, peak in peaks) / spread
    return mean_peak - slope * mean, slope


def _line_of_one(peaks: Peaks) -> tuple[float, float]:
    batch, peak = max(peaks, key=lambda one: one[1].bytes)
    return float(peak.bytes - peak.activations), peak.activations / batch
