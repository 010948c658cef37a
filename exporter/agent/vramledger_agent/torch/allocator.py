"""Read PyTorch's caching allocator: its counters by device, its blocks, and whether they leak.

It calls only functions that never call the GPU: the allocator's own counters, and at most every 30 seconds a
snapshot without stacks, for the largest free block. The counters take 10.6 microseconds on an H200; to
flatten them as ``torch.cuda.memory_stats`` does takes 65.

Without a leak, memory rises and falls within each training step, and its minimum stays the same. A leak
raises this minimum. So we compare the minima of the quarters of the time that we have seen.

What the counters cannot tell, the largest free block and what private pools reserve, a survey finds. It takes
a snapshot of the allocator, whose cost grows with the blocks (1 ms for 401 segments on an H200), while it
holds the interpreter's lock. So the first survey is made once the program is under way, and then at most one
every half minute, less often the longer it took. It leaves out the traces of a history that the program
records, and there is none for a heap that would take too long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from itertools import pairwise
from types import ModuleType

from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.torch.optimizer_steps import OptimizerSteps
from vramledger_agent.torch.recording import (
    WouldImportError,
    custom_allocators,
    recording,
    take_without_import,
)

FIRST_READING = 3
"""The first survey is at the third reading with live blocks: before that a program has hardly begun."""

MIN_PAUSE_SECONDS = 30.0
MIN_PAUSE_TO_COST = 10_000
MAX_BLOCKS = 20_000
MAX_AGE_PAUSES = 4.0


class DeviceBlocks:
    """The blocks of one device at the last survey."""

    __slots__ = ("has_expandable", "largest_free", "private")

    def __init__(self) -> None:
        self.has_expandable = False  # it has expandable segments
        self.largest_free = 0  # bytes of the largest block that a new tensor could have
        self.private = 0  # bytes that private pools reserve


class BlockSurvey:
    """The allocator's blocks as they were at the last survey."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._live_readings = 0
        self._next_survey = 0.0
        self._pause_seconds = MIN_PAUSE_SECONDS
        self._surveyed_at = 0.0
        self._devices: dict[int, DeviceBlocks] = {}
        self._unsupported = False

    def survey_if_due(self, now: float, stats: Iterable[dict[str, object]]) -> None:
        """Take a snapshot if it is time for one and the heap is not too large."""
        if now < self._next_survey or self._unsupported:
            return
        live = count_blocks(stats)
        self._live_readings += live > 0
        if self._live_readings < FIRST_READING:
            return
        self._next_survey = now + MIN_PAUSE_SECONDS
        if live > MAX_BLOCKS:
            return
        begun = time.thread_time()
        self._devices = self.survey_now()
        self._pause_seconds = max(MIN_PAUSE_SECONDS, (time.thread_time() - begun) * MIN_PAUSE_TO_COST)
        self._surveyed_at = now
        self._next_survey = now + self._pause_seconds

    def survey_now(self) -> dict[int, DeviceBlocks]:
        """Return each device's blocks now; empty, from now on, where they cannot be read cheaply."""
        try:
            segments = take_snapshot(self._torch)
        except (RuntimeError, TypeError, AttributeError) as error:  # a version that we do not know
            if belongs_to_program(error):
                raise
            self._unsupported = True
            return {}
        if segments is None:
            return {}
        recording.compare({"segments": segments})  # before a failure needs it
        return sum_segments(segments)

    def device_blocks(self, ordinal: int) -> DeviceBlocks | None:
        """Return what is known of a device's blocks, None when that is too old."""
        if time.monotonic() - self._surveyed_at > MAX_AGE_PAUSES * self._pause_seconds:
            return None
        return self._devices.get(ordinal)


def count_blocks(stats: Iterable[dict[str, object]]) -> int:
    total = 0
    for device in stats:
        for family in ("active", "inactive_split"):
            counts = device.get(family)
            if isinstance(counts, dict):
                total += counts["all"]["current"]
    return total


