"""Serve a simulated fleet: ``python -m tests.support.fleet.server HOSTS GPUS HOLDERS`` prints its port."""

import asyncio
import sys

from aiohttp import web

from tests.support.fleet.hosts import FleetHost, fleet


def make_app(hosts: list[FleetHost]) -> web.Application:
    """Build an application that answers ``/hosts/N/metrics`` for every host."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=hosts[int(request.match_info["number"])].page(),
            headers={"Content-Type": "text/plain; version=0.0.4", "Content-Encoding": "gzip"},
        )

    app = web.Application()
    app.router.add_get(r"/hosts/{number:\d+}/metrics", metrics)
    return app


async def serve(hosts: int, gpus: int, holders: int) -> None:
    runner = web.AppRunner(make_app(fleet(hosts, gpus, holders)), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:4])))
