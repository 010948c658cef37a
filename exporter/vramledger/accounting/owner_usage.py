"""Charge each device's memory to its owners, and measure what was freed when holders ended.

Byte-seconds are integrated by the left rule: what a sample saw counts, in the state that it saw, until the
next sample. On average we notice a holder's start as late as its end, so both delays cancel. Only
spans that are fully covered by samples count. A span that is longer than the gap rule, or that has a failed
sample in it, is added to :attr:`OwnerUsageTotals.uncounted` instead. The clock is the monotonic one, so
setting the wall clock changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vramledger.accounting.pid_reuse import same_process
from vramledger.accounting.sample import Sample
from vramledger.model.label import label_text
from vramledger.model.reading import ProcessFacts
from vramledger.model.snapshot import Ledger, OwnerUsage, OwnerUsageTotals, State, UndividedBytes

UNKNOWN = ("unknown", "")
"""Type and name of the owner of a holding whose process we never saw."""

OTHER = ("other", "other")
"""The entry for all owners beyond ``--owners.max``; no resolver gives this type."""

KEPT = 300.0
"""Seconds for which an owner that holds nothing any more keeps its entry, even if a new owner needs one. So a
slow scrape still sees it."""

GONE_MAX = 5
"""The maximum number of a device's owners that hold nothing any more and still have series: those that left
last. This keeps the page of 8 GPUs and 64 holders below 1,730 series, however often owners change. If
more than 5 owners leave one device between two scrapes, the usage of the first of them since the last scrape
is not seen."""

SETTLE = 2.0
"""Seconds from the end of a holding until we measure what was freed.

