"""Find owners of processes on request, without waiting long; if a file system hangs, names are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vramledger.model.reading import Owner, ProcessFacts, ProcessRow
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners import ended
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.resolver import ResolvedOwner, resolve_from_facts, resolve_owner
from vramledger.readers.owners.slurm_steps import JobNumbers, running_steps

CHECK_INTERVAL = 10.0
"""Seconds between two checks of whether owners have ended, and of missing names."""

NAME_ATTEMPTS = 6
"""The maximum number of searches for a missing name: a kubelet that has not made its directory after a minute
will not make it."""

_Identity = tuple[int, int]


class _ResolvedFacts(NamedTuple):
    facts: ProcessFacts
    resolved: ResolvedOwner


@dataclass(slots=True)
class _Holder:
    """What is remembered of a process that holds memory."""

    facts: ProcessFacts
    watched: ended.WatchedProcess | None
    attempts: int


class _OwnerCheck(NamedTuple):
    ended: dict[_Identity, str]
    resolutions: list[_ResolvedFacts]


class OwnerReader:
    """Find the owners of processes, and notice when an owner ends.

    Files are read in threads of their own. If an answer is late, it is first given without names, and again
    with them.
    """

    def __init__(self, host: Host, rootfs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take names from the host's files below ``rootfs``."""
        self._host = host
        self._files = HostFiles(rootfs)
        self._numbers = JobNumbers(host, self._files)
        self._clock = clock
        self._last_check = clock()
        self._resolutions: BoundedReader[_ResolvedFacts] = BoundedReader()
        self._checks: BoundedReader[_OwnerCheck] = BoundedReader()
        self._holders: dict[_Identity, _Holder] = {}
        self._ended: dict[_Identity, str] = {}

    def add_owners(self, facts: Iterable[ProcessFacts], timeout: float) -> list[ProcessFacts]:
        """Return facts with their owners, after waiting at most ``timeout`` seconds for the names.

        If names were late in an earlier call, its facts are returned again with them.
        """
        requested: dict[_Identity, ProcessFacts] = {}
        for each in facts:
            requested[each.pid, each.start] = each
            key = (each.pid, each.start, each.parent)
            self._resolutions.submit(key, partial(self._resolve, each), partial(_resolved_from_facts, each))
        answered: dict[_Identity, ProcessFacts] = {}
        for resolution in self._resolutions.collect(timeout):
            answered.update([self._remember(resolution, requested)])
        for late in requested.keys() - answered.keys():
            answered.update([self._remember(_resolved_from_facts(requested[late]), requested)])
        return list(answered.values())

    def check_owners(self, rows: Iterable[ProcessRow]) -> tuple[dict[int, str], list[ProcessFacts]]:
        """Return the processes that have lost their owner, with the reason, and facts with names found late.

        Never waits: what it returns is the result of the last check, one each :data:`CHECK_INTERVAL` seconds.
        """
        present = {(row.pid, row.start) for row in rows}
        for identity in self._holders.keys() - present:
            del self._holders[identity]
        resolved: list[ProcessFacts] = []
        for result in self._checks.collect(0.0):
            self._ended = result.ended
            for each in result.resolutions:
                identity = (each.facts.pid, each.facts.start)
                if identity in self._holders and each.resolved.owner != self._holders[identity].facts.owner:
                    resolved.append(self._remember(each, {})[1])
        if self._clock() - self._last_check >= CHECK_INTERVAL:
            self._last_check = self._clock()
            holders = dict(self._holders)
            self._checks.submit("owners", partial(self._check, holders), lambda: _OwnerCheck(self._ended, []))
        return {pid: why for (pid, start), why in self._ended.items() if (pid, start) in present}, resolved

    def _remember(
        self, resolution: _ResolvedFacts, requested: dict[_Identity, ProcessFacts]
    ) -> tuple[_Identity, ProcessFacts]:
        identity = (resolution.facts.pid, resolution.facts.start)
        known = self._holders.get(identity)
        newest = requested.get(identity) or (known.facts if known is not None else resolution.facts)
        facts = replace(newest, owner=_keep_notebook(resolution.resolved.owner, known))
        if known is not None and known.watched is not None and not _can_end(resolution.resolved):
            # Version 1 of cgroups shows a zombie at the root: it still belongs to the job that it was in.
            facts = replace(facts, owner=known.facts.owner, cgroup=known.facts.cgroup)
        # The owner that a process had first can end; a process that was moved still belongs to that owner.
        watch = known.watched if known is not None else None
        if watch is None:
            watch = ended.watch_process(
                resolution.resolved.place,
                facts.cgroup or (),
                resolution.resolved.owner,
                self._host.started_at(facts.start),
            )
        attempts_left = (
            0 if resolution.resolved.complete else (known.attempts if known is not None else NAME_ATTEMPTS)
        )
        self._holders[identity] = _Holder(facts, watch, attempts_left)
        return identity, facts

    def _resolve(self, facts: ProcessFacts) -> _ResolvedFacts:
        return _ResolvedFacts(facts, resolve_owner(self._files, facts, self._numbers.number))

    def _check(self, holders: dict[_Identity, _Holder]) -> _OwnerCheck:
        resolutions = []
        for holder in holders.values():
            if holder.attempts > 0:
                holder.attempts -= 1
                resolutions.append(self._resolve(holder.facts))
        watched = {pid: each.watched for (pid, _), each in holders.items() if each.watched is not None}
        starts = {pid: start for pid, start in holders}  # noqa: C416 a dict of its keys' parts
        evidence = ended.check_owners(
            self._files, watched, self._host.cgroup, partial(running_steps, self._host)
        )
        return _OwnerCheck({(pid, starts[pid]): why for pid, why in evidence.items()}, resolutions)


def _keep_notebook(owner: Owner | None, known: _Holder | None) -> Owner | None:
    """Return an owner with the notebook that was known before: once a kernel has ended, nobody names it."""
    before = known.facts.owner if known is not None else None
    if owner is None or before is None or owner.notebook:
        return owner
    return owner._replace(notebook=before.notebook)


def _can_end(resolved: ResolvedOwner) -> bool:
    """Tell whether the owner is one that can end before its processes do."""
    return bool(resolved.place.pod_uid or resolved.place.containers or resolved.place.slurm)


def _resolved_from_facts(facts: ProcessFacts) -> _ResolvedFacts:
    return _ResolvedFacts(facts, resolve_from_facts(facts))
