"""Read values from PyTorch's nested counters, and compute further values from them: pure functions."""

from __future__ import annotations

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
    """Return whether an allocator configuration enables expandable segments."""
    for item in text.replace(" ", "").lower().split(","):
        key, _, value = item.partition(":")
        if key == "expandable_segments":
            return value in {"true", "1"}
    return False
