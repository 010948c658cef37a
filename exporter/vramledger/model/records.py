"""Write what is declared in this package as JSON, read and check it, and move its times, by its declaration.

What is read is checked, because the program at the other end may not be ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from vramledger.errors import VramledgerError

LABEL_VALUE_MAX = 256
"""Characters of a label value; a longer one is cut, so that no process name can make the page large."""

_SURROGATES = re.compile("[\ud800-\udfff]")


def label_text(text: str) -> str:
    """Cut a text to the maximum length of a label value, and replace what UTF-8 cannot encode."""
    if len(text) > LABEL_VALUE_MAX:
        text = text[: LABEL_VALUE_MAX - 1] + "…"
    return _SURROGATES.sub("\ufffd", text)


Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

JSON_VERSION = 2
"""The version of the documents of the ledger and the history; a change that breaks readers changes it."""


_T = TypeVar("_T")
_ENCODER = msgspec.json.Encoder()

READ_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeError)
"""What msgspec raises for text that is not what it should be; the first says where in it, in one line."""


class RecordError(VramledgerError):
    """The text is not such a record."""


def write_record(record: object) -> bytes:
    """Return a record as JSON without a line break; what UTF-8 cannot encode is a question mark."""
    try:
        return _ENCODER.encode(record)
    except UnicodeEncodeError:
        plain = json.dumps(
            msgspec.to_builtins(record, str_keys=True), ensure_ascii=False, separators=(",", ":")
        )
        return plain.encode(errors="replace")


def read_record(text: bytes | str, shape: type[_T]) -> _T:
    """Return what :func:`write_record` wrote of a class. Raises RecordError if it is not one."""
    try:
        return msgspec.json.decode(text, type=shape)
    except READ_ERRORS as error:
        raise RecordError(f"not a {shape.__name__} of this version ({error})") from error


Mover = Callable[[Any, float], Any]
Moved = Callable[[str, inspect.Type], bool]


@cache
def mover_of(declared: type, is_moved: Moved) -> Mover:
    """Return what moves the fields of a declared type, and of all types in it, that are to be moved."""
    found = _mover("", inspect.type_info(declared), is_moved)
    assert found is not None  # noqa: S101 it has such fields
    return found


def _mover(name: str, kind: inspect.Type, is_moved: Moved) -> Mover | None:  # noqa: PLR0911 one a kind
    if isinstance(kind, inspect.UnionType):
        kinds = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
        movers = [each for each in (_mover(name, each, is_moved) for each in kinds) if each is not None]
        return _optional(*movers) if movers else None
    if is_moved(name, kind):
        return lambda value, by: value + by
    if isinstance(kind, inspect.Metadata):
        return _mover(name, kind.type, is_moved)
    if isinstance(kind, inspect.TupleType):
        return _of_tuple([_mover("", each, is_moved) for each in kind.item_types])
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return _of_items(
            _mover("", kind.item_type, is_moved), list if isinstance(kind, inspect.ListType) else tuple
        )
    if isinstance(kind, inspect.DictType):
        return _of_dict(_mover("", kind.value_type, is_moved))
    if isinstance(kind, inspect.StructType):
        return _of_object(msgspec.structs.replace, kind.fields, is_moved)
    if isinstance(kind, inspect.NamedTupleType):
        return _of_object(lambda value, **changes: value._replace(**changes), kind.fields, is_moved)
    return None


def _optional(mover: Mover) -> Mover:
    return lambda value, by: None if value is None else mover(value, by)


def _of_tuple(movers: list[Mover | None]) -> Mover | None:
    if not any(movers):
        return None
    return lambda value, by: tuple(
        each if mover is None else mover(each, by) for mover, each in zip(movers, value, strict=True)
    )


def _of_items(mover: Mover | None, made: Callable[[Iterable[Any]], Any]) -> Mover | None:
    return None if mover is None else lambda value, by: made(mover(each, by) for each in value)


def _of_dict(mover: Mover | None) -> Mover | None:
    return None if mover is None else lambda value, by: {key: mover(each, by) for key, each in value.items()}


def _of_object(replace: Callable[..., Any], fields: Iterable[inspect.Field], is_moved: Moved) -> Mover | None:
    found = ((each.name, _mover(each.name, each.type, is_moved)) for each in fields)
    movers = {name: mover for name, mover in found if mover is not None}
    if not movers:
        return None
    return lambda value, by: replace(
        value, **{name: mover(getattr(value, name), by) for name, mover in movers.items()}
    )
