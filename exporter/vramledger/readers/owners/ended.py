"""Notice that an owner has ended while its process still runs, from the host's files, never by a guess.

An owner has marks on the host while it exists. The kubelet has a directory for the pod, a runtime has one for
the running container, and Slurm's step daemon has a cgroup for itself; with version 1 of cgroups the daemon
itself is looked for. A mark counts as gone when two checks in a row miss it in a directory that can still be
listed. One of these must also prove that the mark belongs there:

- The mark itself was seen there. Nothing else tells in which directory a runtime keeps a container: its
  cgroup names neither the namespace of containerd, nor the root of Docker, Podman or CRI-O, so another
  container's mark proves nothing.
- Another pod of the same kubelet has its mark there, and the directory has changed since the process started.
  The cgroup path names the kubelet: each has a cgroup of its own above its pods.

Docker also writes down when a container has ended. A live process always has a cgroup, but it can be moved to
another one. Then its first cgroup must be gone too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from msgspec import Struct, field

from vramledger.model.reading import Owner
from vramledger.readers.owners.cgroups import CgroupPlace, hierarchy_paths, parse_cgroup
from vramledger.readers.owners.containers import has_docker_recorded_end
from vramledger.readers.owners.host_files import DirectoryListing, HostFiles

KUBELET = "var/lib/kubelet/pods"
CGROUPS = "sys/fs/cgroup"

RUNNING = (
    "run/containerd/io.containerd.runtime.v2.task/moby",  # Docker
    "run/docker/containerd/daemon/io.containerd.runtime.v2.task/moby",  # Docker with a containerd of its own
    "run/containerd/io.containerd.runtime.v2.task/k8s.io",
    "run/containerd/io.containerd.runtime.v2.task/default",  # nerdctl, ctr
    "run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io",
    "run/crun",  # Podman, CRI-O
    "run/runc",
)
"""Where a directory named by its id exists for as long as a container runs."""

MISSES_NEEDED = 2
CGROUP_CHECK_EVERY = 3
"""One of this many checks reads a cgroup again, unless something was wrong: 512 files take 5 ms."""

_CGROUP_FILE = "cgroup.procs"
"""Every cgroup has this file, the root of a hierarchy too; an empty mount point or a tmpfs does not."""


class _Mark(NamedTuple):
    """What an owner has on the host while it lives: a name in a directory; ``kind`` is the kind of owner."""

    directory: str
    name: str
    kind: str


_Listings = dict[str, DirectoryListing | None]


class WatchedProcess(Struct):
    """One process whose owner can end: its first cgroup, the marks seen, the checks that missed.

    ``started`` is the Unix time of its start. ``seen`` has the identity of the directory in which a mark was.
    """

    place: CgroupPlace
    cgroup: tuple[str, ...]
    label: str
    started: float
    seen: dict[_Mark, tuple[int, int]] = field(default_factory=dict)
    missed: int = 0
    checks: int = 0
    evidence: str | None = None


def watch_process(
    place: CgroupPlace, cgroup: tuple[str, ...], owner: Owner | None, started: float
) -> WatchedProcess | None:
    """Start to watch a process, by its Unix start; None if its owner cannot end before its processes do."""
    if owner is None or not (place.pod_uid or place.containers or place.slurm):
        return None
    return WatchedProcess(place, cgroup, f"{_KIND_NAMES.get(owner.type, owner.type)} {owner.name}", started)


def check_owners(
    files: HostFiles,
    processes: Mapping[int, WatchedProcess],
    cgroup_of: Callable[[int], tuple[str, ...] | None],
    running_steps: Callable[[], Collection[tuple[str, str]] | None] = lambda: None,
) -> dict[int, str]:
    """Check every process; return evidence of ended owners. ``running_steps``: daemons' (job, step)."""
    by_daemon = {pid: step for pid, each in processes.items() if (step := _step_by_daemon(each.place))}
    steps = running_steps() if by_daemon else None
    listings: _Listings = {}
    kubelets = {
        _kubelet(each.place) for each in processes.values() if _POD in _find_marks(files, each, listings)
    } - {""}
    ended: dict[int, str] = {}
    for pid, each in processes.items():
        why = _removed_mark(each, listings, kubelets) or _recorded_end(files, each, listings)
        if not why and steps is not None and pid in by_daemon and by_daemon[pid] not in steps:
            why = _REMOVAL_EVIDENCE[_STEP]
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


