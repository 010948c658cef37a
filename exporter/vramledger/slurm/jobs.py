"""Tell which Slurm jobs run on this host, what they were given, and to which of them a process belongs.

A job runs as long as one of its step daemons does. ``slurmstepd`` is a process of root that writes its step
into its title (``slurmstepd: [4711.batch]``). It lives exactly as long as its step, with every plugin that
tracks processes and with both versions of cgroups. slurmd is there between the jobs too: where it is seen, a
missing step daemon proves that its step has ended. What a job was given is in its :class:`JobRecord`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct, field

from vramledger.model.reading import ProcessRow
from vramledger.model.records import RecordError, read_record
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.own_process import own_cgroup
from vramledger.readers.owners.cgroups import CgroupPlace, own_containers, parse_cgroup
from vramledger.readers.owners.host_files import HostFiles

RECORDS = "run/vramledger-slurm"
"""Where the scripts of deploy/slurm keep what they know; only root may write there."""

_RECORD_CAP = 65_536


class JobRecord(msgspec.Struct, frozen=True):
    """What slurmd has told the prolog of a job."""

    job: str
    sluid: str = ""  # its other name, which the cgroups of Slurm 26.05 have; empty before
    uid: int | None = None  # the number of its user, None when not known
    user: str = ""  # the name of its user
    account: str = ""  # its account; empty without accounting
    # its devices as :mod:`vramledger.slurm.names` names them, None when they are not known
    devices: tuple[str, ...] | None = None


def read_records(files: HostFiles, directory: str = RECORDS) -> dict[str, JobRecord]:
    """Return the records of all jobs on this host, of every slurmd."""
    found: dict[str, JobRecord] = {}
    for node in sorted(files.list_directories(f"{directory}/jobs") or ()):
        for name in sorted(files.list_names(f"{directory}/jobs/{node}") or ()):
            data = files.read(f"{directory}/jobs/{node}/{name}", _RECORD_CAP)
            if name.isdigit() and data is not None:
                with suppress(RecordError):
                    found[name] = read_record(data, JobRecord)
    return found


STEP_DAEMON = "slurmstepd"
_NODE_DAEMONS = ("slurmd", "slurmd-wlm")
MAX_NUMBERS = 4_096
"""How many SLUIDs are remembered with their numbers."""

_TITLE = re.compile(rb"slurmstepd: \[(\d{1,10})(?:\+\d+)?\.([\w.]+?)(?:\+\d+)?\]")


def place_of(host: Host, pid: int) -> CgroupPlace:
    """Return where a process belongs; below our own containers, names are those that slurmd has chosen."""
    ours = own_containers(own_cgroup())
    return parse_cgroup(host.cgroup(pid) or (), ours, HostFiles(Path("/")).users_own)


def step_of_daemon(host: Host, pid: int) -> tuple[str, str] | None:
    """Return job and step of a step daemon, None for any other process."""
    if host.comm(pid) != STEP_DAEMON or not _is_roots(host, pid):
        return None
    match = _TITLE.match(host.title(pid))
    return (match[1].decode(), match[2].decode()) if match else None


def step_daemons(host: Host) -> Iterator[tuple[int, str, str]]:
    """Yield the pid, the job and the step of every step daemon on this host."""
    for pid, name in _daemons(host):
        if name == STEP_DAEMON and (step := step_of_daemon(host, pid)) is not None:
            yield pid, *step


def running_steps(host: Host) -> frozenset[tuple[str, str]] | None:
    """Return job and step of every step daemon on this host; None if not even slurmd is seen here."""
    found = frozenset((job, step) for _, job, step in step_daemons(host))
    slurmd = bool(found) or any(name != STEP_DAEMON for _, name in _daemons(host))
    return found if slurmd else None


def job_numbers(host: Host) -> dict[str, str]:
    """Return the number of each job whose step daemon is in a cgroup that has the job's SLUID."""
    marks = ((place_of(host, pid).slurm, job) for pid, job, _ in step_daemons(host))
    return {mark.job: job for mark, job in marks if mark is not None and not mark.job.isdigit()}


def _daemons(host: Host) -> Iterator[tuple[int, str]]:
    """Yield the pid and the name of each of root's processes that has the name of a daemon of Slurm's."""
    for pid in host.pids():
        name = host.comm(pid)
        if name is not None and name in (STEP_DAEMON, *_NODE_DAEMONS) and _is_roots(host, pid):
            yield pid, name


