"""Say how much memory was missing, and which batch would fit: pure functions over what was known."""

from __future__ import annotations

from vramledger.agent.oom.verdict import AllocationFailure

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


class Step:
    """A step that succeeded: its batch, its peak and, if known, the bytes of activations at the peak."""

    __slots__ = ("activations", "batch", "peak")

    def __init__(self, batch: int, peak: int, activations: int | None) -> None:
        self.batch = batch
        self.peak = peak
        self.activations = activations


def fitting_batch(steps: list[Step], failed: int, usable: int) -> int | None:
    """Return the largest batch that fits by the slope of the last steps; None where they do not show it.

    With batches of different sizes the slope is the one of the line through their peaks. With one size it is
    the activations at the peak, for each element of the batch.
    """
    line = _line_through(steps) if len({step.batch for step in steps}) > 1 else _line_of_one(steps)
    if line is None:
        return None
    base, slope = line
    if slope <= 0 or base < 0:
        return None
    fits = int((MAX_FILL * usable - base) / slope)
    return fits if 1 <= fits < failed else None


def _line_through(steps: list[Step]) -> tuple[float, float]:
    """Return where the line of least squares begins, and its slope."""
    batch = sum(step.batch for step in steps) / len(steps)
    peak = sum(step.peak for step in steps) / len(steps)
    spread = sum((step.batch - batch) ** 2 for step in steps)
    slope = sum((step.batch - batch) * (step.peak - peak) for step in steps) / spread
    return peak - slope * batch, slope


def _line_of_one(steps: list[Step]) -> tuple[float, float] | None:
    known = [(step.peak, step.activations, step.batch) for step in steps if step.activations is not None]
    if not known:
        return None
    peak, activations, batch = max(known)
    return float(peak - activations), activations / batch
