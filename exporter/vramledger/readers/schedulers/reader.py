"""Ask the schedulers of a host at a slow pace; no sample waits for one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vramledger.model.reading import Scheduler
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.schedulers import batch_jobs, kubelet

READ_INTERVAL = 20.0
"""Seconds between two looks: a reservation lasts minutes to days, and 64 steps of Slurm cost 10 ms of CPU."""

FIRST_WAIT = 0.25
"""Seconds that the first sample waits for the first look: the commands that take one sample want it too."""

Looked = tuple[Scheduler, ...]


class SchedulerReader:
    """Look every :data:`READ_INTERVAL` seconds in a thread, and say what the last finished look found."""

    def __init__(self, host: Host, rootfs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Look at the schedulers below ``rootfs``, for the first time at the next call of :meth:`look`."""
        self._host = host
        self._rootfs = rootfs
        self._tree = HostFiles(rootfs)
        self._clock = clock
        self._next = clock()
        self._timeout = FIRST_WAIT
        self._guard: BoundedReader[Looked | None] = BoundedReader(clock=clock)
        self._found: Looked = ()
        self._known: dict[str, tuple[str, ...]] = {}
        self._told: dict[tuple[str, int], Mapping[str, str]] = {}

    def look(self) -> Looked:
        """Return what is reserved, by the last look that has finished.

        Never waits, but for the first look, and at most :data:`FIRST_WAIT` seconds for that.
        """
        timeout, self._timeout = self._timeout, 0.0
        if self._clock() >= self._next:
            self._next = self._clock() + READ_INTERVAL
            self._guard.submit("schedulers", self._look, lambda: None)
        for found in self._guard.collect(timeout):
            # A look that hangs leaves nothing: what was true a while ago is not said to be true now.
            self._found = () if found is None else tuple(self._remembered(found))
        return self._found

    def _look(self) -> Looked:
        asked: dict[tuple[str, int], Mapping[str, str]] = {}

        def environment(place: str, pid: int) -> Mapping[str, str] | None:
            # A process keeps the environment that it began with, so nobody is asked twice.
            told = self._told.get((place, pid))
            if told is None:
                told = self._host.variables(pid, batch_jobs.VARIABLES)
            if told is not None:
                asked[place, pid] = told
            return told

        found = (
            kubelet.read_kubelet(self._rootfs),
            batch_jobs.read_slurm(self._tree, environment),
            batch_jobs.read_nomad(self._tree, environment),
        )
        self._told = asked
        return tuple(each for each in found if each is not None)

    def _remembered(self, found: Looked) -> Iterator[Scheduler]:
        """Add the devices that each has given away before: between two jobs they are its own all the same.

        Who has never given a GPU away and offers none has nothing to do with them.
        """
        for scheduler in found:
            granted = (device for grant in scheduler.grants for device in grant.devices)
            before = self._known.get(scheduler.name, ())
            managed = tuple(dict.fromkeys((*scheduler.managed, *before, *granted)))
            self._known[scheduler.name] = managed
            if managed:
                yield scheduler._replace(managed=managed)
