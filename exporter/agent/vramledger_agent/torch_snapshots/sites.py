"""Sum live bytes by the line that allocated them, and find which lines hold more in a later snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vramledger_agent.torch_snapshots.snapshot import AllocationSnapshot, Block
from vramledger_agent.torch_snapshots.user_lines import Frame, Stack, common_frame

OLDER = "(allocated before the recording)"
"""Replaces the line of code for memory whose line was not recorded."""


class AllocationSite(NamedTuple):
    """A line of the user's program with the live memory that it allocated."""

    frame: Frame | None  # the user's innermost line; None for what is older than the recording
    callers: Stack  # the user's lines above it through which most bytes came, innermost first
    size: int  # live bytes
    blocks: int  # live allocations


class SiteGrowth(NamedTuple):
    """A site that holds more than before: ``before`` and ``after`` are bytes, the counts allocations."""

    site: AllocationSite
    before: int
    blocks_before: int

    @property
    def size(self) -> int:
        return self.site.size - self.before

    @property
    def blocks(self) -> int:
        """Return by how many allocations it grew; fewer, larger ones make this negative."""
        return self.site.blocks - self.blocks_before


class SnapshotDifference(NamedTuple):
    """What grew between two snapshots."""

    grown: tuple[SiteGrowth, ...]  # the sites, the one that grew most first
    # a line through which nine tenths of the growth came, preferably one that frees nothing again; None if
    # there is no such line
    through: Frame | None
    before: int  # live bytes in all, first snapshot
    after: int  # live bytes in all, second snapshot
    older: int  # by how much the bytes without a line grew


def site_frame(stack: Stack) -> Frame | None:
    """Return the line to which a stack is counted: its innermost."""
    return stack[0] if stack else None


def sum_by_site(blocks: Iterable[Block]) -> list[AllocationSite]:
    sizes: dict[Frame | None, dict[Stack, int]] = {}
    counts: dict[Frame | None, int] = {}
    for block in blocks:
        key = site_frame(block.stack)
        stacks = sizes.setdefault(key, {})
        stacks[block.stack] = stacks.get(block.stack, 0) + block.size
        counts[key] = counts.get(key, 0) + 1
    found = [
        AllocationSite(
            key, max(stacks, key=lambda stack: stacks[stack])[1:], sum(stacks.values()), counts[key]
        )
        for key, stacks in sizes.items()
    ]
    return sorted(found, key=lambda site: (-site.size, str(site.frame)))


def compare_snapshots(first: AllocationSnapshot, second: AllocationSnapshot) -> SnapshotDifference:
    """Compare two snapshots of one program, the older one first."""
    before = {site.frame: site for site in sum_by_site(first.blocks)}
    grown = []
    older = 0
    for site in sum_by_site(second.blocks):
        was = before.get(site.frame)
        growth = SiteGrowth(site, was.size if was else 0, was.blocks if was else 0)
        if site.frame is None:
            older = growth.size
        elif growth.size > 0:
            grown.append(growth)
    if None in before and all(block.stack for block in second.blocks):
        older = -before[None].size
    grown.sort(key=lambda growth: (-growth.size, str(growth.site.frame)))
    return SnapshotDifference(
        tuple(grown),
        common_frame(_grown_stacks(first, second), _kept_shares(second)),
        sum(block.size for block in first.blocks),
        sum(block.size for block in second.blocks),
        older,
    )


def _grown_stacks(first: AllocationSnapshot, second: AllocationSnapshot) -> list[tuple[Stack, int]]:
    sizes: dict[Stack, int] = {}
    for blocks, sign in ((second.blocks, 1), (first.blocks, -1)):
        for block in blocks:
            sizes[block.stack] = sizes.get(block.stack, 0) + sign * block.size
    return [(stack, size) for stack, size in sizes.items() if stack and size > 0]


def _kept_shares(snapshot: AllocationSnapshot) -> dict[Frame, float]:
    """Return for each line the share of its recorded bytes that is still allocated at the end."""
    allocated: dict[Frame, int] = {}
    kept: dict[Frame, int] = {}
    alive: dict[tuple[int, int], tuple[Stack, int]] = {}
    for event in snapshot.events:
        key = event.device, event.address
        if event.action == "alloc":
            alive[key] = event.stack, event.size
            for frame in set(event.stack):
                allocated[frame] = allocated.get(frame, 0) + event.size
        elif event.action == "free_completed":
            alive.pop(key, None)
    for stack, size in alive.values():
        for frame in set(stack):
            kept[frame] = kept.get(frame, 0) + size
    return {frame: kept.get(frame, 0) / size for frame, size in allocated.items() if size}
