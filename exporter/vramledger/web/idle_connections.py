"""Prevent that many idle or hostile connections take all file descriptors of the exporter."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from weakref import WeakSet

from aiohttp import web

from vramledger.web.access.pre_auth import PreAuthFactory

_CHECK_INTERVAL = 15.0
"""Seconds between two checks of the connections; one that has sent no request is closed at its second
check. aiohttp before 3.14 waits for the first request for ever."""

_CROWDED = 0.5
"""The share of our descriptors that connections may take before the idle ones are closed immediately.
Otherwise, where descriptors are few, clients that send nothing would block all other clients until the next
check."""

_CROWDED_CHECK_INTERVAL = 1.0

_REFUSED = frozenset({401, 403, 429, 503})
"""After these answers a connection counts as idle."""


def raise_descriptor_limit() -> None:
    """Allow ourselves as many open files as the system does: 1024 by default, and each client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the kernel's fs.nr_open was set below it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class IdleCloser:
    """Close the connections whose clients never send a request."""

    def __init__(self) -> None:
        self._in_use: WeakSet[asyncio.BaseTransport] = WeakSet()

    async def record_request(self, request: web.Request, response: web.StreamResponse) -> None:
        """Record that a connection has sent a request; from now on aiohttp's keep-alive watches it."""
        if request.transport is not None and response.status not in _REFUSED:
            self._in_use.add(request.transport)

    async def watch(self, factory: PreAuthFactory) -> None:
        """Watch the connections for ever."""
        suspects: WeakSet[asyncio.BaseTransport] = WeakSet()
        checked = time.monotonic()
        while True:
            await asyncio.sleep(min(_CROWDED_CHECK_INTERVAL, _CHECK_INTERVAL))
            connections = factory.connections
            crowded = len(connections) > _CROWDED * resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if not crowded and time.monotonic() - checked < _CHECK_INTERVAL:
                continue
            checked = time.monotonic()
            idle: WeakSet[asyncio.BaseTransport] = WeakSet()
            for connection in connections:
                transport = connection.transport
                if transport is None or transport in self._in_use:
                    continue
                if transport in suspects:
                    connection.force_close()
                idle.add(transport)
            suspects = idle
