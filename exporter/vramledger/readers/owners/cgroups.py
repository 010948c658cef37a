"""Find out where a process belongs from the lines of ``/proc/PID/cgroup``. Pure: no file is opened.

The kernel wrote the lines, but a user who may make directories below a cgroup chose the names in them. Every
user may make directories below ``user@UID.service``, so a name of a pod or a Slurm job there is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from vramledger.readers.owners.slurm import SlurmMark, begins_slurm, parse_slurm
from vramledger.readers.owners.systemd import UNIT, USER_MANAGER

MAX_SEGMENTS = 64
"""The maximum number of parts of a path that are read; Docker in a pod on a nested kubelet has a dozen."""

DELETED = " (deleted)"
"""The kernel appends this to the path of a cgroup that was removed under a process that has exited."""


class ContainerMark(NamedTuple):
    """A container in a cgroup path.

    ``runtime`` is ``docker``, ``containerd``, ``cri-o``, ``podman``, ``nerdctl``, ``lxc`` or ``nspawn``,
    empty where the path does not show it. ``id`` is its 64 digits, for LXC and nspawn its name.
    """

    runtime: str
    id: str


class CgroupPlace(NamedTuple):
    """Where a process belongs, as far as its cgroups say.

    Attributes:
        pod_uid: of the outermost Kubernetes pod, with dashes; empty without one.
        containers: the containers around it, outermost first.
        slurm: the Slurm job around it.
        unit: the systemd unit that it runs in, of the user's manager where there is one.
        user_manager: the uid whose systemd manager it runs below (rootless containers, user services).
        nested: whether the pod itself is in a container (kind, minikube), whose kubelet is not the host's.
        path: the path that named the most owners.
    """

    pod_uid: str = ""
    containers: tuple[ContainerMark, ...] = ()
    slurm: SlurmMark | None = None
    unit: str = ""
    user_manager: int | None = None
    nested: bool = False
    path: str = ""


_OTHERS = 2
_UID = r"[0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}"
_POD = re.compile(
    rf"(?:(?:[\w.]+-)*kubepods(?:-besteffort|-burstable|-guaranteed)?-)?pod(?P<uid>{_UID})(?:\.slice)?"
)
_CONTAINER = re.compile(
    r"(?:(?P<prefix>docker|cri-containerd|containerd|crio|libpod|libpod-payload|nerdctl|cri-dockerd)-)?"
    r"(?P<id>[0-9a-f]{64})(?:\.scope)?"
)
_LXC = re.compile(r"lxc\.payload\.(?P<id>[A-Za-z0-9][\w.-]{0,63})")
_NSPAWN = re.compile(r"systemd-nspawn@(?P<id>[A-Za-z0-9][\w.-]{0,63})\.service")
_RUNTIMES = {
    "docker": "docker",
    "cri-dockerd": "docker",
    "cri-containerd": "containerd",
    "containerd": "containerd",
    "crio": "cri-o",
    "libpod": "podman",
    "libpod-payload": "podman",
    "nerdctl": "nerdctl",
}


def parse_cgroup(lines: Iterable[str]) -> CgroupPlace:
    """Find the pod, container, job and unit of a process in its ``cgroup`` file (version 1, 2 or both).

    The path that names the most owners counts: with version 1 a job may be in some hierarchies only
    (Slurm leaves systemd's alone), and a runtime may leave out one that it does not manage.
    """
    places = [(order, _parse_path(path)) for order, path in sorted(_ordered_paths(lines))]
    if not places:
        return CgroupPlace()
    best = max((place for _, place in places), key=_owner_count)
    # Only systemd's own hierarchy (version 2, or the named one of version 1) names the unit.
    unit = places[0][1].unit if places[0][0] < _OTHERS else ""
    manager = next((place.user_manager for _, place in places if place.user_manager is not None), None)
    return best._replace(unit=unit, user_manager=manager)


def hierarchy_paths(lines: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return (controllers, path) of each hierarchy in which the process is not at the root."""
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and path.startswith("/") and path != "/":
            found.append((controllers, path))
    return tuple(found)


def unified_path(lines: Iterable[str]) -> str | None:
    """Return the path in version 2 of cgroups; None if there is none, or if it is outside our namespace."""
    paths = (line[3:] for line in lines if line.startswith("0::/"))
    return next((path for path in paths if ".." not in path.split("/")), None)


def _ordered_paths(lines: Iterable[str]) -> list[tuple[int, str]]:
    """Return the paths, systemd's own hierarchy first, then version 2, then the rest."""
    order = {"name=systemd": 0, "": 1}
    return [(order.get(controllers, _OTHERS), path) for controllers, path in hierarchy_paths(lines)]


def _owner_count(place: CgroupPlace) -> int:
    return 2 * bool(place.pod_uid) + len(place.containers) + 2 * (place.slurm is not None)


def _parse_path(path: str) -> CgroupPlace:
    parts = path.removesuffix(DELETED).split("/")[:MAX_SEGMENTS]
    # A ".." stands for what is outside our own cgroup namespace: the rest of the path is read as usual.
    segments = [part for part in parts if part not in ("", "..")]
    pod, nested, unit = "", False, ""
    manager: int | None = None
    slurm: SlurmMark | None = None
    containers: list[ContainerMark] = []
    before = ""
    for position, segment in enumerate(segments):
        # This is cgroup v1 under a containerd that was not configured for systemd: "SLICE:cri-containerd:ID".
        head, _, tail = segment.partition(":")
        found = _parse_container(tail.replace(":", "-"), before) or _parse_container(head, before)
        pod_match = None if manager is not None else _POD.fullmatch(head)
        if pod_match is not None and not pod:
            pod, nested = _dashed(pod_match["uid"]), bool(containers)
        if manager is None and slurm is None and begins_slurm(segment, position, segments):
            slurm = parse_slurm(segments[position + 1 :])
        elif found is not None:
            if found not in containers:
                containers.append(found)
        elif manager_match := USER_MANAGER.fullmatch(segment):
            if not containers and manager is None:
                manager, unit = int(manager_match["uid"]), segment
        elif UNIT.fullmatch(segment) and not containers and (not unit or USER_MANAGER.fullmatch(unit)):
            unit = segment.removeprefix("_")
        before = segment
    return CgroupPlace(pod, tuple(containers), slurm, unit, manager, nested, path)


def _parse_container(segment: str, before: str) -> ContainerMark | None:
    if match := _CONTAINER.fullmatch(segment):
        runtime = _RUNTIMES.get(match["prefix"] or "", "")
        return ContainerMark(runtime or ("docker" if before == "docker" else ""), match["id"])
    if match := _LXC.fullmatch(segment):
        return ContainerMark("lxc", match["id"])
    if before == "lxc" and re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", segment):
        return ContainerMark("lxc", segment)
    if match := _NSPAWN.fullmatch(segment):
        return ContainerMark("nspawn", match["id"])
    return None


def _dashed(uid: str) -> str:
    """Write a pod's UID as Kubernetes does; a static pod's is a hash and has no dashes."""
    return uid.replace("_", "-")
