"""The live page's stream: one render for all who look, sent as server-sent events.

An event has the rows that changed since the one before it: 0.7 kB where the whole is 12.6 kB (8 GPUs with 64
holders each, one of them at work, compressed). Who has just come, or was too slow for the last event, gets
all rows instead, so nothing is kept for anybody: a viewer costs its connection and at most one unsent event.

Events are compressed once for all viewers. Each is a piece of raw deflate that refers to nothing before
it and ends on a whole byte, so any series of them after a gzip header is one valid stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from aiohttp import web
from aiohttp.http import HttpVersion11

from vramledger.logs import fields, log
from vramledger.metrics.exposition import gzip_accepted
from vramledger.model.snapshot import Snapshot
from vramledger.views.timeline import Timeline
from vramledger.web.cancellation import cancelled
from vramledger.web.page_rows import Rows, difference, rows
from vramledger.web.services import AppServices

VIEWERS_MAX = 500
"""Streams at once; the next is told to try again later."""

HEARTBEAT = 5.0
"""Seconds without a sample after which an empty event says that we are still here."""

PERIOD = 0.5
"""Seconds from one event to the next at least, however fast samples come."""

_STALLED = 20.0
# Seconds in which a viewer took nothing of what it was sent, after which it is dropped.

_LEVEL = 6
# zlib's own choice; an event is compressed once for all.

_GZIP_HEADER = bytes((0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF))

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would keep the events until it has 4 kB of them
    "Vary": "Accept-Encoding",
}


class PageEvent(NamedTuple):
    """One event as it goes out: plain, and as a piece of deflate."""

    plain: bytes
    packed: bytes

    @classmethod
    def of(cls, changed: Rows, gone: list[str], *, full: bool) -> PageEvent:
        """Write an event."""
        text = json.dumps({"full": full, "rows": changed, "gone": gone}, separators=(",", ":"))
        return cls.written(f"data: {text}\n\n".encode())

    @classmethod
    def written(cls, plain: bytes) -> PageEvent:
        """Compress what has been written."""
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        return cls(plain, deflate.compress(plain) + deflate.flush(zlib.Z_SYNC_FLUSH))


_BEAT = PageEvent.of({}, [], full=False)
_HELLO = PageEvent.written(b"retry: 2000\n\n")


@dataclass(eq=False)
class Viewer:
    """One open stream.

    Attributes:
        transport: its connection.
        chunked: whether the body is in chunks: HTTP/1.1, and not 1.0 as nginx asks unless told otherwise.
        packed: whether it takes gzip.
        seen: number of the last event that it got, None when it needs all rows.
        waiting: since when it has taken nothing, None while it keeps up.
        gone: set when the stream is to end.
    """

    transport: asyncio.Transport
    chunked: bool
    packed: bool
    seen: int | None = None
    waiting: float | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, event: PageEvent) -> None:
        """Hand an event to the connection; aiohttp's own way would cost a task a viewer and event."""
        body = event.packed if self.packed else event.plain
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self.chunked else body)

    def lags(self, now: float) -> bool:
        """Tell whether it has not taken the last event yet; one that stays so too long is dropped."""
        if not self.transport.get_write_buffer_size():
            self.waiting = None
            return False
        self.waiting = self.waiting or now
        if now - self.waiting > _STALLED:
            self.transport.abort()
            self.gone.set()
        return True


class _Drawn(NamedTuple):
    """What one render gave; None is an event that nobody needs."""

    rows: Rows
    change: PageEvent | None
    full: PageEvent | None


