"""Find out where a process belongs from the lines of ``/proc/PID/cgroup``. Pure: no file is opened.

The kernel wrote the lines, but a user who may make directories below a cgroup chose the names in them. So
only names above the first such cgroup are facts. Every user may make directories below ``user@UID.service``,
whoever is root in a container may below that, and a unit may be delegated to its user: names of pods, jobs
and containers there are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from vramledger.slurm.names import SlurmMark, begins_slurm, parse_slurm

UNIT = re.compile(r"[A-Za-z0-9:_.@\\-]{1,240}\.(?:service|scope)")
USER_MANAGER = re.compile(r"user@(?P<uid>[0-9]{1,10})\.service")

_PERSONAL = re.compile(
    r"session-.*\.scope|init\.scope|user@.*\.service|user-runtime-dir@.*\.service"
    r"|(?:vte|tmux|kitty|ghostty)-spawn-.*\.scope|app-.*\.scope|gnome-terminal-server\.service"
    r"|gnome-session.*|plasma-.*|dbus(?:-broker)?\.service|.*getty@.*\.service"
    r"|(?:ssh|sshd|cron|crond|atd|gdm|sddm|lightdm|display-manager)(?:@.*)?\.service"
)


def is_personal(unit: str) -> bool:
    """Tell whether a unit belongs to a person's session, rather than being a service."""
    return _PERSONAL.fullmatch(unit) is not None


def is_in_service(lines: Iterable[str]) -> bool:
    """Tell whether a process is in the cgroup of a service; one of a person's session does not count."""
    parts = (part for _, path in hierarchy_paths(lines) for part in path.split("/"))
    return any(part.endswith(".service") and UNIT.fullmatch(part) and not is_personal(part) for part in parts)


MAX_SEGMENTS = 64
"""The maximum number of parts of a path that are read; Docker in a pod on a nested kubelet has a dozen."""

DELETED = " (deleted)"
"""The kernel appends this to the path of a cgroup that was removed under a process that has exited."""


class ContainerMark(NamedTuple):
    """A container in a cgroup path: its ``runtime``, empty if not shown, and its 64 digits or name."""

    runtime: str
    id: str


class CgroupPlace(NamedTuple):
    """Where a process belongs, as far as its cgroups say."""

    pod_uid: str = ""  # of the outermost Kubernetes pod, with dashes; empty without one
    # the containers around it that are attested, outermost first: the host's, or in our own container also
    # those that it has started
    containers: tuple[ContainerMark, ...] = ()
    slurm: SlurmMark | None = None  # the Slurm job around it
    unit: str = ""  # the systemd unit that it runs in, of the user's manager where there is one
    # the uid whose systemd manager it runs below (rootless containers, user services)
    user_manager: int | None = None
    path: str = ""  # the path that named the most owners


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


def parse_cgroup(
    lines: Iterable[str],
    ours: Collection[ContainerMark] = (),
    users_own: Callable[[str, str], bool] = lambda _controllers, _path: False,
) -> CgroupPlace:
    """Find the pod, container, job and unit of a process in its ``cgroup`` file (version 1, 2 or both).

    ``users_own``: tells by the controllers and the path whether a user may name what is below a cgroup.
    The path that names the most owners counts: with version 1 a job may be in some hierarchies only (Slurm
    leaves systemd's alone), and a runtime may leave out one that it does not manage.
    """
    places = [
        (order, _parse_path(path, ours, partial(users_own, controllers)))
        for order, path, controllers in sorted(_ordered_paths(lines))
    ]
    if not places:
        return CgroupPlace()
    best = max(
        (place for _, place in places),
        key=lambda place: 2 * bool(place.pod_uid) + len(place.containers) + 2 * (place.slurm is not None),
    )
    # Only systemd's own hierarchy (version 2, or the named one of version 1) names the unit.
    unit = places[0][1].unit if places[0][0] < _OTHERS else ""
    manager = next((place.user_manager for _, place in places if place.user_manager is not None), None)
    return best._replace(unit=unit, user_manager=manager)


def own_containers(lines: tuple[str, ...]) -> tuple[ContainerMark, ...]:
    """Return the containers that we are in ourselves, outermost first, by the lines of our own cgroups."""
    ours: tuple[ContainerMark, ...] = ()
    while len(found := parse_cgroup(lines, ours).containers) > len(ours):
        ours = found
    return ours


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


def _ordered_paths(lines: Iterable[str]) -> list[tuple[int, str, str]]:
    order = {"name=systemd": 0, "": 1}
    found = hierarchy_paths(lines)
    return [(order.get(controllers, _OTHERS), path, controllers) for controllers, path in found]


def _parse_path(path: str, ours: Collection[ContainerMark], users_own: Callable[[str], bool]) -> CgroupPlace:
    parts = path.removesuffix(DELETED).split("/")[:MAX_SEGMENTS]
    # A ".." stands for what is outside our own cgroup namespace: the rest of the path is read as usual.
    segments = [part for part in parts if part not in ("", "..")]
    managed = next((at for at, each in enumerate(segments) if USER_MANAGER.fullmatch(each)), len(segments))
    pod, unit, before = "", "", ""
    manager: int | None = None
    slurm: SlurmMark | None = None
    containers: list[ContainerMark] = []
    for position, segment in enumerate(segments[:managed]):
        # This is cgroup v1 under a containerd that was not configured for systemd: "SLICE:cri-containerd:ID".
        head, _, tail = segment.partition(":")
        found = _parse_container(tail.replace(":", "-"), before) or _parse_container(head, before)
        pod_match = _POD.fullmatch(head)
        begins = begins_slurm(segment, position, segments)
        if (begins or found or pod_match) and any(map(users_own, _above(parts, position))):
            break
        if pod_match is not None:
            pod = pod or pod_match["uid"].replace("_", "-")  # a static pod's is a hash and has no dashes
        if begins:
            slurm = slurm or parse_slurm(segments[position + 1 :])
        elif found is not None:
            containers += [found] if found not in containers else []
            if found not in ours:
                break
        elif UNIT.fullmatch(segment) and not containers:
            unit = unit or segment.removeprefix("_")
        before = segment
    else:
        named = managed < len(segments) and not any(map(users_own, _above(parts, managed)))
        if named and not containers:
            manager = int(segments[managed].partition("@")[2].partition(".")[0])
            unit = _users_unit(segments[managed + 1 :]) or segments[managed]
    return CgroupPlace(pod, tuple(containers), slurm, unit, manager, path)


def _above(parts: list[str], position: int) -> Iterator[str]:
    """Yield the cgroups above a part of a path, which begin with a ``..`` for each level outside ours."""
    named = [part for part in parts if part]
    outside = named.count("..")
    yield from ("/" + "/".join(named[:end]) for end in range(outside + 1, outside + position + 1))


def _users_unit(segments: list[str]) -> str:
    before = ""
    for segment in segments:
        if _parse_container(segment, before):
            break
        if UNIT.fullmatch(segment):
            return segment.removeprefix("_")
        before = segment
    return ""


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
