"""Read the settings by which PyTorch's allocator works now, whoever set them: pure functions."""

from __future__ import annotations

MIB = 2**20
UNLIMITED = "unlimited"
OFF = "off"


def read_settings(text: str | None, stats: dict[str, object] | None) -> dict[str, str]:
    """Return the settings by their names; one that is not known is left out.

    Args:
        text: the configuration, as PyTorch or the environment has it; None when not known.
        stats: the counters of a device: what they say of a setting is certain.
    """
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
