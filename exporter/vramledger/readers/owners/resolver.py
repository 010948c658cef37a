"""Combine what is known of a process, and decide which fact names its owner.

Only what the kernel attests decides: the user, and a cgroup that only root can make. The order is: Slurm job,
pod, container, unit, user:

- a **Slurm job** wins over the pod or container around it, which is only the node that slurmd runs on,
  and over a container inside it, which the job's user started: people identify with jobs;
- a **pod** wins over what runs inside it, Docker in a pod too: the cluster knows the pod;
- a **unit** counts only where it says more than the user. A login session, a terminal or the user's
  manager does not, nor do the services that start other people's programs (sshd, cron);
- below a **user's own manager** (``user@UID.service``) the user chooses every name, of units and of rootless
  containers, so the user is the owner;
- a **notebook** is never the owner: the program itself names it, in its environment.

Whatever else is known still fills its own field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vramledger.model.reading import Owner, ProcessFacts
from vramledger.readers.owners.cgroups import CgroupPlace, parse_cgroup
from vramledger.readers.owners.containers import read_container_name
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.kubernetes import PodNames, parse_runtime_name, read_pod_names
from vramledger.readers.owners.systemd import is_personal

SHORT_ID = 12
"""How many digits of a container's id are its short id, as in ``docker ps``."""


class ResolvedOwner(NamedTuple):
    """The answer for one process; ``complete`` says that another search cannot find more."""

    place: CgroupPlace
    owner: Owner | None
    complete: bool


def resolve_from_facts(facts: ProcessFacts) -> ResolvedOwner:
    """Return the owner as far as the facts of the process show it; no file is read."""
    place = parse_cgroup(facts.cgroup or ())
    return ResolvedOwner(
        place,
        _build_owner(facts, place, None, ""),
        complete=not (place.pod_uid or place.containers) and _has_number(place),
    )


def resolve_owner(
    files: HostFiles, facts: ProcessFacts, number_of: Callable[[str], str] = str
) -> ResolvedOwner:
    """Return the owner of a process, with the names that the host's files give. It may hang.

    ``number_of`` gives the number of a Slurm job for the name that its cgroup has.
    """
    place = parse_cgroup(facts.cgroup or ())
    if place.slurm is not None:
        place = place._replace(slurm=place.slurm._replace(job=number_of(place.slurm.job)))
    names: PodNames | None = None
    container = ""
    # Below a user's own systemd manager the user names the cgroups: if such a name claims a container, we do
    # not look for it among root's containers.
    if place.user_manager is None:
        ids = tuple(each.id for each in place.containers)
        if place.pod_uid:
            names = read_pod_names(files, place.pod_uid, ids)
        if names is None or not names.container:
            # Take the innermost container that this host knows; the names that Docker in a container has
            # given are not in this host's files.
            container = next(
                (name for each in reversed(place.containers) if (name := read_container_name(files, each))),
                "",
            )
            if place.pod_uid and (parsed := parse_runtime_name(container, place.pod_uid)):
                names = parsed
    named = bool(names and names.container) if place.pod_uid else bool(container or not place.containers)
    complete = (named and _has_number(place)) or place.user_manager is not None
    return ResolvedOwner(place, _build_owner(facts, place, names, container), complete)


def _has_number(place: CgroupPlace) -> bool:
    """Tell whether the job, if there is one, is known by its number."""
    return place.slurm is None or place.slurm.job.isdigit()


def _build_owner(
    facts: ProcessFacts, place: CgroupPlace, names: PodNames | None, container: str
) -> Owner | None:
    notebook = facts.owner.notebook if facts.owner is not None else ""
    inside = (names.container if names else "") or container
    if not inside and place.containers:
        innermost = place.containers[-1]
        inside = innermost.id if innermost.runtime in ("lxc", "nspawn") else innermost.id[:SHORT_ID]
    owner = Owner(
        "",
        "",
        namespace=names.namespace if names else "",
        pod=(names.pod if names else place.pod_uid),
        container=inside,
        slurm_job=place.slurm.job if place.slurm else "",
        unit=place.unit,
        notebook=notebook,
    )
    user = ("user", facts.user or "")
    answers = (
        ("slurm", owner.slurm_job),
        ("pod", f"{owner.namespace}/{owner.pod}" if owner.namespace else owner.pod),
        ("container", owner.container),
        ("unit", "" if is_personal(owner.unit) else owner.unit),
        user,
    )
    attested = answers if place.user_manager is None else (user,)
    kind, name = next((answer for answer in attested if answer[1]), ("", ""))
    return owner._replace(type=kind, name=name) if kind else None
