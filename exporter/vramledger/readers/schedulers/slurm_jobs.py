"""Tell which Slurm jobs run on this host, what they were given, and to which of them a process belongs.

A job runs as long as one of its step daemons does. What a job was given is in a record that the prolog makes
and the epilog removes, from what slurmd tells them. It is Slurm's own word, also for a job without a
process, and no user can write it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vramledger.model.reading import ProcessRow
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.cgroups import parse_cgroup
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.slurm_steps import STEP_DAEMON, running_steps, step_of_daemon

RECORDS = "run/vramledger-slurm"
"""Where the scripts of deploy/slurm keep what they know, below the root file system; only root may write
there."""

_RECORD_CAP = 65_536
_VARIABLES = frozenset({"SLURM_JOB_ID"})
_MAX_ANCESTORS = 64


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What slurmd has told the prolog of a job.

    Attributes:
        job: its number.
        sluid: its other name, which the cgroups of Slurm 26.05 have; empty before.
        uid: the number of its user, None when not known.
        user: the name of its user.
        account: its account; empty without accounting.
        devices: its devices as :mod:`slurm_gres` names them, None when they are not known.
    """

    job: str
    sluid: str = ""
    uid: int | None = None
    user: str = ""
    account: str = ""
    devices: tuple[str, ...] | None = None

    def to_json(self) -> str:
        """Write the record as :func:`read_records` reads it."""
        names = ("job", "sluid", "uid", "user", "account", "devices")
        return json.dumps({name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True)
class NodeJobs:
    """The jobs of this host.

    Attributes:
        running: those with a step daemon.
        records: what is known of jobs that have begun and not ended, by number.
    """

    running: frozenset[str] = frozenset()
    records: Mapping[str, JobRecord] = field(default_factory=dict)

    def number(self, name: str) -> str:
        """Return the number of a job that a cgroup names by number or by SLUID."""
        return next((each.job for each in self.records.values() if name and name == each.sluid), name)


def read_records(files: HostFiles, directory: str = RECORDS) -> dict[str, JobRecord]:
    """Return the records of all jobs on this host, of every slurmd."""
    found: dict[str, JobRecord] = {}
    for node in sorted(files.list_directories(f"{directory}/jobs") or ()):
        for name in sorted(files.list_names(f"{directory}/jobs/{node}") or ()):
            data = files.read(f"{directory}/jobs/{node}/{name}", _RECORD_CAP)
            if name.isdigit() and data is not None and (record := _parse_record(name, data)) is not None:
                found[name] = record
    return found


def _parse_record(name: str, data: bytes) -> JobRecord | None:
    try:
        raw = json.loads(data)
        devices = raw["devices"]
        texts = [str(raw[key]) for key in ("sluid", "user", "account")]
        uid = None if raw["uid"] is None else int(raw["uid"])
        return JobRecord(
            name, texts[0], uid, texts[1], texts[2], None if devices is None else tuple(map(str, devices))
        )
    except (ValueError, TypeError, KeyError):
        return None


def running_jobs(host: Host) -> frozenset[str]:
    """Return the jobs that have a step daemon on this host."""
    return frozenset(job for job, _ in running_steps(host) or ())


def job_of(host: Host, row: ProcessRow, jobs: NodeJobs) -> str | None:
    """Return the job to which a process belongs, None if to no job that we can see.

    Its cgroup decides. Where Slurm tracks processes without cgroups, it belongs to the step daemon among its
    ancestors. A process that has left its parents is known by its environment, if it also has the user of
    that job.
    """
    mark = parse_cgroup(host.cgroup(row.pid) or ()).slurm
    if mark is not None:
        return jobs.number(mark.job)
    for pid in _ancestors(host, row):
        if (step := step_of_daemon(host, pid)) is not None:
            return step[0]
    written = (host.variables(row.pid, _VARIABLES) or {}).get("SLURM_JOB_ID", "")
    record = jobs.records.get(written)
    known = record is not None and record.uid is not None and record.uid == host.uid(row.pid)
    return written if known else None


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
