"""The JSON that other programs read: the ledger now, its last 15 minutes, and the schemas of both."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from vramledger.metrics.exposition import gzip_accepted
from vramledger.model.json_values import Json
from vramledger.views.ledger_json import document
from vramledger.views.timeline import Timeline
from vramledger.web.render_cache import RenderCache
from vramledger.web.request_limiter import RequestLimiter
from vramledger.web.services import CONFIG, SOURCE

_SCHEMAS = {
    name: (Path(__file__).parent / "schemas" / f"{name}.json").read_bytes() for name in ("ledger", "history")
}


def add_documents(app: web.Application, timeline: Timeline, renders: RenderCache) -> None:
    """Route the documents and their schemas."""
    source = app[SOURCE]
    turns = RequestLimiter(
        app[CONFIG].max_requests
    )  # not the scrapes': whoever reads these keeps no Prometheus out

    async def answer(request: web.Request, want: str, make: Callable[[], dict[str, Json]]) -> web.Response:
        packed = gzip_accepted(",".join(request.headers.getall("Accept-Encoding", [])))

        def body() -> bytes:
            text = json.dumps(make()).encode()
            return gzip.compress(text, 1, mtime=0) if packed else text

        headers = {"Content-Type": "application/json", "Vary": "Accept-Encoding", "Cache-Control": "no-store"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=await renders.share(source.snapshot, (want, packed), body), headers=headers)

    async def make_ledger(request: web.Request) -> web.Response:
        snapshot = source.snapshot
        return await answer(request, "ledger", lambda: document(snapshot, timeline.growth(snapshot)))

    async def make_history(request: web.Request) -> web.Response:
        return await answer(request, "history", timeline.document)

    async def ledger(request: web.Request) -> web.StreamResponse:
        return await turns.take(request, make_ledger)

    async def history(request: web.Request) -> web.StreamResponse:
        return await turns.take(request, make_history)

    app.router.add_get("/api/v1/ledger", ledger)
    app.router.add_get("/api/v1/history", history)
    app.router.add_get("/api/v1/schema/{name}", _schema)


async def _schema(request: web.Request) -> web.Response:
    found = _SCHEMAS.get(request.match_info["name"])
    if found is None:
        raise web.HTTPNotFound
    return web.Response(body=found, content_type="application/schema+json")
