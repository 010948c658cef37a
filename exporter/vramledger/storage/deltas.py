"""Write how a document differs from the one before it, and apply that.

A document is what JSON has: objects, arrays, texts, numbers. Samples a second apart are nearly equal, so what
is stored of most is a short patch. A patch of an object is an object: a scalar is the new value of a key, an
object is a patch of that key's value. What :data:`SET` holds replaces a value as a whole, :data:`GONE` names
keys that are gone, :data:`ITEMS` has patches of an array's items by their position.
"""

from __future__ import annotations

from typing import Any

SET, GONE, ITEMS = "=", "-", "#"

_RESERVED = frozenset({SET, GONE, ITEMS})
"""Keys that a patch cannot name: an object with one of them is written as a whole."""

_LISTS = (list, tuple)
_CONTAINERS = (dict, list, tuple)


def difference(before: Any, after: Any) -> Any:  # noqa: ANN401 whatever JSON has
    """Return the patch that makes ``after`` of ``before``; they differ."""
    if isinstance(after, dict):
        if isinstance(before, dict) and _RESERVED.isdisjoint(after):
            return _object_difference(before, after)
    elif isinstance(after, _LISTS):
        if isinstance(before, _LISTS) and len(before) == len(after) and _is_nested(after):
            changed = {
                str(place): difference(old, new)
                for place, (old, new) in enumerate(zip(before, after, strict=True))
                if old != new
            }
            return {ITEMS: changed}
    else:
        return after
    return {SET: after}


def _object_difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for key, new in after.items():
        old = before.get(key, _MISSING)
        if old is _MISSING:
            patch[key] = {SET: new} if isinstance(new, _CONTAINERS) else new
        elif old != new or type(old) is not type(new):
            patch[key] = difference(old, new)
    if len(before) + len(patch) != len(after) or not before.keys() <= after.keys():
        gone = [key for key in before if key not in after]
        if gone:
            patch[GONE] = gone
    return patch


_MISSING = object()


def _is_nested(values: list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether an array holds others: one of plain values is written again, which is as short."""
    return any(isinstance(each, _CONTAINERS) for each in values)


def apply(before: Any, patch: Any) -> Any:  # noqa: ANN401
    """Return what a patch makes of ``before``, which stays. Raises ValueError if it does not fit."""
    if not isinstance(patch, dict):
        return patch
    if SET in patch:
        return patch[SET]
    if ITEMS in patch:
        if not isinstance(before, list):
            raise ValueError("a patch of an array where there is none")
        items = list(before)
        for place, each in patch[ITEMS].items():
            items[int(place)] = apply(items[int(place)], each)
        return items
    if not isinstance(before, dict):
        raise ValueError("a patch of an object where there is none")  # noqa: TRY004
    after = dict(before)
    for key in patch.get(GONE, ()):
        del after[key]
    for key, each in patch.items():
        if key != GONE:
            after[key] = apply(after.get(key), each)
    return after
