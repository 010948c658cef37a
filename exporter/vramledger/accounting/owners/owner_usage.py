"""Charge each device's memory to its owners, and measure what was freed when holders ended.

Byte-seconds are integrated by the left rule: what a sample saw counts, in the state that it saw, until the
next sample. On average we notice a holder's start as late as its end, so both delays cancel. Only spans that
are fully covered by samples count. A span that is longer than the gap rule, or that has a failed sample in
it, is added to :attr:`OwnerUsageTotals.uncounted` instead. The clock is the monotonic one, so setting the
wall clock changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from vramledger.accounting.sample import Sample
from vramledger.model.reading import DeviceReading, ProcessFacts
from vramledger.model.records import label_text
from vramledger.model.snapshot import Ledger, OwnerUsage, OwnerUsageTotals, State, UndividedBytes

UNKNOWN = ("unknown", "")
"""Type and name of the owner of a holding whose process we never saw."""

OTHER = ("other", "other")
"""The entry for all owners beyond ``--owners.max``; no resolver gives this type."""

KEPT = 300.0
"""Seconds for which an owner that holds nothing keeps its entry, so that a slow scrape still sees it."""

GONE_MAX = 5
"""The maximum number of a device's owners that hold nothing any more and still have series: those that left
last. This keeps the page of 8 GPUs and 64 holders below 1,730 series, however often owners change."""

SETTLE = 2.0
"""Seconds from a holding's end until what was freed is measured: 20 GiB took 94 ms on an H200."""

EPISODE_MAX = 10.0
"""Seconds after which we measure anyway, when holdings keep ending one after the other."""

NOISE = 66 * 2**20
"""Bytes by which ``unattributed`` changes without a cause: 0 to 66 MiB in an hour on an H200."""

Key = tuple[str, str]


class Charge(NamedTuple):
    """One holding as its owner, (type, name) or None, is charged for it; ``wasted``: held without work."""

    pid: int
    start: int | None
    owner: Key | None
    state: State
    memory: int | None
    wasted: bool = False


def owner_of(facts: ProcessFacts | None) -> Key | None:
    """Return (type, name) of the owner of a process, as labels: two that look alike share one entry."""
    owner = None if facts is None else facts.owner_or_user
    return None if owner is None else (owner.type, label_text(owner.name))


class Usage(msgspec.Struct, omit_defaults=True):
    """What one owner has used and wasted."""

    owner: Key  # its type and name
    seconds: dict[State, float] = {}  # byte-seconds by state
    wasted_seconds: float | None = None  # those that were wasted, None while it never wasted any
    freed: int = 0  # bytes that its ended holdings have freed
    not_freed: int = 0  # bytes that they have not
    gone: float | None = None  # the monotonic time since which it holds nothing
    held: dict[State, int] = {}  # the bytes that it holds now, by state
    wasting: int = 0  # those that it wastes now


class ChargedHolding(msgspec.Struct, omit_defaults=True):
    """A holding of the newest sample.

    ``dead_since`` is monotonic; ``counted`` says that its bytes are in the counter of what was not freed.
    """

    charge: Charge
    owner: Key
    dead_since: float | None = None
    counted: bool = False


class Unclaimed(NamedTuple):
    """The bytes of a device that belong to no listed process, that were counted twice, and that were left."""

    unattributed: int
    overlap: int
    left: int


class Episode(msgspec.Struct):
    """Holdings that ended close together: what they freed is measured for all of them together."""

    began: float
    last: float
    before: Unclaimed
    ended: list[tuple[Key, int]] = []


class DeviceUsageState(msgspec.Struct, omit_defaults=True):
    """What is remembered of one device's owners."""

    owners: dict[str, Usage] = {}  # what each has used, by :func:`_entry`
    known: dict[int, ChargedHolding] = {}  # the holdings of the newest sample, by pid
    # what belonged to nobody in the newest sample, None when it had no balance
    unclaimed: Unclaimed | None = None
    last: float | None = None  # monotonic time of the newest sample
    unanswered: bool = False  # whether a sample without data came after it
    uncounted: float = 0.0  # the seconds that no sample covers
    episode: Episode | None = None  # the holdings that have just ended


