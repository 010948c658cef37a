"""Limit the errors that clients can cause to one log line a minute, so that they cannot fill the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from vramledger.logs import fields, log

_INTERVAL = 60.0
"""Seconds between two lines. Without descriptors, asyncio reports a hundred errors a second, a traceback
each; a scanner sends thousands of malformed requests a second."""

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]


class _LineLimit:
    """Allow one line of the log in an interval, and count what is left out between two."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_until = float("-inf")
        self._dropped = 0

    def admit(self) -> int | None:
        """Return how many lines were left out before this one; None if this one is left out as well."""
        now = self._clock()
        if now < self._silent_until:
            self._dropped += 1
            return None
        dropped, self._dropped = self._dropped, 0
        self._silent_until = now + _INTERVAL
        return dropped


def limited_exception_handler(clock: Callable[[], float] = time.monotonic) -> ExceptionHandler:
    """Return an exception handler for the event loop: one line a minute, the traceback at debug only."""
    limit = _LineLimit(clock)

    def log_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        dropped = limit.admit()
        if dropped is None:
            return
        error = context.get("exception")
        log.error(
            "Event loop error",
            exc_info=error,
            extra=fields(what=context.get("message"), err=error, not_logged_before=dropped),
        )

    return log_error


class RequestErrorFilter(logging.Filter):
    """Turn aiohttp's error for every malformed request into one warning of ours a minute.

    A scanner, or a client that wants to fill our disk, sends thousands of them a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = _LineLimit(clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Log our own message, or count it; drop the record itself."""
        dropped = self._limit.admit()
        if dropped is not None:
            error = record.exc_info[1] if record.exc_info else None
            log.warning(
                "Malformed request",
                exc_info=error,
                extra=fields(what=record.getMessage(), err=error, not_logged_before=dropped),
            )
        return False
