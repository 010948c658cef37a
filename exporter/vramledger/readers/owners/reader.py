"""Owners of processes on request, without ever waiting long: a hung file system costs names only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vramledger.model.reading import ProcessFacts, ProcessRow
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners import ended
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.resolver import ResolvedOwner, resolve_from_facts, resolve_owner

CHECK_INTERVAL = 10.0
"""Seconds between two looks at whether owners have ended, and at names that were missing."""

NAME_ATTEMPTS = 6
"""Looks for a missing name; a kubelet that is a minute late with its directory has none."""

_Identity = tuple[int, int]


class _Named(NamedTuple):
    facts: ProcessFacts
    found: ResolvedOwner


@dataclass(slots=True)
class _Holder:
    """What is remembered of a process that holds memory."""

    facts: ProcessFacts
    watched: ended.WatchedProcess | None
    attempts: int


class _Look(NamedTuple):
    ended: dict[_Identity, str]
    named: list[_Named]


class OwnerReader:
    """Say who answers for processes, and notice when that owner ends.

    Files are read in threads of their own. An answer that is late is given without names first, and
    again with them.
    """

    def __init__(self, host: Host, rootfs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take names from the host's files below ``rootfs``."""
        self._host = host
        self._tree = HostFiles(rootfs)
        self._clock = clock
        self._looked = clock()
        self._names: BoundedReader[_Named] = BoundedReader()
        self._looks: BoundedReader[_Look] = BoundedReader()
        self._holders: dict[_Identity, _Holder] = {}
        self._ended: dict[_Identity, str] = {}

    def learn(self, facts: Iterable[ProcessFacts], timeout: float) -> list[ProcessFacts]:
        """Return facts with their owners, after waiting at most ``timeout`` seconds for the names.

        Those whose names were late in an earlier call come again.
        """
        asked: dict[_Identity, ProcessFacts] = {}
        for each in facts:
            asked[each.pid, each.start] = each
            key = (each.pid, each.start, each.parent)
            self._names.submit(key, partial(self._resolve, each), partial(_outline, each))
        told: dict[_Identity, ProcessFacts] = {}
        for named in self._names.collect(timeout):
            told.update([self._remember(named, asked)])
        for late in asked.keys() - told.keys():
            told.update([self._remember(_outline(asked[late]), asked)])
        return list(told.values())

    def look(self, rows: Iterable[ProcessRow]) -> tuple[dict[int, str], list[ProcessFacts]]:
        """Return who has lost its owner, and why, and facts whose names were found only now.

        Never waits: what it returns is the result of the last look, one each :data:`CHECK_INTERVAL` seconds.
        """
        present = {(row.pid, row.start) for row in rows}
        for identity in self._holders.keys() - present:
            del self._holders[identity]
        named: list[ProcessFacts] = []
        for result in self._looks.collect(0.0):
            self._ended = result.ended
            for each in result.named:
                identity = (each.facts.pid, each.facts.start)
                if identity in self._holders and each.found.owner != self._holders[identity].facts.owner:
                    named.append(self._remember(each, {})[1])
        if self._clock() - self._looked >= CHECK_INTERVAL:
            self._looked = self._clock()
            holders = dict(self._holders)
            self._looks.submit("owners", partial(self._look, holders), lambda: _Look(self._ended, []))
        return {pid: why for (pid, start), why in self._ended.items() if (pid, start) in present}, named

    def _remember(
        self, named: _Named, asked: dict[_Identity, ProcessFacts]
    ) -> tuple[_Identity, ProcessFacts]:
        identity = (named.facts.pid, named.facts.start)
        known = self._holders.get(identity)
        newest = asked.get(identity) or (known.facts if known is not None else named.facts)
        facts = replace(newest, owner=named.found.owner)
        # Where a process belonged first is what can end; moved elsewhere, it is still that owner's.
        watch = known.watched if known is not None else None
        if watch is None:
            watch = ended.watch_process(named.found.place, facts.cgroup or (), named.found.owner)
        left = 0 if named.found.complete else (known.attempts if known is not None else NAME_ATTEMPTS)
        self._holders[identity] = _Holder(facts, watch, left)
        return identity, facts

    def _resolve(self, facts: ProcessFacts) -> _Named:
        return _Named(facts, resolve_owner(self._tree, facts))

    def _look(self, holders: dict[_Identity, _Holder]) -> _Look:
        named = []
        for holder in holders.values():
            if holder.attempts > 0:
                holder.attempts -= 1
                named.append(self._resolve(holder.facts))
        watched = {pid: each.watched for (pid, _), each in holders.items() if each.watched is not None}
        starts = {pid: start for pid, start in holders}  # noqa: C416 a dict of its keys' parts
        found = ended.check_owners(self._tree, watched, self._host.cgroup)
        return _Look({(pid, starts[pid]): why for pid, why in found.items()}, named)


def _outline(facts: ProcessFacts) -> _Named:
    return _Named(facts, resolve_from_facts(facts))
