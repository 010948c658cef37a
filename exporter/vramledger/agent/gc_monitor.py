"""Count the GPU bytes that Python's cyclic collector frees: a tensor in a cycle lives until it runs.

A full collection costs milliseconds, reading the counters around it some ten microseconds; the frequent
collections of young objects are not looked at, so the figure is a lower bound.
"""

from __future__ import annotations

import gc

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable

OLDEST = 2
"""The generation of a full collection."""


class Collector:
    """What the cyclic collector did to GPU memory since we watch it.

    Attributes:
        freed: GPU bytes less after its full collections than before them.
        allocated: returns the bytes that the program's tensors hold now, None while nobody knows.
        nudge: called after every collection, on whatever thread it ran; must be quick.
    """

    __slots__ = ("allocated", "before", "freed", "nudge")

    def __init__(self, nudge: Callable[[], None]) -> None:
        self.freed: int | None = None
        self.allocated: Callable[[], int | None] | None = None
        self.before: int | None = None
        self.nudge = nudge

    def watch(self) -> None:
        """Be told of collections."""
        if self not in gc.callbacks:
            gc.callbacks.append(self)

    def unwatch(self) -> None:
        """Be told no more."""
        if self in gc.callbacks:
            gc.callbacks.remove(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Read the counters before and after a full collection."""
        try:
            if phase == "stop":
                self.nudge()
            if info["generation"] != OLDEST or self.allocated is None:
                return
            if phase == "start":
                self.before = self.allocated()
            elif self.before is not None:
                after = self.allocated()
                if after is not None:
                    self.freed = (self.freed or 0) + max(0, self.before - after)
                self.before = None
        except Exception:
            self.allocated = None

    def entry(self) -> dict[str, object]:
        """Return what the report says about the collector."""
        return {
            "enabled": gc.isenabled(),
            "collections": gc.get_stats()[OLDEST]["collections"],
            "freed_bytes": self.freed,
        }
