"""Notice that an owner has ended while its process lives on, from the host's files, never by a guess.

Every owner leaves marks while it lives. The kubelet has a directory for the pod, a runtime has one for the
running container, and Slurm's step daemon has a cgroup for itself. A mark counts as gone only under these
conditions. The directory can still be listed, and two checks in a row miss the mark. The mark was seen
before, or another live process has its own mark of the same kind in the same directory; then the directory is
the one in use, even if our first check of the process was too late. A live process always has a cgroup, but
it can be moved to another one. Then its first cgroup must be gone too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from vramledger.model.reading import Owner
from vramledger.readers.owners.cgroups import CgroupPlace, hierarchy_paths, parse_cgroup
from vramledger.readers.owners.host_files import HostFiles

KUBELET = "var/lib/kubelet/pods"
CGROUPS = "sys/fs/cgroup"

RUNNING = (
    "run/containerd/io.containerd.runtime.v2.task/moby",  # Docker
    "run/containerd/io.containerd.runtime.v2.task/k8s.io",
    "run/containerd/io.containerd.runtime.v2.task/default",  # nerdctl, ctr
    "run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io",
    "run/crun",  # Podman, CRI-O
    "run/runc",
)
"""Where a directory named by its id exists for as long as a container runs."""

MISSES_NEEDED = 2
"""The number of consecutive checks that must miss a mark."""

CGROUP_CHECK_EVERY = 3
"""One of this number of checks reads a process' cgroup again, unless the last check found something wrong.
Reading 512 files takes 5 ms, two thirds of a check, and a process is hardly ever moved."""

_Mark = tuple[str, str]


@dataclass(slots=True)
class WatchedProcess:
    """One process whose owner can end: its first cgroup, the marks seen, the checks that missed."""

    place: CgroupPlace
    cgroup: tuple[str, ...]
    label: str
    seen: set[_Mark] = field(default_factory=set)
    missed: int = 0
    checks: int = 0
    evidence: str | None = None


def watch_process(place: CgroupPlace, cgroup: tuple[str, ...], owner: Owner | None) -> WatchedProcess | None:
    """Start to watch a process; return None if its owner cannot end before its processes do."""
    if owner is None or not (place.pod_uid or place.containers or place.slurm):
        return None
    return WatchedProcess(place, cgroup, f"{_KIND_NAMES.get(owner.type, owner.type)} {owner.name}")


def check_owners(
    files: HostFiles,
    processes: Mapping[int, WatchedProcess],
    cgroup_of: Callable[[int], tuple[str, ...] | None],
) -> dict[int, str]:
    """Check every watched process once; return the evidence for those whose owner has ended."""
    listed: dict[str, frozenset[str] | None] = {}
    used = {
        (directory, kind)
        for each in processes.values()
        for directory, kind in _present_marks(files, each, listed)
    }
    ended: dict[int, str] = {}
    for pid, each in processes.items():
        why = _removed_mark(each, listed, used)
        if not why and (each.missed or each.checks % CGROUP_CHECK_EVERY == 0):
            why = _left_cgroup(files, each, cgroup_of(pid))
        each.checks += 1
        each.missed = each.missed + 1 if why else 0
        if why and each.missed >= MISSES_NEEDED:
            each.evidence = f"its {each.label} has ended: {why}"
        elif not why:
            each.evidence = None
        if each.evidence is not None:
            ended[pid] = each.evidence
    return ended


def _possible_marks(place: CgroupPlace) -> list[tuple[str, str, str]]:
    """Return the marks that an owner may have on the host: directory, name, and the kind of mark."""
    if place.user_manager is not None:
        return []
    marks = []
    if place.pod_uid and not place.nested:
        marks.append((KUBELET, place.pod_uid, "pod"))
    if place.containers:
        # The outermost container is the host's own; containers inside it are not in the host's directories.
        outermost = place.containers[0]
        # For a container without a known runtime, any directory may be the right one.
        kind = outermost.runtime or f"container {outermost.id}"
        marks += [(directory, outermost.id, kind) for directory in RUNNING]
    step = _step_directory(place)
    if step:
        marks.append((step, "slurm", "step"))
    return marks


def _present_marks(
    files: HostFiles, each: WatchedProcess, listed: dict[str, frozenset[str] | None]
) -> Iterator[tuple[str, str]]:
    """Yield directory and kind of the marks that exist, and remember them."""
    for directory, name, kind in _possible_marks(each.place):
        if directory not in listed:
            listed[directory] = files.list_names(directory)
        if name in (listed[directory] or ()):
            each.seen.add((directory, name))
            yield directory, kind


def _removed_mark(
    each: WatchedProcess, listed: dict[str, frozenset[str] | None], used: Collection[tuple[str, str]]
) -> str | None:
    """Return the evidence that a mark was removed: we saw it before, or other processes have one there."""
    missing: set[str] = set()
    present: set[str] = set()
    for directory, name, kind in _possible_marks(each.place):
        names = listed[directory]
        if names is None:
            continue
        if name in names:
            present.add(kind)
        elif (directory, name) in each.seen or (directory, kind) in used:
            missing.add(kind)
    for kind in missing - present:
        return _REMOVAL_EVIDENCE.get(kind, "its runtime no longer has the container")
    return None


_REMOVAL_EVIDENCE = {
    "pod": "the kubelet has removed the pod's directory",
    "step": "the step's slurmstepd has ended",
}


def _step_directory(place: CgroupPlace) -> str:
    """Return the version 2 cgroup of a Slurm step, whose child ``slurm`` contains only slurmstepd."""
    if place.slurm is None or not place.slurm.step or "slurmstepd.scope/" not in place.path:
        return ""
    head, mark, _ = place.path.partition(f"/step_{place.slurm.step}/")
    return f"{CGROUPS}{head}{mark}".rstrip("/") if mark else ""


def _left_cgroup(files: HostFiles, each: WatchedProcess, now: tuple[str, ...] | None) -> str | None:
    """Say that a process is no longer in its owner's cgroup, and that this cgroup is gone."""
    if now is None or now == each.cgroup:
        return None
    place, current = each.place, parse_cgroup(now)
    lost = (
        (place.pod_uid and not current.pod_uid)
        or (place.containers and not current.containers)
        or (place.slurm is not None and current.slurm is None)
    )
    if not lost:
        return None
    for controllers, path in hierarchy_paths(each.cgroup):
        if path != place.path:
            continue
        hierarchy = controllers.removeprefix("name=")
        roots = [f"{CGROUPS}/{hierarchy}"] if hierarchy else [CGROUPS, f"{CGROUPS}/unified"]
        held = [
            files.has_directory(f"{root}{path.rstrip('/')}")
            for root in roots
            if files.list_names(root) is not None
        ]
        if held and set(held) == {False}:
            return "the process is outside of its cgroup, which was removed"
        return None
    return None


_KIND_NAMES = {"slurm": "Slurm job"}
