"""Route each path to its answer, and write errors: one line of plain text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from vramledger.logs import fields, log
from vramledger.web.json_api import add_json_routes
from vramledger.web.page import Page, read_host_name
from vramledger.web.page_stream import PageStream
from vramledger.web.past_api import PastApi
from vramledger.web.render_cache import RenderCache
from vramledger.web.runbooks import Runbooks
from vramledger.web.scrape import Scrape
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
