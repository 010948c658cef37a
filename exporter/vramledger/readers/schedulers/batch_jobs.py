"""Read which devices Slurm and Nomad have assigned to jobs, from the environment of the jobs' processes.

Both are found by their cgroups, which the kernel attests, so jobs that hold nothing are found as well. A
job's first process says which devices it has. ``SLURM_JOB_GPUS`` or ``SLURM_STEP_GPUS`` are global numbers,
those of ``/dev/nvidiaN``, and Nomad's device plugin puts UUIDs into ``NVIDIA_VISIBLE_DEVICES``. This needs no
access to the controller or API of either, only the right to read the environment. A job that forges its
environment misstates only its own devices. ``CUDA_VISIBLE_DEVICES`` and ``GPU_DEVICE_ORDINAL`` are not
evidence: where devices are constrained they count from 0 in every job.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from vramledger.model.reading import Grant, Scheduler
from vramledger.readers.owners.cgroups import parse_cgroup
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.slurm import SCOPE

SLURM, NOMAD = "slurm", "nomad"

ALL_DEVICES = "*"
"""Means all devices of the host."""

SLURM_VARIABLES = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
VARIABLES = frozenset(
    (
        *SLURM_VARIABLES,
        "NVIDIA_VISIBLE_DEVICES",
        *("NOMAD_ALLOC_ID", "NOMAD_JOB_NAME", "NOMAD_TASK_NAME"),
    )
)
"""The only variables of an environment that are kept here; the rest is dropped while reading."""

MAX_CGROUPS = 4_000
"""The maximum number of cgroups in one read: a step of Slurm has five, and a node runs some hundred steps or
tasks."""

MAX_PROCESSES = 64
"""The maximum number of processes of a cgroup that are read. Not every process has the variables: one that
was just forked has them only after its exec, and ``env -i`` drops them."""

_CGROUPS = "sys/fs/cgroup"
_SYSTEM = f"{_CGROUPS}/system.slice"
_SLURM_V1 = tuple(
    f"{_CGROUPS}/{controller}/slurm" for controller in ("freezer", "devices", "memory", "cpuset")
)
_SLURM_PART = re.compile(r"(?!(?:slurm|system)$).+")
"""Any cgroup except those of Slurm's own daemons: a job may make further cgroups below its own."""
_SLURM_DEPTH = 8
_SLURM_CONFIGURATION = ("etc/slurm", "run/slurm/conf", "var/spool/slurmd/conf-cache")
_GRES = re.compile(
    r"^[^#\n]*\b(?:Name=gpu\b|AutoDetect=nv|GresTypes=(?:[^#\s]*,)?gpu\b)", re.IGNORECASE | re.MULTILINE
)
_NOMAD_V1 = tuple(f"{_CGROUPS}/{controller}/nomad" for controller in ("freezer", "devices", "cpuset"))
_NOMAD_DEPTH = 2
_NUMBERS = re.compile(r"\d{1,3}(?:-\d{1,3})?")
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
        """Yield a cgroup and those below it along parts whose names fit."""
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
        """Return the first result that ``parse`` gives for a process of a cgroup.

        The process with the lowest number comes first. If there is no answer, and there may be one in a
        process that was not read, the result as a whole is not complete.
        """
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


def read_slurm(files: HostFiles, environment: Environment) -> Scheduler | None:
    """Read which devices Slurm's jobs on this host have; None if the host has no slurmd."""
    roots = [
        f"{_SYSTEM}/{name}" for name in sorted(files.list_names(_SYSTEM) or ()) if SCOPE.fullmatch(name)
    ] or [root for root in _SLURM_V1 if files.has_directory(root)][:1]
    if not roots:
        return None
    reader = _JobReader(files, environment)
    jobs: dict[str, dict[str, None]] = {}
    for root in roots:
        for cgroup in reader.cgroups(root, _SLURM_PART, _SLURM_DEPTH):
            mark = parse_cgroup([f"0::{cgroup.removeprefix(_CGROUPS)}"]).slurm
            if mark is not None and (devices := reader.first_answer(cgroup, _slurm_devices)):
                jobs.setdefault(mark.job, {}).update(dict.fromkeys(devices))
    grants = tuple(Grant(SLURM, job, tuple(devices)) for job, devices in sorted(jobs.items()))
    managed = (ALL_DEVICES,) if grants or _slurm_has_gpus(files) else ()
    return Scheduler(SLURM, managed, grants, reader.complete)


def read_nomad(files: HostFiles, environment: Environment) -> Scheduler | None:
    """Read which devices Nomad's tasks on this host have; None if the host has no Nomad client."""
    roots = [f"{_CGROUPS}/nomad.slice", *_NOMAD_V1]
    roots = [root for root in roots if files.has_directory(root)][:1]
    if not roots:
        return None
    reader = _JobReader(files, environment)
    grants: dict[Grant, None] = {}
    for cgroup in reader.cgroups(roots[0], re.compile(".+"), _NOMAD_DEPTH):
        if (given := reader.first_answer(cgroup, _nomad_task)) is not None:
            name, devices = given
            grants[Grant(NOMAD, name, devices, cgroup.rpartition("/")[2])] = None
    return Scheduler(NOMAD, (), tuple(grants), reader.complete)


def _slurm_devices(variables: Mapping[str, str]) -> tuple[str, ...] | None:
    written = next((variables[name] for name in SLURM_VARIABLES if variables.get(name)), "")
    return parse_slurm_devices(written) or None


def _nomad_task(variables: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
    devices = tuple(_DEVICE.findall(variables.get("NVIDIA_VISIBLE_DEVICES", "")))
    alloc = variables.get("NOMAD_ALLOC_ID", "")[:8]
    if not devices or not alloc:
        return None
    names = (variables.get("NOMAD_JOB_NAME"), variables.get("NOMAD_TASK_NAME"), alloc)
    return "/".join(each for each in names if each), devices


def parse_slurm_devices(written: str) -> tuple[str, ...]:
    """Read ``0,2-3``, or the UUIDs of MIG instances, as Slurm writes them.

    A number N means ``/dev/nvidiaN``.
    """
    found: list[str] = []
    for word in written.split(","):
        if _NUMBERS.fullmatch(word):
            first, _, last = word.partition("-")
            found += [f"nvidia{number}" for number in range(int(first), int(last or first) + 1)]
        elif _DEVICE.fullmatch(word):
            found.append(word)
    return tuple(found)


def _slurm_has_gpus(files: HostFiles) -> bool:
    """Tell whether the configuration names GPUs, for a node on which no job has one now."""
    texts = (
        files.read(f"{directory}/{name}", _LIST_CAP) or b""
        for directory in _SLURM_CONFIGURATION
        for name in ("gres.conf", "slurm.conf")
    )
    return any(_GRES.search(text.decode(errors="replace")) for text in texts)
