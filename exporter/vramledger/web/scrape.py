"""The telemetry path: one scrape, from its headers and query to the bytes of its answer."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from vramledger.config import Config
from vramledger.errors import UsageError
from vramledger.exposition import Exposition, Want, gzip_accepted, negotiate, select
from vramledger.web.renders import Renders
from vramledger.web.source import Source

_WRITE_TIMEOUT = 30.0
# Seconds in which a client must take its answer. Without an end to it, forty clients that never read would
# hold all of --web.max-requests for ever.

_SLOW = 2.0
# Seconds in which a client should have taken its answer. Who takes longer has to go, the slowest first, when
# somebody else could not be served: Prometheus takes milliseconds.


class Scrape:
    """Answers GET and HEAD on the telemetry path from the newest snapshot, never waiting for a GPU."""

    def __init__(self, config: Config, source: Source, exposition: Exposition, renders: Renders) -> None:
        self._config = config
        self._source = source
        self._exposition = exposition
        self._renders = renders
        self._running = 0
        self._writing: dict[asyncio.Transport, float] = {}  # since when, the oldest first

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one scrape; 503 beyond ``--web.max-requests`` at once, 400 for filters that make no sense."""
        most = self._config.max_requests
        if most and self._running >= most and not self._make_room():
            text = f"--web.max-requests={most} is reached; try again later.\n"
            return web.Response(status=503, text=text)
        self._running += 1
        try:
            return await self._answer(request)
        finally:
            self._running -= 1

    def _make_room(self) -> bool:
        """End the answer that has been under way for longest, if that is too long."""
        transport, since = next(iter(self._writing.items()), (None, 0.0))
        if transport is None or time.monotonic() - since < _SLOW:
            return False
        del self._writing[transport]
        transport.abort()
        return True

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        try:
            selected = select(self._config, query.getall("collect[]", []), query.getall("exclude[]", []))
        except UsageError as error:
            return web.Response(status=400, text=f"{error}\n")
        form = negotiate(",".join(request.headers.getall("Accept", [])))
        want = Want(
            collectors=selected,
            names=frozenset(query.getall("name[]")) if "name[]" in query else None,
            openmetrics=form.openmetrics,
            compressed=gzip_accepted(",".join(request.headers.getall("Accept-Encoding", []))),
        )
        snapshot = self._source.snapshot
        page = await self._renders.share(snapshot, want, lambda: self._exposition.render(snapshot, want))
        headers = {"Content-Type": form.content_type, "Vary": "Accept, Accept-Encoding"}
        if want.compressed:
            headers["Content-Encoding"] = "gzip"
        response = web.Response(body=page, headers=headers)
        await response.prepare(request)
        transport = request.transport
        if isinstance(transport, asyncio.Transport):
            self._writing[transport] = time.monotonic()
        try:
            await asyncio.wait_for(response.write_eof(), _WRITE_TIMEOUT)
        except asyncio.TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            if isinstance(transport, asyncio.Transport):
                self._writing.pop(transport, None)
        return response
