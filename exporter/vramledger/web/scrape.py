"""Answer scrapes on the telemetry path, from headers and query to the bytes of the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from vramledger.config import Config
from vramledger.errors import UsageError
from vramledger.metrics.exposition import Exposition, ScrapeRequest, negotiate_format, select_collectors
from vramledger.web.render_cache import RenderCache
from vramledger.web.response_headers import read_list, takes_gzip
from vramledger.web.services import AppServices

_WRITE_TIMEOUT = 30.0
"""Seconds in which a client must read: forty that do not would hold all --web.max-requests."""

_SLOW = 2.0
"""Seconds within which a client should have read its answer. If another client could not be served, the
slower ones are disconnected, the slowest first: Prometheus takes milliseconds."""


class RequestLimiter:
    """Answer a limited number of requests together: what a client does not read stays in our memory."""

    def __init__(self, most: int) -> None:
        """Allow ``most`` requests together; 0 means no limit."""
        self._most = most
        self._running = 0
        self._writing: dict[asyncio.Transport, float] = {}  # start times, the oldest first

    async def serve(
        self, request: web.Request, respond: Callable[[web.Request], Awaitable[web.Response]]
    ) -> web.StreamResponse:
        """Make a response and write it to the last byte; 503 immediately when too many are under way."""
        if self._most and self._running >= self._most and not self._abort_slowest():
            text = f"--web.max-requests={self._most} is reached; try again later.\n"
            return web.Response(status=503, text=text)
        self._running += 1
        try:
            response = await respond(request)
            await response.prepare(request)
            await self._write(request, response)
            return response
        finally:
            self._running -= 1

    def _abort_slowest(self) -> bool:
        """End the answer that has been under way for the longest time, if that is too long."""
        transport, since = next(iter(self._writing.items()), (None, 0.0))
        if transport is None or time.monotonic() - since < _SLOW:
            return False
        del self._writing[transport]
        transport.abort()
        return True

    async def _write(self, request: web.Request, response: web.Response) -> None:
        transport = request.transport
        if not isinstance(transport, asyncio.Transport):
            return  # the client has gone
        self._writing[transport] = time.monotonic()
        # A timer, as asyncio.wait_for makes a task for each answer.
        timer = asyncio.get_running_loop().call_later(_WRITE_TIMEOUT, transport.abort)
        try:
            await response.write_eof()
        finally:
            timer.cancel()
            self._writing.pop(transport, None)


class Scrape:
    """Answer GET and HEAD on the telemetry path from the newest snapshot, never waiting for a GPU."""

    def __init__(
        self, config: Config, services: AppServices, exposition: Exposition, render_cache: RenderCache
    ) -> None:
        self._config = config
        self._services = services
        self._exposition = exposition
        self._render_cache = render_cache
        self._limiter = RequestLimiter(config.max_requests)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one scrape; 503 above ``--web.max-requests`` at the same time, 400 for wrong filters."""
        return await self._limiter.serve(request, self._respond)

    async def _respond(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            selected = select_collectors(
                self._config, query.getall("collect[]", []), query.getall("exclude[]", [])
            )
        except UsageError as error:
            return web.Response(status=400, text=f"{error}\n")
        exposition_format = negotiate_format(read_list(request, hdrs.ACCEPT))
        wanted = ScrapeRequest(
            collectors=selected,
            names=frozenset(query.getall("name[]")) if "name[]" in query else None,
            openmetrics=exposition_format.openmetrics,
            compressed=takes_gzip(request),
        )
        snapshot = self._services.snapshot
        page = await self._render_cache.share(
            snapshot, wanted, lambda: self._exposition.render(snapshot, wanted)
        )
        headers = {"Content-Type": exposition_format.content_type, "Vary": "Accept, Accept-Encoding"}
        if wanted.compressed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=page, headers=headers)
