"""What the agent is told: variables of the environment, so that every process of a program has them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Mapping

SOCKET = "/run/vramledger/agent.sock"
INTERVAL = 1.0

SHORTEST = 0.25
"""Seconds: the exporter takes four reports a second from one process."""

LONGEST = 3600.0


class Settings:
    """What this process does, read from the environment once.

    Attributes:
        socket: of the exporter.
        interval: seconds between two reports.
        consents: what may be asked of this process: ``reclaim``, ``snapshot``.
        reports: directory for the out-of-memory reports, None for the usual one.
    """

    __slots__ = ("consents", "interval", "reports", "socket")

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.socket = environ.get("VRAMLEDGER_AGENT_SOCKET") or SOCKET
        self.interval = seconds(environ.get("VRAMLEDGER_AGENT_INTERVAL"))
        consents = environ.get("VRAMLEDGER_AGENT_CONSENT", "")
        self.consents = frozenset(word.strip() for word in consents.split(",") if word.strip())
        self.reports = environ.get("VRAMLEDGER_AGENT_REPORTS") or None


def seconds(text: str | None) -> float:
    """Return an interval that the exporter takes; whatever cannot be read as one is the usual one.

    Nobody may be told that a value is bad: this is the user's program, not ours.
    """
    try:
        value = float(text or INTERVAL)
    except ValueError:
        return INTERVAL
    return min(max(value, SHORTEST), LONGEST) if value == value else INTERVAL  # noqa: PLR0124 a NaN is not itself
