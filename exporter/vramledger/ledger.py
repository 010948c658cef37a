"""The balance of one device: total = free + reserved + the holdings by state + unattributed, exactly.

Pure integer arithmetic; it neither asks nor remembers anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from vramledger.readings import MemoryReading
from vramledger.snapshot import Book, State


def balance(memory: MemoryReading, holdings: Iterable[tuple[State, int]]) -> Book | None:
    """Balance a device's memory over (state, bytes) of its holdings.

    Used is what is neither free nor reserved: the driver's own ``used`` is read in the same call, but
    only the difference makes the book add up to the byte on every driver. What the holdings add up to
    beyond used (memory shared between processes, readings a moment apart) comes off the state with
    the most bytes first and is returned as the overlap.

    Returns:
        None when the driver's figures contradict themselves (free and reserved exceed the total).
    """
    used = memory.total - memory.free - (memory.reserved or 0)
    if used < 0 or memory.free < 0:
        return None
    states = dict.fromkeys(State, 0)
    for state, held in holdings:
        states[state] += held
    overlap = excess = max(0, sum(states.values()) - used)
    for state in sorted(states, key=lambda each: -states[each]):
        if not excess:
            break
        taken = min(excess, states[state])
        states[state] -= taken
        excess -= taken
    return Book(
        total=memory.total,
        free=memory.free,
        reserved=memory.reserved,
        states=states,
        unattributed=used - sum(states.values()),
        overlap=overlap,
    )
