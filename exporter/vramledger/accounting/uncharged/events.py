"""Remember what happened to the uncharged bytes of each pool of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from vramledger.accounting.uncharged import solver
from vramledger.accounting.uncharged.solver import Identity, Left, Range, Source, Sources
from vramledger.model.device_signs import LEAST_BYTES, MIB, beyond_contexts
from vramledger.model.snapshot import Holding, Ledger

CONTEXT_LEAST = 128 * MIB
"""What every program is charged without sharing it, its context: 518 MiB on an H100, less on small cards."""

PRESSURE = 256 * MIB
"""With less free memory the driver swaps one program's managed pages for another's, at the same sum."""

WATCHED = 2.5
"""The longest seconds between two looks at the used bytes in which no creator can have come and gone."""

READ_LATE = 30.0
"""Seconds after bytes have moved within which a mapping that has grown may have grown before them: mappings
are read every 3 to 10 s, of many holders more slowly."""


class PoolMoment(NamedTuple):
    """When a sample was taken, and who held memory then."""

    now: float  # monotonic seconds
    clock: float  # Unix time
    gap: float  # the longest span since the sample before without samples missing between them, in seconds
    # seconds after the sample before until the newest look, which found the used bytes unchanged
    watched: float
    # the holders of all devices of the host; of one that does not answer, those that it listed last
    everybody: frozenset[Identity]
    complete: bool  # whether each device has listed its holders at least once


class HolderBefore(NamedTuple):
    """A holder of a pool in the last sample."""

    pid: int  # as NVML lists it
    start: int | None
    memory: int | None  # what it was charged there
    managed: Range | None = None  # what it had in managed memory, None where nothing was to be found out
    bound: int | None = None  # what it could have in managed memory at most, None when not known

    @property
    def identity(self) -> Identity:
        return self.pid, self.start


class PoolState(msgspec.Struct, omit_defaults=True):
    at: float | None = None  # monotonic time of the last sample, None before the first
    rest: int = 0  # uncharged bytes then, beyond those of the contexts
    reference: int = 0  # the steady part of them when bytes last moved
    moved: float = 0.0  # monotonic time at which they last moved
    there: frozenset[Identity] = frozenset()  # who was listed then
    free: int = 0  # free bytes then
    unwatched: int = 0  # bytes of which somebody may have got a handle while we did not watch
    late: int = 0  # bytes that came while we did not watch, whoever has them
    lefts: list[Left] = []  # what ended holders left behind
    holders: list[HolderBefore] = []  # who was listed in the last sample


def record_calm(state: PoolState, ledger: Ledger, listed: Sequence[tuple[str, Holding]], now: float) -> bool:
    """Record a sample in which nothing is uncharged (nearly every one); say whether that was all."""
    if state.rest or state.unwatched or state.lefts or _rest_of(ledger, len(listed)):
        return False
    state.at, state.free = now, ledger.free
    state.reference = state.late = 0
    state.holders = [HolderBefore(each.pid, each.start, each.memory) for _, each in listed]
    return True


def _rest_of(ledger: Ledger, holders: int) -> int:
    """Return uncharged bytes beyond contexts; 0 where the driver counts its own reserve as used."""
    return 0 if ledger.driver_reserved is None else beyond_contexts(ledger.unattributed, holders)


def record_events(
    state: PoolState,
    pool: solver.MemoryPool,
    moment: PoolMoment,
    user_of: Callable[[int, int | None], str | None],
) -> Sources:
    """Record what has changed, and return who can have the bytes now; ``user_of`` names a process' user."""
    rest = _rest_of(pool.ledger, len(pool.holders))
    if state.at is None:
        state.rest = state.reference = state.unwatched = state.late = rest
    now = moment.now
    before, span = state.rest, 0.0 if state.at is None else now - state.at
    holders = {each.identity: each for each in pool.holders}
    listed = {each.identity: each for each in state.holders}
    ended = [each for identity, each in listed.items() if identity not in holders]
    # The memory and the list of processes are read a moment apart: one reading alone neither adds bytes nor
    # removes any.
    steady, highest = min(rest, before), max(rest, before)
    quiet = state.at is not None and span <= moment.gap and _is_quiet(state, pool, steady, ended)
    if span - moment.watched > WATCHED:
        state.unwatched += max(0, rest - before)
        state.late += max(0, rest - before)
    identities = {each.identity for each in ended}
    for left in state.lefts:
        if not quiet or not identities.isdisjoint(left.group):
            left.range = Range(max(0, left.range.least - max(0, before - rest)), left.range.most)
    if not quiet or ended:
        state.reference = steady
    if not quiet:
        state.moved, state.there = now, frozenset(holders)
    settled: dict[Identity, Range] = {}
    if quiet and not _was_read_late(state, holders, now):
        settled = {each.identity: each.managed for each in listed.values() if each.managed is not None}
    if ended and (found := _left_range(ended, rest - before)) is not None:
        largest = max(ended, key=lambda each: each.memory or 0)
        creator = largest.pid, user_of(largest.pid, largest.start)
        elsewhere = moment.everybody.difference(holders, listed)
        group = frozenset(holders)
        unlisted = not moment.complete
        state.lefts.append(Left(creator, moment.clock, now, group, elsewhere, found, unlisted))
    state.unwatched, state.late = min(state.unwatched, highest), min(state.late, highest)
    for left in state.lefts:
        left.range = Range(min(left.range.least, highest), min(left.range.most, highest))
        left.elsewhere &= moment.everybody
    state.lefts = [left for left in state.lefts if left.range.most >= LEAST_BYTES]
    state.at, state.rest, state.free = now, rest, pool.ledger.free
    return solver.collect_sources(
        pool, steady, state.lefts, now, unwatched=state.unwatched, late=state.late, settled=settled
    )


