"""Tell from a holder's CPU time that it may have worked when the driver named another holder.

The driver's rows name the process that ran last. Of two programs in a pipeline, where the second one works as
soon as the first one has, they name only the second. But nobody launches anything without CPU time. Measured
on an H200 with one sample a second: the first program of a pipeline took 1.45 ms in seconds in which the GPU
worked (1.33 at least), and 0.57 in the others. Idle programs beside it took the same in both: an idle context
0.61 and 0.61 ms, a notebook 0.89 and 0.88, a server that answers a request a second 1.88 and 1.82. On an H100
a 64x64 matmul took 0.4 ms more, a copy as much, a CUDA graph 1.7.

Programs that do nothing on an H100 took, in a median quiet second and in one with work of others: contexts of
PyTorch, CuPy, JAX and of the driver alone 0.6 and 0.6 ms, a notebook 0.9 and 0.9, a server that wakes up 20
times a second 3.9 and 4.0. Four threads that poll took 42.0 and 41.6, with 1.3 ms between the quartiles, a
program that prepares data 498 and 500, with 47: of these it says nothing.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

STANDS_OUT = 0.00025
"""Seconds of CPU time by which a sample must exceed the usual: the smallest work took 0.4 ms."""

QUIET_KEPT, QUIET_NEEDED = 31, 8
BURSTS_KEPT, BURSTS_RECENT = 15, 5

OUTLIERS = 3
"""Kept bursts that must stand out where a program works in some only; of idle ones two may, by chance."""

SATURATED = 0.5
"""The share of a core from which CPU time says nothing: a program that spins does not take more to launch."""

_THREE_QUARTERS = 0.75

_V = TypeVar("_V")


class CpuBesideWork(msgspec.Struct, omit_defaults=True):
    """What is remembered of one holder."""

    known: bool = False  # whether what it took in the last sample is known
    quiet: list[float] = []  # what it took a second in the last samples in which the device did nothing
    # whether it took more in the last samples in which the device worked for another holder
    bursts: list[bool] = []

    def update(self, taken: float | None, elapsed: float, *, busy: bool, own: bool) -> None:
        """Record a sample. ``own``: whether it is known that this holder worked."""
        self.known = taken is not None
        if own or taken is None:
            self.bursts.clear()
        elif not busy and elapsed > 0:
            _append_newest(self.quiet, taken / elapsed, QUIET_KEPT)
        elif (usual := self._usual(elapsed)) is not None:
            _append_newest(self.bursts, taken - usual > STANDS_OUT, BURSTS_KEPT)

    def tells(self, elapsed: float) -> bool:
        """Tell whether work would show: the CPU time is known, steady, and not that of a spinning loop."""
        return self.known and self._usual(elapsed) is not None

    @property
    def may_work(self) -> bool:
        """Whether it took more CPU time in most of the last bursts, or in some of all; one is chance."""
        recent = self.bursts[-BURSTS_RECENT:]
        return sum(recent) >= max(2, (len(recent) + 1) // 2) or sum(self.bursts) >= OUTLIERS

    def _usual(self, elapsed: float) -> float | None:
        """Return the CPU time of a usual quiet sample of this length, None where work would not stand out."""
        if len(self.quiet) < QUIET_NEEDED:
            return None
        ordered = sorted(self.quiet)
        usual = elapsed * ordered[len(ordered) // 2]
        spread = elapsed * ordered[int(_THREE_QUARTERS * len(ordered))] - usual
        return None if spread > STANDS_OUT or usual > SATURATED * elapsed else usual


def _append_newest(values: list[_V], value: _V, most: int) -> None:
    """Add a value, and drop the oldest ones beyond ``most``."""
    values.append(value)
    del values[:-most]
