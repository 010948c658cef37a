"""Judge what a program needs of a device, and what to limit it to, from what was seen of it.

A framework's own peak of memory in use is the need. What NVML charges is an upper bound: a cache, a pool or a
preallocation is part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vramledger.accounting.holders.policies import CONTEXT_BYTES
from vramledger.commands.fit_input import (
    Busy,
    CgroupRoom,
    DeviceUse,
    Evictable,
    FrameworkUse,
    OfferedDevice,
    Program,
)
from vramledger.model.snapshot import Grade
from vramledger_agent.printable import gib
from vramledger_agent.protocol.frameworks import FRAMEWORKS_BY_NAME

YES, TIGHT, AFTER, PERHAPS, NO, UNKNOWN = "yes", "tight", "after", "perhaps", "no", "unknown"
"""The verdicts: room; without headroom; after others free theirs; need not known; none; nothing known."""

_FITTING = (YES, TIGHT)


class Offer(NamedTuple):
    """What one device offers to a program."""

    device: OfferedDevice
    verdict: str  # one of the verdicts above
    runs_here: bool  # the program holds memory there; when it is started again, that is free
    # bytes that it could have now, None when not known; an upper bound where ``limit`` is not known
    room: int | None
    # what the cgroup above it that leaves it least may take, or one of which that is not known; None without
    # a limit
    limit: CgroupRoom | None
    evict: tuple[Evictable, ...]  # whose memory would have to be freed for ``after``
    copies_now: int | None  # how many such programs the room is enough for; None when not known
    copies_empty: int | None  # how many the whole device is enough for; None when not known
    allowed: bool  # False if schedulers decide who gets the device and this program has not got it
    reserved: str  # whom it is reserved for, or whom to ask; empty where no scheduler manages it

    @property
    def usable(self) -> bool:
        """Return whether the program can be started there now."""
        return self.allowed and self.verdict in _FITTING


def make_offer(need: MemoryNeed, device: OfferedDevice, program: Program, *, live: bool) -> Offer:
    """Say what a device offers; if not ``live``, a holder of the program's pid may be another one."""
    own = device.holdings.get(program.pid, 0) if live else 0
    limits = device.limits_of(program, live=live)
    allowance = min((most for each in limits if (most := each.most(own)) is not None), default=None)
    sure = all(each.known for each in limits)
    room, capacity = device.free, device.capacity
    if room is not None:
        room = room + own if allowance is None else min(room + own, allowance)
    if capacity is not None:
        capacity = min((capacity, *(each.maximum for each in limits if each.maximum is not None)))
    evict: tuple[Evictable, ...] = ()
    verdict = UNKNOWN
    if room is not None:
        others = [each for pid, each in device.evictable.items() if not live or pid != program.pid]
        verdict, evict = _verdict(need, room, others, allowance)
        if not sure and verdict != NO:
            verdict, evict = PERHAPS, ()
    # The reason is named: for a doubt the limit that is not known, for a NO the least of those that are.
    limit = min(limits, key=lambda each: (each.known != (verdict == NO), each.most(own) or 0), default=None)
    allowed, reserved = _reserved(device, program)
    enough = need.enough
    measured = all(each.maximum is not None for each in limits)
    return Offer(
        device,
        verdict,
        runs_here=live and program.pid in device.holdings,
        room=room,
        limit=limit,
        evict=evict,
        copies_now=None if room is None or not enough or not sure else room // enough,
        copies_empty=None if capacity is None or not enough or not measured else capacity // enough,
        allowed=allowed,
        reserved=reserved,
    )


def _verdict(
    need: MemoryNeed, room: int, others: Sequence[Evictable], allowance: int | None
) -> tuple[str, tuple[Evictable, ...]]:
    """Return the verdict, and who would have to free memory; nobody does for more than the allowance."""
    enough = need.enough
    if enough is not None and room >= enough:
        return YES, ()
    if need.bytes is not None and room >= need.bytes:
        return (PERHAPS if need.failed else TIGHT), ()
    wanted = need.bytes if enough is None else enough
    chosen: list[Evictable] = []
    gained = 0
    for each in sorted(others, key=lambda each: -each.bytes):
        if wanted is None or room + gained >= wanted or (allowance is not None and allowance < wanted):
            break
        chosen.append(each)
        gained += each.bytes
    if wanted is not None and chosen and room + gained >= wanted:
        return AFTER, tuple(chosen)
    return (PERHAPS if need.bytes is None else NO), ()


