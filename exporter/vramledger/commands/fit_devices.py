"""Say which devices have room for a program: free now, after others have freed theirs, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vramledger.commands.fit_input import CgroupRoom, Evictable, OfferedDevice, Program
from vramledger.commands.memory_need import MemoryNeed

YES, TIGHT, AFTER, PERHAPS, NO, UNKNOWN = "yes", "tight", "after", "perhaps", "no", "unknown"
"""The verdicts: room; without headroom; after others free theirs; need not known; none; nothing known."""

_FITS = (YES, TIGHT)


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
        return self.allowed and self.verdict in _FITS


def make_offer(need: MemoryNeed, device: OfferedDevice, program: Program, *, live: bool) -> Offer:
    """Say what a device offers; if not ``live``, a holder of the program's pid may be another one."""
    own = device.holdings.get(program.pid, 0) if live else 0
    limits = device.limits_of(program, live=live)
    allowance = min((most for each in limits if (most := each.most(own)) is not None), default=None)
    sure = all(each.known for each in limits)
    room, capacity = device.free, device.capacity
    if room is not None:
        room = _least(room + own, allowance)
    if capacity is not None:
        maxima = [each.maximum for each in limits if each.maximum is not None]
        capacity = _least(capacity, min(maxima, default=None))
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


def _least(bytes_: int, bound: int | None) -> int:
    return bytes_ if bound is None else min(bytes_, bound)


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
