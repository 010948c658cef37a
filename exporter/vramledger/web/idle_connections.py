"""What keeps many connections, idle or hostile, from blinding the exporter and from filling the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from weakref import WeakSet

from aiohttp import web

from vramledger.logs import fields, log
from vramledger.web.access.pre_auth import Doorstep

_SILENT = 15.0
# Seconds between two looks at the connections; one that asks nothing is closed at the second look that it
# meets. aiohttp before 3.14 waits for the first request for ever.

_CROWDED = 0.5
# Share of our descriptors that connections may take before the silent ones must go at once. Where there are
# few descriptors, clients that say nothing would keep everybody else out until the next look.

_CROWDED_LOOK = 1.0

_REFUSED = frozenset({401, 403, 429, 503})
# Answers after which a connection is no better than a silent one.

_SELDOM = 60.0
# Seconds between two lines about the event loop's errors. Out of descriptors, asyncio reports a hundred a
# second, a traceback each.

Complain = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]


def raise_descriptor_limit() -> None:
    """Allow ourselves as many open files as the system does: 1024 by default, and each client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the kernel's fs.nr_open was lowered below it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def complain_seldom(clock: Callable[[], float] = time.monotonic) -> Complain:
    """Return an exception handler for the event loop: one line a minute, the traceback at debug only."""
    quiet_until, dropped = float("-inf"), 0

    def complain(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal quiet_until, dropped
        now = clock()
        if now < quiet_until:
            dropped += 1
            return
        error = context.get("exception")
        log.error(
            "Event loop error",
            exc_info=error,
            extra=fields(what=context.get("message"), err=error, not_logged_before=dropped),
        )
        quiet_until, dropped = now + _SELDOM, 0

    return complain


class Quiet(logging.Filter):
    """Turn aiohttp's error for every request that makes no sense into one warning of ours a minute.

    A scanner, or who wants our disk full, sends thousands of them a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._until = float("-inf")
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Log it in our own words, or count it; the record itself goes nowhere."""
        if self._clock() < self._until:
            self._dropped += 1
            return False
        error = record.exc_info[1] if record.exc_info else None
        log.warning(
            "A request made no sense",
            exc_info=error,
            extra=fields(what=record.getMessage(), err=error, not_logged_before=self._dropped),
        )
        self._until, self._dropped = self._clock() + _SELDOM, 0
        return False


class IdleCloser:
    """Close the connections whose clients never ask anything."""

    def __init__(self) -> None:
        self._asked: WeakSet[asyncio.BaseTransport] = WeakSet()

    async def heard(self, request: web.Request, response: web.StreamResponse) -> None:
        """Note that a connection has asked something; from now on aiohttp's keep-alive watches it."""
        if request.transport is not None and response.status not in _REFUSED:
            self._asked.add(request.transport)

    @contextlib.asynccontextmanager
    async def broken(self, doorstep: Doorstep) -> AsyncIterator[None]:
        """Watch the connections until the block ends."""
        watching = asyncio.create_task(self._watch(doorstep))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self, doorstep: Doorstep) -> None:
        suspects: WeakSet[asyncio.BaseTransport] = WeakSet()
        looked = time.monotonic()
        while True:
            await asyncio.sleep(min(_CROWDED_LOOK, _SILENT))
            connections = doorstep.connections
            crowded = len(connections) > _CROWDED * resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if not crowded and time.monotonic() - looked < _SILENT:
                continue
            looked = time.monotonic()
            silent: WeakSet[asyncio.BaseTransport] = WeakSet()
            for connection in connections:
                transport = connection.transport
                if transport is None or transport in self._asked:
                    continue
                if transport in suspects:
                    connection.force_close()
                silent.add(transport)
            suspects = silent
