"""Divide the uncharged bytes of a pool of memory among those who can have them: ranges in, ranges out.

Each possible holder is a source with a range, and the ranges must add up to the bytes. If a source has all
that the others cannot have, that much is certainly its own. Nothing here remembers or changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from vramledger.accounting.owners.owner_usage import SETTLE
from vramledger.model.device_signs import LEAST_BYTES, MIB
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import Holding, Ledger, State, UndividedBytes, UnixTime

TOLERANCE = 16 * MIB
"""Bytes by which two figures that mean the same memory differ, besides 1 % of them."""

UNEXPLAINED = 256 * MIB
"""Uncharged bytes beyond all mappings that contradict nothing: 126 MiB with JAX on an H100."""

_MILDEST = (
    *(State.ACTIVE, State.UNKNOWN, State.IDLE, State.STOPPED),
    *(State.ORPHANED, State.STUCK, State.ZOMBIE, State.DEAD),
)
"""Undivided bytes count under the mildest state of those who may have them: to know less is never harsher."""

Identity = tuple[int, int | None]


def alike(one: int, other: int) -> bool:
    return abs(one - other) <= max(TOLERANCE, max(one, other) // 100)


class Range(NamedTuple):
    """Bytes of one source: what it certainly has, and what it can have at most."""

    least: int
    most: int

    @property
    def exact(self) -> bool:
        """Whether the range is as narrow as the readings allow."""
        return self.least > 0 and alike(self.least, self.most)

    def within(self, other: Range) -> Range:
        """Return what both ranges allow, apart from noise; this one, if they contradict each other."""
        if other.least > self.most + LEAST_BYTES or self.least > other.most + LEAST_BYTES:
            return self
        least = max(self.least, min(other.least, self.most))
        return Range(least, max(least, min(self.most, other.most)))


NOTHING = Range(0, 0)

_S = TypeVar("_S")


def narrow(total: int, ranges: Mapping[_S, Range]) -> dict[_S, Range]:
    """Narrow the ranges of sources that together have a number of bytes.

    A source has at least what all others cannot have, and at most what no other certainly has. Where they
    certainly have more than there is, nothing is certain any more.
    """
    least, most = sum(each.least for each in ranges.values()), sum(each.most for each in ranges.values())
    if least > total and not alike(least, total):
        ranges, least = {source: Range(0, each.most) for source, each in ranges.items()}, 0
    narrowed = {}
    for source, each in ranges.items():
        low = max(each.least, total - (most - each.most))
        high = max(0, min(each.most, total - (least - each.least)))
        narrowed[source] = Range(min(low, high), high)
    return narrowed


class PoolHolder(NamedTuple):
    """A holder of a pool of memory, as NVML and /proc show it."""

    uuid: str  # the device on which it is listed
    holding: Holding  # its holding there
    owner: tuple[str, str] | None  # type and name of its owner, None when not known
    bound: int | None  # the managed memory that it can have at most, None when not known
    reported: int | None = None  # managed memory that its agent reports there, None without such a report

    @property
    def identity(self) -> Identity:
        return self.holding.pid, self.holding.start


class MemoryPool(NamedTuple):
    """The memory of a device, or of the compute instances that share one."""

    key: str  # the UUID under which it is counted
    ledger: Ledger  # its balance before anything uncharged has a holder
    holders: tuple[PoolHolder, ...]  # everybody whom NVML lists there
    # processes that have the device open and that NVML does not list; None when not known
    hidden: tuple[HiddenHolder, ...] | None


class Left(msgspec.Struct, eq=False):
    """Memory that a holder left behind when it ended. It can only become less."""

    creator: tuple[int, str | None]  # its pid and the name of its user
    ended: UnixTime  # Unix time at which its end was seen
    at: float  # the same moment on the monotonic clock
    group: frozenset[Identity]  # the holders of that moment
    # the holders of other devices at that moment. One that has mapped the memory keeps it, and NVML does not
    # list it here: measured with ``cuMemCreate`` and NCCL on two H100s
    elsewhere: frozenset[Identity]
    range: Range  # the bytes that it left and that are still in use
    # whether the holders of another device were not known at that moment, so that one of them may have the
    # memory too
    unlisted: bool = False


Source = Identity | Left | str
"""A holder's managed memory, what an ended holder left, or one of the two that nobody can be named for."""

_UNWATCHED, _UNKNOWN = "unwatched", "unknown"


