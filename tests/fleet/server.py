"""Serve a simulated fleet: ``python -m tests.fleet.server HOSTS`` prints its port, then serves."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from tests.fleet.hosts import Host, fleet


def make_app(hosts: list[Host]) -> web.Application:
    """Build an application that answers ``/hosts/N/metrics`` for every host."""

    async def metrics(request: web.Request) -> web.Response:
        page = hosts[int(request.match_info["number"])].page()
        return web.Response(
            body=page,
            headers={"Content-Type": "text/plain; version=0.0.4", "Content-Encoding": "gzip"},
        )

    app = web.Application()
    app.router.add_get(r"/hosts/{number:\d+}/metrics", metrics)
    return app


async def serve(count: int) -> None:
    """Serve until ended."""
    runner = web.AppRunner(make_app(fleet(count)), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
