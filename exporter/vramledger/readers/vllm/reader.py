"""Keep what the vLLM servers of the holders say of their KV caches; no sample waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from vramledger.model.reading import KvCache, ProcessRow
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.vllm.answer import NOTHING, CacheFigures, parse_figures, request_metrics
from vramledger.readers.vllm.server import Server, find_server

READ_INTERVAL = 10.0
"""Seconds between two rounds."""

KEEP = 60.0
"""Seconds for which a round is shown while no newer one has ended: longer than any round takes."""

MAX_SERVERS = 16
"""Servers that are asked in a round; with the longest time for an answer that takes 32 s."""

STUCK_AFTER = 45.0
"""Seconds after which a round is given up."""

_Round = tuple[KvCache, ...]


class KvCacheReader:
    """Ask in a thread, one server after the other."""

    def __init__(
        self,
        root: str,
        *,
        request: Callable[[Server], bytes | None] = lambda server: request_metrics(server.listener),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nobody is asked before :meth:`update` has a holder.

        Args:
            root: where the host's proc file system is.
            request: returns a server's page of metrics.
            clock: monotonic seconds.
        """
        self._root = root
        self._request = request
        self._clock = clock
        self._rounds: BoundedReader[_Round] = BoundedReader(stuck_after=STUCK_AFTER, max_stuck=1, clock=clock)
        self._known: _Round = ()
        self._begun = self._answered = float("-inf")
        self._silent: set[tuple[int, int]] = set()
        self.seconds: float | None = None
        """How long the last round took; None before its end."""

    def update(self, rows: Iterable[ProcessRow]) -> tuple[KvCache, ...]:
        """Return what is known of these processes, and have it read again when it is time."""
        listed = tuple(rows)
        for found in self._rounds.collect(0.0):
            self._known, self._answered = found, self._clock()
            self.seconds = self._answered - self._begun
        if listed and not self._rounds.busy and self._clock() - self._begun >= READ_INTERVAL:
            self._begun = self._clock()
            self._rounds.submit("vllm", partial(self._read, listed), tuple)
        if self._clock() - self._answered > KEEP:
            self._known = ()
        present = {(row.pid, row.start) for row in listed}
        return tuple(each for each in self._known if (each.pid, each.start) in present)

    def _read(self, rows: tuple[ProcessRow, ...]) -> _Round:
        servers = {row: server for row in rows if (server := find_server(self._root, row)) is not None}
        # Those that did not answer come last: they must not use up the requests of the others.
        order = sorted(
            set(servers.values()), key=lambda each: ((each.pid, each.start) in self._silent, each.pid)
        )
        figures: dict[Server, CacheFigures] = {}
        silent = set()
        for server in order[:MAX_SERVERS]:
            page = self._request(server)
            if page is None:
                silent.add((server.pid, server.start))
            else:
                figures[server] = parse_figures(page)
        self._silent = silent
        # Another program cannot have answered if the same socket still listens, and in the same process.
        return tuple(
            KvCache(row.pid, row.start, *figures[server])
            for row, server in servers.items()
            if figures.get(server, NOTHING) != NOTHING and find_server(self._root, row) == server
        )