def _is_roots(host: Host, pid: int) -> bool:
    """Tell whether a process is root's, and not that of a container's root or of who starts a setuid program.

    Both choose its name and its title. Our own container is where slurmd is if it is in one. The container's
    name tells one that shares our PID namespace.
    """
    if not host.is_roots(pid):
        return False
    place = place_of(host, pid)
    return place.user_manager is None and set(place.containers) <= set(own_containers(own_cgroup()))


class JobNumbers:
    """Give a job its number where cgroups name it by its SLUID, as those of Slurm 26.05 do.

    The step daemon says it, and so does the prolog's record.
    """

    def __init__(self, host: Host, files: HostFiles) -> None:
        self._host = host
        self._files = files
        self._known: dict[str, str] = {}

    def number(self, name: str) -> str:
        """Return the number of a job; its SLUID as long as the number is not known."""
        if name and not name.isdigit() and name not in self._known:
            recorded = {each.sluid: each.job for each in read_records(self._files).values() if each.sluid}
            found = {**self._known, **recorded, **job_numbers(self._host)}
            self._known = dict(list(found.items())[-MAX_NUMBERS:])
        return self._known.get(name, name)


_VARIABLES = frozenset({"SLURM_JOB_ID"})
_MAX_ANCESTORS = 64


class NodeJobs(Struct, frozen=True):
    """The jobs of this host."""

    # those with a step daemon, with the start of the first of them in clock ticks since boot
    running: Mapping[str, int] = field(default_factory=dict)
    # what is known of jobs that have begun and not ended, by number
    records: Mapping[str, JobRecord] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)  # the numbers of running jobs by their SLUIDs

    def number(self, name: str) -> str:
        """Return the number of a job that a cgroup names by number or by SLUID."""
        recorded = (each.job for each in self.records.values() if name and name == each.sluid)
        return self.numbers.get(name) or next(recorded, name)


def running_jobs(host: Host) -> dict[str, int]:
    """Return the jobs that have a step daemon on this host, with the start of the first of them."""
    found: dict[str, int] = {}
    for pid, job, _ in step_daemons(host):
        if (row := host.row(pid)) is not None:
            found[job] = min(row.start, found.get(job, row.start))
    return found


def job_of(host: Host, row: ProcessRow, jobs: NodeJobs) -> str | None:
    """Return the job to which a process belongs, None if to no job that we can see.

    Its cgroup decides. Where Slurm tracks processes without cgroups, it belongs to the step daemon among its
    ancestors. A process that has left its parents is known by its environment, if it also has the user of
    that job. In a container, which has users of its own, its environment alone decides: it can only claim to
    end with a job.
    """
    place = place_of(host, row.pid)
    if place.slurm is not None:
        return jobs.number(place.slurm.job)
    for pid in _ancestors(host, row):
        if (step := step_of_daemon(host, pid)) is not None:
            return step[0]
    written = (host.variables(row.pid, _VARIABLES) or {}).get("SLURM_JOB_ID", "")
    record = jobs.records.get(written)
    # In a rootless container the kernel's number of the user is a subordinate one.
    users = {host.uid(row.pid), place.user_manager} - {None}
    same_user = record is not None and record.uid in users
    return written if record is not None and (same_user or place.containers) else None


def possible_jobs(host: Host, row: ProcessRow, jobs: NodeJobs) -> frozenset[str]:
    """Return the jobs to which a process may belong: the one that is known, or none.

    A container that a daemon has started for a job's client (``docker run``) shows no job.
    """
    job = job_of(host, row, jobs)
    if job is not None:
        return frozenset({job})
    if not place_of(host, row.pid).containers:
        return frozenset()
    return frozenset(job for job, began in jobs.running.items() if began <= row.start)


def _ancestors(host: Host, row: ProcessRow) -> Iterator[int]:
    for _ in range(_MAX_ANCESTORS):
        if row.ppid <= 1 or (parent := host.row(row.ppid)) is None:
            return
        yield parent.pid
        row = parent


def members(host: Host, job: str, jobs: NodeJobs) -> Iterator[ProcessRow]:
    """Yield the processes whose cgroup is that of a job, holders or not; never its step daemons."""
    for pid in host.pids():
        mark = place_of(host, pid).slurm
        if mark is None or jobs.number(mark.job) != job or host.comm(pid) == STEP_DAEMON:
            continue
        if (row := host.row(pid)) is not None:
            yield row
