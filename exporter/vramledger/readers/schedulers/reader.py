"""Read the schedulers of a host at a slow pace; no sample waits for one of them.

Read which devices Slurm and Nomad have assigned to jobs, from the environment of the jobs' processes.

Where the scripts of deploy/slurm run, each Slurm job has a record of what slurmd gave to it, also a job
without a process. Other jobs are found by their cgroups, which the kernel attests, so jobs that hold nothing
are found as well. A job's first process says which devices it has. ``SLURM_JOB_GPUS`` or ``SLURM_STEP_GPUS``
are positions in gres.conf, which :mod:`vramledger.slurm.names` maps to device files. Nomad's plugin puts
UUIDs into ``NVIDIA_VISIBLE_DEVICES``. This needs no access to the controller or API of either, only the right
to read the environment. A job may forge it, so such a grant is ``claimed``: it makes no device a scheduler's.
``CUDA_VISIBLE_DEVICES`` and ``GPU_DEVICE_ORDINAL`` are not evidence: where devices are constrained they count
from 0 in every job.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from vramledger.kubernetes import kubelet
from vramledger.model.reading import Grant, Scheduler
from vramledger.readers.collector import PATIENCE, BoundedReader, Collector, Context, Part
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.cgroups import parse_cgroup
from vramledger.readers.owners.host_files import HostFiles
from vramledger.slurm.jobs import RECORDS, JobNumbers, JobRecord, read_records
from vramledger.slurm.names import SCOPE, devices_of, parse_capabilities, parse_gres

SLURM, NOMAD = "slurm", "nomad"

ALL_DEVICES = "*"
"""Means all devices of the host."""

SLURM_VARIABLES = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
VARIABLES = frozenset(
    (*SLURM_VARIABLES, "NVIDIA_VISIBLE_DEVICES", *("NOMAD_ALLOC_ID", "NOMAD_JOB_NAME", "NOMAD_TASK_NAME"))
)
"""The only variables of an environment that are kept here; the rest is dropped while reading."""

MAX_CGROUPS = 4_000
"""The maximum number of cgroups in one read: a step of Slurm has five, and a node runs some hundred."""

MAX_PROCESSES = 64
"""The maximum number of processes of a cgroup read: one just forked lacks the variables."""

_CGROUPS = "sys/fs/cgroup"
_SYSTEM = f"{_CGROUPS}/system.slice"
_CONTROLLERS_V1 = ("freezer", "devices", "memory", "cpuset")
_ROOT_V1 = re.compile(r"slurm(?:_[\w.-]+)?")
"""The name has the node's as a suffix where slurmd was built for several on a host, as Debian's is."""
_SLURM_PART = re.compile(r"(?!(?:slurm|system)$).+")
"""Any cgroup except those of Slurm's own daemons: a job may make further cgroups below its own."""
_SLURM_DEPTH = 8
_SLURM_CONFIGURATION = ("etc/slurm", "run/slurm/conf", "var/spool/slurmd/conf-cache")
_GRES = re.compile(
    r"^[^#\n]*\b(?:Name=gpu\b|AutoDetect=nv|GresTypes=(?:[^#\s]*,)?gpu\b)", re.IGNORECASE | re.MULTILINE
)
_NOMAD_V1 = tuple(f"{_CGROUPS}/{controller}/nomad" for controller in ("freezer", "devices", "cpuset"))
_NOMAD_DEPTH = 2
_NOMAD_TASK = re.compile(r"(?P<alloc>[0-9a-f]{8})[0-9a-f-]*\.(?P<task>.+?)(?:\.scope)?")
"""The cgroup of Nomad's own drivers has the names of allocation and task; that of Docker's has not."""
_DEVICE = re.compile(r"(?:GPU|MIG)-[\w/-]{1,80}", re.ASCII)
_LIST_CAP = 1024 * 1024

Environment = Callable[[str, int], Mapping[str, str] | None]
"""The allow-listed variables of a process in a cgroup, None when they are not known."""

_T = TypeVar("_T")


