"""Say how much memory was missing, and which batch would fit: pure functions over what was known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vramledger.agent.oom.verdict import AllocationFailure
from vramledger.agent.torch.step_peaks import OPTIMIZER

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


class PartPeak(NamedTuple):
    """The peak of a part of a step: bytes, and how many of them were activations."""

    bytes: int
    activations: int


class Step(NamedTuple):
    """A step that succeeded.

    Attributes:
        batch: its size.
        peak: its highest bytes.
        parts: the peaks of its forward pass, its backward pass and its optimizer; empty where they are not
            known.
    """

    batch: int
    peak: int
    parts: Mapping[str, PartPeak]


def fitting_batch(steps: Sequence[Step], failed: int, usable: int) -> int | None:
    """Return the largest batch that fits by the slope of the last steps; None where they do not show it.

    Each part of a step has a slope of its own: a small batch has its peak in the optimizer, which needs the
    same for any batch, and a large one in the backward pass. With batches of different sizes the slope is the
    one of the line through a part's peaks. With one size it is the activations at the peak, for each element
    of the batch; at an optimizer's peak these do not follow the batch.
    """
    several = len({step.batch for step in steps}) > 1
    if all(step.parts for step in steps):
        names = {name for step in steps for name in step.parts if several or name != OPTIMIZER}
        series = [[(step.batch, step.parts[name]) for step in steps if name in step.parts] for name in names]
    else:
        series = [[(step.batch, PartPeak(step.peak, 0)) for step in steps]] if several else []
    fits = [_fits(one, usable) for one in series]
    found = [size for size in fits if size is not None]
    if not found:
        return None
    fitting = min(found)
    return fitting if 1 <= fitting < failed else None


def _fits(peaks: Sequence[tuple[int, PartPeak]], usable: int) -> int | None:
    """Return the largest batch that fits by one part's peaks; None where they do not rise with the batch."""
    several = len({batch for batch, _ in peaks}) > 1
    base, slope = _line_through(peaks) if several else _line_of_one(peaks)
    if slope <= 0 or base < 0:
        return None
    return int((MAX_FILL * usable - base) / slope)


def _line_through(peaks: Sequence[tuple[int, PartPeak]]) -> tuple[float, float]:
    """Return where the line of least squares begins, and its slope."""
    mean = sum(batch for batch, _ in peaks) / len(peaks)
    mean_peak = sum(peak.bytes for _, peak in peaks) / len(peaks)
    spread = sum((batch - mean) ** 2 for batch, _ in peaks)
    slope = sum((batch - mean) * (peak.bytes - mean_peak) for batch, peak in peaks) / spread
    return mean_peak - slope * mean, slope


def _line_of_one(peaks: Sequence[tuple[int, PartPeak]]) -> tuple[float, float]:
    batch, peak = max(peaks, key=lambda one: one[1].bytes)
    return float(peak.bytes - peak.activations), peak.activations / batch
