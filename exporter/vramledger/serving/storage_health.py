"""Know the status of the storage: what was sent, what is on the disk, what was lost, and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vramledger.metrics.storage import StorageFigures

LATE_SECONDS = 30.0
"""Seconds without confirmation until readings do not count as stored: 4 s a write, thinning a second."""

SLOW_DISK = "the disk does not keep up"
NO_ANSWER = "the process that stores does not answer"


class StorageHealth:
    """What is known of the storage; used from the event loop, and read from any thread."""

    def __init__(
        self,
        size_limit: int,
        age_limit: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = size_limit, age_limit
        self._clock = clock
        self._monotonic = monotonic
        self._sent = self._handled = self._stored = 0
        self._unconfirmed_since: float | None = None
        self._size: int | None = None
        self._oldest: float | None = None
        self._newest: float | None = None
        self._written = self._written_before = 0
        self._dropped = self._dropped_there = self._restarts = 0
        self._stores: bool | None = None
        self._given_up = False
        self._last_error: tuple[float, str] | None = None

    def record_sent(self, readings: int) -> None:
        """Count readings that were sent to the process that stores."""
        self._sent += readings
        if readings and self._unconfirmed_since is None:
            self._unconfirmed_since = self._monotonic()

    def record_dropped(self, readings: int, error: str) -> None:
        """Count readings that could not be sent."""
        self._dropped += readings
        self.record_error(error)

    def record_error(self, error: str) -> None:
        """Remember why nothing is stored now."""
        self._stores = False
        self._last_error = self._clock(), error

    def record_given_up(self, error: str) -> None:
        """Remember that nothing will be sent any more: what is confirmed from now on was sent before."""
        self._given_up = True
        self.record_error(error)

    def record_status(self, status: dict[str, Any]) -> None:
        """Take what the process that stores says of itself since its start."""
        handled = int(status["stored"]) + int(status["dropped"])
        self._dropped_there = int(status["dropped"])
        progress = handled > self._handled
        self._handled = handled
        if progress:
            self._unconfirmed_since = self._monotonic() if self._sent > handled else None
        self._written = self._written_before + int(status["written"])
        self._size, self._oldest = status["size"], status["oldest"]
        if status["newest"] is not None:
            self._newest = float(status["newest"])
        if status["error"]:
            self.record_error(str(status["error"]))
        elif int(status["stored"]) > self._stored and not self._given_up:
            self._stores = True
        if status["house_error"] and self._stores is not False:  # otherwise the newest error says why
            self._last_error = self._clock(), str(status["house_error"])
        self._stored = int(status["stored"])

    def record_end(self, error: str) -> None:
        """Count what a process that has ended has not stored."""
        self._dropped += self._dropped_there + max(0, self._sent - self._handled)
        self._sent = self._handled = self._stored = self._dropped_there = 0
        self._unconfirmed_since = None
        self._written_before = self._written
        self.record_error(error)

    def record_restart(self) -> None:
        """Count a new process that stores."""
        self._restarts += 1

    def figures(self) -> StorageFigures:
        """Return what is known now."""
        since = self._unconfirmed_since
        if since is not None and self._monotonic() - since > LATE_SECONDS and self._stores is not False:
            self.record_error(NO_ANSWER)
        return StorageFigures(
            up=self._stores,
            size=self._size,
            size_limit=self._limits[0],
            age_limit=self._limits[1],
            oldest=self._oldest,
            newest=self._newest,
            written=self._written,
            dropped=self._dropped + self._dropped_there,
            restarts=self._restarts,
            last_error=self._last_error,
        )