_POD, _CONTAINER, _STEP = "pod", "container", "step"


def _possible_marks(place: CgroupPlace) -> list[_Mark]:
    marks = []
    if place.pod_uid:
        marks.append(_Mark(KUBELET, place.pod_uid, _POD))
    if place.containers:
        # The outermost container is the host's own; containers inside it are not in the host's directories.
        marks += [_Mark(directory, place.containers[0].id, _CONTAINER) for directory in RUNNING]
    step = _step_directory(place)
    if step:
        marks.append(_Mark(step, "slurm", _STEP))
    return marks


def _find_marks(files: HostFiles, each: WatchedProcess, listings: _Listings) -> set[str]:
    kinds = set()
    for mark in _possible_marks(each.place):
        if mark.directory not in listings:
            listings[mark.directory] = files.list_directory(mark.directory)
        listing = listings[mark.directory]
        if listing is not None and mark.name in listing.names:
            each.seen[mark] = listing.identity
            kinds.add(mark.kind)
    return kinds


def _removed_mark(each: WatchedProcess, listings: _Listings, kubelets: Collection[str]) -> str | None:
    """Return a mark that is gone from the directory in which it was, or in which it must have been."""
    missing: set[str] = set()
    present: set[str] = set()
    for mark in _possible_marks(each.place):
        listing = listings[mark.directory]
        if listing is None:
            continue
        if mark.name in listing.names:
            present.add(mark.kind)
        elif each.seen.get(mark) == listing.identity or (
            mark.kind == _POD and _kubelet(each.place) in kubelets and listing.modified > each.started
        ):
            missing.add(mark.kind)
    return next((_REMOVAL_EVIDENCE[kind] for kind in sorted(missing - present)), None)


def _recorded_end(files: HostFiles, each: WatchedProcess, listings: _Listings) -> str | None:
    place = each.place
    if not place.containers:
        return None
    outermost = place.containers[0]
    running = any(
        listing is not None and outermost.id in listing.names for listing in map(listings.get, RUNNING)
    )
    if outermost.runtime not in ("docker", "") or running:
        return None
    recorded = has_docker_recorded_end(files, outermost.id, each.started)
    return "Docker has recorded its end" if recorded else None


def _kubelet(place: CgroupPlace) -> str:
    """Return the cgroup below which a kubelet has all of its pods; empty when the path does not show it."""
    head, mark, rest = place.path.partition("kubepods")
    return f"{head}{mark}{rest.partition('/')[0]}" if mark else ""


_REMOVAL_EVIDENCE = {
    _POD: "the kubelet has removed the pod's directory",
    _CONTAINER: "its runtime no longer has the container",
    _STEP: "the step's slurmstepd has ended",
}


def _step_directory(place: CgroupPlace) -> str:
    """Return the version 2 cgroup of a Slurm step, whose child ``slurm`` contains only slurmstepd."""
    if place.slurm is None or not place.slurm.step or "slurmstepd.scope/" not in place.path:
        return ""
    head, mark, _ = place.path.partition(f"/step_{place.slurm.step}/")
    return f"{CGROUPS}{head}{mark}".rstrip("/") if mark else ""


def _step_by_daemon(place: CgroupPlace) -> tuple[str, str] | None:
    """Return a process' job and step, where version 1 has no mark; a SLUID alone is not in a title."""
    mark = place.slurm
    if mark is None or not mark.step or not mark.job.isdigit() or _step_directory(place):
        return None
    return (mark.job, mark.step) if not place.containers else None


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
            if _CGROUP_FILE in (files.list_names(root) or ())
        ]
        if held and set(held) == {False}:
            return "the process is outside of its cgroup, which was removed"
        return None
    return None


_KIND_NAMES = {"slurm": "Slurm job"}
