"""Find the holders of bytes that NVML charges to no process, and never guess one.

Two kinds of memory are in no process' bytes (measured on H100 and H200, driver 580): managed memory, and
memory whose creator has ended while another process still has an exported handle of it. What is known of
them are bounds. A process has no more managed memory than its mappings of ``/dev/nvidia-uvm``; a creator
leaves no more than what was charged to it; together they are what NVML reports as used and charges to nobody.

So each possible holder is a source with a range, and the ranges must add up to these bytes. If a source has
all that the others cannot have, that much is certainly its own. Bytes that were there at our first look may
come from a creator that we never saw, so another holder may have them too. What stays uncertain is published
as a range, and its bytes are undivided: one of the named holders has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vramledger.accounting.byte_ranges import NOTHING, TOLERANCE, Range, alike, narrow
from vramledger.accounting.owner_usage import SETTLE
from vramledger.accounting.uncharged_evidence import HolderEvidence, LeftEvidence, created, describe
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import (
    Holding,
    Ledger,
    LeftBytes,
    State,
    UnchargedBytes,
    UndividedBytes,
)
from vramledger.model.uncharged_memory import LEAST_BYTES, MIB, beyond_contexts

CONTEXT_LEAST = 128 * MIB
"""What every program is charged without being able to share it: its context. On an H100 it takes 518 MiB, on
small cards less."""

PRESSURE = 256 * MIB
"""With less free memory than this the driver moves managed pages of one program out for those of another, and
the sum stays as it is."""

UNEXPLAINED = 256 * MIB
"""Uncharged bytes beyond all mappings that say nothing against the mappings. JAX with unified memory had 126
MiB beyond its own on an H100; other programs had 0 to 66."""

WATCHED = 2.5
"""The longest span between two looks at the used bytes, in seconds, in which no creator can have started,
shared its memory and ended."""

READ_LATE = 30.0
"""Seconds after bytes have moved within which a mapping that has grown may have grown before them: mappings
are read every 3 to 10 s, of many holders more slowly."""

_MILDEST = (
    *(State.ACTIVE, State.UNKNOWN, State.IDLE, State.STOPPED),
    *(State.ORPHANED, State.STUCK, State.ZOMBIE, State.DEAD),
)
"""Undivided bytes count under the mildest state of those who may have them: to know less is never harsher."""

Identity = tuple[int, int | None]
"""A holder's pid and start."""


class PoolHolder(NamedTuple):
    """A holder of a pool of memory, as NVML and /proc show it.

    Attributes:
        uuid: the device on which it is listed.
        holding: its holding there.
        user: the name of its user, None when not known.
        owner: type and name of its owner, None when not known.
        bound: the managed memory that it can have at most, None when not known.
        reported: managed memory that its agent reports there, None without such a report.
    """

    uuid: str
    holding: Holding
    user: str | None
    owner: tuple[str, str] | None
    bound: int | None
    reported: int | None = None

    @property
    def identity(self) -> Identity:
        """Its pid and start."""
        return self.holding.pid, self.holding.start


class MemoryPool(NamedTuple):
    """The memory of a device, or of the compute instances that share one.

    Attributes:
        key: the UUID under which it is counted.
        ledger: its balance before anything uncharged has a holder.
        holders: everybody whom NVML lists there.
        hidden: processes that have the device open and that NVML does not list; None when not known.
    """

    key: str
    ledger: Ledger
    holders: tuple[PoolHolder, ...]
    hidden: tuple[HiddenHolder, ...] | None


class PoolMoment(NamedTuple):
    """When a sample was taken, and who held memory then.

    Attributes:
        now: monotonic seconds.
        clock: Unix time.
        gap: the longest span since the sample before without samples missing between them, in seconds.
        watched: seconds after the sample before until the newest look, which found the used bytes unchanged.
        everybody: the holders of all devices of the host; of one that does not answer, those that it listed
            last.
        complete: whether each device has listed its holders at least once.
    """

    now: float
    clock: float
    gap: float
    watched: float
    everybody: frozenset[Identity]
    complete: bool


