"""Write the objects that the accounting remembers as JSON values, and make them again.

Only classes of the packages in :data:`_PACKAGES` are written, and only these are made; reading runs no code
of the text. A field is known by its name, so that a newer version of the program reads what an older one
wrote: a field that the text does not have keeps its default, and one that the class does not have any more is
dropped.

A tuple is an array. Everything else that is neither a scalar nor an object with plain keys has a mark:

| mark | what it is |
|---|---|
| ``~o`` | an object: its class, and its fields beside the mark |
| ``~m`` | a mapping whose keys are not plain texts; the keys are JSON |
| ``~c`` | the same, a counter |
| ``~l``, ``~q``, ``~s``, ``~f`` | a list, a deque, a set, a frozen set |
| ``~d`` | a deque that has a limit: the limit, and the items |
| ``~a``, ``~b``, ``~e`` | an array of numbers, bytes, a value of an enumeration |
"""

from __future__ import annotations

import enum
import inspect
import json
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, cast

from vramledger.errors import RecordingError

_ROOT = "vramledger."
_PACKAGES = ("accounting.", "model.", "views.timeline.")


class ObjectWriter:
    """Write objects; what never changes is written once, for as long as it is used."""

    def __init__(
        self, settings: Mapping[str, object], convert: Callable[[Any], Any] = lambda each: each
    ) -> None:
        """Prepare.

        Args:
            settings: what the program was started with, by the name of the constructors' arguments. It is not
                written: a program that is started with other flags uses these.
            convert: is called with each frozen object, and returns what is written in place of it.
        """
        self._private = {f"_{name}" for name in settings}
        self._convert = convert
        self._kept: dict[int, tuple[object, Any]] = {}
        self._used: dict[int, tuple[object, Any]] = {}

    def write(self, value: object) -> Any:  # noqa: ANN401 JSON values
        """Return a value as JSON values."""
        self._used = {}
        written = self._write(value)
        self._kept = self._used
        return written

    def _write(self, value: Any) -> Any:  # noqa: ANN401, PLR0911 - a return a kind of value
        kind: Any = type(value)
        if kind in _SCALARS:
            return value
        if kind is tuple:
            return [self._write(each) for each in value]
        if kind is dict:
            return self._mapping(value, "~m")
        if kind in _MARKED:
            return self._collection(value, _MARKED[kind])
        if kind is Counter:
            return self._mapping(value, "~c", plain=False)
        if kind is array:
            return {"~a": [value.typecode, value.tolist()]}
        if kind is bytes:
            return {"~b": value.hex()}
        if isinstance(value, enum.Enum):
            return {"~e": [_name_of(kind), value.value]}
        if isinstance(value, Mapping):
            return self._mapping(value, "~m")
        return self._object(value, kind)

    def _collection(self, value: Any, mark: str) -> dict[str, Any]:  # noqa: ANN401
        items = [self._write(each) for each in (sorted(value, key=repr) if mark in ("~s", "~f") else value)]
        if mark == "~q" and value.maxlen is not None:
            return {"~d": [value.maxlen, items]}
        return {mark: items}

    def _mapping(self, value: Mapping[Any, Any], mark: str, *, plain: bool = True) -> dict[str, Any]:
        if plain and all(type(key) is str and key[:1] not in _MARKS for key in value):
            return {key: self._write(each) for key, each in value.items()}
        keys = ((json.dumps(self._write(key), separators=(",", ":")), each) for key, each in value.items())
        return {mark: {key: self._write(each) for key, each in keys}}

    def _object(self, value: Any, kind: type) -> Any:  # noqa: ANN401
        frozen = _is_frozen(kind)
        if frozen:
            known = self._kept.get(id(value))
            if known is not None and known[0] is value:
                self._used[id(value)] = known
                return known[1]
            named = self._convert(value)
        else:
            named = value
        written = {"~o": _name_of(kind)}
        for name in _field_names(kind) or vars(named):
            if name not in self._private and name not in _transient(kind):
                written[name] = self._write(getattr(named, name))
        if frozen:
            self._used[id(value)] = (value, written)
        return written


