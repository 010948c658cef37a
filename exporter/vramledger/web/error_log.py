"""Keeps errors that clients can cause as often as they like from filling the log: a line a minute."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from vramledger.logs import fields, log

_INTERVAL = 60.0
# Seconds between two lines. Out of descriptors, asyncio reports a hundred errors a second, a traceback each;
# a scanner sends thousands of malformed requests a second.

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]


class _LineLimit:
    """Allow one line of the log an interval, and count what is left out between two."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_until = float("-inf")
        self._dropped = 0

    def admit(self) -> int | None:
        """Return how many lines were left out before this one; None when this one is left out as well."""
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
    """Turn aiohttp's error for every request that makes no sense into one warning of ours a minute.

    A scanner, or a client that wants our disk full, sends thousands of them a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = _LineLimit(clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Log it in our own words, or count it; the record itself goes nowhere."""
        dropped = self._limit.admit()
        if dropped is not None:
            error = record.exc_info[1] if record.exc_info else None
            log.warning(
                "A request made no sense",
                exc_info=error,
                extra=fields(what=record.getMessage(), err=error, not_logged_before=dropped),
            )
        return False
