"""How many answers of one kind may be under way at once, and how long a client may take over one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

_WRITE_TIMEOUT = 30.0
# Seconds in which a client must take its answer. Without an end to it, forty clients that never read would
# hold all of --web.max-requests for ever.


class Turns:
    """Answer a bounded number of requests at once: what a client does not read stays in our memory."""

    def __init__(self, most: int) -> None:
        """Allow ``most`` at once; 0 means no limit."""
        self._most = most
        self._running = 0

    async def take(
        self, request: web.Request, make: Callable[[web.Request], Awaitable[web.Response]]
    ) -> web.StreamResponse:
        """Make an answer and hand it over to the last byte; 503 at once when too many are under way."""
        if self._most and self._running >= self._most:
            text = f"--web.max-requests={self._most} is reached; try again later.\n"
            return web.Response(status=503, text=text)
        self._running += 1
        try:
            response = await make(request)
            await response.prepare(request)
            try:
                await asyncio.wait_for(response.write_eof(), _WRITE_TIMEOUT)
            except asyncio.TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
            return response
        finally:
            self._running -= 1
