"""Combine what is known of a process, and decide which fact names its owner.

Only what the kernel attests decides: the user, and a cgroup that only root can make. The order is: Slurm job,
pod, container, unit, user:

- a **Slurm job** wins over a container inside it, which the job's user started: people identify with jobs.
  Where slurmd itself runs in a container, only an exporter in this container knows its jobs: others see
  names that the container's root has chosen;
- a **pod** or **container** wins over what runs inside it, Docker in a pod too: its root chooses those names;
- a **unit** counts only where it says more than the user. A login session, a terminal or the user's
  manager does not, nor do the services that start other people's programs (sshd, cron), nor one whose
  processes belong to several users (JupyterHub): a person's process there is the person's;
- below a **user's own manager** (``user@UID.service``) the user chooses every name, of units and of rootless
  containers, so the user is the owner;
- a **notebook** is never the owner: the program itself names it, in its environment.

Whatever else is known still fills its own field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from vramledger.kubernetes.pod_names import PodNames, parse_runtime_name, read_pod_names
from vramledger.model.reading import Owner, ProcessFacts
from vramledger.readers.owners.cgroups import CgroupPlace, ContainerMark, is_personal, parse_cgroup
from vramledger.readers.owners.containers import read_container_name
from vramledger.readers.owners.host_files import HostFiles

SHORT_ID = 12
"""How many digits of a container's id are its short id, as in ``docker ps``."""


class ResolvedOwner(NamedTuple):
    """The answer for one process; ``complete`` says that another search cannot find more."""

    place: CgroupPlace
    owner: Owner | None
    complete: bool


def resolve_from_facts(facts: ProcessFacts, ours: Collection[ContainerMark] = ()) -> ResolvedOwner:
    """Return the owner as far as the facts of the process show it; no file is read."""
    place = parse_cgroup(facts.cgroup or (), ours)
    return ResolvedOwner(
        place,
        _build_owner(facts, place, None, ""),
        complete=not (place.pod_uid or place.containers) and _has_number(place),
    )


def resolve_owner(
    files: HostFiles,
    facts: ProcessFacts,
    number_of: Callable[[str], str] = str,
    is_shared: Callable[[ProcessFacts, str], bool] = lambda _facts, _unit: False,
    ours: Collection[ContainerMark] = (),
) -> ResolvedOwner:
    """Return the owner of a process, with the names that the host's files give. It may hang."""
    place = parse_cgroup(facts.cgroup or (), ours, files.users_own)
    if place.slurm is not None:
        place = place._replace(slurm=place.slurm._replace(job=number_of(place.slurm.job)))
    names: PodNames | None = None
    container = ""
    if place.pod_uid:
        names = read_pod_names(files, place.pod_uid, tuple(each.id for each in place.containers))
    if names is None or not names.container:
        # In our own container there may be several; the host may not know the innermost.
        container = next(
            (name for each in reversed(place.containers) if (name := read_container_name(files, each))), ""
        )
        if place.pod_uid and (parsed := parse_runtime_name(container, place.pod_uid)):
            names = parsed
    named = bool(names and names.container) if place.pod_uid else bool(container or not place.containers)
    complete = named and _has_number(place)
    owner = _build_owner(facts, place, names, container)
    if owner is not None and owner.type == "unit" and facts.user and is_shared(facts, place.unit):
        owner = owner._replace(type="user", name=facts.user)
    return ResolvedOwner(place, owner, complete)


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
