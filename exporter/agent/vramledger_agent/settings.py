"""The agent's settings: variables of the environment, so that every process of a program has them."""

from __future__ import annotations

import os

from vramledger_agent.protocol.messages import (
    CONSENT_VARIABLE,
    DEFAULT_SOCKET,
    FROM_START_VARIABLE,
    INTERVAL_VARIABLE,
    MAX_INTERVAL_SECONDS,
    REPORTS_VARIABLE,
    SOCKET_VARIABLE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Mapping

DEFAULT_INTERVAL_SECONDS = 1.0

SHORTEST_INTERVAL_SECONDS = 0.25
"""The exporter reads four messages a second of one process."""


class Settings:
    """What this process does, read from the environment once."""

    __slots__ = ("consents", "interval", "records_from_start", "report_directory", "socket_path")

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.socket_path = environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET  # of the exporter's socket
        self.interval = parse_interval(environ.get(INTERVAL_VARIABLE))  # seconds between two reports
        consents = environ.get(CONSENT_VARIABLE, "")
        # the requests that this process allows: ``reclaim``, ``snapshot``
        self.consents = frozenset(word.strip() for word in consents.split(",") if word.strip())
        # record PyTorch's memory history from its first allocation on
        self.records_from_start = environ.get(FROM_START_VARIABLE) == "1"
        # for the out-of-memory reports, None for the default one
        self.report_directory = environ.get(REPORTS_VARIABLE) or None


def parse_interval(text: str | None) -> float:
    """Return an interval that the exporter accepts; the default one for what is not a number."""
    try:
        value = float(text or DEFAULT_INTERVAL_SECONDS)
    except ValueError:
        return DEFAULT_INTERVAL_SECONDS
    if value != value:  # noqa: PLR0124 only a NaN differs from itself
        return DEFAULT_INTERVAL_SECONDS
    return min(max(value, SHORTEST_INTERVAL_SECONDS), MAX_INTERVAL_SECONDS)