def record_found(state: PoolState, sources: Sources, found: Mapping[Source, Range]) -> None:
    state.unwatched = sources.unwatched
    state.holders = [
        HolderBefore(
            *each.identity,
            each.holding.memory,
            found[each.identity] if each.identity in sources.managed else None,
            each.bound,
        )
        for each in sources.able.values()
    ]
    if sources.settled:
        for left in sources.lefts:  # it never becomes more
            left.range = Range(min(left.range.least, found[left].most), found[left].most)


def _of_ended(ended: Iterable[HolderBefore]) -> Range:
    gone = [each.managed or solver.NOTHING for each in ended]
    return Range(sum(each.least for each in gone), sum(each.most for each in gone))


def _was_read_late(state: PoolState, holders: Mapping[Identity, solver.PoolHolder], now: float) -> bool:
    """Tell whether a mapping has grown that perhaps was there before the bytes that have last moved.

    JAX that grows takes them and maps them at once, and its mapping is read some seconds later (measured on
    an H100).
    """
    if now - state.moved > READ_LATE:
        return False
    bounds = {each.identity: each.bound or 0 for each in state.holders}
    known = ((bounds.get(i, 0), holders[i].bound) for i in state.there if i in holders)
    return any(bound is not None and bound > before + LEAST_BYTES for before, bound in known)


def _left_range(ended: Sequence[HolderBefore], rise: int) -> Range | None:
    """Return what holders that have just ended can have left behind; None if it is nothing.

    Their managed memory is gone with them, so they left what the sum did not fall by it. Where that may be
    nothing, they left no more than they were charged for beyond a context.
    """
    managed = _of_ended(ended)
    least, most = rise + managed.least, rise + managed.most
    if least < 2 * LEAST_BYTES:
        least = 0
        most = min(most, sum(max(0, (each.memory or 0) - CONTEXT_LEAST) for each in ended))
    return Range(least, most) if most >= 2 * LEAST_BYTES else None


def _is_quiet(state: PoolState, pool: solver.MemoryPool, count: int, ended: Sequence[HolderBefore]) -> bool:
    """Tell whether no uncharged bytes can have moved from one holder to another since they last moved.

    While memory is short, pages of one program make room for those of another one. A holder that ended takes
    its own bytes along, also those that another one had left it, and nobody else's.
    """
    if min(pool.ledger.free, state.free) < max(PRESSURE, pool.ledger.total // 100):
        return False
    if abs(count - state.reference) <= LEAST_BYTES:
        return True
    gone, identities = _of_ended(ended), {each.identity for each in ended}
    left = sum(each.range.most for each in state.lefts if not identities.isdisjoint(each.group))
    return (
        bool(ended)
        and gone.least - solver.TOLERANCE <= state.reference - count <= gone.most + left + solver.TOLERANCE
    )
