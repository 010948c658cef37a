"""Declare the families of the storage, and know their values: what was sent, stored and lost, and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vramledger.metrics.families import PREFIX, Collected, Family

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


_WITHOUT_STORAGE = "when there is no `--storage.path`"
_EXPORTER = "exporter"
_WRITER = "the process that stores"


class StorageFigures(NamedTuple):
    """What the exporter knows of its storage, as :data:`FAMILIES`; None where it does not know it yet."""

    up: bool | None  # whether readings reach the disk
    size: int | None  # bytes on the disk
    size_limit: int  # the bytes that it may have
    age_limit: float  # seconds for which it is kept
    oldest: float | None  # Unix time of the oldest moment that can be shown
    newest: float | None  # Unix time of the newest reading that is on the disk
    written: int  # bytes written since the exporter started
    dropped: int  # readings that were not stored, since the exporter started
    restarts: int  # how often the process that stores was started again
    last_error: tuple[float, str] | None  # Unix time and text of the newest error


def _family(
    name: str, help_: str, *labels: str, source: str = _WRITER, absent: str = _WITHOUT_STORAGE
) -> Family:
    return Family(PREFIX + name, labels, help_, _EXPORTER, source, absent)


UP = _family(
    "storage_up",
    "1 while readings reach the disk of --storage.path, 0 while they do not.",
    source="what the process that stores has confirmed",
    absent="before the first reading was stored or failed to be",
)
SIZE = _family(
    "storage_size_bytes",
    "Bytes on the disk that the storage takes, with the files that were put aside.",
    source="`stat`, every 30 s",
    absent="when the directory cannot be read",
)
SIZE_LIMIT = _family(
    "storage_retention_limit_bytes",
    "Bytes that the storage may take; the oldest is removed first.",
    source="`--storage.size`",
)
AGE_LIMIT = _family(
    "storage_retention_limit_seconds",
    "How long the storage keeps what it has.",
    source="`--storage.retention`",
)
OLDEST = _family(
    "storage_oldest_timestamp_seconds",
    "Unix time of the oldest moment that the storage can show.",
    source="the file of the past, every 30 s",
    absent="when nothing is stored, and when the directory cannot be read",
)
NEWEST = _family(
    "storage_newest_timestamp_seconds",
    "Unix time of the newest reading that this exporter has on the disk, synchronised.",
    absent="before the first reading is stored",
)
WRITTEN = _family(
    "storage_written_bytes_total",
    "Bytes written to the log of the storage since the exporter started, with those of thinning.",
)
DROPPED = _family(
    "storage_dropped_samples_total",
    "Readings that were not stored since the exporter started: the disk or the process that stores failed, "
    "or was too slow.",
    source="the exporter's count, and that of the process that stores",
)
RESTARTS = _family(
    "storage_restarts_total",
    "How often the exporter has started the process that stores again, because it had ended.",
    source="the exporter's count",
)
LAST_ERROR = _family(
    "storage_last_error_timestamp_seconds",
    "Unix time of the newest error of the storage, with its text.",
    "error",
    source="the exporter's clock",
    absent="before the first error",
)

FAMILIES = (UP, SIZE, SIZE_LIMIT, AGE_LIMIT, OLDEST, NEWEST, WRITTEN, DROPPED, RESTARTS, LAST_ERROR)


def collect(figures: StorageFigures) -> Collected:
    """Return the families with their samples."""
    *values, last_error = figures
    collected: Collected = [
        (family, [((), float(value))])
        for family, value in zip(FAMILIES, values, strict=False)
        if value is not None
    ]
    if last_error is not None:
        collected.append((LAST_ERROR, [(last_error[1:], last_error[0])]))
    return collected