class PoolResult(NamedTuple):
    """What was found out about a pool.

    Attributes:
        key: the UUID under which it is counted; empty when nothing is known of it.
        held: what each holder has uncharged, by (UUID, pid); one that cannot have any is not in it.
        undivided: the bytes that one of several holders has; None if there are none.
        left: what ended holders have left behind.
        ledger: the balance of the pool, if nothing is uncharged there beyond contexts.
    """

    key: str = ""
    held: Mapping[tuple[str, int], UnchargedBytes] = {}
    undivided: UndividedBytes | None = None
    left: tuple[LeftBytes, ...] = ()
    ledger: Ledger | None = None


@dataclass(slots=True, eq=False)
class _Left:
    """Memory that a holder left behind when it ended. It can only become less.

    Attributes:
        creator: its pid and the name of its user.
        ended: Unix time at which its end was seen.
        at: the same moment on the monotonic clock.
        group: the holders of that moment.
        elsewhere: the holders of other devices at that moment. One that has mapped the memory keeps it, and
            NVML does not list it here: measured with ``cuMemCreate`` and NCCL on two H100s.
        range: the bytes that it left and that are still in use.
        unlisted: whether the holders of another device were not known at that moment, so that one of them may
            have the memory too.
    """

    creator: tuple[int, str | None]
    ended: float
    at: float
    group: frozenset[Identity]
    elsewhere: frozenset[Identity]
    range: Range
    unlisted: bool = False


Source = Identity | _Left | str
"""A holder's managed memory, what an ended holder left, or one of the two that nobody can be named for."""

_UNWATCHED, _UNKNOWN = "unwatched", "unknown"


@dataclass(slots=True)
class _PoolState:
    """What is remembered of a pool.

    Attributes:
        at: monotonic time of the last sample, None before the first.
        rest: uncharged bytes then, beyond those of the contexts.
        reference: the steady part of them when bytes last moved.
        moved: monotonic time at which they last moved.
        there: who was listed then.
        free: free bytes then.
        unwatched: bytes of which somebody may have got a handle while we did not watch.
        late: bytes that came while we did not watch, whoever has them.
        lefts: what ended holders left behind.
        holders: who was listed then.
        listed: the same, if nothing was known or to be found out of them.
        managed: what each of them had in managed memory.
        bounds: what each of them could have at most.
    """

    at: float | None = None
    rest: int = 0
    reference: int = 0
    moved: float = 0.0
    there: frozenset[Identity] = frozenset()
    free: int = 0
    unwatched: int = 0
    late: int = 0
    lefts: list[_Left] = field(default_factory=list)
    holders: dict[Identity, PoolHolder] = field(default_factory=dict)
    listed: Sequence[tuple[str, Holding]] = ()
    managed: dict[Identity, Range] = field(default_factory=dict)
    bounds: dict[Identity, int] = field(default_factory=dict)

    def of_ended(self, ended: Iterable[PoolHolder]) -> Range:
        """Return what holders that have ended had in managed memory."""
        gone = [self.managed.get(each.identity, NOTHING) for each in ended]
        return Range(sum(each.least for each in gone), sum(each.most for each in gone))


