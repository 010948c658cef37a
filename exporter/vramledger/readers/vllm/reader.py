"""Keep what the vLLM servers of the holders say of their KV caches; no sample waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from vramledger.model.reading import KvCache, ProcessRow
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.vllm.answer import NOTHING, CacheFigures, parse_figures, request_metrics
from vramledger.readers.vllm.server import Server, find_server

READ_INTERVAL = 10.0
"""Seconds between two rounds."""

KEEP = 60.0
"""Seconds from the beginning of a round for which its figures are shown: longer than two rounds take, one of
them with silent servers only."""

MAX_SERVERS = 16
"""Servers that are asked in a round."""

ROUND_MAX = 25.0
"""Seconds after which no further server is asked in a round; the others have their turn in the next one."""

STUCK_AFTER = 45.0
"""Seconds after which a round is given up."""


class _Round(NamedTuple):
    """What was found in one round; ``begun`` and ``seconds`` say when, and how long it took."""

    begun: float
    seconds: float
    found: tuple[KvCache, ...]


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
        self._rounds: BoundedReader[_Round | None] = BoundedReader(
            stuck_after=STUCK_AFTER, max_stuck=1, clock=clock
        )
        self._known: tuple[KvCache, ...] = ()
        self._begun = self._answered = float("-inf")
        self._silent: set[tuple[int, int]] = set()
        self._asked: dict[tuple[int, int], float] = {}
        self.seconds: float | None = None
        """How long the last round took; None before its end."""

    @property
    def answers(self) -> bool:
        """Whether a round has ended lately; the servers of one may have been silent."""
        return self._clock() - self._answered <= KEEP

    def update(self, rows: Iterable[ProcessRow]) -> tuple[KvCache, ...]:
        """Return what is known of these processes, and have it read again when it is time."""
        listed = tuple(rows)
        if not listed:
            self.seconds = None
        for ended in self._rounds.collect(0.0):
            if ended is None:  # it hangs, and was given up
                self._known = ()
            elif ended.begun > self._answered:
                self._answered, self.seconds, self._known = ended
        if listed and not self._rounds.busy and self._clock() - self._begun >= READ_INTERVAL:
            self._begun = self._clock()
            self._rounds.submit("vllm", partial(self._read, listed, self._begun), lambda: None)
        if not self.answers:
            self._known = ()
        present = {(row.pid, row.start) for row in listed}
        return tuple(each for each in self._known if (each.pid, each.start) in present)

    def _read(self, rows: tuple[ProcessRow, ...], begun: float) -> _Round:
        servers = {row: server for row in rows if (server := find_server(self._root, row)) is not None}
        named = {(server.pid, server.start): server for server in servers.values()}
        # Those that did not answer come last: they must not use up the requests of the others. Otherwise the
        # one that has waited longest comes first, so that each has its turn.
        order = sorted(named, key=lambda each: (each in self._silent, self._asked.get(each, 0.0), each))
        figures: dict[Server, CacheFigures] = {}
        for name in order[:MAX_SERVERS]:
            if self._clock() - begun > ROUND_MAX:
                break
            self._asked[name] = self._clock()
            page = self._request(named[name])
            if page is None:
                self._silent.add(name)
            else:
                self._silent.discard(name)
                figures[named[name]] = parse_figures(page)
        self._silent &= named.keys()
        self._asked = {name: at for name, at in self._asked.items() if name in named}
        # Another program cannot have answered if the same socket still listens, and in the same process.
        found = tuple(
            KvCache(row.pid, row.start, *figures[server])
            for row, server in servers.items()
            if figures.get(server, NOTHING) != NOTHING and find_server(self._root, row) == server
        )
        return _Round(begun, self._clock() - begun, found)