class Live:
    """Watch the source, remember its last 15 minutes, and tell all viewers what changes."""

    def __init__(self, source: AppServices, timeline: Timeline) -> None:
        self._source = source
        self._timeline = timeline
        self._viewers: set[Viewer] = set()
        self._wake = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="live")  # its own: a scrape waits for no event
        self._rows: Rows = {}
        self._number = 0
        self._full: PageEvent | None = None
        self._shown: object = None

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """Work as long as the application does (one of its ``cleanup_ctx``)."""
        tasks = [asyncio.create_task(self._note()), asyncio.create_task(self._tell())]
        yield
        await cancelled(*tasks)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def dismiss(self) -> None:
        """End all streams: who may still look opens another one, and is asked for the password."""
        for viewer in self._viewers:
            viewer.gone.set()
            if viewer.transport.get_write_buffer_size():
                viewer.transport.abort()  # one that does not read would keep it open

    async def end(self, _: web.Application) -> None:
        """End all streams, so that the exporter can stop."""
        for viewer in self._viewers:
            viewer.gone.set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one stream until the viewer goes away, is too slow, or we stop."""
        if len(self._viewers) >= VIEWERS_MAX:
            return web.Response(status=503, text=f"{VIEWERS_MAX} viewers are enough; try again later.\n")
        packed = gzip_accepted(",".join(request.headers.getall("Accept-Encoding", [])))
        response = web.StreamResponse(headers=_HEADERS)
        if packed:
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        if request.method == "HEAD" or not isinstance(request.transport, asyncio.Transport):
            return response
        await response.write(_GZIP_HEADER + _HELLO.packed if packed else _HELLO.plain)
        viewer = Viewer(request.transport, request.version >= HttpVersion11, packed)
        self._viewers.add(viewer)
        self._wake.set()
        try:
            await viewer.gone.wait()
        finally:
            self._viewers.discard(viewer)
        return response

    async def _note(self) -> None:
        serial = 0
        while True:
            snapshot = await self._source.newer(serial)
            serial = snapshot.serial
            self._timeline.note(snapshot)
            if self._viewers:
                self._wake.set()

    async def _tell(self) -> None:
        last = float("-inf")
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), HEARTBEAT)
            if all(viewer.seen is not None for viewer in self._viewers):  # who has just come is served now
                await asyncio.sleep(last + PERIOD - time.monotonic())
            self._wake.clear()
            self._sweep()
            if not self._viewers:
                self._rows, self._full, self._shown = {}, None, None
                continue
            last = time.monotonic()
            try:
                await self._send()
            except Exception as error:  # noqa: BLE001 - a defect must not end the stream for good
                what = f"{type(error).__name__}: {error}"
                log.error("Live page failed", exc_info=error, extra=fields(err=what))
                self._shown = None

    def _sweep(self) -> None:
        for viewer in [each for each in self._viewers if each.transport.is_closing()]:
            viewer.gone.set()
            self._viewers.discard(viewer)

    async def _send(self) -> None:
        """Render what has changed, and hand it to everybody who can take it."""
        snapshot, ready = self._source.snapshot, self._source.ready
        shown = (snapshot.serial, snapshot.up, snapshot.failure, ready)
        news = shown != self._shown
        now = time.monotonic()
        able = [viewer for viewer in self._viewers if not viewer.lags(now)]
        current = self._number
        behind = any(viewer.seen != current for viewer in able)
        if news or (behind and self._full is None):
            loop = asyncio.get_running_loop()
            drawn = await loop.run_in_executor(
                self._pool, self._draw, snapshot, ready, self._rows, news, behind
            )
            self._rows, self._full, self._shown = drawn.rows, drawn.full, shown
            if drawn.change is not None:
                self._number += 1
        else:
            drawn = _Drawn(self._rows, None, self._full)
        for viewer in able:
            if viewer.seen == current:
                viewer.write(drawn.change or _BEAT)
            elif drawn.full is not None:
                viewer.write(drawn.full)
            else:
                continue
            viewer.seen = self._number

    def _draw(self, snapshot: Snapshot, ready: bool, before: Rows, news: bool, full: bool) -> _Drawn:  # noqa: FBT001 for a thread pool
        after = rows(snapshot, self._timeline.growth(snapshot), ready=ready) if news else before
        change = PageEvent.of(*difference(before, after), full=False) if news and before else None
        return _Drawn(after, change, PageEvent.of(after, [], full=True) if full else None)
