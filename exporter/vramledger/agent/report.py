"""Build one report: the full state each time, in the wire format's version 1."""

from __future__ import annotations

import json
import sys

VERSION = 1
LONGEST = 65536
PYTHON = sys.version.split(maxsplit=1)[0]


def agent() -> object:
    """Return our version, which the package above us has."""
    return getattr(sys.modules.get("vramledger"), "__version__", None)


def known(entry: dict[str, object]) -> dict[str, object]:
    """Leave out what is None: not known is never zero."""
    return {name: value for name, value in entry.items() if value is not None}


def encode(report: dict[str, object]) -> bytes:
    """Return the message, without the frameworks' figures if it would be too long for the wire."""
    message = json.dumps(report, separators=(",", ":")).encode()
    if len(message) <= LONGEST:
        return message
    return json.dumps({**report, "frameworks": []}, separators=(",", ":")).encode()