A killed holder of 20 GiB took 94 ms on an H200; the list of processes and the used memory are read a moment
apart.
"""

EPISODE_MAX = 10.0
"""Seconds after which we measure anyway, when holdings keep ending one after the other."""

NOISE = 66 * 2**20
"""Bytes by which ``unattributed`` changes without a cause (measured: 0 to 66 MiB in an hour of work on an
H200)."""

Key = tuple[str, str]


class Charge(NamedTuple):
    """One holding as its owner is charged for it.

    ``owner`` is (type, name), None while not known. ``wasted`` says that the bytes are held without any work.
    """

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


@dataclass(slots=True)
class _Usage:
    """What one owner has used and wasted; ``gone`` is the monotonic time since which it holds nothing."""

    seconds: dict[State, float] = field(default_factory=dict)
    wasted_seconds: float | None = None
    freed: int = 0
    not_freed: int = 0
    gone: float | None = None


@dataclass(slots=True)
class _ChargedHolding:
    """A holding of the newest sample.

    ``dead_since`` is monotonic; ``counted`` says that its bytes are in the counter of what was not freed.
    """

    charge: Charge
    owner: Key
    dead_since: float | None = None
    counted: bool = False


@dataclass(slots=True)
class _Episode:
    """Holdings that ended close together: what they freed is measured for all of them together."""

    began: float
    last: float
    unattributed: int
    overlap: int
    left: int
    ended: list[tuple[Key, int]]


class DeviceUsage:
    """Sum what the owners of one device's memory have used, sample by sample."""

    def __init__(self, most: int) -> None:
        """Start for one device, with at most ``most`` named owners; 0 means no limit."""
        self._most = most
        self._owners: dict[Key, _Usage] = {}
        self._known: dict[int, _ChargedHolding] = {}
        self._held: dict[Key, dict[State, int]] = {}
        self._wasted: Counter[Key] = Counter()
        self._ledger: Ledger | None = None
        self._shared: UndividedBytes | None = None
        self._left = 0
        self._last: float | None = None
        self._unanswered = False
        self._uncounted = 0.0
        self._episode: _Episode | None = None
        self._kept_by_system = False

    def mark_unanswered(self) -> None:
        """Record that a sample had no data of this device, so that the span around it is not known."""
        self._unanswered = True

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

        Args:
            charges: every holding that NVML lists on the device.
            ledger: the balance of the same sample, None if the driver gave no figures for one.
            now: monotonic seconds of the sample.
            gap: the longest span between two samples that still counts, in seconds.
            shared: bytes that one of several holders has; if all of them have one owner, they are its own.
            left: bytes that ended holders have left to others.
            kept_by_system: whether the operating system manages the memory, and may keep pages.
        """
        self._integrate(now, gap)
        self._kept_by_system = kept_by_system
        self._shared = shared
        known = {charge.pid: self._charge(charge, now) for charge in charges}
        ended = [
            before
            for pid, before in self._known.items()
            if pid not in known or not same_process(before.charge.start, known[pid].charge.start)
        ]
        # The owner of a holding that ends at this sample still has its own entry, from the sample before.
        self._count_freed(ended, ledger, left, now)
        self._known = known
        dropped = self._sum_by_owner(now)
        self._count_dead(now)
        self._ledger, self._left = ledger, left
        return self._publish(dropped)

    def _integrate(self, now: float, gap: float) -> None:
        span = 0.0 if self._last is None else now - self._last
        if span > gap or (self._unanswered and span > 0):
            self._uncounted += span
        elif span > 0:
            for key, held in self._held.items():
                seconds = self._owners[key].seconds
                for state, memory in held.items():
                    seconds[state] = seconds.get(state, 0.0) + memory * span
            for key, memory in self._wasted.items():
                usage = self._owners[key]
                usage.wasted_seconds = (usage.wasted_seconds or 0.0) + memory * span
        self._last, self._unanswered = now, False

    def _charge(self, charge: Charge, now: float) -> _ChargedHolding:
        """Find the owner of a holding: a dead one is still charged to the owner that it had while alive."""
        before = self._known.get(charge.pid)
        if before is not None and not same_process(before.charge.start, charge.start):
            before = None
        owner = charge.owner or (before.owner if before is not None else UNKNOWN)
        known = _ChargedHolding(charge, owner)
        if charge.state is State.DEAD:
            known.dead_since = now
            if before is not None and before.dead_since is not None:
                known.dead_since, known.counted = before.dead_since, before.counted
        return known

    def _sum_by_owner(self, now: float) -> int:
        """Sum the holdings by owner and state; return how many owners have no entry of their own."""
        sums: dict[Key, dict[State, int]] = {}
        for each in self._known.values():
            held = sums.setdefault(each.owner, {})
            if each.charge.memory is not None:
                held[each.charge.state] = held.get(each.charge.state, 0) + each.charge.memory
        self._add_shared(sums)
        for key, usage in self._owners.items():
            if key in sums:
                usage.gone = None
            elif usage.gone is None:
                usage.gone = now
        for key in self._gone(now, 0.0)[GONE_MAX:]:
            del self._owners[key]
        fresh = [key for key in sums if key not in self._owners]
        fresh.sort(key=lambda key: (-sum(sums[key].values()), key))
        overflow_owners = [key for key in fresh if not self._add_owner(key, now)]
        for key in overflow_owners:
            held = sums.pop(key)
            rest = sums.setdefault(OTHER, {})
            for state, memory in held.items():
                rest[state] = rest.get(state, 0) + memory
        if OTHER in sums:
            self._owners.setdefault(OTHER, _Usage()).gone = None
        self._held = sums
        self._sum_wasted()
        return len(overflow_owners)

    def _add_shared(self, sums: Mapping[Key, dict[State, int]]) -> None:
        """Add bytes that one of several holders has, if all of them have one owner."""
        if self._shared is not None and self._shared.owner is not None and self._shared.owner in sums:
            held = sums[self._shared.owner]
            held[self._shared.state] = held.get(self._shared.state, 0) + self._shared.bytes

    def _sum_wasted(self) -> None:
        self._wasted = Counter()
        for each in self._known.values():
            if each.charge.wasted:
                key = each.owner if each.owner in self._owners else OTHER
                self._wasted[key] += each.charge.memory or 0
                usage = self._owners[key]
                usage.wasted_seconds = usage.wasted_seconds or 0.0
        if self._shared is not None and self._shared.wasted and self._shared.owner is not None:
            self._wasted[self._shared.owner if self._shared.owner in self._owners else OTHER] += (
                self._shared.bytes
            )

    def _add_owner(self, key: Key, now: float) -> bool:
        """Give an owner its own entry; if necessary remove the owner that has been gone for longest."""
        named = len(self._owners) - (OTHER in self._owners)
        if self._most and named >= self._most:
            gone = self._gone(now, KEPT)
            if not gone:
                return False
            del self._owners[gone[-1]]
        self._owners[key] = _Usage()
        return True

    def _gone(self, now: float, kept: float) -> list[Key]:
        """Return the owners that have held nothing for at least ``kept`` seconds, the longest gone last."""
        gone = [
            (usage.gone, key)
            for key, usage in self._owners.items()
            if key != OTHER and usage.gone is not None and now - usage.gone >= kept
        ]
        return [key for _, key in sorted(gone, reverse=True)]

    def _usage(self, key: Key) -> _Usage:
        if key not in self._owners:
            key = OTHER
        return self._owners.setdefault(key, _Usage())

    def _count_dead(self, now: float) -> None:
        """Count the bytes of a holding that has been dead for a while as not freed."""
        for each in self._known.values():
            if each.dead_since is not None and not each.counted and now - each.dead_since >= SETTLE:
                each.counted = True
                self._usage(each.owner).not_freed += each.charge.memory or 0

    def _count_freed(
        self, ended: Iterable[_ChargedHolding], ledger: Ledger | None, left: int, now: float
    ) -> None:
        """Measure what the ended holdings have freed, once the device does not change any more.

        NVML does not say which process a byte belonged to. But what an ended holding leaves behind is in use
        and belongs to no listed process, so ``unattributed`` rises by it. Where bytes were counted twice
        (shared memory), the overlap shrinks instead, and the other process goes on holding them. Another
        process also goes on holding what was left to it.

        Memory that the operating system manages is not judged: it keeps pages for itself after the end.
        """
        if self._kept_by_system:
            self._episode = None
            return
        gone = [(each.owner, each.charge.memory) for each in ended if each.charge.memory]
        if gone and self._ledger is not None:
            if self._episode is None:
                self._episode = _Episode(
                    now, now, self._ledger.unattributed, self._ledger.overlap, self._left, []
                )
            self._episode.last = now
            self._episode.ended += gone
        episode = self._episode
        if episode is None or ledger is None:
            return
        if now - episode.last < SETTLE and now - episode.began < EPISODE_MAX:
            return
        self._episode = None
        total = sum(memory for _, memory in episode.ended)
        not_freed = min(total, max(0, ledger.unattributed - episode.unattributed))
        if not_freed <= NOISE:
            not_freed = 0
        kept = max(0, episode.overlap - ledger.overlap) + max(0, left - episode.left)
        shared = min(total - not_freed, kept)
        for owner, memory in episode.ended:
            usage = self._usage(owner)
            stayed = not_freed * memory // total
            usage.not_freed += stayed
            usage.freed += memory - stayed - shared * memory // total

    def _publish(self, dropped: int) -> OwnerUsageTotals:
        nothing: Mapping[State, int] = {}
        return OwnerUsageTotals(
            owners=tuple(
                OwnerUsage(
                    type=key[0],
                    name=key[1],
                    held=(held := self._held.get(key, nothing)),
                    byte_seconds={**dict.fromkeys(held, 0.0), **usage.seconds},
                    wasted_byte_seconds=usage.wasted_seconds,
                    freed=None if self._kept_by_system else usage.freed,
                    not_freed=usage.not_freed,
                )
                for key, usage in sorted(self._owners.items())
            ),
            dropped=dropped,
            uncounted=self._uncounted,
        )


class UsageTracker:
    """Sum what the owners of all devices' memory have used, by device UUID."""

    def __init__(self, most: int) -> None:
        """Start empty; see :class:`DeviceUsage` for ``most``."""
        self._most = most
        self._devices: dict[str, DeviceUsage] = {}

    def mark_failed_sample(self) -> None:
        """Record that a sample failed as a whole."""
        for usage in self._devices.values():
            usage.mark_unanswered()

    def mark_unanswered(self, uuid: str) -> None:
        """Record that a device did not answer, or did not say who holds its memory."""
        self._usage_of(uuid).mark_unanswered()

    def update(  # noqa: PLR0913 one argument a fact
        self,
        uuid: str,
        charges: Sequence[Charge],
        ledger: Ledger | None,
        sample: Sample,
        *,
        shared: UndividedBytes | None = None,
        left: int = 0,
        kept_by_system: bool = False,
    ) -> OwnerUsageTotals:
        """Record one sample of a device."""
        return self._usage_of(uuid).update(
            charges,
            ledger,
            sample.monotonic,
            sample.longest_gap,
            shared=shared,
            left=left,
            kept_by_system=kept_by_system,
        )

    def keep_only(self, uuids: Iterable[str]) -> None:
        """Forget all devices except those with these UUIDs."""
        kept = set(uuids)
        for uuid in [uuid for uuid in self._devices if uuid not in kept]:
            del self._devices[uuid]

    def _usage_of(self, uuid: str) -> DeviceUsage:
        usage = self._devices.get(uuid)
        if usage is None:
            usage = self._devices[uuid] = DeviceUsage(self._most)
        return usage
