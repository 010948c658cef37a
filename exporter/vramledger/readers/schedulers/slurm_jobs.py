"""Tell which Slurm jobs run on this host, what they were given, and to which of them a process belongs.

A job runs as long as one of its step daemons does. What it was given is in its record (:mod:`slurm_records`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vramledger.model.reading import ProcessRow
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.cgroups import parse_cgroup
from vramledger.readers.owners.slurm_records import JobRecord
from vramledger.readers.owners.slurm_steps import STEP_DAEMON, step_daemons, step_of_daemon

_VARIABLES = frozenset({"SLURM_JOB_ID"})
_MAX_ANCESTORS = 64


@dataclass(frozen=True, slots=True)
class NodeJobs:
    """The jobs of this host.

    Attributes:
        running: those with a step daemon, with the start of the first of them in clock ticks since boot.
        records: what is known of jobs that have begun and not ended, by number.
        numbers: the numbers of running jobs by their SLUIDs.
    """

    running: Mapping[str, int] = field(default_factory=dict)
    records: Mapping[str, JobRecord] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)

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
    place = parse_cgroup(host.cgroup(row.pid) or ())
    if place.slurm is not None:
        return jobs.number(place.slurm.job)
    for pid in _ancestors(host, row):
        if (step := step_of_daemon(host, pid)) is not None:
            return step[0]
    written = (host.variables(row.pid, _VARIABLES) or {}).get("SLURM_JOB_ID", "")
    record = jobs.records.get(written)
    same_user = record is not None and record.uid is not None and record.uid == host.uid(row.pid)
    return written if record is not None and (same_user or place.containers) else None


def possible_jobs(host: Host, row: ProcessRow, jobs: NodeJobs) -> frozenset[str]:
    """Return the jobs to which a process may belong: the one that is known, or none.

    A container that a daemon has started for a job's client (``docker run``) shows no job. It may belong to
    any job that has begun before it and still runs.
    """
    job = job_of(host, row, jobs)
    if job is not None:
        return frozenset({job})
    if not parse_cgroup(host.cgroup(row.pid) or ()).containers:
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
        mark = parse_cgroup(host.cgroup(pid) or ()).slurm
        if mark is None or jobs.number(mark.job) != job or host.comm(pid) == STEP_DAEMON:
            continue
        if (row := host.row(pid)) is not None:
            yield row