def _reserved(device: OfferedDevice, program: Program) -> tuple[bool, str]:
    """Return whether schedulers let the program have the device, and whom it is reserved for."""
    if not device.schedulers:
        return True, ""
    if not device.granted:
        return False, f"ask {' or '.join(device.schedulers)} for it"
    whom = ", ".join(f"{kind} {name}" for kind, name in device.granted)
    return program.owner in device.granted, f"reserved for {whom}"


def assign_devices(offers: Sequence[Sequence[Offer]]) -> bool:
    """Tell whether each need can have a device of its own: one of its usable offers."""
    taken: dict[str, int] = {}

    def place(number: int, tried: set[str]) -> bool:
        for offer in offers[number]:
            uuid = offer.device.uuid
            if not offer.usable or uuid in tried:
                continue
            tried.add(uuid)
            if uuid not in taken or place(taken[uuid], tried):
                taken[uuid] = number
                return True
        return False

    return all(place(number, set()) for number in range(len(offers)))


MIB = 2**20

HEADROOM = 0.10
"""The share that a pool needs beyond the peak in use: sizes round up, free blocks lie between."""

HEADROOM_LEAST = 64 * MIB
"""A small program's first matrix product takes as much for cuBLAS (68 MiB on an H200)."""

_COPIES_MAX = 1_000_000
"""More copies than a GPU could ever hold: a share near 0 is not divided by."""

_SET_ASIDE = frozenset({"preallocate", "fraction", "limit"})
"""Policies by which a program holds what it was given, whatever it needs."""

_PERMILLE = 1000


class MemoryNeed(NamedTuple):
    """What a program needs of one device, bytes."""

    use: DeviceUse  # what was seen
    bytes: int | None  # its need at its peak so far; None when not known
    planned: int | None  # the same with headroom for the pool; None when not known
    failed: bool  # an allocation has failed
    # what it would have needed for that allocation; None when not known, or if none has failed
    wanted: int | None
    most: int | None  # its highest holding so far, with which it ran; None when not known
    grade: Grade  # how good the evidence for ``bytes``, or else for ``most``, is
    why: str  # the evidence, one sentence
    frameworks: tuple[FrameworkUse, ...]  # those whose peak is known

    @property
    def unused(self) -> bool:
        """Tell whether its frameworks report, and have used nothing on this device."""
        peaks = [each.in_use_peak for each in self.frameworks]
        return bool(peaks) and not self.failed and all(peak is not None and peak < MIB for peak in peaks)

    @property
    def enough(self) -> int | None:
        """Return with how much it certainly runs as it did; None when not known.

        The highest holding is that only of a program that was watched since its start.
        """
        if self.failed:
            return None
        if self.planned is not None:
            return self.planned
        return self.most if self.use.whole_life else None


class LimitAdvice(NamedTuple):
    """A limit for a framework: ``text`` goes into ``where`` (``code`` or ``environment``)."""

    framework: str
    where: str
    text: str
    about: str


