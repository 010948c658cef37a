"""Balance one device: total = free + driver reserve + the holdings by state + unattributed, exactly.

This is integer arithmetic only; it reads nothing and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from vramledger.model.reading import MemoryReading
from vramledger.model.snapshot import Ledger, State


def balance(
    memory: MemoryReading,
    holdings: Iterable[tuple[State, int]],
    *,
    blind: bool = False,
    uncharged: Iterable[tuple[State, int]] = (),
) -> Ledger | None:
    """Balance a device's memory over (state, bytes) of its holdings.

    ``uncharged`` are the bytes that NVML charges to no process and whose holders are known, at most those
    that the holdings leave over.

    We are ``blind`` outside the host's PID namespace, where NVML lists no process to us. The bytes beyond the
    holdings then belong to holders that we cannot see: they are unknown, and not unattributed.

    Used is what is neither free nor the driver's reserve. The driver's own ``used`` is read in the same call,
    but only the difference makes the ledger add up to the byte on every driver. The holdings may add up to
    more than used, where processes share memory or the readings are a moment apart. This excess is subtracted
    from the state with the most bytes first, and is returned as the overlap.

    Returns:
        None when the driver's figures contradict themselves (free and the reserve exceed the total).
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
    rest = left = used - sum(states.values())
    for state, held in uncharged:
        given = min(held, rest)
        states[state] += given
        rest -= given
    if blind:
        states[State.UNKNOWN] += rest
        rest = 0
    return Ledger(
        total=memory.total,
        free=memory.free,
        driver_reserved=memory.reserved,
        states=states,
        unattributed=rest,
        overlap=overlap,
        uncharged=left,
    )
