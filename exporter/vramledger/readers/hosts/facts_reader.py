"""Read facts of processes on request, without waiting long for any of them."""

from __future__ import annotations

from vramledger.model.reading import ProcessFacts, ProcessRow
from vramledger.readers.bounded import MAX_STUCK, STUCK_AFTER, BoundedReader
from vramledger.readers.hosts.host import Host


class FactsReader:
    """Read facts in a thread: the facts of a process that is stuck in the driver can hang.

    ``cmdline``, ``environ`` and ``maps`` can hang. Such a process is reported without them (they are in its
    ``denied``), and again with them if the read returns.
    """

    def __init__(self, host: Host, *, stuck_after: float = STUCK_AFTER, max_stuck: int = MAX_STUCK) -> None:
        self._host = host
        self._reads: BoundedReader[ProcessFacts | None] = BoundedReader(
            stuck_after=stuck_after, max_stuck=max_stuck
        )

    @property
    def stuck(self) -> int:
        """The number of reads that hang now."""
        return self._reads.stuck

    def request(self, row: ProcessRow) -> None:
        """Request the facts of a process that is new or has a new parent."""
        self._reads.submit(
            (row.pid, row.start), lambda: self._host.facts(row), lambda: self._host.basic_facts(row)
        )

    def collect(self, timeout: float) -> list[ProcessFacts]:
        """Return the facts read since the last call; wait at most ``timeout`` seconds for those under way.

        A process that has ended meanwhile has none.
        """
        return [facts for facts in self._reads.collect(timeout) if facts is not None]
