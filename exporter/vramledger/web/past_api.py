"""Serve the past to the page: a moment, and the scale of the slider.

A process of its own computes both, one after the other. Here they are only passed on, and kept for those who
ask for the same. So many visitors cannot make the exporter slow; an answer that nobody waits for any more is
not computed. What is not there is said in the answer: a browser would report another status as an error of
the page.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from vramledger.errors import VramledgerError
from vramledger.model.records import JSON_VERSION
from vramledger.rate_limit import TokenBucket

AskPast = Callable[[dict[str, Any]], Awaitable[tuple[dict[str, Any], bytes]]]
"""Return the head and content of the storage's answer to a question."""

_KEPT_MAX = 16
_KEPT_SECONDS = 30.0
_RATE, _BURST = 4.0, 12.0
"""Questions to the storage a second, of all visitors together."""

_LOOK_SECONDS = 0.5
"""Seconds from one look whether the visitor is still there to the next."""

_LATEST = 1e11
_SPAN_MAX = 366 * 86400.0


class PastApi:
    """The answers about the past; used from the event loop only."""

    def __init__(self, ask: AskPast | None) -> None:
        """Answer with what ``ask`` gives; None where nothing is stored."""
        self._ask = ask
        self._kept: OrderedDict[tuple[object, ...], tuple[float, bytes]] = OrderedDict()
        self._bucket = TokenBucket(time.monotonic(), _RATE, _BURST)

    def add_routes(self, app: web.Application) -> None:
        """Route both documents."""
        app.router.add_get("/api/v1/past", self._moment)
        app.router.add_get("/api/v1/past/scale", self._scale)

    async def _moment(self, request: web.Request) -> web.Response:
        at = _time(request, "at")
        if at is None:
            return web.Response(status=400, text="Write the moment as ?at=UNIX_SECONDS.\n")
        return await self._answer(request, ("at", at), {"ask": "at", "at": at, "view": "page"})

    async def _scale(self, request: web.Request) -> web.Response:
        begin, end = _time(request, "from"), _time(request, "to")
        if begin is None or end is None or not 0 < end - begin <= _SPAN_MAX:
            return web.Response(status=400, text="Write the span as ?from=UNIX_SECONDS&to=UNIX_SECONDS.\n")
        return await self._answer(request, ("scale", begin, end), {"ask": "slider", "from": begin, "to": end})

    async def _answer(
        self, request: web.Request, key: tuple[object, ...], question: dict[str, Any]
    ) -> web.Response:
        if self._ask is None:
            return _json(_problem("nothing is stored; start the exporter with --storage.path"))
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is None or now - kept[0] > _KEPT_SECONDS:
            if not self._bucket.consume(now):
                return web.Response(status=503, text="Too many ask for the past; try again.\n")
            try:
                _, content = await _while_connected(request, self._ask(question))
            except VramledgerError as error:
                return _json(_problem(str(error)))
            kept = self._kept[key] = (now, content)
            while len(self._kept) > _KEPT_MAX:
                self._kept.popitem(last=False)
        return _json(kept[1])


async def _while_connected(
    request: web.Request, answering: Awaitable[tuple[dict[str, Any], bytes]]
) -> tuple[dict[str, Any], bytes]:
    """Return an answer; it is cancelled when the visitor has closed the connection."""
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


def _json(body: bytes) -> web.Response:
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    return web.Response(body=body, headers=headers)


def _problem(why: str) -> bytes:
    return json.dumps({"version": JSON_VERSION, "error": why}).encode()


def _time(request: web.Request, name: str) -> float | None:
    """Return a time of the query in whole seconds, None if it is not one."""
    text = request.query.get(name, "")
    if not text.isascii() or not text.replace(".", "", 1).isdigit():
        return None
    found = float(text)
    return float(int(found)) if 0 < found < _LATEST else None
