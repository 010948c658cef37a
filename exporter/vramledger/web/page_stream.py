"""Stream to the live page: one render for all viewers, sent as server-sent events.

An event has the rows that changed since the previous event: 0.7 kB, while all rows are 12.6 kB (compressed; 8
GPUs with 64 holders each, of which one works). A viewer that is new, or was too slow for the last event, gets
all rows instead. So we keep nothing for a single viewer except its connection and at most one unsent event.
Events are compressed once for all viewers. Each event is a piece of raw deflate that refers to nothing before
it and ends at a byte boundary. So any sequence of events after a gzip header is one valid stream.
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
from functools import partial
from typing import NamedTuple

from aiohttp import web
from aiohttp.http import HttpVersion11

from vramledger.logs import fields, log
from vramledger.model.snapshot import Snapshot
from vramledger.views.timeline import Timeline
from vramledger.web.cancellation import cancel_and_wait
from vramledger.web.connections import connection_limit, most_of_all
from vramledger.web.page_rows import Rows, changed_rows, page_rows
from vramledger.web.response_headers import takes_gzip
from vramledger.web.services import AppServices

VIEWERS_MAX = 500
"""The maximum number of open streams; then the address that has the most loses one, or the next viewer gets
the answer to try again later."""

_CONNECTIONS_SHARE = 0.75
"""The share of all connections that streams may take where descriptors are few."""

HEARTBEAT = 5.0
"""Seconds without a sample after which an empty event says that we are still running."""

PERIOD = 0.5
"""The minimum time between two events, in seconds, even if samples are more frequent."""

_STALLED_MAX = 20.0
"""Seconds after which a viewer that has read nothing is dropped."""

_COMPRESSION = 6
"""The default level of zlib; an event is compressed once for all."""

_GZIP_HEADER = bytes((0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF))

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would keep the events until it has 4 kB of them
    "Vary": "Accept-Encoding",
}


class PageEvent(NamedTuple):
    """One event to send: plain, and as a piece of deflate."""

    plain: bytes
    packed: bytes

    @classmethod
    def from_rows(cls, changed: Rows, gone: list[str], *, full: bool) -> PageEvent:
        """Write an event."""
        text = json.dumps({"full": full, "rows": changed, "gone": gone}, separators=(",", ":"))
        return cls.from_text(f"data: {text}\n\n".encode())

    @classmethod
    def from_text(cls, plain: bytes) -> PageEvent:
        """Compress what has been written."""
        deflate = zlib.compressobj(_COMPRESSION, zlib.DEFLATED, -zlib.MAX_WBITS)
        return cls(plain, deflate.compress(plain) + deflate.flush(zlib.Z_SYNC_FLUSH))


_HEARTBEAT_EVENT = PageEvent.from_rows({}, [], full=False)
_FIRST_EVENT = PageEvent.from_text(b"retry: 2000\n\n")


@dataclass(eq=False)
class Viewer:
    """One open stream."""

    transport: asyncio.Transport  # its connection
    source: str  # the address that it has come from
    chunked: bool  # whether the body is in chunks: HTTP/1.1, and not 1.0, which nginx uses by default
    packed: bool  # whether it accepts gzip
    last_event: int | None = None  # number of the last event that it got, None when it needs all rows
    stalled_since: float | None = None  # when it stopped reading, None while it keeps up
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when the stream is to end

    def write(self, event: PageEvent) -> None:
        """Hand over an event, not by aiohttp's ``write``: it waits for a slow viewer, and all with it."""
        body = event.packed if self.packed else event.plain
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self.chunked else body)

    def lags(self, now: float) -> bool:
        """Tell whether it has not read the last event; a viewer that is behind for too long is dropped."""
        if not self.transport.get_write_buffer_size():
            self.stalled_since = None
            return False
        self.stalled_since = self.stalled_since or now
        if now - self.stalled_since > _STALLED_MAX:
            self.drop()
        return True

    def drop(self) -> None:
        """End it now."""
        self.transport.abort()
        self.ended.set()


