"""Find the step daemons of Slurm on this host: they show which steps run.

``slurmstepd`` is a process of root that writes its step into its title (``slurmstepd: [4711.batch]``). It
lives exactly as long as its step, with every plugin that tracks processes and with both versions of cgroups.
slurmd is there between the jobs too: where it is seen, a missing step daemon proves that its step has ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.cgroups import parse_cgroup
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.slurm_records import read_records

STEP_DAEMON = "slurmstepd"
_NODE_DAEMONS = ("slurmd", "slurmd-wlm")
MAX_NUMBERS = 4_096
"""How many SLUIDs are remembered with their numbers."""

_TITLE = re.compile(rb"slurmstepd: \[(\d{1,10})(?:\+\d+)?\.([\w.]+?)(?:\+\d+)?\]")


def step_of_daemon(host: Host, pid: int) -> tuple[str, str] | None:
    """Return job and step of a step daemon, None for any other process."""
    if host.comm(pid) != STEP_DAEMON or host.uid(pid) != 0:
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
    marks = ((parse_cgroup(host.cgroup(pid) or ()).slurm, job) for pid, job, _ in step_daemons(host))
    return {mark.job: job for mark, job in marks if mark is not None and not mark.job.isdigit()}


def _daemons(host: Host) -> Iterator[tuple[int, str]]:
    """Yield the pid and the name of each of root's processes that has the name of a daemon of Slurm's."""
    for pid in host.pids():
        name = host.comm(pid)
        if name is not None and name in (STEP_DAEMON, *_NODE_DAEMONS) and host.uid(pid) == 0:
            yield pid, name


class JobNumbers:
    """Give a job its number where cgroups name it by its SLUID, as those of Slurm 26.05 do.

    The step daemon says it, and so does the prolog's record. A number stays known after its job has ended,
    for what the job has left.
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
