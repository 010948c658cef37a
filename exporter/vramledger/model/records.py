"""Write the records of this package as JSON, and read them by their annotations.

A record is a dataclass or a NamedTuple of numbers, texts, other records, and tuples and mappings of them.
Both ends must have the same version of the program: a record is read only if it has exactly the fields of its
class. What is read is checked, because the program at the other end may not be ours.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vramledger.errors import VramledgerError

_T = TypeVar("_T")


class RecordError(VramledgerError):
    """The text is not such a record."""


def write_record(record: object) -> bytes:
    """Return a record as JSON without a line break."""
    return json.dumps(record, separators=(",", ":"), default=_plain).encode()


def read_record(text: bytes | str, shape: type[_T]) -> _T:
    """Return the record of a class that :func:`write_record` wrote.

    Raises:
        RecordError: it is not a record of this class.
    """
    try:
        return cast("_T", _reader(cast("Any", shape))(json.loads(text)))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        message = f"not a {shape.__name__} of this version ({error})"
        raise RecordError(message) from error


def _plain(value: object) -> object:
    """Turn what json cannot write by itself into what it can: NamedTuples and names of states it can."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, frozenset):
        return sorted(value)
    message = f"{type(value).__name__} cannot be part of a record"
    raise TypeError(message)


_Reader = Callable[[Any], Any]


@cache
def _reader(shape: Any) -> _Reader:  # noqa: ANN401, PLR0911 - a return a kind of annotation
    """Return the function that reads values of an annotation; it raises a ValueError for any other value."""
    origin, inner = get_origin(shape), get_args(shape)
    if origin in (Union, UnionType):
        return _union_reader(tuple(_reader(each) for each in inner))
    if origin is tuple:
        return _tuple_reader(inner)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(*inner)
    if origin is frozenset:
        items = _tuple_reader((*inner, ...))
        return lambda raw: frozenset(items(raw))
    if isinstance(shape, type) and issubclass(shape, enum.Enum):
        return shape
    if is_dataclass(shape):
        return _dataclass_reader(cast("type", shape))
    if hasattr(shape, "_fields"):
        readers = tuple(_reader(each) for each in get_type_hints(shape).values())
        values = _fixed_reader(readers)
        return lambda raw: shape(*values(raw))
    if shape in (int, float, str, bool, NoneType):
        return _scalar_reader(shape)
    message = f"no record has a field of the type {shape}"
    raise TypeError(message)


def _scalar_reader(shape: type) -> _Reader:
    def read(raw: Any) -> Any:  # noqa: ANN401
        if type(raw) is shape:
            if isinstance(raw, float) and raw - raw != 0:
                message = "a number that is not finite"
                raise ValueError(message)
            return raw
        if shape is float and type(raw) is int:
            return float(raw)
        message = f"{str(raw)[:40]!r} is not {shape.__name__}"
        raise ValueError(message)

    return read


def _union_reader(readers: tuple[_Reader, ...]) -> _Reader:
    def read(raw: Any) -> Any:  # noqa: ANN401
        wrong: ValueError = ValueError("nothing fits")
        for reader in readers:
            try:
                return reader(raw)
            except ValueError as error:
                wrong = error if raw is not None else wrong
        raise wrong

    return read


def _tuple_reader(inner: tuple[Any, ...]) -> _Reader:
    if inner[1:] != (...,):
        return _fixed_reader(tuple(map(_reader, inner)))
    reader = _reader(inner[0])

    def read(raw: Any) -> Any:  # noqa: ANN401
        return tuple(map(reader, _list(raw)))

    return read


def _fixed_reader(readers: tuple[_Reader, ...]) -> _Reader:
    def read(raw: Any) -> Any:  # noqa: ANN401
        if len(_list(raw)) != len(readers):
            message = f"{len(raw)} values for {len(readers)}"
            raise ValueError(message)
        return tuple(reader(each) for reader, each in zip(readers, raw, strict=True))

    return read


def _mapping_reader(key: Any, value: Any) -> _Reader:  # noqa: ANN401
    read_value = _reader(value)
    read_key: _Reader = int if key is int else _reader(key)

    def read(raw: Any) -> Any:  # noqa: ANN401
        if not isinstance(raw, dict):
            message = f"{str(raw)[:40]!r} is not a mapping"
            raise ValueError(message)  # noqa: TRY004 a value of the text, not an argument of ours
        return {read_key(name): read_value(each) for name, each in raw.items()}

    return read


def _dataclass_reader(shape: type) -> _Reader:
    hints = get_type_hints(shape)
    readers = {each.name: _reader(hints[each.name]) for each in fields(shape)}

    def read(raw: Any) -> Any:  # noqa: ANN401
        if not isinstance(raw, dict) or raw.keys() != readers.keys():
            message = f"{str(raw)[:40]!r} is not a {shape.__name__}"
            raise ValueError(message)
        return shape(**{name: reader(raw[name]) for name, reader in readers.items()})

    return read


def _list(raw: Any) -> list[Any]:  # noqa: ANN401
    if not isinstance(raw, list):
        message = f"{str(raw)[:40]!r} is not a list"
        raise ValueError(message)  # noqa: TRY004 a value of the text, not an argument of ours
    return raw
