"""Take values out of plain data that a stranger may have written: each is of its type, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from vramledger.errors import SnapshotError

SIGNED_KEYS = ("address", "addr", "line", "time_us")
"""Addresses of the upper half are negative in some versions; sizes and times never are."""


def mapping(data: object, place: str) -> Mapping[object, object]:
    """Return a dictionary."""
    if not isinstance(data, dict):
        raise_malformed(place, "a dictionary")
    return data


def whole_number(holder: Mapping[object, object], key: str, absent: int | None = None) -> int:
    """Return a whole number, of 0 or more unless :data:`SIGNED_KEYS` has its key."""
    value = holder.get(key, absent)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        raise_malformed(key, "a whole number")
    if value < 0 and key not in SIGNED_KEYS:
        raise_malformed(key, "a number of 0 or more")
    return value


def optional_number(holder: Mapping[object, object], key: str) -> int | None:
    """Return a whole number, or None where there is none."""
    return None if holder.get(key) is None else whole_number(holder, key)


def flag(holder: Mapping[object, object], key: str) -> bool:
    """Return true or false; false where there is no value."""
    value = holder.get(key, False)
    if not isinstance(value, bool):
        raise_malformed(key, "true or false")
    return value


def text(holder: Mapping[object, object], key: str) -> str:
    """Return a text."""
    value = holder.get(key)
    if not isinstance(value, str):
        raise_malformed(key, "a text")
    return value


def items(
    holder: Mapping[object, object], key: str, most: int = 1_000_000
) -> Iterator[Mapping[object, object]]:
    """Yield the dictionaries of a list."""
    found = holder.get(key, [])
    if not isinstance(found, list | tuple):
        raise_malformed(key, "a list")
    if len(found) > most:
        raise_malformed(key, f"a list of at most {most:,} entries")
    for each in found:
        yield mapping(each, key)


def raise_malformed(place: str, wanted: str) -> NoReturn:
    """Refuse a snapshot.

    Raises:
        SnapshotError: always.
    """
    message = f"this is not a memory snapshot of PyTorch that we know: {place!r} is not {wanted}"
    raise SnapshotError(message)
