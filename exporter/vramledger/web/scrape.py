"""Answer scrapes on the telemetry path, from headers and query to the bytes of the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import hdrs, web

from vramledger.config import Config
from vramledger.errors import UsageError
from vramledger.metrics.exposition import Exposition, ScrapeRequest, negotiate_format, select_collectors
from vramledger.model.snapshot import Snapshot
from vramledger.web.connections import most_of_all
from vramledger.web.response_headers import read_list, takes_gzip
from vramledger.web.services import AppServices

_RENDERS_MAX = 16
"""The maximum number of renders of one snapshot that are kept. A client that always sends new filters must
not fill our memory."""

_QUICK = 0.003
"""Seconds: a page that took less the last time is rendered in the event loop. To hand it to a thread costs
0.2 ms, and the page of a host with 25 holders takes 1 ms."""

_THREADS = 2
"""One thread writes text, which holds the interpreter's lock; the other compresses, which does not."""


class RenderCache:
    """Run renders on threads, and keep them for a snapshot or a second, as our own CPU changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="render")
        self._version: Hashable = None
        self._kept: dict[Hashable, asyncio.Future[bytes]] = {}
        self._took: dict[Hashable, float] = {}

    async def share(self, snapshot: Snapshot, key: Hashable, render: Callable[[], bytes]) -> bytes:
        """Return what ``render`` gives for this snapshot and key, made once for any number of requests.

        If a client disconnects, the others still get it; one that fails is not kept. The serial alone does
        not identify a snapshot: after a suspend the newest one is shown without its data.
        """
        version = (snapshot.serial, snapshot.up, snapshot.failure, int(self._clock()))
        if version != self._version:
            self._version, self._kept = version, {}
        kept = self._kept
        result = kept.get(key)
        if result is None and self._took.get(key, _QUICK) < _QUICK:
            return self._render_at_once(kept, key, render)
        if result is None:
            result = asyncio.get_running_loop().run_in_executor(self._pool, self._render, key, render)
            if len(kept) < _RENDERS_MAX:
                kept[key] = result

            def forget_failure(done: asyncio.Future[bytes]) -> None:
                if done.cancelled() or done.exception() is not None:
                    kept.pop(key, None)

            result.add_done_callback(forget_failure)
        return result.result() if result.done() else await asyncio.shield(result)

    def _render_at_once(
        self, kept: dict[Hashable, asyncio.Future[bytes]], key: Hashable, render: Callable[[], bytes]
    ) -> bytes:
        page = self._render(key, render)
        if len(kept) < _RENDERS_MAX:
            result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            result.set_result(page)
            kept[key] = result
        return page

    def _render(self, key: Hashable, render: Callable[[], bytes]) -> bytes:
        begun = time.perf_counter()
        try:
            return render()
        finally:
            if key not in self._took and len(self._took) >= _RENDERS_MAX:
                self._took.clear()
            self._took[key] = time.perf_counter() - begun

    def close(self) -> None:
        """Let the threads end after the render that they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


_WRITE_TIMEOUT = 30.0
"""Seconds in which a client must read: forty that do not would hold all --web.max-requests."""

_SLOW = 2.0
"""Seconds within which a client should have read its answer. If another client could not be served, the
slower ones are disconnected, the slowest first: Prometheus takes milliseconds. So is, at any time, one of the
address that has the most answers unread: twenty new connections a second would hold all places."""


class RequestLimiter:
    """Answer a limited number of requests together: what a client does not read stays in our memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running = 0
        # Since when, and for which address; the oldest first.
        self._writing: dict[asyncio.Transport, tuple[float, str]] = {}

    async def serve(
        self, request: web.Request, respond: Callable[[web.Request], Awaitable[web.Response]]
    ) -> web.StreamResponse:
        """Make a response and write it to the last byte; 503 immediately when too many are under way."""
        source = getattr(request.protocol, "source", "")
        if self._most and self._running >= self._most and not self._abort_one(source):
            text = f"--web.max-requests={self._most} is reached; try again later.\n"
            return web.Response(status=503, text=text)
        self._running += 1
        try:
            response = await respond(request)
            await response.prepare(request)
            await self._write(request, response, source)
            return response
        finally:
            self._running -= 1

    def _abort_one(self, source: str) -> bool:
        busiest = most_of_all((theirs for _, theirs in self._writing.values()), source)
        for transport, (since, theirs) in self._writing.items():
            if theirs == busiest or time.monotonic() - since >= _SLOW:
                del self._writing[transport]
                transport.abort()
                return True
        return False

    async def _write(self, request: web.Request, response: web.Response, source: str) -> None:
        transport = request.transport
        if not isinstance(transport, asyncio.Transport):
            return  # the client has gone
        self._writing[transport] = time.monotonic(), source
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
        # Who always asks for something new has each page rendered, and takes no place of a whole scrape.
        self._whole, self._filtered = RequestLimiter(config.max_requests), RequestLimiter(config.max_requests)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one scrape; 503 above ``--web.max-requests`` at the same time, 400 for wrong filters."""
        limiter = self._filtered if request.query_string else self._whole
        return await limiter.serve(request, self._respond)

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
