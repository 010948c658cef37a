"""Balance one device: its parts add up to the total, exactly.

The parts are free, the driver's reserve, what the operating system holds, the holdings by state, and
unattributed. This is integer arithmetic only; it reads nothing and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vramledger.model.reading import COHERENT, DeviceReading, MemoryReading
from vramledger.model.snapshot import Holding, Ledger, State, UndividedBytes


class SystemBytes(NamedTuple):
    """What the operating system may hold of a device's used memory."""

    least: int | None  # what it counts as its own or as ordinary memory of programs; None when not known
    most: int  # all that it counts as used, the holdings included


def system_bytes(device: DeviceReading) -> SystemBytes | None:
    """Return the most that the operating system may hold of a device; None where it manages no memory."""
    if device.memory is None or device.memory_kind is None:
        return None
    total, node = device.memory.total, device.node
    if device.memory_kind != COHERENT or node is None:
        return SystemBytes(None, total)
    # What is not in the node was never given to the operating system: the driver keeps it.
    return SystemBytes(node.file + node.anonymous + node.kernel, max(0, total - node.free))


def balance_device(
    device: DeviceReading,
    holdings: Sequence[Holding],
    *,
    blind: bool,
    undivided: UndividedBytes | None = None,
) -> Ledger | None:
    """Balance a device over its holdings, with what is known of bytes that NVML charges to nobody."""
    if device.memory is None:
        return None
    uncharged = [(each.state, each.uncharged.least) for each in holdings if each.uncharged is not None]
    if undivided is not None:
        uncharged.append((undivided.state, undivided.bytes))
    charged = ((each.state, each.memory or 0) for each in holdings)
    system = system_bytes(device)
    return balance(device.memory, charged, blind=blind, uncharged=uncharged, system=system)


def balance(
    memory: MemoryReading,
    holdings: Iterable[tuple[State, int]],
    *,
    blind: bool = False,
    uncharged: Iterable[tuple[State, int]] = (),
    system: SystemBytes | None = None,
) -> Ledger | None:
    """Balance a device's memory over (state, bytes) of its holdings.

    ``uncharged`` are the bytes that NVML charges to no process and whose holders are known, at most those
    that the holdings leave over. We are ``blind`` outside the host's PID namespace, where NVML lists no
    process to us. The bytes beyond the holdings then belong to holders that we cannot see: they are unknown,
    and not unattributed. Where the operating system manages the memory, it has the bytes that nobody is
    charged for, up to the limit in ``system``. If we are blind, only what it counts as its own; None when
    that is not known. Used is what is neither free nor the driver's reserve. The driver's own ``used`` is
    read in the same call, but only the difference makes the ledger add up to the byte on every driver. The
    holdings may add up to more than used, where processes share memory or the readings are a moment apart.
    This excess is subtracted from the state with the most bytes first, and is returned as the overlap.
    Returns None when the driver's figures contradict themselves (free and the reserve exceed the total).
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
    operating_system = None
    if system is not None:
        most = system.least if blind else max(0, system.most - sum(states.values()))
        operating_system = None if most is None else min(rest, most)
        rest -= operating_system or 0
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
        operating_system=operating_system,
    )
