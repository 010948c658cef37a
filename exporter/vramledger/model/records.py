"""Write what is declared in this package as JSON, and read and check it by its declaration: the one codec.

What is read is checked, because the program at the other end may not be ours.
"""

from __future__ import annotations

import json
import re
from typing import TypeVar

import msgspec

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
        message = f"not a {shape.__name__} of this version ({error})"
        raise RecordError(message) from error
