"""Build the web application, and the servers in front of it.

Route each path to its answer, make those of JSON, and write errors: one line of plain text.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from aiohttp import hdrs, web

from vramledger.config import Config, ListenAddress
from vramledger.errors import VramledgerError
from vramledger.logs import fields, log
from vramledger.metrics.exposition import Exposition
from vramledger.model.public_ledger import DOCUMENTS, schema
from vramledger.model.records import JSON_VERSION
from vramledger.rate_limit import TokenBucket
from vramledger.verdicts.cleanliness import find_leftovers, leftovers
from vramledger.views.ledger_json import public_ledger
from vramledger.views.timeline import Timeline
from vramledger.web.access.access_control import AccessControl, names_of_loopback
from vramledger.web.cancellation import background_task
from vramledger.web.connections import Connections, raise_descriptor_limit
from vramledger.web.error_log import RequestErrorFilter, limited_exception_handler
from vramledger.web.listening import bound_address, listen, systemd_sockets
from vramledger.web.page import Page, Runbooks, read_host_name
from vramledger.web.page_stream import PageStream
from vramledger.web.response_headers import NO_SNIFFING, takes_gzip
from vramledger.web.scrape import RenderCache, RequestLimiter, Scrape
from vramledger.web.services import CONFIG, SERVICES, AppServices, AskPast, PageState

_KEPT_MAX = 16
_KEPT_SECONDS = 30.0
_RATE, _BURST = 4.0, 12.0
"""Questions to the storage a second, of all visitors together."""

_LOOK_SECONDS = 0.5
"""Seconds from one look whether the visitor is still there to the next."""

_LATEST = 1e11
_SPAN_MAX = 366 * 86400.0


class PastApi:
    """The answers about the past, kept for those who ask for the same; used from the event loop only.

    Another process computes them. What is not there is said in the answer: a browser would report another
    status as an error of the page.
    """

    def __init__(self, ask: AskPast | None) -> None:
        self._ask = ask
        self._kept: OrderedDict[tuple[object, ...], tuple[float, bytes]] = OrderedDict()
        self._bucket = TokenBucket(time.monotonic(), _RATE, _BURST)

    def add_routes(self, app: web.Application) -> None:
        """Route both documents."""
        app.router.add_get("/api/v1/past", self._moment)
        app.router.add_get("/api/v1/past/scale", self._scale)

    async def _moment(self, request: web.Request) -> web.Response:
        at = _time_of(request, "at")
        if at is None:
            return web.Response(status=400, text="Write the moment as ?at=UNIX_SECONDS.\n")
        return await self._answer(request, ("at", at), {"ask": "at", "at": at, "view": "page"})

    async def _scale(self, request: web.Request) -> web.Response:
        begin, end = _time_of(request, "from"), _time_of(request, "to")
        if begin is None or end is None or not 0 < end - begin <= _SPAN_MAX:
            return web.Response(status=400, text="Write the span as ?from=UNIX_SECONDS&to=UNIX_SECONDS.\n")
        return await self._answer(request, ("scale", begin, end), {"ask": "slider", "from": begin, "to": end})

    async def _answer(
        self, request: web.Request, key: tuple[object, ...], question: dict[str, Any]
    ) -> web.Response:
        if self._ask is None:
            return _json_response(_problem("nothing is stored; start the exporter with --storage.path"))
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is None or now - kept[0] > _KEPT_SECONDS:
            if not self._bucket.consume(now):
                return web.Response(status=503, text="Too many ask for the past; try again.\n")
            try:
                _, content = await _while_connected(request, self._ask(question))
            except VramledgerError as error:
                return _json_response(_problem(str(error)))
            kept = self._kept[key] = (now, content)
            while len(self._kept) > _KEPT_MAX:
                self._kept.popitem(last=False)
        return _json_response(kept[1])


async def _while_connected(
    request: web.Request, answering: Awaitable[tuple[dict[str, Any], bytes]]
) -> tuple[dict[str, Any], bytes]:
    task = asyncio.ensure_future(answering)
    try:
        while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
            if request.transport is None or request.transport.is_closing():
                break
        else:
            return task.result()
    finally:
        task.cancel()
    raise VramledgerError("nobody waits for the answer any more")


def _json_response(body: bytes) -> web.Response:
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    return web.Response(body=body, headers=headers)


def _problem(why: str) -> bytes:
    return json.dumps({"version": JSON_VERSION, "error": why}).encode()


def _time_of(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    if not text.isascii() or not text.replace(".", "", 1).isdigit():
        return None
    found = float(text)
    return float(int(found)) if 0 < found < _LATEST else None


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


_SHUTDOWN = 3.0
"""Seconds within which running requests must end when the exporter stops; a render takes milliseconds."""

_KEEP_ALIVE = 35.0
"""Seconds without a request after which a connection is closed. Not 30: with a scrape every 30 s the close
would race with the next scrape."""


def make_app(
    config: Config,
    services: AppServices,
    exposition: Exposition | None = None,
    access: AccessControl | None = None,
    state: PageState | None = None,
) -> web.Application:
    """Build the application of ``services``, and its threads; :func:`serve` refuses requests."""
    access, state = access or AccessControl(None), state or PageState()
    exposition = exposition or Exposition(
        config.processes_max,
        lambda: services.sampler_pid,
        collect_own=lambda: [*access.collect(), *state.collect()],
    )
    render_cache = RenderCache()

    async def close_threads(_: web.Application) -> AsyncIterator[None]:
        yield
        render_cache.close()
        access.close()

    async def complete_headers(_: web.Request, response: web.StreamResponse) -> None:
        for name, value in (NO_SNIFFING, *access.headers):
            response.headers.setdefault(name, value)
        response.headers.popall(hdrs.SERVER, None)

    app = web.Application(middlewares=[plain_errors])
    app[CONFIG] = config
    app[SERVICES] = services
    app.cleanup_ctx.append(close_threads)
    app.on_response_prepare.append(complete_headers)
    scrape = Scrape(config, services, exposition, render_cache)
    page_stream = add_routes(app, scrape, render_cache, state)
    access.on_permissions_changed(page_stream.disconnect_viewers)
    return app


@asynccontextmanager
async def serve(
    config: Config,
    services: AppServices,
    on_bound: Callable[[], None] = lambda: None,
    state: PageState | None = None,
) -> AsyncIterator[tuple[ListenAddress, ...]]:
    """Listen on all addresses until the block ends; yield them with their ports. Raises StartupError.

    ``on_bound`` is called after the last step that may need a right, a low port, and before the first that
    must later work without: reading the files of ``--web.config.file``. ``state`` is filled for the control
    socket.
    """
    raise_descriptor_limit()
    asyncio.get_running_loop().set_exception_handler(limited_exception_handler())
    sockets = systemd_sockets() if config.systemd_socket else listen(config.listen)
    try:
        on_bound()
        state = state or PageState()
        async with _run_application(config, services, sockets, state) as access:
            reachable = any(each.family != socket.AF_UNIX for each in sockets)
            state.check_open = lambda: reachable and access.open_to_all
            addresses = tuple(map(bound_address, sockets))
            for address in addresses:
                page = _page_url(address, secure=access.context is not None)
                log.info("Listening", extra=fields(address=address, page=page))
            yield addresses
    finally:
        for listening in sockets:
            listening.close()


@asynccontextmanager
async def _run_application(
    config: Config, services: AppServices, sockets: list[socket.socket], state: PageState
) -> AsyncIterator[AccessControl]:
    access = AccessControl(config.web_config)
    access.host_names = names_of_loopback(map(bound_address, sockets), config.listen)
    app = make_app(config, services, access=access, state=state)
    # Its errors are caused by clients (scanners, TLS on a plain port): a line a minute, a traceback at debug
    # only.
    logger = logging.getLogger(f"{log.name}.http")
    error_filter = RequestErrorFilter()
    logger.addFilter(error_filter)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN)
    try:
        await runner.setup()
        assert runner.server is not None  # noqa: S101 setup has just made it
        connections = Connections(
            runner.server,
            lambda: access.context,
            access_log=None,
            logger=logger,
            keepalive_timeout=_KEEP_ALIVE,
        )
        answer = runner.server.request_handler
        runner.server.request_handler = partial(_guarded, answer, access, connections)
        access.on_clients_changed(connections.close_all)
        async with AsyncExitStack() as stack:
            stack.callback(connections.close)
            await stack.enter_async_context(background_task(access.watch()))
            for listening in sockets:
                await stack.enter_async_context(background_task(connections.accept(listening)))
            yield access
    finally:
        await runner.cleanup()
        logger.removeFilter(error_filter)


async def _guarded(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    access: AccessControl,
    connections: Connections,
    request: web.BaseRequest,
) -> web.StreamResponse:
    """Let only allowed requests through; middlewares would run after the path is resolved."""
    connections.request_begins(request)
    # From Python 3.12 on aiohttp's task begins at once: a burst of requests would be one turn of the loop.
    await asyncio.sleep(0)
    refusal = await access.refusal(request)
    if refusal is not None:
        return refusal
    with connections.allowed(request):
        return await answer(request)


def _page_url(address: ListenAddress, *, secure: bool) -> str:
    host = "localhost" if address.host in ("", "::", "0.0.0.0") else address.host  # noqa: S104 compared only
    return f"{'https' if secure else 'http'}://{ListenAddress(host, address.port)}/"