class UnchargedTracker:
    """Remember, for each pool, what came, what was left behind and who certainly had what."""

    def __init__(self) -> None:
        """Start with nothing remembered."""
        self._pools: dict[str, _PoolState] = {}

    def shift_times(self, seconds: float) -> None:
        """Move the Unix times along with a clock that was set."""
        for state in self._pools.values():
            for left in state.lefts:
                left.ended += seconds

    def keep_only(self, keys: Collection[str]) -> None:
        """Forget all pools except these."""
        for key in [key for key in self._pools if key not in keys]:
            del self._pools[key]

    def record_calm(
        self, key: str, ledger: Ledger, listed: Sequence[tuple[str, Holding]], now: float
    ) -> bool:
        """Record a sample of a pool in which nothing is uncharged; say whether that was all.

        Nearly every sample is like this, and a host may have hundreds of holders.
        """
        state = self._pools.setdefault(key, _PoolState())
        if state.rest or state.unwatched or state.lefts or _rest_of(ledger, len(listed)):
            return False
        state.at, state.free, state.listed = now, ledger.free, listed
        state.reference = state.late = 0
        state.holders, state.managed, state.bounds = {}, {}, {}
        return True

    def update(
        self,
        pools: Iterable[MemoryPool],
        moment: PoolMoment,
        holder: Callable[[str, Holding], PoolHolder],
    ) -> dict[str, PoolResult]:
        """Record one sample.

        Args:
            pools: those whose ledger is known, and for which :meth:`record_calm` was not all.
            moment: when it was taken, and who held memory then.
            holder: returns what is known of a holder that was listed on a device.
        """
        samples = []
        for pool in pools:
            state = self._pools.setdefault(pool.key, _PoolState())
            if state.listed:
                known = [holder(*each) for each in state.listed]
                state.holders, state.listed = {each.identity: each for each in known}, ()
            samples.append(_record(state, pool, moment))
        foreign = _foreign_bytes(samples)
        results = {}
        for sample in samples:
            found = sample.narrowed(foreign)
            sample.remember(found)
            results[sample.pool.key] = _publish(sample, found)
        return results


def _rest(pool: MemoryPool) -> int:
    """Return the uncharged bytes of a pool that the contexts of its holders do not explain.

    A driver that does not report its own reserve counts it as used, so nothing can be said there.
    """
    return _rest_of(pool.ledger, len(pool.holders))


def _rest_of(ledger: Ledger, holders: int) -> int:
    return 0 if ledger.driver_reserved is None else beyond_contexts(ledger.unattributed, holders)


def _record(state: _PoolState, pool: MemoryPool, moment: PoolMoment) -> _PoolSample:
    """Record what has changed since the last sample, and return the sources of this one."""
    rest = _rest(pool)
    if state.at is None:
        state.rest = state.reference = state.unwatched = state.late = rest
    now = moment.now
    before, span = state.rest, 0.0 if state.at is None else now - state.at
    holders = {each.identity: each for each in pool.holders}
    ended = [each for identity, each in state.holders.items() if identity not in holders]
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
    settled = state.managed if quiet and not _was_read_late(state, holders, now) else {}
    state.bounds = {identity: each.bound for identity, each in holders.items() if each.bound is not None}
    if ended and (found := _left_range(state, ended, rest - before)) is not None:
        largest = max(ended, key=lambda each: each.holding.memory or 0)
        creator = largest.holding.pid, largest.user
        elsewhere = moment.everybody.difference(holders, state.holders)
        group = frozenset(holders)
        unlisted = not moment.complete
        state.lefts.append(_Left(creator, moment.clock, now, group, elsewhere, found, unlisted))
    state.unwatched, state.late = min(state.unwatched, highest), min(state.late, highest)
    for left in state.lefts:
        left.range = Range(min(left.range.least, highest), min(left.range.most, highest))
        left.elsewhere &= moment.everybody
    state.lefts = [left for left in state.lefts if left.range.most >= LEAST_BYTES]
    state.at, state.rest, state.free, state.holders = now, rest, pool.ledger.free, holders
    return _PoolSample(state, pool, steady, settled)


def _was_read_late(state: _PoolState, holders: Mapping[Identity, PoolHolder], now: float) -> bool:
    """Tell whether a mapping has grown that perhaps was there before the bytes that have last moved.

    Who has these bytes was then found out with a bound that was too low. JAX that grows takes them and maps
    them at once, and its mapping is read some seconds later (measured on an H100).
    """
    if now - state.moved > READ_LATE:
        return False
    known = ((state.bounds.get(i, 0), holders[i].bound) for i in state.there if i in holders)
    return any(bound is not None and bound > before + LEAST_BYTES for before, bound in known)


