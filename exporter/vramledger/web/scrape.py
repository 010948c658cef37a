"""The telemetry path: one scrape, from its headers and query to the bytes of its answer."""

from __future__ import annotations

from aiohttp import web

from vramledger.config import Config
from vramledger.errors import UsageError
from vramledger.metrics.exposition import Exposition, Want, gzip_accepted, negotiate, select
from vramledger.web.render_cache import RenderCache
from vramledger.web.request_limiter import RequestLimiter
from vramledger.web.services import AppServices


class Scrape:
    """Answers GET and HEAD on the telemetry path from the newest snapshot, never waiting for a GPU."""

    def __init__(
        self, config: Config, source: AppServices, exposition: Exposition, renders: RenderCache
    ) -> None:
        self._config = config
        self._source = source
        self._exposition = exposition
        self._renders = renders
        self._turns = RequestLimiter(config.max_requests)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one scrape; 503 beyond ``--web.max-requests`` at once, 400 for filters that make no sense."""
        return await self._turns.take(request, self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
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
        return web.Response(body=page, headers=headers)
