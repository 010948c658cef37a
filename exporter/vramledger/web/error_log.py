"""Limit the errors that clients can cause to one log line a minute, so that they cannot fill the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from vramledger.logs import fields, log
from vramledger.rate_limit import LineLimit

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]


def limited_exception_handler(clock: Callable[[], float] = time.monotonic) -> ExceptionHandler:
    """Return an exception handler for the event loop: one line a minute, the traceback at debug only."""
    limit = LineLimit(clock)

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
    """Turn aiohttp's errors of malformed requests, of which scanners send thousands, into one a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = LineLimit(clock)

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
