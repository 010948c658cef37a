"""Build the web application, and the servers in front of it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import hdrs, web

from vramledger.config import Config, ListenAddress
from vramledger.logs import fields, log
from vramledger.metrics.exposition import Exposition
from vramledger.web.access.access_control import AccessControl
from vramledger.web.access.host_names import names_of_loopback
from vramledger.web.cancellation import background_task
from vramledger.web.connections import Connections, raise_descriptor_limit
from vramledger.web.error_log import RequestErrorFilter, limited_exception_handler
from vramledger.web.listening import bound_address, listen, systemd_sockets
from vramledger.web.render_cache import RenderCache
from vramledger.web.response_headers import NO_SNIFFING
from vramledger.web.routes import add_routes, plain_errors
from vramledger.web.scrape import Scrape
from vramledger.web.services import CONFIG, SERVICES, AppServices, PageState

RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

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
    if access is None:
        access = AccessControl(None)
    state = state or PageState()
    if exposition is None:
        exposition = Exposition(
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
    """Listen on all addresses of the configuration until the block ends, then stop gracefully.

    ``on_bound`` is called after the last step that may need a privilege, a low port, and before the first
    step that must later work without it: reading the files of ``--web.config.file``. ``state`` is filled for
    the control socket. Yields the addresses with the ports that the system chose. Raises StartupError if an
    address cannot be listened on, or the web configuration is wrong.
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
        runner.server.request_handler = _guarded(runner.server.request_handler, access, connections)
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


def _guarded(answer: RequestHandler, access: AccessControl, connections: Connections) -> RequestHandler:
    """Let only allowed requests through; middlewares would run after the path is resolved."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        connections.request_begins(request)
        refusal = await access.refusal(request)
        if refusal is not None:
            return refusal
        with connections.allowed(request):
            return await answer(request)

    return handle


def _page_url(address: ListenAddress, *, secure: bool) -> str:
    """Return the address at which a person on this machine finds the page."""
    host = "localhost" if address.host in ("", "::", "0.0.0.0") else address.host  # noqa: S104 compared only
    return f"{'https' if secure else 'http'}://{ListenAddress(host, address.port)}/"