class _JobReader:
    """Read the environments of jobs' processes, and remember whether one may be missing."""

    def __init__(self, files: HostFiles, environment: Environment) -> None:
        self.complete = True
        self._files = files
        self._environment = environment

    def cgroups(self, root: str, part: re.Pattern[str], depth: int) -> Iterator[str]:
        found = self._below(root, part, depth)
        yield from itertools.islice(found, MAX_CGROUPS)
        if next(found, None) is not None:
            self.complete = False

    def _below(self, cgroup: str, part: re.Pattern[str], depth: int) -> Iterator[str]:
        yield cgroup
        names = self._files.list_directories(cgroup) if depth else frozenset[str]()
        if names is None:
            self._missed(cgroup)
        for name in sorted(names or ()):
            if part.fullmatch(name):
                yield from self._below(f"{cgroup}/{name}", part, depth - 1)

    def first_answer(self, cgroup: str, parse: Callable[[Mapping[str, str]], _T | None]) -> _T | None:
        """Return the first result of ``parse``, by pid; incomplete if none and a process was not read."""
        listed = self._files.read(f"{cgroup}/cgroup.procs", _LIST_CAP)
        if listed is None:
            self._missed(cgroup)
            return None
        # In a PID namespace of our own the kernel writes 0 for a process that we do not see.
        pids = sorted(int(line) for line in listed.split() if line.isdigit())
        unread = len(pids) > MAX_PROCESSES
        for pid in pids[:MAX_PROCESSES]:
            variables = self._environment(cgroup, pid) if pid else None
            if variables is None:
                unread = True
            elif (answer := parse(variables)) is not None:
                return answer
        if unread:
            self.complete = False
        return None

    def _missed(self, cgroup: str) -> None:
        """Record that a cgroup could not be read, unless it is gone: its job has ended."""
        if self._files.has_directory(cgroup) is not False:
            self.complete = False


def read_slurm(
    files: HostFiles, environment: Environment, number_of: Callable[[str], str] = str
) -> Scheduler | None:
    """Return the devices of Slurm's jobs, None without slurmd; ``number_of`` numbers a cgroup's name."""
    records = read_records(files)
    recorded = {job: each for job, each in records.items() if each.devices is not None}
    roots = [
        f"{_SYSTEM}/{name}" for name in sorted(files.list_names(_SYSTEM) or ()) if SCOPE.fullmatch(name)
    ] or _slurm_roots_v1(files)
    if not roots and not recorded:
        return None
    gres = _read_gres(files)
    reader = _JobReader(files, environment)
    numbers = {each.sluid: job for job, each in records.items() if each.sluid}
    jobs = _read_slurm_cgroups(
        reader, roots, gres, recorded, lambda name: numbers.get(name) or number_of(name)
    )
    for job, record in recorded.items():
        jobs.setdefault(job, dict.fromkeys(record.devices or ()))
    grants = tuple(
        _grant(job, tuple(devices), records.get(job)) for job, devices in sorted(jobs.items()) if devices
    )
    managed = tuple(dict.fromkeys(gres or ()))
    if not managed and (_attested_devices(grants) or _slurm_has_gpus(files)):
        managed = (ALL_DEVICES,)
    return Scheduler(SLURM, managed, grants, reader.complete)


def _read_slurm_cgroups(
    reader: _JobReader,
    roots: Iterable[str],
    gres: tuple[str, ...] | None,
    recorded: Mapping[str, JobRecord],
    number_of: Callable[[str], str],
) -> dict[str, dict[str, None]]:
    jobs: dict[str, dict[str, None]] = {}

    def devices_written(variables: Mapping[str, str]) -> tuple[str, ...] | None:
        written = next((variables[name] for name in SLURM_VARIABLES if variables.get(name)), "")
        if not written:
            return None
        devices = devices_of(written, gres)
        if devices is None:  # it has a GPU, and it is not known which
            reader.complete = False
        return devices or ()

    for root in roots:
        for cgroup in reader.cgroups(root, _SLURM_PART, _SLURM_DEPTH):
            mark = parse_cgroup([f"0::{cgroup.removeprefix(_CGROUPS)}"]).slurm
            if mark is None:
                continue
            job = number_of(mark.job)
            record = recorded.get(job)
            devices = record.devices if record else reader.first_answer(cgroup, devices_written)
            jobs.setdefault(job, {}).update(dict.fromkeys(devices or ()))
    return jobs


def _grant(job: str, devices: tuple[str, ...], record: JobRecord | None) -> Grant:
    user, account = (record.user, record.account) if record is not None else ("", "")
    claimed = record is None or record.devices is None
    return Grant(SLURM, job, devices, user=user, account=account, claimed=claimed)


def _attested_devices(grants: Iterable[Grant]) -> list[str]:
    return [device for grant in grants if not grant.claimed for device in grant.devices]