def assess_need(last: DeviceUse, headroom: float = HEADROOM) -> MemoryNeed:
    """Say what a program needs of one device."""
    frameworks, most = last.frameworks, last.peak
    in_use = [each.in_use_peak for each in frameworks]
    moment = "at the peak since its start or its last reset"
    if in_use == [None] and last.used_at_failure is not None:
        # A framework that counts no peak: what it had as its allocation failed was needed at least.
        in_use = [last.used_at_failure]
        frameworks = (frameworks[0]._replace(in_use_peak=last.used_at_failure),)
        moment = "when its allocation failed"
    if not frameworks or None in in_use:
        grade, why = _outside_evidence(last, most)
        return MemoryNeed(last, None, None, last.failed, None, most, grade, why, ())
    peaks = [peak for peak in in_use if peak is not None]
    rest, grade, about_rest = _rest(last)
    planned = rest + sum(peak + _headroom(peak, headroom) for peak in peaks)
    counted = " and ".join(f"{each.title} counted {gib(each.in_use_peak)} in use" for each in frameworks)
    why = f"{counted} {moment}, and {about_rest}"
    wanted = None
    if last.failed_request is not None:
        before = sum(peaks) if last.used_at_failure is None else last.used_at_failure
        wanted = rest + max(before + last.failed_request, *peaks)
    serves = FRAMEWORKS_BY_NAME.get(last.framework)
    if serves is not None and serves.serves:
        why += f"; {serves.title} fills the share that it is given, and may need less"
    return MemoryNeed(last, rest + sum(peaks), planned, last.failed, wanted, most, grade, why, frameworks)


def _rest(last: DeviceUse) -> tuple[int, Grade, str]:
    """Return the bytes outside the pools: the grade says whether they are known."""
    if last.overhead is not None:
        return last.overhead, Grade.PROVEN, f"{gib(last.overhead)} are outside its pools"
    in_use = sum(each.in_use_peak or 0 for each in last.frameworks)
    if last.held is not None and last.held < in_use + CONTEXT_BYTES:
        # It holds so little that the rest cannot be what we would assume.
        rest = max(0, last.held - in_use)
        return rest, Grade.INFERRED, f"at most {gib(rest)} are outside its pools"
    return (
        CONTEXT_BYTES,
        Grade.INFERRED,
        (f"{gib(CONTEXT_BYTES)} are assumed for context and libraries, which it does not report"),
    )


def _headroom(peak: int, share: float) -> int:
    return max(int(peak * share), HEADROOM_LEAST if share else 0)


def _outside_evidence(use: DeviceUse, most: int | None) -> tuple[Grade, str]:
    """Say what is known of a program whose frameworks do not report their peak."""
    framework = FRAMEWORKS_BY_NAME.get(use.framework)
    title = "its framework" if framework is None else framework.title
    if most is None:
        return Grade.INFERRED, "NVML does not say what it holds, and no agent reports from inside it"
    if use.policy in _SET_ASIDE:
        return Grade.INFERRED, (
            f"{title} takes memory by the policy {use.policy!r}, whatever the program needs, and no agent "
            "reports from inside it: start it with 'vramledger run'"
        )
    if not use.whole_life:
        return Grade.INFERRED, (
            f"it held {gib(most)} at most while it was watched, which was not since its start: it may "
            "need more, or less; an agent counts its need: start it with 'vramledger run'"
        )
    return Grade.SEEN, (
        "it has held no more than that since its start; a part of it may be a cache, so it may need less"
    )


def copies_by_compute(busy: Busy | None) -> int | None:
    """Return how many such programs a device has time for; None when not known, or when it did nothing."""
    if busy is None or busy.mean <= 0:
        return None
    return max(1, int(min(1 / busy.mean, _COPIES_MAX) + 1e-9))


def limit_advice(need: MemoryNeed, capacity: int | None, headroom: float = HEADROOM) -> Iterator[LimitAdvice]:
    """Yield how to limit each framework with a known peak; nothing if it does not fit, or has failed."""
    if need.failed:
        return
    for each in need.frameworks:
        declared = FRAMEWORKS_BY_NAME.get(each.name)
        if declared is None or each.in_use_peak is None:
            continue
        bytes_ = each.in_use_peak + _headroom(each.in_use_peak, headroom)
        mib = -(-bytes_ // MIB)
        permille = None if not capacity else -(-bytes_ * _PERMILLE // capacity)
        if permille is not None and permille > _PERMILLE:
            continue
        for limit in declared.limits:
            if permille is None and "{share}" in limit.text:
                continue
            share = f"{(permille or 0) / _PERMILLE:.3f}"
            text = limit.text.format(mib=mib, bytes=mib * MIB, share=share, ordinal=each.ordinal or 0)
            yield LimitAdvice(each.title, limit.where, text, limit.about)
