"""Render once for all requests of the same page of the same snapshot, off the event loop if it takes long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from vramledger.model.snapshot import Snapshot

_RENDERS_MAX = 16
"""The maximum number of renders of one snapshot that are kept. A client that always sends new filters must
not fill our memory."""

_QUICK = 0.003
"""Seconds: a page that took less the last time is rendered in the event loop. To hand it to a thread costs
0.2 ms, and the page of a host with 25 holders takes 1 ms."""

_THREADS = 2
"""One thread writes text, which holds the interpreter's lock; the other compresses, which does not."""


class RenderCache:
    """Run renders on threads, and keep them for a snapshot or a second, as our own CPU changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="render")
        self._version: Hashable = None
        self._kept: dict[Hashable, asyncio.Future[bytes]] = {}
        self._took: dict[Hashable, float] = {}

    async def share(self, snapshot: Snapshot, key: Hashable, render: Callable[[], bytes]) -> bytes:
        """Return what ``render`` gives for this snapshot and key, made once for any number of requests.

        The serial alone does not identify a snapshot: after a suspend the publisher shows the newest one
        without its data, under its serial, and our clock may have been stopped. If a client disconnects, the
        other clients still get the render. A render that fails is not kept.
        """
        kept = self._renders_of(snapshot)
        result = kept.get(key)
        if result is None and self._took.get(key, _QUICK) < _QUICK:
            return self._render_at_once(kept, key, render)
        if result is None:
            result = asyncio.get_running_loop().run_in_executor(self._pool, self._render, key, render)
            if len(kept) < _RENDERS_MAX:
                kept[key] = result

            def forget_failure(done: asyncio.Future[bytes]) -> None:
                if done.cancelled() or done.exception() is not None:
                    kept.pop(key, None)

            result.add_done_callback(forget_failure)
        return result.result() if result.done() else await asyncio.shield(result)

    def _renders_of(self, snapshot: Snapshot) -> dict[Hashable, asyncio.Future[bytes]]:
        """Return what is kept of this snapshot and second."""
        version = (snapshot.serial, snapshot.up, snapshot.failure, int(self._clock()))
        if version != self._version:
            self._version = version
            self._kept = {}
        return self._kept

    def _render_at_once(
        self, kept: dict[Hashable, asyncio.Future[bytes]], key: Hashable, render: Callable[[], bytes]
    ) -> bytes:
        page = self._render(key, render)
        if len(kept) < _RENDERS_MAX:
            result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            result.set_result(page)
            kept[key] = result
        return page

    def _render(self, key: Hashable, render: Callable[[], bytes]) -> bytes:
        begun = time.perf_counter()
        try:
            return render()
        finally:
            if key not in self._took and len(self._took) >= _RENDERS_MAX:
                self._took.clear()
            self._took[key] = time.perf_counter() - begun

    def close(self) -> None:
        """Let the threads end after the render that they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
