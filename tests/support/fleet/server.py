"""Serve a simulated fleet: ``python -m tests.support.fleet.server HOSTS GPUS HOLDERS`` prints its port."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from tests.support.fleet.hosts import FleetHost, fleet


def make_app(hosts: list[FleetHost]) -> web.Application:
    """Build an application that answers ``/hosts/N/metrics`` for every host.

    A POST to ``/hosts/N/stop`` ends a host's exporter, one to ``/hosts/N/start`` starts it again.
    """

    def host(request: web.Request) -> FleetHost:
        return hosts[int(request.match_info["number"])]

    async def metrics(request: web.Request) -> web.Response:
        if not host(request).up:
            raise web.HTTPServiceUnavailable  # a failed scrape, as when nobody listens
        return web.Response(
            body=host(request).page(),
            headers={"Content-Type": "text/plain; version=0.0.4", "Content-Encoding": "gzip"},
        )

    async def stop(request: web.Request) -> web.Response:
        host(request).up = False
        return web.Response()

    async def start(request: web.Request) -> web.Response:
        host(request).restart()
        host(request).up = True
        return web.Response()

    app = web.Application()
    app.router.add_get(r"/hosts/{number:\d+}/metrics", metrics)
    app.router.add_post(r"/hosts/{number:\d+}/stop", stop)
    app.router.add_post(r"/hosts/{number:\d+}/start", start)
    return app


async def serve(hosts: int, gpus: int, holders: int) -> None:
    """Serve until ended."""
    runner = web.AppRunner(make_app(fleet(hosts, gpus, holders)), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:4])))
