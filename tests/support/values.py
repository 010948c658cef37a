"""Values of a type, made from its hints: a test of all fields needs no list of them."""

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any


def values_of(hint: Any) -> Iterator[Any]:  # noqa: ANN401 a type
    """Yield values of a type: a full one first, and then each that could be taken for no value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for each in arguments:
            yield from values_of(each)
    elif hint is type(None):
        yield None
    elif hint in (int, float, str, bool):
        yield {int: 3, float: 0.5, str: "x", bool: True}[hint]
        yield hint()
    elif origin is tuple and arguments[-1] is Ellipsis:
        yield (next(values_of(arguments[0])),)
        yield ()
    elif origin is tuple:
        yield tuple(next(values_of(each)) for each in arguments)
    elif origin is Mapping:
        key, value = (next(values_of(each)) for each in arguments)
        yield {key: value}
        yield {}
    else:  # of a class with fields
        made = {name: [*values_of(each)] for name, each in typing.get_type_hints(hint).items()}
        for turn in range(max(map(len, made.values()))):
            yield hint(**{name: values[min(turn, len(values) - 1)] for name, values in made.items()})
