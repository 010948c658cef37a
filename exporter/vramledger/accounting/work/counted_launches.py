"""Choose the holders whose launches are counted, from half the idle threshold on, and judge the counts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from vramledger.model.reading import LaunchCount, Reading
from vramledger.model.snapshot import State

MAX_HOLDERS = 16
"""The number of holders that are counted at once; a look at one of them takes 2 to 9 ms every 2 s."""

COUNTED_SHARE = 0.5
"""The share of the idle threshold for which a holder is counted before it is proven idle."""

COUNTED_STATES = (State.ACTIVE, State.IDLE, State.ORPHANED)
"""In the other states a holder does not run, or it is not known who it is."""

HolderId = tuple[int, int]
"""Pid and start time of a process."""


class Candidate(NamedTuple):
    """One holding, as far as it matters here."""

    holder: HolderId  # its process
    memory: int  # its bytes
    quiet: float  # for how many seconds there was no sign of work
    proven: bool  # the device's own counters prove its quiet already


def proves_quiet(count: LaunchCount | None, idle_after: float) -> bool:
    """Tell whether a holder has called nothing for long enough."""
    return count is not None and count.quiet is not None and count.quiet >= COUNTED_SHARE * idle_after


def counts_launches(reading: Reading) -> bool:
    """Tell whether launches are counted on this host now."""
    alive, _ = reading.collectors.get("launches", (False, 0.0))
    return alive


def choose_holders(
    candidates: Iterable[Candidate], counts: Collection[LaunchCount], idle_after: float
) -> tuple[HolderId, ...]:
    """Return the holders that are to be counted: quiet on all their devices, and not proven idle on one.

    Those that are counted already stay, then come those with the most memory.
    """
    memory: dict[HolderId, int] = {}
    busy: set[HolderId] = set()
    needed: set[HolderId] = set()
    for each in candidates:
        memory[each.holder] = memory.get(each.holder, 0) + each.memory
        if each.quiet < COUNTED_SHARE * idle_after:
            busy.add(each.holder)
        elif not each.proven:
            needed.add(each.holder)
    counted = {(count.pid, count.start): count for count in counts}
    wanted = sorted(needed - busy, key=lambda holder: (holder not in counted, -memory[holder], holder))
    impossible = [holder for holder in wanted if holder in counted and counted[holder].problem]
    possible = [holder for holder in wanted if holder not in impossible]
    return tuple(sorted((*possible[:MAX_HOLDERS], *impossible)))