class Sources(Struct, frozen=True, eq=False):
    """Who can have the uncharged bytes of a pool in one sample."""

    pool: MemoryPool  # the pool
    bytes: int  # its uncharged bytes beyond those of the contexts
    able: Mapping[Identity, PoolHolder]  # the holders
    # how much managed memory each of them can have; empty without evidence for any
    managed: Mapping[Identity, int]
    lefts: tuple[Left, ...]  # what ended holders left, once it is certain that it was not only freed late
    pending: tuple[Left, ...]  # what was perhaps only freed late
    # processes that NVML does not list and that may have what an ended holder left
    hidden: tuple[HiddenHolder, ...]
    matched: bool  # the mappings are together as large as the uncharged bytes
    alone: bool  # only one holder is there, nobody is hidden, and its mappings are known
    unwatched: int  # bytes of which an unknown holder may have a handle
    late: bool  # some of the bytes came while we did not watch
    settled: Mapping[Identity, Range]  # the ranges of the last sample, if nothing can have moved since

    def heirs(self, left: Left) -> frozenset[Identity]:
        """Return who can have what an ended one left: who was there then, as it may pass it on, or all."""
        there = left.group & frozenset(self.able)
        return there if there or left.elsewhere else frozenset(self.able)

    @property
    def others(self) -> frozenset[int]:
        """Return the pids that NVML does not list here and that may have what an ended holder left."""
        elsewhere = {pid for left in self.lefts for pid, _ in left.elsewhere}
        return frozenset(elsewhere | {each.pid for each in self.hidden})


class Solution(NamedTuple):
    """The range of each source; and whether hardly more bytes are there than all sources can have."""

    ranges: Mapping[Source, Range]
    rest_is_small: bool


def collect_sources(  # noqa: PLR0913 one argument a fact
    pool: MemoryPool,
    count: int,
    lefts: Iterable[Left],
    now: float,
    *,
    unwatched: int,
    late: int,
    settled: Mapping[Identity, Range],
) -> Sources:
    """Collect who can have the uncharged bytes of a pool.

    ``unwatched``: bytes of which somebody may have got a handle while we did not watch. ``late``: bytes that
    came while we did not watch, whoever has them. ``settled``: the ranges of the last sample, if nothing can
    have moved since.
    """
    able = {each.identity: each for each in pool.holders}
    hidden = tuple(each for each in pool.hidden or () if each.kind != "monitor")
    # The driver may keep a handle of a dead process, but its managed memory went with its mappings.
    bounds = {i: each.bound for i, each in able.items() if each.holding.state is not State.DEAD}
    evident = any(bounds.values())
    managed = {
        identity: min(count, count if bound is None else bound)
        for identity, bound in bounds.items()
        if bound or (bound is None and evident)
    }
    readable = all(bounds[identity] is not None for identity in managed)
    mapped = sum(bounds[identity] or 0 for identity in managed)
    fits = alike(mapped, count) or count <= mapped <= pool.ledger.unattributed
    matched = bool(count) and evident and readable and fits
    alone = len(able) == 1 and not hidden and readable and evident
    lefts = tuple(lefts)
    return Sources(
        pool,
        count,
        able,
        managed,
        tuple(left for left in lefts if now - left.at >= SETTLE),
        tuple(left for left in lefts if now - left.at < SETTLE),
        hidden,
        matched,
        alone,
        # If the bytes are all those of the mappings, nobody else can have any.
        0 if matched or (count and alone and mapped + UNEXPLAINED >= count) else unwatched,
        late >= LEAST_BYTES,
        settled,
    )


def solve(sources: Sources, foreign: Mapping[Identity, int]) -> Solution:
    """Return the range of each source; ``foreign`` bytes on a holder's devices cannot be its own."""
    ranges: dict[Source, Range] = {identity: Range(0, most) for identity, most in sources.managed.items()}
    ranges.update({left: left.range for left in (*sources.lefts, *sources.pending)})
    ranges[_UNWATCHED] = Range(0, sources.unwatched)
    room = sum(each.most for each in ranges.values())
    # More bytes than all sources can have: somebody whom we do not know has some, and perhaps all.
    beyond = max(0, sources.bytes - room)
    unknown = beyond if beyond <= UNEXPLAINED or alike(room, sources.bytes) else sources.bytes
    rest_is_small = unknown == beyond and not foreign
    unknown = max([unknown, *(foreign.get(identity, 0) for identity in sources.managed)])
    ranges[_UNKNOWN] = Range(0, min(unknown, sources.bytes))
    for identity, before in sources.settled.items():
        if identity in sources.managed:
            ranges[identity] = ranges[identity].within(before)
    return Solution(narrow(sources.bytes, ranges), rest_is_small)


