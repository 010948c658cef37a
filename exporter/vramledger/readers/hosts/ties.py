"""Look at what ties holders to others, between the samples, by :mod:`tie_search`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from vramledger.model.holder_facts import Ties
from vramledger.readers.collector import BoundedReader, Collector, Context, Health, Part
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.tie_search import Watched, find_ties

LOOK_INTERVAL = 10.0
MOST_TIME = 0.01
STUCK_AFTER = 45.0
_Identity = tuple[int, int]


class _TiesFound(NamedTuple):
    """What a look has found; when it began, and how long it took."""

    begun: float
    seconds: float
    found: tuple[Ties, ...]


class TiesReader(Collector):
    """Look in a thread, so that no sample waits for it."""

    needs = ("process", "facts")

    def __init__(self, host: Host, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._namespace = host.pid_namespace() is True
        self._looks: BoundedReader[_TiesFound | None] = BoundedReader(
            stuck_after=STUCK_AFTER, max_stuck=1, clock=clock
        )
        self._holders: dict[_Identity, Watched] = {}
        self._begun = float("-inf")
        self._newest: _TiesFound | None = None
        self._error: Exception | None = None

    def read(self, context: Context) -> Part:
        present = {(row.pid, row.start): row for row in context.rows}
        self._holders = {
            identity: each._replace(row=present[identity])
            for identity, each in self._holders.items()
            if identity in present
        }
        changed = False
        for facts in context.facts:
            identity = facts.pid, facts.start
            if (row := present.get(identity)) is not None:
                before = self._holders.get(identity)
                self._holders[identity] = Watched(
                    row, facts, row.ppid if before is None else before.first_parent
                )
                changed = changed or before is None or before.facts.parent != facts.parent
        for ended in self._looks.collect(0.0):
            self._newest, self._error = ended, None
        self._error = next(iter(self._looks.take_errors().values()), self._error)
        pause = 0.0 if self._newest is None else self._newest.seconds / MOST_TIME
        due = self._clock() - self._begun >= max(pause, 1.0 if changed else LOOK_INTERVAL)
        if self._holders and due and not self._looks.busy:
            self._begun = self._clock()
            self._looks.submit(
                "ties", partial(self._find_ties, tuple(self._holders.values()), self._begun), lambda: None
            )
        found = () if self._newest is None else self._newest.found
        return {"ties": tuple(each for each in found if (each.pid, each.start) in present)}

    @property
    def health(self) -> Health | None:
        """Whether the last look has ended, and how long it took; None before the first one."""
        return None if self._newest is None else (self._error is None, self._newest.seconds)

    def errors(self) -> Iterator[Exception]:
        if self._error is not None:
            yield self._error

    def _find_ties(self, holders: tuple[Watched, ...], begun: float) -> _TiesFound:
        found = find_ties(self._host.root, holders, host_namespace=self._namespace)
        return _TiesFound(begun, self._clock() - begun, found)


def make_collector(host: Host) -> TiesReader:
    return TiesReader(host)