def take_snapshot(torch: ModuleType) -> list[dict[str, object]] | None:
    """Return the allocator's segments; None where a recorded history makes that too expensive or unsafe.

    Before torch 2.12 they would contain the whole history.
    """
    native = torch._C
    code = getattr(getattr(torch.cuda.memory, "memory_snapshot", None), "__code__", None)
    if code is not None and "include_traces" in code.co_varnames:  # torch 2.12
        argument: object = (0, 0, False)
    elif native._cuda_isHistoryEnabled():
        return None
    else:
        argument = None
    try:  # blocks keep their stacks, also once nothing is recorded
        snapshot = take_without_import(torch, lambda: native._cuda_memorySnapshot(argument))
    except WouldImportError:
        return None
    segments: list[dict[str, object]] = snapshot["segments"]
    return segments


def sum_segments(segments: Iterable[dict[str, object]]) -> dict[int, DeviceBlocks]:
    found: dict[int, DeviceBlocks] = {}
    for segment in segments:
        blocks = found.setdefault(_int_or_zero(segment.get("device")), DeviceBlocks())
        private = tuple(segment.get("segment_pool_id") or (0, 0)) != (0, 0)  # type: ignore[arg-type]
        size = _int_or_zero(segment.get("total_size"))
        blocks.has_expandable = blocks.has_expandable or bool(segment.get("is_expandable"))
        if private:
            blocks.private += size
            continue  # its free blocks belong to a CUDA graph
        for block in segment.get("blocks") or ():  # type: ignore[attr-defined]
            if block["state"] == "inactive":
                blocks.largest_free = max(blocks.largest_free, block["size"])
    return found


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0


MAX_MINIMA = 256
"""When there are more minima than this, each pair of neighbours is replaced by the smaller of the two."""

MIN_MINIMA = 8
WARM_UP_SHARE = 0.1
"""The share of the time at the start that does not count: a program loads its model then."""

MIN_RISE_SHARE = 0.25
"""Every rise must be at least this share of the mean rise: one jump is not a leak."""

MAX_STEP = 3
"""The part of a leak before what proves it has no step above so many mean ones: a jump is no part of it."""

QUARTERS = 4


class LeakDetector:
    """The history of the allocated bytes on one device."""

    __slots__ = ("_minimum", "_readings", "_readings_per_minimum", "minima")

    def __init__(self) -> None:
        self.minima: list[int] = []  # the minimum of each stretch of readings; all stretches have one length
        self._readings_per_minimum = 1
        self._readings = 0
        self._minimum: int | None = None

    def add(self, allocated: int) -> None:
        """Add a reading, in bytes; readings come at even intervals."""
        self._minimum = allocated if self._minimum is None else min(self._minimum, allocated)
        self._readings += 1
        if self._readings < self._readings_per_minimum:
            return
        self.minima.append(self._minimum)
        self._minimum = None
        self._readings = 0
        if len(self.minima) > MAX_MINIMA:
            self.minima = [min(pair) for pair in zip(self.minima[::2], self.minima[1::2], strict=False)]
            self._readings_per_minimum *= 2

    def leaked_bytes(self) -> int | None:
        """Return by how much the minimum has risen: 0 if not steadily, None when it is too early to say."""
        return latest_rise(self.minima)


