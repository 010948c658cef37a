"""Check whether a value is what its annotations say: for content of files that anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def type_error(value: object, shape: Any) -> str | None:  # noqa: ANN401 an annotation
    """Return what is wrong with a value, in a few words; None when it has this shape.

    Numbers must be finite. A whole number counts as a float, but a bool does not count as a number.
    """
    if shape is Any or shape is object:
        return None
    wrong = f"{str(value)[:40]!r} is not of type {getattr(shape, '__name__', shape)}"
    origin = get_origin(shape)
    if origin is not None:
        return _generic_error(value, origin, get_args(shape), wrong)
    if is_dataclass(shape) or hasattr(shape, "_fields"):
        return _record_error(value, shape) if isinstance(value, shape) else wrong
    return None if _is_plain(value, shape) else wrong


def _generic_error(value: object, origin: Any, inner: tuple[Any, ...], wrong: str) -> str | None:  # noqa: ANN401
    if origin in (Union, UnionType):
        return None if any(type_error(value, each) is None for each in inner) else wrong
    if origin is Literal:
        return None if value in inner else wrong
    if origin is tuple:
        return _tuple_error(value, inner) if isinstance(value, (tuple, list)) else wrong
    if origin in (dict, Mapping):
        return _mapping_error(value, *inner) if isinstance(value, Mapping) else wrong
    return None if isinstance(value, origin) else wrong


def _is_plain(value: object, shape: Any) -> bool:  # noqa: ANN401 an annotation
    if shape in (None, NoneType):
        return value is None
    if shape in (int, float):
        number = isinstance(value, (int, float) if shape is float else int) and not isinstance(value, bool)
        return number and value - value == 0  # type: ignore[operator]
    return isinstance(value, shape)


@cache
def _hints(shape: type) -> dict[str, Any]:
    return get_type_hints(shape)


def _record_error(value: object, shape: type) -> str | None:
    for name, each in _hints(shape).items():
        wrong = type_error(getattr(value, name), each)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _tuple_error(value: tuple[object, ...] | list[object], inner: tuple[Any, ...]) -> str | None:
    if inner[1:] == (...,):
        inner = inner[:1] * len(value)
    if len(inner) != len(value):
        return f"{len(value)} values for {len(inner)}"
    return next(filter(None, map(type_error, value, inner)), None)


def _mapping_error(value: Mapping[object, object], key: Any, inner: Any) -> str | None:  # noqa: ANN401
    for name, each in value.items():
        wrong = type_error(name, key) or type_error(each, inner)
        if wrong is not None:
            return f"{str(name)[:20]}: {wrong}"
    return None
