"""Route each path to its answer, make those of JSON, and write errors: one line of plain text."""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from aiohttp import web

from vramledger.logs import fields, log
from vramledger.model.public_ledger import DOCUMENTS, schema
from vramledger.verdicts.cleanliness import find_leftovers, leftovers
from vramledger.views.ledger_json import public_ledger
from vramledger.views.timeline import Timeline
from vramledger.web.page import Page, Runbooks, read_host_name
from vramledger.web.page_stream import PageStream
from vramledger.web.past_api import PastApi
from vramledger.web.render_cache import RenderCache
from vramledger.web.response_headers import takes_gzip
from vramledger.web.scrape import RequestLimiter, Scrape
from vramledger.web.services import CONFIG, SERVICES, PageState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_routes(
    app: web.Application, scrape: Scrape, render_cache: RenderCache, state: PageState
) -> PageStream:
    """Route all paths, each for GET and HEAD; return the streams of the page."""
    config, services = app[CONFIG], app[SERVICES]
    timeline = state.timeline
    page_stream = PageStream(services, timeline)
    app.cleanup_ctx.append(page_stream.run)
    app.on_shutdown.append(page_stream.end_streams)
    add_json_routes(app, timeline, render_cache)
    PastApi(state.past).add_routes(app)
    app.router.add_get(config.telemetry_path, scrape.serve)
    app.router.add_get("/-/healthy", _healthy)
    app.router.add_get("/-/ready", _ready)
    # The runbooks are also served without the live page: alerts link to them.
    live = config.page and config.telemetry_path != "/"
    page = Page(config.telemetry_path, live=live, host=read_host_name(config.sampling.rootfs))
    runbooks = Runbooks(page)
    app.router.add_get("/page/{folder}/{name}", page.serve_file)
    app.router.add_get("/runbooks", runbooks.redirect)
    app.router.add_get("/runbooks/", runbooks.serve)
    app.router.add_get("/runbooks/{name}", runbooks.serve)
    if live:
        app.router.add_get("/", page.serve_index)
        app.router.add_get("/api/v1/events", page_stream.serve)
    return page_stream


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="vramledger is healthy.\n")


async def _ready(request: web.Request) -> web.Response:
    if request.app[SERVICES].ready:
        return web.Response(text="vramledger is ready.\n")
    return web.Response(status=503, text="vramledger has not finished its first sample yet.\n")


@web.middleware
async def plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into one line of text, and a bug of ours into one line of the log as well."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        path = request.app[CONFIG].telemetry_path
        return web.Response(status=404, text=f"There is nothing here; the metrics are at {path}\n")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        text = f"This path accepts only {allowed}.\n"
        return web.Response(status=405, text=text, headers={"Allow": allowed})
    except web.HTTPException:
        raise
    except ConnectionError:
        raise  # the client has gone away: there is nobody to answer and nothing to report
    except Exception as error:  # noqa: BLE001 - a defect must cost its own request only
        what = f"{type(error).__name__}: {error}"
        log.exception("Request failed", extra=fields(path=request.path, err=what))
        return web.Response(status=500, text="An internal error; the log of vramledger has the reason.\n")


def add_json_routes(app: web.Application, timeline: Timeline, render_cache: RenderCache) -> None:
    """Route the JSON documents and their schemas."""
    services = app[SERVICES]
    # These documents have a separate limiter, so that their readers cannot block Prometheus' scrapes.
    limiter = RequestLimiter(app[CONFIG].max_requests)

    async def respond(request: web.Request, name: str, make: Callable[[], object]) -> web.Response:
        packed = takes_gzip(request)

        def render() -> bytes:
            text = msgspec.json.encode(make())
            return gzip.compress(text, 1, mtime=0) if packed else text

        headers = {"Content-Type": "application/json", "Vary": "Accept-Encoding", "Cache-Control": "no-store"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        body = await render_cache.share(services.snapshot, (name, packed), render)
        return web.Response(body=body, headers=headers)

    def make_ledger() -> object:
        snapshot = services.snapshot
        return public_ledger(snapshot, timeline.growth(snapshot))

    def make_leftovers() -> object:
        snapshot = services.snapshot
        return leftovers(find_leftovers(snapshot), snapshot.watched_since, snapshot.time)

    documents = {"ledger": make_ledger, "history": timeline.history, "leftovers": make_leftovers}
    for name, make in documents.items():
        app.router.add_get(
            f"/api/v1/{name}", partial(limiter.serve, respond=partial(respond, name=name, make=make))
        )
    app.router.add_get("/api/v1/schema/{name}", _schema)


async def _schema(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in DOCUMENTS:
        raise web.HTTPNotFound
    return web.Response(body=schema(name), content_type="application/schema+json")
