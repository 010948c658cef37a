"""Count the GPU bytes that Python's cyclic collector frees: a tensor in a cycle lives until it runs.

A full collection costs milliseconds; reading the counters around it takes about ten microseconds. The
frequent collections of young objects are not measured, so the figure is a lower bound.
"""

from __future__ import annotations

import gc

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable

FULL_GENERATION = 2
"""The generation of a full collection."""


class GCMonitor:
    """What the cyclic collector has done to GPU memory since the monitor started.

    Attributes:
        freed_bytes: the sum of the GPU bytes that its full collections freed.
        read_allocated: returns the bytes that the program's tensors hold now; None while that is not known.
        after_collection: called after every collection, on whatever thread it ran; must be quick.
    """

    __slots__ = ("_allocated_before", "after_collection", "freed_bytes", "read_allocated")

    def __init__(self, after_collection: Callable[[], None]) -> None:
        self.freed_bytes: int | None = None
        self.read_allocated: Callable[[], int | None] | None = None
        self.after_collection = after_collection
        self._allocated_before: int | None = None

    def start(self) -> None:
        """Make every collection call the monitor."""
        if self not in gc.callbacks:
            gc.callbacks.append(self)

    def stop(self) -> None:
        """Stop collections from calling the monitor."""
        if self in gc.callbacks:
            gc.callbacks.remove(self)

    def reset(self) -> None:
        """Drop the figures and the two functions: a forked child cannot use them."""
        self.freed_bytes = self._allocated_before = self.read_allocated = None

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Read the counters before and after a full collection."""
        try:
            if phase == "stop":
                self.after_collection()
            if info["generation"] != FULL_GENERATION or self.read_allocated is None:
                return
            if phase == "start":
                self._allocated_before = self.read_allocated()
            elif self._allocated_before is not None:
                after = self.read_allocated()
                if after is not None:
                    self.freed_bytes = (self.freed_bytes or 0) + max(0, self._allocated_before - after)
                self._allocated_before = None
        except Exception:
            self.read_allocated = None

    def report_entry(self) -> dict[str, object]:
        """Return what the report has about the collector."""
        return {
            "enabled": gc.isenabled(),
            "collections": gc.get_stats()[FULL_GENERATION]["collections"],
            "freed_bytes": self.freed_bytes,
        }
