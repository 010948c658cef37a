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
    """Leave out what is None, down to the last device: not known is never zero.

    A framework that counts below zero has lost count, which is not known either; the exporter would refuse
    the whole report for it.
    """
    found: dict[str, object] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            found[name] = known(value)
        elif isinstance(value, list):
            found[name] = [known(each) if isinstance(each, dict) else each for each in value]
        elif value is not None and not (isinstance(value, int) and value < 0):
            found[name] = value
    return found


def encode(report: dict[str, object]) -> bytes:
    """Return the message, without the frameworks' figures if it would be too long for the wire."""
    message = json.dumps(report, separators=(",", ":")).encode()
    if len(message) <= LONGEST:
        return message
    return json.dumps({**report, "frameworks": []}, separators=(",", ":")).encode()