def _left_range(state: _PoolState, ended: list[PoolHolder], rise: int) -> Range | None:
    """Return what holders that have just ended can have left behind; None if it is nothing.

    Their managed memory is gone with them, so they left what the sum did not fall by it. Where that may be
    nothing, they left no more than they were charged for beyond a context.
    """
    managed = state.of_ended(ended)
    least, most = rise + managed.least, rise + managed.most
    if least < 2 * LEAST_BYTES:
        least = 0
        most = min(most, sum(max(0, (each.holding.memory or 0) - CONTEXT_LEAST) for each in ended))
    return Range(least, most) if most >= 2 * LEAST_BYTES else None


def _is_quiet(state: _PoolState, pool: MemoryPool, count: int, ended: list[PoolHolder]) -> bool:
    """Tell whether no uncharged bytes can have moved from one holder to another since they last moved.

    While memory is short, pages of one program make room for those of another one. A holder that ended takes
    its own bytes along, also those that another one had left it, and nobody else's.
    """
    if min(pool.ledger.free, state.free) < max(PRESSURE, pool.ledger.total // 100):
        return False
    if abs(count - state.reference) <= LEAST_BYTES:
        return True
    gone, identities = state.of_ended(ended), {each.identity for each in ended}
    left = sum(each.range.most for each in state.lefts if not identities.isdisjoint(each.group))
    return bool(ended) and gone.least - TOLERANCE <= state.reference - count <= gone.most + left + TOLERANCE


class _PoolSample:
    """Who can have the uncharged bytes of a pool in one sample.

    Attributes:
        pool: the pool.
        state: what is remembered of it.
        bytes: its uncharged bytes beyond those of the contexts.
        able: the holders.
        managed: how much managed memory each of them can have; empty without evidence for any.
        lefts: what ended holders left, once it is certain that it was not only freed late.
        rest_is_small: hardly more bytes are there than all sources can have.
        pending: what was perhaps only freed late.
        hidden: processes that NVML does not list and that may have what an ended holder left.
        matched: the mappings are together as large as the uncharged bytes.
        alone: only one holder is there, nobody is hidden, and its mappings are known.
        unwatched: bytes of which an unknown holder may have a handle.
        settled: the ranges of the last sample, if nothing can have moved since.
    """

    def __init__(
        self, state: _PoolState, pool: MemoryPool, count: int, settled: Mapping[Identity, Range]
    ) -> None:
        """Collect the sources."""
        self.pool, self.state, self.bytes, self.settled = pool, state, count, settled
        self.able = {each.identity: each for each in pool.holders}
        self.hidden = tuple(each for each in pool.hidden or () if each.kind != "monitor")
        # The driver may keep a handle of a dead process, but its managed memory went with its mappings.
        alive = {i: each for i, each in self.able.items() if each.holding.state is not State.DEAD}
        bounds = {identity: each.bound for identity, each in alive.items()}
        evident = any(bounds.values())
        self.managed = {
            identity: min(count, count if bound is None else bound)
            for identity, bound in bounds.items()
            if bound or (bound is None and evident)
        }
        at = state.at or 0.0
        self.lefts = [left for left in state.lefts if at - left.at >= SETTLE]
        self.pending = [left for left in state.lefts if at - left.at < SETTLE]
        self._compare_mappings(bounds)
        self.unwatched = state.unwatched
        self.rest_is_small = True

    def _compare_mappings(self, bounds: Mapping[Identity, int | None]) -> None:
        """Compare the mappings with the bytes; if these are all theirs, nobody else can have any."""
        count, pool = self.bytes, self.pool
        evident = any(bounds.values())
        readable = all(bounds[identity] is not None for identity in self.managed)
        mapped = sum(bounds[identity] or 0 for identity in self.managed)
        charged_to_nobody = pool.ledger.unattributed
        fits = alike(mapped, count) or count <= mapped <= charged_to_nobody
        self.matched = bool(count) and evident and readable and fits
        self.alone = len(self.able) == 1 and not self.hidden and readable and evident
        if self.matched or (count and self.alone and mapped + UNEXPLAINED >= count):
            self.state.unwatched = 0

    def narrowed(self, foreign: Mapping[Identity, int]) -> dict[Source, Range]:
        """Return the range of each source.

        ``foreign`` are bytes on a holder's devices that cannot be its own; on which device is not known.
        """
        ranges: dict[Source, Range] = {identity: Range(0, most) for identity, most in self.managed.items()}
        ranges.update({left: left.range for left in (*self.lefts, *self.pending)})
        ranges[_UNWATCHED] = Range(0, self.unwatched)
        room = sum(each.most for each in ranges.values())
        # More bytes than all sources can have: somebody whom we do not know has some, and perhaps all.
        beyond = max(0, self.bytes - room)
        unknown = beyond if beyond <= UNEXPLAINED or alike(room, self.bytes) else self.bytes
        self.rest_is_small = unknown == beyond and not foreign
        unknown = max([unknown, *(foreign.get(identity, 0) for identity in self.managed)])
        ranges[_UNKNOWN] = Range(0, min(unknown, self.bytes))
        for identity, before in self.settled.items():
            if identity in self.managed:
                ranges[identity] = ranges[identity].within(before)
        return narrow(self.bytes, ranges)

    def remember(self, found: Mapping[Source, Range]) -> None:
        """Remember the ranges of this sample."""
        self.state.managed = {identity: found[identity] for identity in self.managed}
        if self.settled:
            for left in self.lefts:  # it never becomes more
                left.range = Range(min(left.range.least, found[left].most), found[left].most)

    def heirs(self, left: _Left) -> frozenset[Identity]:
        """Return the holders that can have what an ended one left: those of that moment, otherwise all.

        Only one of them can have passed the handle on to a later one.
        """
        there = left.group & frozenset(self.able)
        return there if there or left.elsewhere else frozenset(self.able)

    @property
    def others(self) -> frozenset[int]:
        """Return the pids that NVML does not list here and that may have what an ended holder left."""
        elsewhere = {pid for left in self.lefts for pid, _ in left.elsewhere}
        return frozenset(elsewhere | {each.pid for each in self.hidden})


def _foreign_bytes(samples: Iterable[_PoolSample]) -> dict[Identity, int]:
    """Return by how much a process would have more managed memory on its devices than it has mapped.

    Then some of these bytes are not its own. It may also be that the driver keeps copies of its pages on
    several devices, which it does for memory that is mostly read.
    """
    certain: dict[Identity, int] = {}
    bounds: dict[Identity, int] = {}
    for sample in samples:
        found = sample.narrowed({})
        for identity in sample.managed:
            if (bound := sample.able[identity].bound) is not None:
                bounds[identity] = bound
                certain[identity] = certain.get(identity, 0) + found[identity].least
    return {
        identity: count - bounds[identity]
        for identity, count in certain.items()
        if bounds[identity] < count and not alike(bounds[identity], count)
    }


def _publish(sample: _PoolSample, found: Mapping[Source, Range]) -> PoolResult:
    """Turn the ranges of the sources into what each holder has."""
    left = tuple(_left_bytes(each, sample) for each in sample.lefts)
    if not sample.bytes:
        return PoolResult(sample.pool.key, left=left)
    shares = {identity: _share(identity, sample, found) for identity in sample.able}
    shares = {identity: share for identity, share in shares.items() if share.most >= LEAST_BYTES}
    excess = sum(share.least for share in shares.values()) - sample.bytes
    if excess > 0:  # two readings a moment apart: the largest gives way
        largest = max(shares, key=lambda identity: shares[identity].least)
        shares[largest] = Range(max(0, shares[largest].least - excess), shares[largest].most)
    rivals = frozenset(identity for identity, share in shares.items() if not share.exact)
    held = {
        (sample.able[identity].uuid, identity[0]): describe(_evidence(identity, share, rivals, sample, found))
        for identity, share in shares.items()
    }
    return PoolResult(sample.pool.key, held, _undivided(sample, shares, rivals, found), left)


def _share(identity: Identity, sample: _PoolSample, found: Mapping[Source, Range]) -> Range:
    """Return what a holder has of all sources together."""
    own, open_to_it = 0, 0
    certain = 0
    for source, each in found.items():
        able = _candidates(source, sample)
        if identity in able:
            open_to_it += each.most
            alone = not (isinstance(source, _Left) and (sample.hidden or source.elsewhere or source.unlisted))
            if len(able) == 1 and alone:
                own += each.most
                certain += each.least
    others = sum(each.most for each in found.values()) - own
    least = min(own, max(certain, sample.bytes - others))
    most = min(sample.bytes, open_to_it)
    return Range(most, most) if least and alike(least, most) else Range(least, most)


def _candidates(source: Source, sample: _PoolSample) -> frozenset[Identity]:
    """Return the holders that can have the bytes of a source.

    Bytes that came while we did not watch may be handles, and then any holder's; but without managed memory
    on the device nothing says that a holder has them at all.
    """
    if isinstance(source, tuple):
        return frozenset((source,))
    if isinstance(source, _Left):
        return sample.heirs(source) if source in sample.lefts else frozenset()
    if source == _UNKNOWN:
        return frozenset(sample.able) if sample.alone and sample.rest_is_small else frozenset()
    return frozenset(sample.able) if sample.managed else frozenset()


def _evidence(
    identity: Identity,
    share: Range,
    rivals: frozenset[Identity],
    sample: _PoolSample,
    found: Mapping[Source, Range],
) -> HolderEvidence:
    holder = sample.able[identity]
    hidden = sample.hidden[0].pid if sample.hidden else None
    return HolderEvidence(
        share,
        holder.holding.memory or 0,
        found.get(identity, NOTHING),
        holder.bound,
        holder.reported,
        [
            LeftEvidence(
                found[left],
                created(*left.creator, left.ended),
                [pid for pid, _ in heirs],
                hidden,
                [pid for pid, _ in left.elsewhere],
            )
            for left in sample.lefts
            if identity in (heirs := sample.heirs(left))
        ],
        [pid for pid, _ in rivals - {identity}],
        sample.matched,
        sample.state.late >= LEAST_BYTES,
    )


def _undivided(
    sample: _PoolSample,
    shares: Mapping[Identity, Range],
    rivals: frozenset[Identity],
    found: Mapping[Source, Range],
) -> UndividedBytes | None:
    """Return the bytes that one of several holders has, and who they are; None if there are none.

    Bytes that perhaps nobody here has do not count: those that a holder has perhaps only freed late, and what
    is more than all mappings and handles together.
    """
    given = sum(share.least for share in shares.values())
    evident = sum(each.most for source, each in found.items() if _has_evidence(source, sample))
    late = sum(found[left].least for left in sample.pending)
    count = min(sample.bytes - late, evident) - given
    if count < LEAST_BYTES or not rivals or (len(rivals) == 1 and not sample.others):
        return None
    group = [sample.able[identity] for identity in rivals]
    elsewhere = {pid for left in sample.lefts for pid, _ in left.elsewhere}
    states = {each.holding.state for each in group} | ({State.ACTIVE} if elsewhere else set())
    owners = {each.owner for each in group} if not sample.others else {None}
    return UndividedBytes(
        bytes=count,
        pids=tuple(sorted({each.holding.pid for each in group} | elsewhere)),
        state=next(state for state in _MILDEST if state in states),
        wasted=not elsewhere and all(each.holding.wasted for each in group),
        owner=owners.pop() if len(owners) == 1 else None,
    )


def _has_evidence(source: Source, sample: _PoolSample) -> bool:
    if isinstance(source, tuple):
        return bool(sample.able[source].bound)
    return isinstance(source, _Left) and source in sample.lefts and bool(sample.heirs(source))


def _left_bytes(left: _Left, sample: _PoolSample) -> LeftBytes:
    pids = tuple(sorted(pid for pid, _ in sample.heirs(left) | left.elsewhere))
    return LeftBytes(*left.creator, left.ended, *left.range, pids, created(*left.creator, left.ended))