def latest_rise(minima: list[int]) -> int | None:
    """Return by how many bytes the minima rise, over the whole time or since a later moment.

    A leak may begin after hours. So the second half of the minima is looked at as well, the last quarter, and
    so on. Later parts count only if they end above everything before them: what rises and falls again reaches
    the same height.
    """
    whole = leaked_bytes(minima)
    if whole is None:
        return None
    rises = [whole]
    length = len(minima) // 2
    while length >= MIN_MINIMA:
        before, last = minima[:-length], minima[-length:]
        rise = leaked_bytes(last)
        newest = min(last[-length // QUARTERS :])
        if rise and newest > max(before):
            pace = rise / (length * (1 - WARM_UP_SHARE) * (1 - 1 / QUARTERS))
            start = len(before) + int(length * WARM_UP_SHARE)
            rises.append(max(rise, newest - _least_where_it_began(minima, start, MAX_STEP * pace)))
        length //= 2
    return max(rises)


def _least_where_it_began(minima: list[int], start: int, steepest: float) -> int:
    """Return the minimum from which a rise, seen from ``start`` on, began: no step up to there is steeper."""
    least = min(minima[start:])
    settled = int(len(minima) * WARM_UP_SHARE)
    while start > settled and 0 < least - minima[start - 1] <= steepest:
        start -= 1
        least = minima[start]
    return least


def leaked_bytes(minima: list[int]) -> int | None:
    """Return by how many bytes the minima of their quarters rise; see :func:`latest_rise`."""
    if len(minima) < MIN_MINIMA:
        return None
    settled = minima[int(len(minima) * WARM_UP_SHARE) :]
    size = len(settled) / QUARTERS
    least = [min(settled[int(quarter * size) : int((quarter + 1) * size)]) for quarter in range(QUARTERS)]
    rises = [after - before for before, after in pairwise(least)]
    total = least[-1] - least[0]
    if total <= 0 or min(rises) < MIN_RISE_SHARE * total / len(rises):
        return 0
    return total


NATIVE = "native"


class TorchAllocator:
    """What is known of the allocator; it is read by the agent's thread, and when an allocation fails."""

    def __init__(self, torch: ModuleType, backend: str, optimizer_steps: OptimizerSteps) -> None:
        self.torch = torch  # PyTorch's module, in which CUDA is initialised
        native = torch._C
        self.backend = backend  # the allocator's name, as PyTorch has it
        self._custom_allocators = custom_allocators(torch)
        self.supported = self.backend == NATIVE  # it has counters that can be read
        self._environ = (
            os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
        )
        self._configuration = getattr(native, "_accelerator_getAllocatorSettings", lambda: self._environ)
        self._read_pinned = getattr(native, "_cuda_hostMemoryStats", None)
        # the program's settings enable expandable segments
        self.expandable_enabled = enables_expandable_segments(self._configuration())
        self.used: set[int] = set()  # ordinals of the devices that the program has allocated on
        # CUDA's initialisation makes one generator for each device; asking for the count would be a CUDA
        # call.
        self._device_count = len(torch.cuda.default_generators)
        self._updates = 0
        self._stats: dict[int, dict[str, object]] = {}
        self._figures: dict[int, tuple[object, dict[str, int | None]]] = {}
        self._blocks = BlockSurvey(torch)
        self._leak_detectors: dict[int, LeakDetector] = {}
        self._first_steps: dict[int, LeakDetector] = {}
        self._optimizer_steps = optimizer_steps
        if self.supported:
            recording.used_devices = lambda: tuple(self.used) if self.may_read() else ()
            optimizer_steps.note_step = lambda: self.note_step(tuple(self.used))

    def update(self) -> None:
        """Read the counters, and keep the allocated bytes: their history shows a leak."""
        self.refresh()
        if not self.may_read():
            return
        self._updates += 1
        for ordinal in tuple(self.used):
            allocated = self.figures(ordinal)["allocated"]
            if allocated is not None:
                self._leak_detectors.setdefault(ordinal, LeakDetector()).add(allocated)
        self._blocks.survey_if_due(time.monotonic(), list(self._stats.values()))

    def may_read(self) -> bool:
        """Tell whether the allocator may be read now; see :mod:`custom_allocators` for when it may not."""
        if self.supported and self._custom_allocators.exist():
            self.supported = False
        return self.supported

    def refresh(self) -> None:
        if not self.may_read():
            return
        try:
            self.read_stats(self._due_devices())
        except RuntimeError as error:  # an allocator without counters that calls itself native
            if belongs_to_program(error):
                raise
            self.supported = False

    def read_stats(self, ordinals: set[int]) -> None:
        read = self.torch._C._cuda_memoryStats
        for ordinal in ordinals:
            stats = read(ordinal)
            self._stats[ordinal] = stats
            if ordinal not in self.used and stats["allocation"]["all"]["allocated"]:
                self.used.add(ordinal)

    def figures(self, ordinal: int) -> dict[str, int | None]:
        """Return the figures of a device's counters, as they were last read."""
        stats = self._stats[ordinal]
        read, figures = self._figures.get(ordinal, (None, {}))
        if read is not stats:  # another thread may have read them meanwhile, where an allocation failed
            figures = read_counters(stats)
            self._figures[ordinal] = stats, figures
        return figures

    def survey_blocks(self, ordinal: int, max_blocks: int) -> DeviceBlocks | None:
        """Survey a device's blocks now; None if it has more than ``max_blocks``."""
        if count_blocks([self._stats[ordinal]]) > max_blocks:
            return None
        return self._blocks.survey_now().get(ordinal)

    def note_step(self, ordinals: Iterable[int]) -> None:
        """Keep what is allocated at the end of one of the program's first steps."""
        if not self.may_read():
            return
        read = self.torch._C._cuda_memoryStats
        for ordinal in ordinals:
            allocated = read(ordinal)["allocated_bytes"]["all"]["current"]
            self._first_steps.setdefault(ordinal, LeakDetector()).add(allocated)

    def leaked_bytes(self, ordinal: int) -> int | None:
        """Return by how much the minimum of the allocated bytes has risen; None when it is too early to say.

        A program's first steps take less time than the readings need, so their ends are looked at as well.
        """
        rises = [
            detectors[ordinal].leaked_bytes()
            for detectors in (self._leak_detectors, self._first_steps)
            if ordinal in detectors
        ]
        return max((rise for rise in rises if rise is not None), default=None)

    def minima(self, ordinal: int) -> list[int]:
        detector = self._leak_detectors.get(ordinal)
        return [] if detector is None else list(detector.minima)

    def categories(self, ordinal: int, allocated: int | None) -> dict[str, int] | None:
        return self._optimizer_steps.categories(ordinal, allocated)

    def keeps_gradients(self) -> bool | None:
        return self._optimizer_steps.keeps_gradients

    def device_entry(self, ordinal: int) -> dict[str, object]:
        figures = self.figures(ordinal)
        blocks = self._blocks.device_blocks(ordinal)
        expandable = self.expandable_enabled or (blocks is not None and blocks.has_expandable)
        private = figures["private_pools"]
        if private is None and blocks is not None:
            private = blocks.private
        entry: dict[str, object] = {
            "ordinal": ordinal,
            **figures,
            "private_pools": private,
            "reclaimable": reclaimable_bytes(figures, expandable=expandable, private=private),
            "largest_free_block": None if blocks is None else blocks.largest_free,
            "categories": self.categories(ordinal, figures["allocated"]),
        }
        return {name: value for name, value in entry.items() if value is not None}

    def process_entry(self) -> dict[str, object]:
        """Return what the report has about all devices together: settings, and pinned host memory.

        Before 2.12 PyTorch does not say how it is configured, so the environment of its start counts.
        """
        stats = next(iter(self._stats.values()), None)
        entry: dict[str, object] = {"settings": read_settings(self._configuration(), stats)}
        if self._read_pinned is not None:  # from 2.7 on
            entry |= read_pinned(self._read_pinned())
        return entry

    def _due_devices(self) -> set[int]:
        """Return the devices whose counters to read now: the used devices, and one more in turn.

        If none is used, it returns all, so that the first allocation is seen immediately. Reading all at
        every turn would cost 9 us a device on an H200.
        """
        if not self.used:
            return set(range(self._device_count))
        return {*self.used, self._updates % self._device_count}


MIB = 2**20
UNLIMITED = "unlimited"
OFF = "off"


def read_settings(text: str | None, stats: dict[str, object] | None) -> dict[str, str]:
    """Return the known settings by name; what a device's counters (``stats``) say is certain."""
    found: dict[str, str] = {}
    if text is not None:
        items = dict(_items(text))
        found["expandable_segments"] = (
            "true" if items.get("expandable_segments") in ("true", "1") else "false"
        )
        threshold = _number(items.get("garbage_collection_threshold", "0"))
        if threshold is not None:
            found["garbage_collection_threshold"] = f"{threshold:g}" if threshold > 0 else OFF
    limit = stats.get("max_split_size") if stats is not None else None
    if isinstance(limit, int):
        found["max_split_size_mb"] = f"{limit // MIB}" if 0 < limit < 2**60 else UNLIMITED
    return found


def read_pinned(stats: object) -> dict[str, int]:
    """Return the bytes of pinned host memory that the allocator has, and those in use; empty if not known."""
    found: dict[str, int] = {}
    if isinstance(stats, dict):
        for name, family in (("pinned", "allocated_bytes"), ("pinned_in_use", "active_bytes")):
            values = stats.get(family)
            value = values.get("current") if isinstance(values, dict) else None
            if isinstance(value, int) and value >= 0:
                found[name] = value
    return found


def _items(text: str) -> list[tuple[str, str]]:
    parts = [item.partition(":") for item in text.replace(" ", "").lower().split(",")]
    return [(key, value) for key, _, value in parts]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


COUNTER_FAMILIES = {
    # By our name: the family of counters and the counter in it.
    "reserved": ("reserved_bytes", "current"),
    "allocated": ("allocated_bytes", "current"),
    "active": ("active_bytes", "current"),
    "requested": ("requested_bytes", "current"),
    "inactive_split": ("inactive_split_bytes", "current"),
    "reserved_peak": ("reserved_bytes", "peak"),
    "allocated_peak": ("allocated_bytes", "peak"),
    "allocations": ("allocation", "allocated"),
}
COUNTER_KEYS = {"alloc_retries": "num_alloc_retries", "ooms": "num_ooms"}


def read_counters(stats: dict[str, object]) -> dict[str, int | None]:
    """Return the figures of one device's counters; a figure that this version does not count is None."""
    found: dict[str, int | None] = {}
    for name, (family, which) in COUNTER_FAMILIES.items():
        pools = stats.get(family)
        everything = pools.get("all") if isinstance(pools, dict) else None
        found[name] = everything.get(which) if isinstance(everything, dict) else None
    reserved = stats.get("reserved_bytes")
    for name in ("small_pool", "large_pool"):
        part = reserved.get(name) if isinstance(reserved, dict) else None
        found[name] = part.get("current") if isinstance(part, dict) else None
    for name, key in COUNTER_KEYS.items():
        value = stats.get(key)
        found[name] = value if isinstance(value, int) else None
    found["private_pools"] = private_pool_bytes(stats)
    return found


def private_pool_bytes(stats: dict[str, object]) -> int | None:
    """Return the bytes that CUDA graphs' private pools reserve; before 2.13 torch does not say."""
    pools = stats.get("reserved_bytes_by_private_pools")
    if not isinstance(pools, dict):
        return None
    total = 0
    for pool in pools.values():
        everything = pool.get("all") if isinstance(pool, dict) else None
        if not isinstance(everything, dict):
            return None
        total += everything.get("current", 0)
    return total


def reclaimable_bytes(
    figures: dict[str, int | None], *, expandable: bool | None, private: int | None
) -> int | None:
    """Return what ``empty_cache()`` would free now, None where the counters do not tell.

    With expandable segments they do not tell, because no counter of split blocks includes those. With private
    pools they do not tell either, because these keep their cache while a CUDA graph may be replayed.
    """
    reserved, active, split = figures["reserved"], figures["active"], figures["inactive_split"]
    if expandable is not False or private != 0 or reserved is None or active is None or split is None:
        return None
    return max(0, reserved - active - split)


def enables_expandable_segments(text: str) -> bool:
    """Return whether an allocator configuration enables expandable segments; its first word counts."""
    return dict(reversed(_items(text))).get("expandable_segments") in {"true", "1"}