class DeviceUsage:
    """Sum what the owners of one device's memory have used, sample by sample."""

    def __init__(self, most: int, state: DeviceUsageState | None = None) -> None:
        """Go on from what is remembered of one device, with at most ``most`` named owners; 0 means all."""
        self._most = most
        self.state = DeviceUsageState() if state is None else state

    def update(  # noqa: PLR0913 one argument a fact
        self,
        charges: Sequence[Charge],
        ledger: Ledger | None,
        now: float,
        gap: float,
        *,
        shared: UndividedBytes | None = None,
        left: int = 0,
        kept_by_system: bool = False,
    ) -> OwnerUsageTotals:
        """Record one sample.

        ``ledger``: the balance of the same sample, None if the driver gave no figures for one. ``gap``: the
        longest span between two samples that still counts, in seconds. ``shared``: bytes that one of several
        holders has; if all of them have one owner, they are its own. ``kept_by_system``: whether the
        operating system manages the memory, and may keep pages.
        """
        state = self.state
        self._integrate(now, gap)
        known = {charge.pid: self._charge(charge, now) for charge in charges}
        ended = [
            before
            for pid, before in state.known.items()
            if pid not in known or not _is_same_process(before.charge.start, known[pid].charge.start)
        ]
        unclaimed = None if ledger is None else Unclaimed(ledger.unattributed, ledger.overlap, left)
        # The owner of a holding that ends at this sample still has its own entry, from the sample before.
        # Memory that the operating system manages is not judged: it keeps pages for itself after the end.
        if kept_by_system:
            state.episode = None
        else:
            self._count_freed(ended, unclaimed, now)
        state.known, state.unclaimed = known, unclaimed
        dropped = self._sum_by_owner(shared, now)
        self._count_dead(now)
        return self._publish(dropped, kept_by_system=kept_by_system)

    def _integrate(self, now: float, gap: float) -> None:
        span = 0.0 if self.state.last is None else now - self.state.last
        if span > gap or (self.state.unanswered and span > 0):
            self.state.uncounted += span
        elif span > 0:
            for usage in self.state.owners.values():
                for state, memory in usage.held.items():
                    usage.seconds[state] = usage.seconds.get(state, 0.0) + memory * span
                if usage.wasting:
                    usage.wasted_seconds = (usage.wasted_seconds or 0.0) + usage.wasting * span
        self.state.last, self.state.unanswered = now, False

    def _charge(self, charge: Charge, now: float) -> ChargedHolding:
        """Find the owner of a holding: a dead one is still charged to the owner that it had while alive."""
        before = self.state.known.get(charge.pid)
        if before is not None and not _is_same_process(before.charge.start, charge.start):
            before = None
        owner = charge.owner or (before.owner if before is not None else UNKNOWN)
        known = ChargedHolding(charge, owner)
        if charge.state is State.DEAD:
            known.dead_since = now
            if before is not None and before.dead_since is not None:
                known.dead_since, known.counted = before.dead_since, before.counted
        return known

    def _sum_by_owner(self, shared: UndividedBytes | None, now: float) -> int:
        """Sum the holdings by owner and state; return how many owners have no entry of their own."""
        owners, sums = self.state.owners, self._sums(shared)
        for usage in owners.values():
            if usage.owner in sums:
                usage.gone = None
            elif usage.gone is None:
                usage.gone = now
        for each_gone in self._gone(now, 0.0)[GONE_MAX:]:
            del owners[_entry(each_gone)]
        fresh = [key for key in sums if _entry(key) not in owners]
        fresh.sort(key=lambda key: (-sum(sums[key].values()), key))
        overflow_owners = [key for key in fresh if not self._add_owner(key, now)]
        for key in overflow_owners:
            held = sums.pop(key)
            rest = sums.setdefault(OTHER, {})
            for state, memory in held.items():
                rest[state] = rest.get(state, 0) + memory
        if OTHER in sums:
            self._usage(OTHER).gone = None
        for usage in owners.values():
            usage.held, usage.wasting = sums.get(usage.owner, {}), 0
        self._sum_wasted(shared)
        return len(overflow_owners)

    def _sums(self, shared: UndividedBytes | None) -> dict[Key, dict[State, int]]:
        sums: dict[Key, dict[State, int]] = {}
        for each in self.state.known.values():
            held = sums.setdefault(each.owner, {})
            if each.charge.memory is not None:
                held[each.charge.state] = held.get(each.charge.state, 0) + each.charge.memory
        if shared is not None and shared.owner is not None and shared.owner in sums:
            held = sums[shared.owner]
            held[shared.state] = held.get(shared.state, 0) + shared.bytes
        return sums

    def _sum_wasted(self, shared: UndividedBytes | None) -> None:
        for each in self.state.known.values():
            if each.charge.wasted:
                usage = self._usage(each.owner)
                usage.wasting += each.charge.memory or 0
                usage.wasted_seconds = usage.wasted_seconds or 0.0
        if shared is not None and shared.wasted and shared.owner is not None:
            self._usage(shared.owner).wasting += shared.bytes

    def _add_owner(self, key: Key, now: float) -> bool:
        """Give an owner its own entry; if necessary remove the owner that has been gone for longest."""
        owners = self.state.owners
        named = len(owners) - (_entry(OTHER) in owners)
        if self._most and named >= self._most:
            gone = self._gone(now, KEPT)
            if not gone:
                return False
            del owners[_entry(gone[-1])]
        owners[_entry(key)] = Usage(key)
        return True

    def _gone(self, now: float, kept: float) -> list[Key]:
        gone = [
            (usage.gone, usage.owner)
            for usage in self.state.owners.values()
            if usage.owner != OTHER and usage.gone is not None and now - usage.gone >= kept
        ]
        return [key for _, key in sorted(gone, reverse=True)]

    def _usage(self, key: Key) -> Usage:
        found = self.state.owners.get(_entry(key))
        return self.state.owners.setdefault(_entry(OTHER), Usage(OTHER)) if found is None else found

    def _count_dead(self, now: float) -> None:
        for each in self.state.known.values():
            if each.dead_since is not None and not each.counted and now - each.dead_since >= SETTLE:
                each.counted = True
                self._usage(each.owner).not_freed += each.charge.memory or 0

    def _count_freed(self, ended: Iterable[ChargedHolding], unclaimed: Unclaimed | None, now: float) -> None:
        """Measure what the ended holdings have freed, once the device does not change any more.

        NVML does not say which process a byte belonged to. But what an ended holding leaves behind is in use
        and belongs to no listed process, so ``unattributed`` rises by it. Where bytes were counted twice
        (shared memory), the overlap shrinks instead, and the other process goes on holding them.
        """
        state = self.state
        gone = [(each.owner, each.charge.memory) for each in ended if each.charge.memory]
        if gone and state.unclaimed is not None:
            if state.episode is None:
                state.episode = Episode(now, now, state.unclaimed)
            state.episode.last = now
            state.episode.ended += gone
        episode = state.episode
        if episode is None or unclaimed is None:
            return
        if now - episode.last < SETTLE and now - episode.began < EPISODE_MAX:
            return
        state.episode = None
        total = sum(memory for _, memory in episode.ended)
        before = episode.before
        not_freed = min(total, max(0, unclaimed.unattributed - before.unattributed))
        if not_freed <= NOISE:
            not_freed = 0
        kept = max(0, before.overlap - unclaimed.overlap) + max(0, unclaimed.left - before.left)
        shared = min(total - not_freed, kept)
        for owner, memory in episode.ended:
            usage = self._usage(owner)
            stayed = not_freed * memory // total
            usage.not_freed += stayed
            usage.freed += memory - stayed - shared * memory // total

    def _publish(self, dropped: int, *, kept_by_system: bool) -> OwnerUsageTotals:
        return OwnerUsageTotals(
            owners=tuple(
                OwnerUsage(
                    type=usage.owner[0],
                    name=usage.owner[1],
                    held=usage.held,
                    byte_seconds={**dict.fromkeys(usage.held, 0.0), **usage.seconds},
                    wasted_byte_seconds=usage.wasted_seconds,
                    freed=None if kept_by_system else usage.freed,
                    not_freed=usage.not_freed,
                )
                for usage in sorted(self.state.owners.values(), key=lambda usage: usage.owner)
            ),
            dropped=dropped,
            uncounted=self.state.uncounted,
        )