def foreign_bytes(pools: Iterable[Sources]) -> dict[Identity, int]:
    """Return by how much a process would have more managed memory on its devices than it has mapped.

    Then some of these bytes are not its own. It may also be that the driver keeps copies of its pages on
    several devices, which it does for memory that is mostly read.
    """
    certain: dict[Identity, int] = {}
    bounds: dict[Identity, int] = {}
    for sources in pools:
        found = solve(sources, {}).ranges
        for identity in sources.managed:
            if (bound := sources.able[identity].bound) is not None:
                bounds[identity] = bound
                certain[identity] = certain.get(identity, 0) + found[identity].least
    return {
        identity: count - bounds[identity]
        for identity, count in certain.items()
        if bounds[identity] < count and not alike(bounds[identity], count)
    }


def share_out(sources: Sources, solution: Solution) -> dict[Identity, Range]:
    """Return what each holder has of all sources together; one that cannot have any is left out."""
    shares = {identity: _share(identity, sources, solution) for identity in sources.able}
    shares = {identity: share for identity, share in shares.items() if share.most >= LEAST_BYTES}
    excess = sum(share.least for share in shares.values()) - sources.bytes
    if excess > 0:  # two readings a moment apart: the largest gives way
        largest = max(shares, key=lambda identity: shares[identity].least)
        shares[largest] = Range(max(0, shares[largest].least - excess), shares[largest].most)
    return shares


def _share(identity: Identity, sources: Sources, solution: Solution) -> Range:
    own, open_to_it = 0, 0
    certain = 0
    for source, each in solution.ranges.items():
        able = _candidates(source, sources, solution)
        if identity in able:
            open_to_it += each.most
            alone = not (isinstance(source, Left) and (sources.hidden or source.elsewhere or source.unlisted))
            if len(able) == 1 and alone:
                own += each.most
                certain += each.least
    others = sum(each.most for each in solution.ranges.values()) - own
    least = min(own, max(certain, sources.bytes - others))
    most = min(sources.bytes, open_to_it)
    return Range(most, most) if least and alike(least, most) else Range(least, most)


def _candidates(source: Source, sources: Sources, solution: Solution) -> frozenset[Identity]:
    """Return the holders that can have the bytes of a source.

    Bytes that came while we did not watch may be handles, and then any holder's; but without managed memory
    on the device nothing says that a holder has them at all.
    """
    if isinstance(source, tuple):
        return frozenset((source,))
    if isinstance(source, Left):
        return sources.heirs(source) if source in sources.lefts else frozenset()
    if source == _UNKNOWN:
        return frozenset(sources.able) if sources.alone and solution.rest_is_small else frozenset()
    return frozenset(sources.able) if sources.managed else frozenset()


def rivals_of(shares: Mapping[Identity, Range]) -> frozenset[Identity]:
    """Return the holders of which it is not certain what they have."""
    return frozenset(identity for identity, share in shares.items() if not share.exact)


def undivided_bytes(
    sources: Sources, shares: Mapping[Identity, Range], found: Mapping[Source, Range]
) -> UndividedBytes | None:
    """Return the bytes that one of several holders has, and who they are; None if there are none.

    Bytes that perhaps nobody here has do not count: those that a holder has perhaps only freed late, and what
    is more than all mappings and handles together.
    """
    rivals = rivals_of(shares)
    given = sum(share.least for share in shares.values())
    evident = sum(each.most for source, each in found.items() if _has_evidence(source, sources))
    late = sum(found[left].least for left in sources.pending)
    count = min(sources.bytes - late, evident) - given
    if count < LEAST_BYTES or not rivals or (len(rivals) == 1 and not sources.others):
        return None
    group = [sources.able[identity] for identity in rivals]
    elsewhere = {pid for left in sources.lefts for pid, _ in left.elsewhere}
    states = {each.holding.state for each in group} | ({State.ACTIVE} if elsewhere else set())
    owners = {each.owner for each in group} if not sources.others else {None}
    return UndividedBytes(
        bytes=count,
        pids=tuple(sorted({each.holding.pid for each in group} | elsewhere)),
        state=next(state for state in _MILDEST if state in states),
        wasted=not elsewhere and all(each.holding.wasted for each in group),
        owner=owners.pop() if len(owners) == 1 else None,
    )


def _has_evidence(source: Source, sources: Sources) -> bool:
    if isinstance(source, tuple):
        return bool(sources.able[source].bound)
    return isinstance(source, Left) and source in sources.lefts and bool(sources.heirs(source))
