"""Read durations as Prometheus writes them."""

from __future__ import annotations

import re

from vramledger.errors import UsageError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(text: str) -> float:
    """Read a duration as Prometheus writes it (``250ms``, ``1m30s``), in seconds.

    Raises:
        UsageError: it is not a positive duration.
    """
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
    if _DURATION.sub("", text) or seconds <= 0:
        message = f"{text!r} is not a duration; write for example 500ms, 1s, 10m or 1h30m"
        raise UsageError(message)
    return seconds
