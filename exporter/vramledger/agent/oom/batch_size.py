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
    """A step that succeeded: its batch, the bytes allocated at its peak and, if known, when it began."""

    __slots__ = ("batch", "peak", "resident")

    def __init__(self, batch: int, peak: int, resident: int | None) -> None:
        self.batch = batch
        self.peak = peak
        self.resident = resident


def fitting_batch(steps: list[Step], failed: int, usable: int) -> int | None:
    """Return the largest batch that fits by the slope of the last steps; None where they do not show it.

    With batches of different sizes the slope is the one of the line through them. With one size it is the
    bytes that the step added to those at its beginning, for each element of the batch.
    """
    sizes = {step.batch for step in steps}
    if not sizes:
        return None
    if len(sizes) > 1:
        mean = sum(step.batch for step in steps) / len(steps)
        height = sum(step.peak for step in steps) / len(steps)
        spread = sum((step.batch - mean) ** 2 for step in steps)
        slope = sum((step.batch - mean) * (step.peak - height) for step in steps) / spread
        base = height - slope * mean
    else:
        known = [step for step in steps if step.resident is not None]
        if not known:
            return None
        largest = max(known, key=lambda step: step.peak)
        base = largest.resident or 0
        slope = (largest.peak - base) / largest.batch
    if slope <= 0 or base < 0:
        return None
    fits = int((MAX_FILL * usable - base) / slope)
    return fits if 1 <= fits < failed else None
