"""Answer scrapes on the telemetry path, from headers and query to the bytes of the answer."""

from __future__ import annotations

from aiohttp import web

from vramledger.config import Config
from vramledger.errors import UsageError
from vramledger.metrics.exposition import Exposition, ScrapeRequest, negotiate_format, select_collectors
from vramledger.web.render_cache import RenderCache
from vramledger.web.request_limiter import RequestLimiter
from vramledger.web.response_headers import takes_gzip
from vramledger.web.services import AppServices


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
        exposition_format = negotiate_format(",".join(request.headers.getall("Accept", [])))
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