class PageStream:
    """Record the snapshots of the last 15 minutes, and send what changes to all viewers."""

    def __init__(self, services: AppServices, timeline: Timeline) -> None:
        self._services = services
        self._timeline = timeline
        self._viewers: set[Viewer] = set()
        self._wake = asyncio.Event()
        # separate threads, so that a scrape does not wait for an event
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="live")
        self._sent_rows: Rows = {}
        self._event_number = 0
        self._full_event: PageEvent | None = None
        self._rendered_from: object = None

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """Run for as long as the application runs (one of its ``cleanup_ctx``)."""
        tasks = [asyncio.create_task(self._record_snapshots()), asyncio.create_task(self._send_events())]
        yield
        await cancel_and_wait(*tasks)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def disconnect_viewers(self) -> None:
        """End all streams: a viewer that opens another one must send the password again."""
        for viewer in self._viewers:
            viewer.ended.set()
            if viewer.transport.get_write_buffer_size():
                viewer.transport.abort()  # a viewer that does not read would keep it open

    async def end_streams(self, _: web.Application) -> None:
        """End all streams, so that the exporter can stop."""
        for viewer in self._viewers:
            viewer.ended.set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one stream until the viewer goes away, is too slow, or we stop."""
        most = min(VIEWERS_MAX, int(connection_limit() * _CONNECTIONS_SHARE))
        source = getattr(request.protocol, "source", "")
        if len(self._viewers) >= most:
            busiest = most_of_all((each.source for each in self._viewers), source)
            dropped = next((each for each in self._viewers if each.source == busiest), None)
            if dropped is None:
                return web.Response(status=503, text=f"{most} viewers are enough; try again later.\n")
            self._viewers.discard(dropped)
            dropped.drop()
        packed = takes_gzip(request)
        response = web.StreamResponse(headers=_HEADERS)
        if packed:
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        if request.method == "HEAD" or not isinstance(request.transport, asyncio.Transport):
            return response
        await response.write(_GZIP_HEADER + _FIRST_EVENT.packed if packed else _FIRST_EVENT.plain)
        viewer = Viewer(request.transport, source, request.version >= HttpVersion11, packed)
        self._viewers.add(viewer)
        self._wake.set()
        try:
            await viewer.ended.wait()
        finally:
            self._viewers.discard(viewer)
        return response

    async def _record_snapshots(self) -> None:
        serial = 0
        while True:
            snapshot = await self._services.wait_for_newer(serial)
            serial = snapshot.serial
            self._timeline.record(snapshot)
            if self._viewers:
                self._wake.set()

    async def _send_events(self) -> None:
        last = float("-inf")
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), HEARTBEAT)
            if all(viewer.last_event is not None for viewer in self._viewers):  # a new viewer is served now
                await asyncio.sleep(last + PERIOD - time.monotonic())
            self._wake.clear()
            for viewer in [each for each in self._viewers if each.transport.is_closing()]:
                viewer.ended.set()
                self._viewers.discard(viewer)
            if not self._viewers:
                self._sent_rows, self._full_event, self._rendered_from = {}, None, None
                continue
            last = time.monotonic()
            try:
                await self._send_event()
            except Exception as error:  # noqa: BLE001 - a bug must not end the stream
                what = f"{type(error).__name__}: {error}"
                log.error("Live page failed", exc_info=error, extra=fields(err=what))
                self._rendered_from = None

    async def _send_event(self) -> None:
        snapshot, ready = self._services.snapshot, self._services.ready
        version = (snapshot.serial, snapshot.up, snapshot.failure, ready)
        changed = version != self._rendered_from
        now = time.monotonic()
        ready_viewers = [viewer for viewer in self._viewers if not viewer.lags(now)]
        current = self._event_number
        behind = any(viewer.last_event != current for viewer in ready_viewers)
        change: PageEvent | None = None
        if changed or (behind and self._full_event is None):
            loop = asyncio.get_running_loop()
            self._sent_rows, change, self._full_event = await loop.run_in_executor(
                self._pool,
                partial(self._render, snapshot, self._sent_rows, ready=ready, changed=changed, full=behind),
            )
            self._rendered_from = version
            if change is not None:
                self._event_number += 1
        for viewer in ready_viewers:
            if viewer.last_event == current:
                viewer.write(change or _HEARTBEAT_EVENT)
            elif self._full_event is not None:
                viewer.write(self._full_event)
            else:
                continue
            viewer.last_event = self._event_number

    def _render(
        self, snapshot: Snapshot, before: Rows, *, ready: bool, changed: bool, full: bool
    ) -> tuple[Rows, PageEvent | None, PageEvent | None]:
        """Return the rows, and the events with what has changed and with all; None if no viewer needs it."""
        after = page_rows(snapshot, self._timeline.growth(snapshot), ready=ready) if changed else before
        change = PageEvent.from_rows(*changed_rows(before, after), full=False) if changed and before else None
        return after, change, PageEvent.from_rows(after, [], full=True) if full else None
