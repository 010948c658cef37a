"""Build the web application, and the servers in front of it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import hdrs, web

from vramledger.config import Config, ListenAddress
from vramledger.logs import fields, log
from vramledger.metrics.exposition import Exposition
from vramledger.web.access.access_control import AccessControl
from vramledger.web.access.pre_auth import PreAuthFactory
from vramledger.web.cancellation import background_task
from vramledger.web.error_log import RequestErrorFilter, limited_exception_handler
from vramledger.web.idle_connections import IdleCloser, raise_descriptor_limit
from vramledger.web.listening import BACKLOG, bound_address, listen, systemd_sockets
from vramledger.web.render_cache import RenderCache
from vramledger.web.response_headers import NO_SNIFFING
from vramledger.web.routes import Handler, add_routes, plain_errors
from vramledger.web.scrape import Scrape
from vramledger.web.services import CONFIG, SERVICES, AppServices

_SHUTDOWN = 3.0
"""Seconds within which running requests must end when the exporter stops; a render takes milliseconds."""

_KEEP_ALIVE = 35.0
"""Seconds without a request after which a connection is closed. Not 30: with a scrape every 30 s the close
would race with the next scrape."""

_HANDSHAKE = 10.0
"""Seconds for a TLS handshake; asyncio's default would let a silent client hold a descriptor for a minute."""


def make_app(
    config: Config,
    services: AppServices,
    exposition: Exposition | None = None,
    access: AccessControl | None = None,
) -> web.Application:
    """Build the application that serves ``services``; it owns the threads on which it renders.

    Without ``access`` everybody may request everything.
    """
    if access is None:
        access = AccessControl(None)
    if exposition is None:
        exposition = Exposition(config.processes_max, lambda: services.sampler_pid, access=access.collect)
    render_cache = RenderCache()

    async def close_threads(_: web.Application) -> AsyncIterator[None]:
        yield
        render_cache.close()
        access.close()

    @web.middleware
    async def check_access(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = await access.refusal(request)
        return await handler(request) if refusal is None else refusal

    async def complete_headers(_: web.Request, response: web.StreamResponse) -> None:
        for name, value in (NO_SNIFFING, *access.headers):
            response.headers.setdefault(name, value)
        response.headers.popall(hdrs.SERVER, None)

    app = web.Application(middlewares=[check_access, plain_errors])
    app[CONFIG] = config
    app[SERVICES] = services
    app.cleanup_ctx.append(close_threads)
    app.on_response_prepare.append(complete_headers)
    page_stream = add_routes(app, Scrape(config, services, exposition, render_cache), render_cache)
    access.on_permissions_changed(page_stream.disconnect_viewers)
    return app


@asynccontextmanager
async def serve(
    config: Config, services: AppServices, on_bound: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[ListenAddress, ...]]:
    """Listen on all addresses of the configuration until the block ends, then stop gracefully.

    ``on_bound`` is called after the last step that may need a privilege, a low port, and before the first
    step that must later work without it: reading the files of ``--web.config.file``.

    Yields:
        The addresses with the ports that the system chose.

    Raises:
        StartupError: an address cannot be listened on, or the web configuration is wrong.
    """
    raise_descriptor_limit()
    asyncio.get_running_loop().set_exception_handler(limited_exception_handler())
    sockets = systemd_sockets() if config.systemd_socket else listen(config.listen)
    try:
        on_bound()
        async with _run_application(config, services, sockets) as access:
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
    config: Config, services: AppServices, sockets: list[socket.socket]
) -> AsyncIterator[AccessControl]:
    access = AccessControl(config.web_config)
    idle_closer = IdleCloser()
    app = make_app(config, services, access=access)
    app.on_response_prepare.append(idle_closer.record_request)
    # Its errors are caused by clients (scanners, TLS on a plain port): a line a minute, a traceback at debug
    # only.
    logger = logging.getLogger(f"{log.name}.http")
    error_filter = RequestErrorFilter()
    logger.addFilter(error_filter)
    runner = web.AppRunner(
        app, access_log=None, logger=logger, shutdown_timeout=_SHUTDOWN, keepalive_timeout=_KEEP_ALIVE
    )
    try:
        await runner.setup()
        assert runner.server is not None  # noqa: S101 setup has just made it
        factory = PreAuthFactory(runner.server, access)
        async with (
            _accept_connections(sockets, factory, access),
            background_task(idle_closer.watch(factory)),
        ):
            yield access
    finally:
        await runner.cleanup()
        logger.removeFilter(error_filter)


@asynccontextmanager
async def _accept_connections(
    sockets: list[socket.socket], factory: PreAuthFactory, access: AccessControl
) -> AsyncIterator[None]:
    servers: list[asyncio.Server] = []

    async def start() -> None:
        """Accept with the newest context; open connections keep theirs, and none is refused."""
        old = tuple(servers)
        for listening in sockets:
            server = await asyncio.get_running_loop().create_server(
                factory,
                sock=listening.dup(),
                ssl=access.context,
                ssl_handshake_timeout=_HANDSHAKE if access.context is not None else None,
                backlog=BACKLOG,
            )
            servers.append(server)
        for each in old:
            servers.remove(each)
            each.close()

    try:
        await start()
        async with background_task(access.watch(start)):
            yield
    finally:
        for server in servers:
            server.close()
        factory.close()


def _page_url(address: ListenAddress, *, secure: bool) -> str:
    """Return the address at which a person on this machine finds the page."""
    host = "localhost" if address.host in ("", "::", "0.0.0.0") else address.host  # noqa: S104 compared only
    return f"{'https' if secure else 'http'}://{ListenAddress(host, address.port)}/"
