"""Every place of a document, and values that are wrong there."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

WRONG: list[object] = [
    None, -1, 0, 1, 2**62, 2**70, 1.5, 1e-320, 1e308, float("inf"), "", "x" * 1000, "\x1b[2J\n", [], [None],
    [3], {}, {"frameworks": 1}, True, [{}], [{"pid": 7}],
]  # fmt: skip
"""Values of JSON."""

WRONG_PICKLED: list[object] = [*WRONG, b"x", (1,), {"x": {"\x1b]0;": 1}, 7: 7, None: None}]
"""Values that only a pickle has as well."""


def places(data: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every part of a document, in lists to the first two, and to the whole at last."""
    inner: Iterable[Any] = ()
    if isinstance(data, dict):
        inner = data.items()
    elif isinstance(data, list):
        inner = enumerate(data[:2])
    for key, value in inner:
        yield from places(value, (*path, key))
    yield path


def with_value(data: object, place: tuple[Any, ...], value: object) -> Any:  # noqa: ANN401 any document
    """Return a copy of a document with another value at a place."""
    if not place:
        return value
    document: Any = copy.deepcopy(data)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return document