def _entry(owner: Key) -> str:
    """Return the key of an owner's entry: a type has no slash."""
    return f"{owner[0]}/{owner[1]}"


class UsageTracker:
    """Sum what the owners of all devices' memory have used, by device UUID."""

    def __init__(self, most: int, state: dict[str, DeviceUsageState]) -> None:
        self._most = most
        self.state = state

    def mark_failed_sample(self) -> None:
        """Record that a sample failed as a whole, so that the span around it is not known."""
        for usage in self.state.values():
            usage.unanswered = True

    def mark_unanswered(self, uuid: str) -> None:
        """Record that a device did not answer, or did not say who holds its memory."""
        self._state_of(uuid).unanswered = True

    def update(  # noqa: PLR0913 one argument a fact
        self,
        device: DeviceReading,
        charges: Sequence[Charge],
        ledger: Ledger | None,
        sample: Sample,
        *,
        shared: UndividedBytes | None,
        left: int,
    ) -> OwnerUsageTotals | None:
        """Record one sample of a device; return None if its holders are not known."""
        if device.divided:
            return None
        if device.processes is None:
            self.mark_unanswered(device.uuid)
            return None
        return DeviceUsage(self._most, self._state_of(device.uuid)).update(
            charges,
            ledger,
            sample.monotonic,
            sample.longest_gap,
            shared=shared,
            left=left,
            kept_by_system=device.memory_kind is not None,
        )

    def _state_of(self, uuid: str) -> DeviceUsageState:
        return self.state.setdefault(uuid, DeviceUsageState())


def _is_same_process(before: int | None, now: int | None) -> bool:
    """Tell whether two start times of a pid can belong to one process; an unknown start time matches any."""
    return before is None or now is None or before == now
