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

MAX_CGROUPS = 2_000
"""The maximum number of cgroups in one read; a node runs some hundred steps or tasks."""

MAX_PROCESSES = 3
"""The maximum number of processes of a cgroup that are read: more than one, because one that was just forked
may not have its variables yet."""

_CGROUPS = "sys/fs/cgroup"
_SYSTEM = f"{_CGROUPS}/system.slice"
_SLURM_V1 = tuple(
    f"{_CGROUPS}/{controller}/slurm" for controller in ("freezer", "devices", "memory", "cpuset")
)
_SLURM_PART = re.compile(r"(?:uid|job|step|task)_.+|user|s[0-9A-Z]{13}")
_SLURM_DEPTH = 5
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
"""The allow-listed variables of a process in a cgroup, None when we may not read them."""


class _VariableReader:
    """Read the variables of processes, and remember whether those of any process could not be read."""

    def __init__(self, files: HostFiles, environment: Environment) -> None:
        self.files = files
        self.complete = True
        self._environment = environment

    def variables(self, cgroup: str) -> Iterator[Mapping[str, str]]:
        """Yield the variables of some processes in a cgroup, the process with the lowest number first."""
        listed = self.files.read(f"{cgroup}/cgroup.procs", _LIST_CAP) or b""
        # In a PID namespace of our own the kernel writes 0 for a process that we do not see.
        pids = sorted(int(line) for line in listed.split() if line.isdigit())[:MAX_PROCESSES]
        for pid in pids:
            found = self._environment(cgroup, pid) if pid else None
            if found is None:
                self.complete = False
            else:
                yield found


def read_slurm(files: HostFiles, environment: Environment) -> Scheduler | None:
    """Read which devices Slurm's jobs on this host have; None if the host has no slurmd."""
    roots = [
        f"{_SYSTEM}/{name}" for name in sorted(files.list_names(_SYSTEM) or ()) if SCOPE.fullmatch(name)
    ] or [root for root in _SLURM_V1 if files.has_directory(root)][:1]
    if not roots:
        return None
    reader = _VariableReader(files, environment)
    jobs: dict[str, dict[str, None]] = {}
    for root in roots:
        for cgroup in itertools.islice(_leaf_cgroups(files, root, _SLURM_PART, _SLURM_DEPTH), MAX_CGROUPS):
            mark = parse_cgroup([f"0::{cgroup.removeprefix(_CGROUPS)}"]).slurm
            if mark is None:
                continue
            for variables in reader.variables(cgroup):
                written = next((variables[name] for name in SLURM_VARIABLES if variables.get(name)), "")
                if devices := parse_slurm_devices(written):
                    jobs.setdefault(mark.job, {}).update(dict.fromkeys(devices))
                    break
    grants = tuple(Grant(SLURM, job, tuple(devices)) for job, devices in sorted(jobs.items()))
    managed = (ALL_DEVICES,) if grants or _slurm_has_gpus(files) else ()
    return Scheduler(SLURM, managed, grants, reader.complete)


def read_nomad(files: HostFiles, environment: Environment) -> Scheduler | None:
    """Read which devices Nomad's tasks on this host have; None if the host has no Nomad client."""
    roots = [f"{_CGROUPS}/nomad.slice", *_NOMAD_V1]
    roots = [root for root in roots if files.has_directory(root)][:1]
    if not roots:
        return None
    reader = _VariableReader(files, environment)
    grants: dict[Grant, None] = {}
    for cgroup in itertools.islice(
        _leaf_cgroups(files, roots[0], re.compile(".+"), _NOMAD_DEPTH), MAX_CGROUPS
    ):
        for variables in reader.variables(cgroup):
            devices = tuple(_DEVICE.findall(variables.get("NVIDIA_VISIBLE_DEVICES", "")))
            alloc = variables.get("NOMAD_ALLOC_ID", "")[:8]
            if devices and alloc:
                names = (variables.get("NOMAD_JOB_NAME"), variables.get("NOMAD_TASK_NAME"), alloc)
                name = "/".join(each for each in names if each)
                grants[Grant(NOMAD, name, devices, cgroup.rpartition("/")[2])] = None
                break
    return Scheduler(NOMAD, (), tuple(grants), reader.complete)


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


def _leaf_cgroups(files: HostFiles, cgroup: str, part: re.Pattern[str], depth: int) -> Iterator[str]:
    """Yield the innermost cgroups below one that have processes, along parts whose names fit."""
    names = [name for name in sorted(files.list_directories(cgroup) or ()) if part.fullmatch(name)]
    for name in names if depth else ():
        yield from _leaf_cgroups(files, f"{cgroup}/{name}", part, depth - 1)
    if not names or not depth:
        yield cgroup


def _slurm_has_gpus(files: HostFiles) -> bool:
    """Tell whether the configuration names GPUs, for a node on which no job has one now."""
    texts = (
        files.read(f"{directory}/{name}", _LIST_CAP) or b""
        for directory in _SLURM_CONFIGURATION
        for name in ("gres.conf", "slurm.conf")
    )
    return any(_GRES.search(text.decode(errors="replace")) for text in texts)
