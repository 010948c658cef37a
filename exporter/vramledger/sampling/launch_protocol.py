"""Define what the exporter and the process that counts launches write to each other: lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable

from vramledger.model.reading import LaunchCount

INTERVAL = 2.0
"""Seconds between two looks at a holder: so late is its first launch seen."""

OBSTACLE = 5
"""The exit status that says that nothing can be counted on this host; the log says why."""


def encode_holders(holders: Iterable[tuple[int, int]]) -> bytes:
    """Write which holders are to be counted, by pid and start time."""
    return json.dumps(sorted(holders), separators=(",", ":")).encode() + b"\n"


def decode_holders(line: bytes) -> set[tuple[int, int]]:
    """Read what :func:`encode_holders` wrote."""
    return {(int(pid), int(start)) for pid, start in json.loads(line)}


def encode_counts(counts: Iterable[LaunchCount]) -> bytes:
    """Write what is known of the holders."""
    return json.dumps(list(counts), separators=(",", ":")).encode() + b"\n"


def decode_counts(line: bytes) -> tuple[LaunchCount, ...]:
    """Read what :func:`encode_counts` wrote."""
    return tuple(LaunchCount(*each) for each in json.loads(line))
