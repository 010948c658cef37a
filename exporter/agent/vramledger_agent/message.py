"""Encode a report as one message: leave out what is not known, cut what is too long."""

from __future__ import annotations

import json
import sys

from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

_encode = json.JSONEncoder(separators=(",", ":")).encode

PYTHON_VERSION = sys.version.split(maxsplit=1)[0]


def agent_version() -> object:
    """Return our version, which the package above this one has."""
    return getattr(sys.modules.get("vramledger_agent"), "__version__", None)


def drop_unknown(entry: dict[str, object]) -> dict[str, object]:
    """Return an entry without what is None (not known is never zero), or negative, which would be refused."""
    found: dict[str, object] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            found[name] = drop_unknown(value)
        elif isinstance(value, list):
            found[name] = [drop_unknown(each) if isinstance(each, dict) else each for each in value]
        elif value is not None and not (isinstance(value, int) and value < 0):
            found[name] = value
    return found


def encode_report(report: dict[str, object]) -> bytes:
    """Return the message, without the frameworks' figures if it would be too long for the wire."""
    message = _encode(report).encode()
    if len(message) <= MAX_MESSAGE_BYTES:
        return message
    return _encode({**report, "frameworks": []}).encode()