def read_nomad(files: HostFiles, environment: Environment) -> Scheduler | None:
    """Read which devices Nomad's tasks on this host have; None if the host has no Nomad client."""
    roots = [f"{_CGROUPS}/nomad.slice", *_NOMAD_V1]
    roots = [root for root in roots if files.has_directory(root)][:1]
    if not roots:
        return None
    reader = _JobReader(files, environment)
    grants: dict[Grant, None] = {}
    top = roots[0].rpartition("/")[0]
    for cgroup in reader.cgroups(roots[0], re.compile(".+"), _NOMAD_DEPTH):
        given = reader.first_answer(cgroup, partial(_nomad_task, cgroup.rpartition("/")[2]))
        if given is not None:
            grants[Grant(NOMAD, *given, cgroup.removeprefix(top), claimed=True)] = None
    return Scheduler(NOMAD, (), tuple(grants), reader.complete)


def _slurm_roots_v1(files: HostFiles) -> list[str]:
    for controller in _CONTROLLERS_V1:
        names = files.list_directories(f"{_CGROUPS}/{controller}") or ()
        if found := [f"{_CGROUPS}/{controller}/{name}" for name in sorted(names) if _ROOT_V1.fullmatch(name)]:
            return found
    return []


def _read_gres(files: HostFiles) -> tuple[str, ...] | None:
    """Return the devices of Slurm's numbers: as slurmd has said to the scripts, or from gres.conf.

    Where several slurmd of a host differ, or the configuration does not say it, it is not known.
    """
    capabilities = files.read("proc/driver/nvidia-caps/mig-minors", _LIST_CAP) or b""
    places = [
        f"{RECORDS}/{name}" for name in sorted(files.list_names(RECORDS) or ()) if name.startswith("gres.")
    ] or [f"{directory}/gres.conf" for directory in _SLURM_CONFIGURATION]
    texts = (files.read(place, _LIST_CAP) for place in places)
    found = {
        parse_gres(text.decode(errors="replace"), parse_capabilities(capabilities.decode(errors="replace")))
        for text in texts
        if text is not None
    }
    return found.pop() if len(found) == 1 else None


def _nomad_task(cgroup: str, variables: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
    devices = tuple(_DEVICE.findall(variables.get("NVIDIA_VISIBLE_DEVICES", "")))
    alloc = variables.get("NOMAD_ALLOC_ID", "")[:8]
    if not devices or not alloc:
        return None
    job, task = variables.get("NOMAD_JOB_NAME"), variables.get("NOMAD_TASK_NAME")
    if match := _NOMAD_TASK.fullmatch(cgroup):
        job = job if match["alloc"] == alloc else None
        alloc, task = match["alloc"], match["task"]
    return "/".join(each for each in (job, task, alloc) if each), devices


def _slurm_has_gpus(files: HostFiles) -> bool:
    """Tell whether the configuration names GPUs, for a node on which no job has one now."""
    texts = (
        files.read(f"{directory}/{name}", _LIST_CAP) or b""
        for directory in _SLURM_CONFIGURATION
        for name in ("gres.conf", "slurm.conf")
    )
    return any(_GRES.search(text.decode(errors="replace")) for text in texts)


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

    def read(self, context: Context) -> Part:  # noqa: ARG002 as all are called
        return {"schedulers": self.read_schedulers(), "schedulers_read": self.read_at}

    def read_schedulers(self) -> Schedulers:
        """Return the last finished reservations; only the first read is awaited, up to :data:`FIRST_WAIT`."""
        timeout, self._timeout = self._timeout, 0.0
        if self._clock() >= self._next_read:
            self._next_read = self._clock() + READ_INTERVAL
            self._reads.submit("schedulers", self._read_all, lambda: None)
        reads = self._reads.collect(timeout)
        self.failures = tuple(self._reads.take_errors().values())
        if self.failures:
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
            read_slurm(self._files, environment, self._numbers.number),
            read_nomad(self._files, environment),
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
        values = self._host.variables(pid, VARIABLES)
        if values is None:
            return None
        again = known is not None and known.program == program
        return _Variables(program, values, settled=bool(values) or again)

    def _with_earlier_devices(self, found: Schedulers) -> Iterator[Scheduler]:
        """Add the devices that each scheduler has assigned before: between two jobs it still manages them.

        A scheduler of which nobody says that it has assigned a GPU, and which offers none, is left out.
        """
        for scheduler in found:
            granted = _attested_devices(scheduler.grants)
            before = self._managed.get(scheduler.name, ())
            managed = tuple(dict.fromkeys((*scheduler.managed, *before, *granted)))
            self._managed[scheduler.name] = managed
            if managed or scheduler.grants:
                yield scheduler._replace(managed=managed)
