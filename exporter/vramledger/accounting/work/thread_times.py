"""Say from CPU times that a holder has done nothing on its GPUs, beside any neighbour, or may have worked.

Nobody launches anything without running on a CPU. So if no thread but the driver's own ran, nothing was
launched in that time. What was launched before may still run: the driver names it in every row of its
utilisation (measured on an H100: a kernel of 18 s, alone and beside a busy program, in 13 of 13 queries).
Where there are no rows, a device that was not fully busy at some moment since then had no such kernel.

Idle Python programs have helper threads that wake up by a clock: 60 to 95 microseconds of CPU a wake where
they do so twice a second (a notebook's sockets), 100 to 200 where they do so every 5 or 10 s (JAX, pinned
memory, torch.compile); the number of wakes in 30 s varies by two at most. Work from a thread of Python took
390 to 570 a wake. So a helper of Python that keeps such a rhythm is a good sign, with a known gap: a launch
alone, whose result nobody waits for, took 165. In C a launch takes 50 to 95 with the wake, as much as doing
nothing, so the helpers of other programs say nothing.

The driver's rows name the process that ran last. Of two programs in a pipeline, where the second one works as
soon as the first one has, they name only the second. The CPU time of the first tells it. Measured on an H200
with one sample a second: the first program of a pipeline took 1.45 ms in seconds in which the GPU worked
(1.33 at least), and 0.57 in the others. Idle programs beside it took the same in both: an idle context 0.61
and 0.61 ms, a notebook 0.89 and 0.88, a server that answers a request a second 1.88 and 1.82. On an H100 a
64x64 matmul took 0.4 ms more, a copy as much, a CUDA graph 1.7; four threads that poll took 42.0 and 41.6,
with 1.3 ms between the quartiles, and one that prepares data 498 and 500, with 47: these are not told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from vramledger.accounting.holders.states import Quiet
from vramledger.model.reading import Reading, ThreadTimes
from vramledger.model.snapshot import Grade, UnixTime

Clock = tuple[float, UnixTime]
HolderId = tuple[int, int]

HELPER_WAKE = 0.00025
"""Seconds of CPU time that an idle helper thread takes each time it wakes up, at most."""

HELPER_BEYOND = 0.00002
"""Seconds of CPU time that it takes in a second beyond 0.1 ms a wake or 0.2 ms a second, at most."""

RHYTHM_SHARE, RHYTHM_WAKES = 0.04, 2.0
"""By how much wakes may differ from the time before: a clock makes the same number, requests do not."""

NEWEST = 90.0
"""Seconds after which the newest look is too old to prove anything."""

BRIDGED = 180.0
"""Seconds without looks, as after a restart, that quiet before and after them may bridge without proof."""

FULLY_BUSY = 0.95
"""The rate of a GPU that may be busy with one kernel all the time; while one runs, it is at 1."""


class ThreadQuiet(msgspec.Struct, omit_defaults=True):
    """What is remembered of the threads of one process."""

    until: float  # monotonic time of the newest look
    # since when no thread but the driver's ran; None if one ran in the newest span
    still_since: Clock | None = None
    # since when the main thread did not run, and the others kept their rhythm
    steady_since: Clock | None = None
    wakes: float = 0.0  # how often a second the others ran
    # monotonic time at which the newest time without looks ended; quiet that began before it is not proven
    bridged_until: float = 0.0
    fresh: bool = True  # a look has ended since samples were missing, as after a restart


class DeviceSigns(NamedTuple):
    """What a device says of work that goes on while its program sleeps."""

    # since when every sample had rows, and all work was somebody's whom they named; None where the newest had
    # none
    named_since: Clock | None
    # monotonic time of the newest sample in which it was not fully busy; None without one
    free_at: float | None
    rated: bool  # whether it has a rate of utilisation
    client: bool  # whether the holder is a client of MPS: the driver names the server in its place


class ThreadTimesTracker:
    """Find out since when the threads of each process have been quiet."""

    def __init__(self, state: dict[int, dict[int, ThreadQuiet]]) -> None:
        self.state = state

    def update(self, reading: Reading, *, after_gap: bool) -> Mapping[HolderId, ThreadQuiet]:
        """Record a reading's looks, and return what is known; after missing samples a new look counts."""
        offset = reading.time - reading.monotonic
        known = {(pid, start): each for pid, some in self.state.items() for start, each in some.items()}
        if after_gap:
            known = {identity: replace(each, fresh=False) for identity, each in known.items()}
        for times in reading.threads:
            identity = times.pid, times.start
            found = _next(known.get(identity), times, offset)
            if found is None:
                known.pop(identity, None)
            else:
                known[identity] = found
        if after_gap or reading.threads:
            self._remember(known)
        return known if reading.host_pid_namespace is not False else {}

    def _remember(self, known: Mapping[HolderId, ThreadQuiet]) -> None:
        self.state.clear()
        for (pid, start), each in known.items():
            self.state.setdefault(pid, {})[start] = each


