"""Declare the families of the storage; ``serving/storage_health.py`` gives their values."""

from __future__ import annotations

from typing import NamedTuple

from vramledger.metrics.families import PREFIX, Collected, Family

_WITHOUT_STORAGE = "when there is no `--storage.path`"
_EXPORTER = "exporter"
_WRITER = "the process that stores"


class StorageFigures(NamedTuple):
    """What the exporter knows of its storage; None where it does not know it yet."""

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
    values = {
        UP: figures.up,
        SIZE: figures.size,
        SIZE_LIMIT: figures.size_limit,
        AGE_LIMIT: figures.age_limit,
        OLDEST: figures.oldest,
        NEWEST: figures.newest,
        WRITTEN: figures.written,
        DROPPED: figures.dropped,
        RESTARTS: figures.restarts,
    }
    collected: Collected = [
        (family, [((), float(value))]) for family, value in values.items() if value is not None
    ]
    if figures.last_error is not None:
        time, text = figures.last_error
        collected.append((LAST_ERROR, [((text,), time)]))
    return collected
