"""Read how much an allocation requested, and on which device, from the message of a framework's error."""

from __future__ import annotations

import re
from math import prod

from vramledger.agent.frameworks.provider import OutOfMemoryMessage

UNITS = {"b": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_REQUESTED = re.compile(
    r"(?:allocate|allocating|request for) (\d[\d,]*(?:\.\d+)?)\s?(bytes|[KMGT]iB|B)\b", re.IGNORECASE
)
_ORDINAL = re.compile(r"device ordinal (\d+)")
_TENSOR = re.compile(r"allocating tensor with shape\s?\[([\d,]*)\] and type (\w+) on \S*GPU:(\d+)")
_TYPE_BYTES = {
    "float": 4,
    "half": 2,
    "double": 8,
    "bfloat16": 2,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def read_requested(text: str) -> int | None:
    """Return the bytes of ``allocate 1,024 bytes`` or ``allocate 1.50GiB``; None if the text has neither."""
    found = _REQUESTED.search(text)
    if found is None:
        return None
    return int(float(found[1].replace(",", "")) * UNITS[found[2].lower()])


def read_ordinal(text: str) -> int | None:
    """Return the number after ``device ordinal``; None if the text has none."""
    found = _ORDINAL.search(text)
    return None if found is None else int(found[1])


def read_tensor(text: str) -> OutOfMemoryMessage | None:
    """Return what TensorFlow's message says of a tensor on a GPU; None if it is about something else."""
    found = _TENSOR.search(text)
    if found is None:
        return None
    width = _TYPE_BYTES.get(found[2])
    count = prod(int(length) for length in found[1].split(",") if length)
    return OutOfMemoryMessage(int(found[3]), None if width is None else count * width)
