"""The web application, and the sockets that it listens on."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web, web_response

from vramledger.config import Config, ListenAddress
from vramledger.errors import StartupError
from vramledger.exposition import Exposition
from vramledger.logs import fields, log
from vramledger.web.guard import Silence, complain_seldom, raise_descriptor_limit
from vramledger.web.renders import Renders
from vramledger.web.routes import add_routes, plain_errors
from vramledger.web.scrape import Scrape
from vramledger.web.source import CONFIG, SOURCE, Source

_SHUTDOWN = 3.0
# Seconds that running requests have to end in when the exporter stops; a render takes milliseconds.

_BACKLOG = 128

_KEEP_ALIVE = 35.0
# Seconds without a request after which a connection is closed. Not 30: with a scrape every 30 s the end would
# race with the next scrape.

# aiohttp names itself and Python with their versions in every answer, those to malformed requests included,
# which pass no signal or middleware of an application.
web_response.SERVER_SOFTWARE = "vramledger"  # type: ignore[attr-defined]


def make_app(config: Config, source: Source, exposition: Exposition | None = None) -> web.Application:
    """Build the application that serves ``source``; it owns the threads that it renders on."""
    if exposition is None:
        exposition = Exposition(config.processes_max, lambda: source.sampler_pid)
    renders = Renders()

    async def close_renders(_: web.Application) -> AsyncIterator[None]:
        yield
        renders.close()

    app = web.Application(middlewares=[plain_errors])
    app[CONFIG] = config
    app[SOURCE] = source
    app.cleanup_ctx.append(close_renders)
    app.on_response_prepare.append(_no_sniffing)
    add_routes(app, Scrape(config, source, exposition, renders), renders)
    return app


async def _no_sniffing(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Content-Type-Options"] = "nosniff"


@asynccontextmanager
async def serve(config: Config, source: Source) -> AsyncIterator[tuple[ListenAddress, ...]]:
    """Listen on all addresses of the configuration until the block ends, then stop gracefully.

    Yields:
        The addresses with the ports that the system chose.

    Raises:
        StartupError: an address cannot be listened on.
    """
    raise_descriptor_limit()
    asyncio.get_running_loop().set_exception_handler(complain_seldom())
    sockets = _listen(config.listen)
    # Its errors are the clients' (scanners, TLS on a plain port): one line each, a traceback at debug only.
    logger = logging.getLogger(f"{log.name}.http")
    app, silence = make_app(config, source), Silence()
    app.on_response_prepare.append(silence.heard)
    runner = web.AppRunner(
        app, access_log=None, logger=logger, shutdown_timeout=_SHUTDOWN, keepalive_timeout=_KEEP_ALIVE
    )
    try:
        await runner.setup()
        assert runner.server is not None  # noqa: S101 setup has just made it
        for listening in sockets:
            await web.SockSite(runner, listening, backlog=_BACKLOG).start()
        addresses = tuple(_address(listening) for listening in sockets)
        for address in addresses:
            log.info("Listening", extra=fields(address=address, page=_page(address)))
        async with silence.broken(runner.server):
            yield addresses
    finally:
        await runner.cleanup()
        for listening in sockets:
            listening.close()


def _listen(addresses: tuple[ListenAddress, ...]) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            sockets += _bind(address)
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    return sockets


def _bind(address: ListenAddress) -> list[socket.socket]:
    """Open the sockets of one address: one for all of IPv4 and IPv6, or one for each that a name means."""
    sockets: list[socket.socket] = []
    try:
        if not address.host:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listening = socket.create_server(
                ("", address.port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
            )
            return [listening]
        port = address.port
        for family, _, _, _, found in socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM):
            listening = socket.create_server((str(found[0]), port), family=family, backlog=_BACKLOG)
            sockets.append(listening)
            port = listening.getsockname()[1]
    except (OSError, UnicodeError) as error:  # a name that IDNA cannot encode: a..b, a label of 64 letters
        for listening in sockets:
            listening.close()
        raise StartupError(_why(address, error)) from error
    return sockets


def _why(address: ListenAddress, error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return f"cannot listen on {address}: that is no host name; correct --web.listen-address"
    if error.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {address}: the port is taken; stop what listens there "
            f"(ss -ltnp 'sport = :{address.port}') or choose another with --web.listen-address"
        )
    if error.errno == errno.EACCES:
        return (
            f"cannot listen on {address}: not permitted; choose a port above 1023 with --web.listen-address"
        )
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {address}: this host has no such address; correct --web.listen-address"
    return f"cannot listen on {address}: {error.strerror or error}; correct --web.listen-address"


def _page(address: ListenAddress) -> str:
    """Return where a person on this machine finds the page."""
    host = "localhost" if address.host in ("", "::", "0.0.0.0") else address.host  # noqa: S104 compared only
    return f"http://{ListenAddress(host, address.port)}/"


def _address(listening: socket.socket) -> ListenAddress:
    host, port = listening.getsockname()[:2]
    return ListenAddress(str(host), int(port))