def read_object(raw: Any, settings: Mapping[str, object]) -> Any:  # noqa: ANN401
    """Make the value again that an :class:`ObjectWriter` has written.

    Args:
        raw: the JSON values.
        settings: what the program was started with.

    Raises:
        RecordingError: it is not what a writer of this or an earlier version writes.
    """
    try:
        return _Reader(settings).read(raw)
    except (
        *(LookupError, ValueError, TypeError, AttributeError, ImportError),
        *(RecursionError, OverflowError),
    ) as error:
        message = f"not a state of the accounting ({error!r})"
        raise RecordingError(message) from error


class _Reader:
    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings

    def read(self, raw: Any) -> Any:  # noqa: ANN401
        if type(raw) in _SCALARS:
            return raw
        if type(raw) is list:
            return tuple(map(self.read, raw))
        if "~o" in raw:
            return self._object(raw)
        if len(raw) == 1:
            ((mark, content),) = raw.items()
            if mark[:1] == "~":
                return self._marked(mark, content)
        return {key: self.read(each) for key, each in raw.items()}

    def _marked(self, mark: str, content: Any) -> Any:  # noqa: ANN401
        if mark in ("~m", "~c"):
            found = {self.read(json.loads(key)): self.read(each) for key, each in content.items()}
            return found if mark == "~m" else Counter(found)
        if mark in _COLLECTIONS:
            return _COLLECTIONS[mark](map(self.read, content))
        if mark == "~d":
            most, items = content
            return deque(map(self.read, items), most)
        if mark == "~a":
            return array(*content)
        if mark == "~b":
            return bytes.fromhex(content)
        if mark == "~e":
            return _class_of(content[0])(content[1])
        raise LookupError(mark)

    def _object(self, raw: dict[str, Any]) -> Any:  # noqa: ANN401
        kind: Any = _class_of(raw["~o"])
        names = _field_names(kind)
        given = {name: self.read(each) for name, each in raw.items() if name != "~o"}
        if names is None:
            restored = kind(**{name: self._settings[name] for name in inspect.signature(kind).parameters})
            for name in vars(restored).keys() & given.keys():
                setattr(restored, name, given[name])
            return restored
        given = {name: each for name, each in given.items() if name in names}
        if not is_dataclass(kind):
            return kind(**given)
        made: Any = object.__new__(cast("type", kind))
        for each in fields(kind):
            object.__setattr__(made, each.name, given[each.name] if each.name in given else _default(each))
        return made


def _default(field: Field[Any]) -> Any:  # noqa: ANN401
    """Return the default of a field that an earlier version did not have.

    Raises:
        LookupError: it has none.
    """
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        raise LookupError(field.name)
    return field.default


_MARKS = ("~", "=", "-", "#")
"""The first characters of keys that mean something here or in a patch."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_MARKED: Mapping[type, str] = {list: "~l", deque: "~q", set: "~s", frozenset: "~f"}
_COLLECTIONS: Mapping[str, Callable[[Any], Any]] = {mark: kind for kind, mark in _MARKED.items()}


@cache
def _name_of(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix(_ROOT)
    if not name.startswith(_PACKAGES):
        message = f"{name} is not of the accounting"
        raise TypeError(message)
    return name


@cache
def _class_of(name: str) -> Any:  # noqa: ANN401 a class
    module, _, qualified = name.rpartition(".")
    if not name.startswith(_PACKAGES) or not qualified.isidentifier():
        message = f"{name} is not of the accounting"
        raise ValueError(message)
    kind = getattr(import_module(_ROOT + module), qualified)
    if not isinstance(kind, type) or kind.__module__ != _ROOT + module:
        message = f"{name} is not a class of the accounting"
        raise TypeError(message)
    return kind


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass or a NamedTuple; None for a class whose objects have their own."""
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    return getattr(kind, "_fields", None)


@cache
def _transient(kind: type) -> frozenset[str]:
    """Return the attributes of a class that each sample replaces."""
    found: frozenset[str] = getattr(kind, "TRANSIENT", frozenset())
    return found


@cache
def _is_frozen(kind: type) -> bool:
    """Tell whether an object of the class never changes."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return hasattr(kind, "_fields") or (parameters is not None and parameters.frozen)
