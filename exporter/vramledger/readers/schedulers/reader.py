"""Read the schedulers of a host at a slow pace; no sample waits for one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vramledger.kubernetes import kubelet
from vramledger.model.reading import Scheduler
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.collector import PATIENCE, Collector, Context, Part
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.schedulers import batch_jobs
from vramledger.slurm.jobs import JobNumbers

READ_INTERVAL = 20.0
"""Seconds between two reads: a reservation lasts minutes to days, and 64 steps of Slurm cost 17 ms of CPU."""

FIRST_WAIT = 0.25
"""Seconds that the first sample waits for the first read: the commands that take one sample need it too."""

Schedulers = tuple[Scheduler, ...]


class _Variables(NamedTuple):
    """A program's variables; unless ``settled`` read again: an ``exec`` may not have set them yet."""

    program: str
    values: Mapping[str, str]
    settled: bool = True


class _FinishedRead(NamedTuple):
    """What a read found, and the monotonic time at which it began."""

    found: Schedulers
    begun: float


class SchedulerReader(Collector):
    """Read every :data:`READ_INTERVAL` seconds in a thread, and return what the last finished read found."""

    needs = ()
    patience = PATIENCE + FIRST_WAIT

    def __init__(self, host: Host, rootfs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare to read the schedulers below ``rootfs``; the first :meth:`read_schedulers` starts it."""
        self._host = host
        self._rootfs = rootfs
        self._files = HostFiles(rootfs)
        self._numbers = JobNumbers(host, self._files)
        self._clock = clock
        self._next_read = clock()
        self._timeout = FIRST_WAIT
        self._reads: BoundedReader[_FinishedRead | None] = BoundedReader(clock=clock)
        self._found: Schedulers = ()
        self.read_at: float | None = None
        """The monotonic time at which the read began that :meth:`read_schedulers` returned last."""
        self._managed: dict[str, tuple[str, ...]] = {}
        self._variables: dict[tuple[str, int], _Variables] = {}
        self._error: Exception | None = None

    def read(self, context: Context) -> Part:  # noqa: ARG002 as all are called
        """Return the schedulers and when they were read; ``context`` does not matter."""
        return {"schedulers": self.read_schedulers(), "schedulers_read": self.read_at}

    def errors(self) -> Iterator[Exception]:
        """Yield what the last read raised; the next sample begins another one."""
        if self._error is not None:
            yield self._error

    def read_schedulers(self) -> Schedulers:
        """Return the last finished reservations; only the first read is awaited, up to :data:`FIRST_WAIT`."""
        timeout, self._timeout = self._timeout, 0.0
        if self._clock() >= self._next_read:
            self._next_read = self._clock() + READ_INTERVAL
            self._reads.submit("schedulers", self._read_all, lambda: None)
        reads = self._reads.collect(timeout)
        self._error = next(iter(self._reads.take_errors().values()), None)
        if self._error is not None:
            self._found, self.read_at, self._next_read = (), None, self._clock()
        for read in reads:
            # A read that hangs gives nothing: an old reservation is not shown as current.
            self._found = () if read is None else tuple(self._with_earlier_devices(read.found))
            self.read_at = None if read is None else read.begun
        return self._found

    def _read_all(self) -> _FinishedRead:
        begun = self._clock()
        read_now: dict[tuple[str, int], _Variables] = {}

        def environment(place: str, pid: int) -> Mapping[str, str] | None:
            known = self._read_variables(pid, self._variables.get((place, pid)))
            if known is not None:
                read_now[place, pid] = known
            return None if known is None else known.values

        found = (
            kubelet.read_kubelet(self._rootfs),
            batch_jobs.read_slurm(self._files, environment, self._numbers.number),
            batch_jobs.read_nomad(self._files, environment),
        )
        self._variables = read_now
        return _FinishedRead(tuple(each for each in found if each is not None), begun)

    def _read_variables(self, pid: int, known: _Variables | None) -> _Variables | None:
        """Return the variables of a process, which are read once for each program that it runs.

        slurmstepd and Nomad's executor fork a process into the cgroup of a job first, and the job's variables
        come with the ``exec``.
        """
        program = self._host.program_path(pid)
        if known is not None and (program is None or (known.settled and program == known.program)):
            return known
        if program is None:
            # A process that has ended has no variables; those of a process that we may not read are not
            # known.
            return None if self._host.row(pid) is not None else _Variables("", {})
        values = self._host.variables(pid, batch_jobs.VARIABLES)
        if values is None:
            return None
        again = known is not None and known.program == program
        return _Variables(program, values, settled=bool(values) or again)

    def _with_earlier_devices(self, found: Schedulers) -> Iterator[Scheduler]:
        """Add the devices that each scheduler has assigned before: between two jobs it still manages them.

        A scheduler that has never assigned a GPU and offers none has nothing to do with them.
        """
        for scheduler in found:
            granted = (device for grant in scheduler.grants for device in grant.devices)
            before = self._managed.get(scheduler.name, ())
            managed = tuple(dict.fromkeys((*scheduler.managed, *before, *granted)))
            self._managed[scheduler.name] = managed
            if managed:
                yield scheduler._replace(managed=managed)