def _next(before: ThreadQuiet | None, times: ThreadTimes, offset: float) -> ThreadQuiet | None:
    """Return what is known after one more look; None after one that could not read everything."""
    if not times.complete or times.until <= times.since:
        return None
    elapsed = times.until - times.since
    gap = float("inf") if before is None else times.since - before.until
    if before is None or gap > BRIDGED:
        before, gap = ThreadQuiet(times.since), 0.0
    begin = times.since, times.since + offset
    wakes = times.other_runs / elapsed
    known = replace(before, until=times.until, wakes=wakes, fresh=True)
    if gap > 0:
        known = replace(known, bridged_until=times.since)
    known = replace(known, still_since=(before.still_since or begin) if times.still else None)
    if not _is_small(times):
        return replace(known, steady_since=None)
    expected = before.wakes * elapsed
    differs = abs(times.other_runs - expected) > max(RHYTHM_WAKES, RHYTHM_SHARE * expected)
    if before.steady_since is None or differs:
        return replace(known, steady_since=begin)
    # The mean of all that was seen, not the newest, so that a rhythm cannot drift.
    so_far = times.since - before.steady_since[0]
    mean = (before.wakes * so_far + times.other_runs) / (so_far + elapsed) if so_far > 0 else wakes
    return replace(known, wakes=mean)


def _is_small(times: ThreadTimes) -> bool:
    if times.still:
        return True
    return (
        not times.main_runs
        and not times.changed
        and times.longest is not None
        and times.beyond is not None
        and times.longest <= HELPER_WAKE
        and times.beyond <= HELPER_BEYOND
        and times.python is True
    )


def quiet_by_threads(
    known: ThreadQuiet | None, signs: DeviceSigns, workless_since: Clock, now: float, idle_after: float
) -> Quiet | None:
    """Return since when a holder's threads show it quiet, for ``idle_after`` seconds at least, or None."""
    if known is None or not known.fresh or now - known.until > NEWEST:
        return None
    for since, words in (
        (known.still_since, "no thread of it ran except the driver's"),
        (known.steady_since, "its main thread did not run, and the others only kept their rhythm"),
    ):
        begun = max(workless_since, since) if since is not None else None
        if begun is None or known.until - begun[0] < idle_after:
            continue
        named = signs.named_since is not None and signs.named_since[0] <= begun[0] and not signs.client
        free = signs.free_at is not None and signs.free_at > begun[0] + _RATE_PERIOD
        if not named and not free and signs.rated:
            continue
        proven = named and since is known.still_since and begun[0] >= known.bridged_until
        reason = f"{words}, and the driver named it in no row" if named else words
        return Quiet(Grade.PROVEN if proven else Grade.SEEN, begun, reason=reason)
    return None


_RATE_PERIOD = 2.0
"""Seconds for which a rate may still be that of an earlier time."""


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
    values.append(value)
    del values[:-most]
