"""Serve JSON to other programs: the ledger now, its last 15 minutes, what is left over, and their schemas."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from vramledger.model.json_values import Json
from vramledger.views.cleanliness import find_leftovers, results_json
from vramledger.views.ledger_json import snapshot_json
from vramledger.views.timeline import Timeline
from vramledger.web.render_cache import RenderCache
from vramledger.web.request_limiter import RequestLimiter
from vramledger.web.response_headers import takes_gzip
from vramledger.web.services import CONFIG, SERVICES

_SCHEMAS = {
    name: (Path(__file__).parent / "schemas" / f"{name}.json").read_bytes()
    for name in ("ledger", "history", "leftovers")
}


def add_json_routes(app: web.Application, timeline: Timeline, render_cache: RenderCache) -> None:
    """Route the JSON documents and their schemas."""
    services = app[SERVICES]
    # These documents have a separate limiter, so that their readers cannot block Prometheus' scrapes.
    limiter = RequestLimiter(app[CONFIG].max_requests)

    async def respond(request: web.Request, name: str, make: Callable[[], dict[str, Json]]) -> web.Response:
        packed = takes_gzip(request)

        def render() -> bytes:
            text = json.dumps(make()).encode()
            return gzip.compress(text, 1, mtime=0) if packed else text

        headers = {"Content-Type": "application/json", "Vary": "Accept-Encoding", "Cache-Control": "no-store"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        body = await render_cache.share(services.snapshot, (name, packed), render)
        return web.Response(body=body, headers=headers)

    def make_ledger() -> dict[str, Json]:
        snapshot = services.snapshot
        return snapshot_json(snapshot, timeline.growth(snapshot))

    def make_leftovers() -> dict[str, Json]:
        snapshot = services.snapshot
        return results_json(find_leftovers(snapshot), snapshot.watched_since, snapshot.time)

    documents = {"ledger": make_ledger, "history": timeline.as_json, "leftovers": make_leftovers}
    for name, make in documents.items():
        app.router.add_get(
            f"/api/v1/{name}",
            partial(limiter.serve, respond=partial(respond, name=name, make=make)),
        )
    app.router.add_get("/api/v1/schema/{name}", _schema)


async def _schema(request: web.Request) -> web.Response:
    found = _SCHEMAS.get(request.match_info["name"])
    if found is None:
        raise web.HTTPNotFound
    return web.Response(body=found, content_type="application/schema+json")
