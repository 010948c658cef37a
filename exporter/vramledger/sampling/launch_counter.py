"""Run the child process that counts launches, copies and memsets of quiet holders.

It is a process of its own, because it needs a right that nothing else of us has, and because the kernel takes
up to 0.1 s for each counter that is open when it ends: neither a release of the GPUs nor a new sampler waits
for that. Lines on stdin name the holders that are to be counted, lines on stdout say what is known of each.
It ends when stdin is closed or the exporter dies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time

from vramledger.logs import COLLECTOR_FAILED, FailureStreaks, configure, fields, log
from vramledger.model.reading import LaunchCount
from vramledger.model.records import read_record, write_record
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.launches.counter_pool import CounterPool
from vramledger.readers.launches.holder import HolderCounter
from vramledger.readers.launches.uprobes import find_obstacle
from vramledger.sampling.capabilities import COUNT_CAPABILITIES, READ_CAPABILITIES
from vramledger.sampling.privileges import drop_privileges, end_with_parent
from vramledger.sampling.protocol import COUNT_INTERVAL, COUNT_OBSTACLE

RETRY_AFTER = 300.0
"""Seconds after which a holder that could not be counted is tried again."""

MAX_COUNTERS = 600
"""Counters open at once: our end takes 60 s at most; a holder with two threads needs about 200."""

HANGS_AFTER = 30.0
"""Seconds after which a look at one holder is given up: its files may be on a file system of its user."""

_MAX_LINE = 1 << 20


class LaunchCounter:
    """The holders that are counted."""

    def __init__(self, root: str, *, hangs_after: float = HANGS_AFTER) -> None:
        """Start without holders; after ``hangs_after`` seconds a look at a holder is given up."""
        self._root = root
        self._pool = CounterPool(MAX_COUNTERS)
        self._looks: BoundedReader[LaunchCount | None] = BoundedReader(stuck_after=hangs_after)
        self._holders: dict[tuple[int, int], HolderCounter] = {}
        self._failed: dict[tuple[int, int], float] = {}
        self._failing = FailureStreaks(COLLECTOR_FAILED)

    def set_holders(self, wanted: set[tuple[int, int]]) -> None:
        """Count the launches of these holders only; detach from all others."""
        for holder in self._holders.keys() - wanted:
            self._drop(holder)
        for holder in wanted - self._holders.keys():
            self._holders[holder] = HolderCounter(self._root, holder, self._pool)
        self._failed = {holder: since for holder, since in self._failed.items() if holder in wanted}

    def counts(self) -> list[LaunchCount]:
        """Look at every holder, and return what is known of those that answered in time."""
        for holder, counter in self._holders.items():
            self._looks.submit(holder, counter.update, lambda holder=holder: _hanging(holder))  # type: ignore[misc]
        looked = [each for each in self._looks.collect(COUNT_INTERVAL) if each is not None]
        failed = self._looks.take_errors()
        for error in failed.values():
            self._failing.failed("launches", error)
        if not failed:
            self._failing.succeeded("launches")
        looked += [
            LaunchCount(*holder, None, 0, "looking at it failed")
            for holder in self._holders
            if holder in failed
        ]
        # A look that came late is followed by the next one; the newest knows all that those before it knew.
        found = {(each.pid, each.start): each for each in looked}
        now = time.monotonic()
        for holder, count in found.items():
            if count.problem and now - self._failed.setdefault(holder, now) > RETRY_AFTER:
                del self._failed[holder]
                self._holders[holder] = HolderCounter(self._root, holder, self._pool)
        return list(found.values())

    def _drop(self, holder: tuple[int, int]) -> None:
        """Detach from a holder; a look that hangs there comes first."""
        self._looks.submit((*holder, "end"), self._holders.pop(holder).end, lambda: None)


def _hanging(holder: tuple[int, int]) -> LaunchCount:
    return LaunchCount(*holder, None, 0, "its files do not answer")


def _count_forever(root: str) -> None:
    """Look at the holders that the newest line on stdin names, until stdin is closed."""
    counter = LaunchCounter(root)
    unread = b""
    while True:
        begun = time.monotonic()
        _write(write_record(list(counter.counts())) + b"\n")
        while (left := begun + COUNT_INTERVAL - time.monotonic()) > 0:
            if not select.select([0], [], [], left)[0]:
                continue
            data = os.read(0, 65536)
            if not data or len(unread) > _MAX_LINE:
                return
            *lines, unread = (unread + data).split(b"\n")
            if lines:
                counter.set_holders(read_record(lines[-1], set[tuple[int, int]]))


def _write(line: bytes) -> None:
    data = memoryview(line)
    while data:
        data = data[os.write(1, data) :]


def main() -> int:
    """Run until the exporter ends; the exit status says whether anything can be counted here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is handled by the exporter
    end_with_parent()
    configure(*sys.argv[2:4])
    drop_privileges(use=READ_CAPABILITIES | COUNT_CAPABILITIES)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    status = 0
    if obstacle := find_obstacle(sys.argv[1]):
        log.error("No launches are counted", extra=fields(err=obstacle))
        status = COUNT_OBSTACLE
    else:
        with contextlib.suppress(BrokenPipeError):
            _count_forever(sys.argv[1])
    sys.stderr.flush()
    os._exit(status)  # a thread that closes a counter must not delay the end of our work
