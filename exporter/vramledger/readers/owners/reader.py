"""Find owners of processes on request, without waiting long; if a file system hangs, names are missing.

A systemd service whose processes belong to several users has no owner but these: JupyterHub, RStudio and the
daemons of batch systems without cgroups start the programs of many people in their own service.

Combine what is known of a process, and decide which fact names its owner.

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

import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from vramledger.kubernetes.pods import PodNames, parse_runtime_name, read_pod_names
from vramledger.model.reading import Owner, ProcessFacts, ProcessRow
from vramledger.readers.collector import PATIENCE, BoundedReader, Collector, Context, Part
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.own_process import own_cgroup
from vramledger.readers.owners import ended
from vramledger.readers.owners.cgroups import (
    CgroupPlace,
    ContainerMark,
    hierarchy_paths,
    is_personal,
    own_containers,
    parse_cgroup,
)
from vramledger.readers.owners.containers import read_container_name
from vramledger.readers.owners.host_files import HostFiles
from vramledger.slurm.jobs import JobNumbers, running_steps

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


CHECK_INTERVAL = 10.0
NAMES_TIMEOUT = 0.25
"""Seconds for which a sample waits for the owners of new processes; late ones come with the next sample."""

NAME_ATTEMPTS = 6
"""The most searches for a missing name: what a kubelet has not made in a minute it never makes."""

_Identity = tuple[int, int]


class _ResolvedFacts(NamedTuple):
    facts: ProcessFacts
    resolved: ResolvedOwner


class _Holder(Struct):
    """What is remembered of a process that holds memory."""

    facts: ProcessFacts
    watched: ended.WatchedProcess | None
    attempts: int


class _OwnerCheck(NamedTuple):
    ended: dict[_Identity, str]
    resolutions: list[_ResolvedFacts]


class OwnerReader(Collector):
    """Find owners, and notice their end; threads read files, and late answers come first without names."""

    patience = PATIENCE + NAMES_TIMEOUT

    def __init__(self, host: Host, rootfs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._files = HostFiles(rootfs)
        self._numbers = JobNumbers(host, self._files)
        self._units = UnitUsers(host, clock=clock)
        self._ours = own_containers(own_cgroup())
        self._clock = clock
        self._last_check = clock()
        self._resolutions: BoundedReader[_ResolvedFacts] = BoundedReader()
        self._checks: BoundedReader[_OwnerCheck] = BoundedReader()
        self._holders: dict[_Identity, _Holder] = {}
        self._ended: dict[_Identity, str] = {}
        self._again: dict[_Identity, ProcessFacts] = {}
        self._unsent: list[ProcessFacts] = []

    def read(self, context: Context) -> Part:
        """Return which owners have ended, and the facts of this sample with their owners."""
        present = {(row.pid, row.start) for row in context.rows}
        ended, renamed = self.check_owners(context.rows)
        wanted = {**self._again, **{(facts.pid, facts.start): facts for facts in context.facts}}
        self._again = {}
        unresolved = [facts for identity, facts in wanted.items() if identity in present]
        self._unsent += [*renamed, *self.add_owners(unresolved, NAMES_TIMEOUT)]
        return {
            "ended": ended,
            "facts": tuple(facts for facts in self._unsent if (facts.pid, facts.start) in present),
        }

    def accept(self) -> None:
        self._unsent.clear()

    def add_owners(self, facts: Iterable[ProcessFacts], timeout: float) -> list[ProcessFacts]:
        """Return facts with owners after ``timeout`` at most; later names bring their facts again."""
        requested: dict[_Identity, ProcessFacts] = {}
        for each in facts:
            requested[each.pid, each.start] = each
            key = (each.pid, each.start, each.parent)
            self._resolutions.submit(key, partial(self._resolve, each), partial(self._from_facts, each))
        answered: dict[_Identity, ProcessFacts] = {}
        for resolution in self._resolutions.collect(timeout):
            answered.update([self._remember(resolution, requested)])
        failed = self._resolutions.take_errors()
        self.failures = (*self.failures, *failed.values())
        for late in requested.keys() - answered.keys():
            if (*late, requested[late].parent) in failed:
                self._again[late] = requested[late]
            answered.update([self._remember(self._from_facts(requested[late]), requested)])
        return list(answered.values())

    def check_owners(self, rows: Iterable[ProcessRow]) -> tuple[dict[int, str], list[ProcessFacts]]:
        """Return processes without their owner, and late names, of the last check; it never waits."""
        present = {(row.pid, row.start) for row in rows}
        for identity in self._holders.keys() - present:
            del self._holders[identity]
        resolved: list[ProcessFacts] = []
        for result in self._checks.collect(0.0):
            self._ended = result.ended
            for each in result.resolutions:
                identity = (each.facts.pid, each.facts.start)
                if identity in self._holders and each.resolved.owner != self._holders[identity].facts.owner:
                    resolved.append(self._remember(each, {})[1])
        if failed := self._checks.take_errors():
            self.failures = (*self.failures, *failed.values())
            self._ended, self._last_check = {}, float("-inf")
        if self._clock() - self._last_check >= CHECK_INTERVAL:
            self._last_check = self._clock()
            holders = dict(self._holders)
            self._checks.submit("owners", partial(self._check, holders), lambda: _OwnerCheck(self._ended, []))
        return {pid: why for (pid, start), why in self._ended.items() if (pid, start) in present}, resolved

    def _remember(
        self, resolution: _ResolvedFacts, requested: dict[_Identity, ProcessFacts]
    ) -> tuple[_Identity, ProcessFacts]:
        identity = (resolution.facts.pid, resolution.facts.start)
        known = self._holders.get(identity)
        newest = requested.get(identity) or (known.facts if known is not None else resolution.facts)
        facts = replace(newest, owner=_keep_notebook(resolution.resolved.owner, known))
        place = resolution.resolved.place
        can_end = place.pod_uid or place.containers or place.slurm
        if known is not None and known.watched is not None and not can_end:
            # Version 1 of cgroups shows a zombie at the root: it still belongs to the job that it was in.
            facts = replace(facts, owner=known.facts.owner, cgroup=known.facts.cgroup)
        # The owner that a process had first can end; a process that was moved still belongs to that owner.
        watch = known.watched if known is not None else None
        if watch is None:
            watch = ended.watch_process(
                resolution.resolved.place,
                facts.cgroup or (),
                resolution.resolved.owner,
                self._host.started_at(facts.start),
            )
        attempts_left = (
            0 if resolution.resolved.complete else (known.attempts if known is not None else NAME_ATTEMPTS)
        )
        self._holders[identity] = _Holder(facts, watch, attempts_left)
        return identity, facts

    def _resolve(self, facts: ProcessFacts) -> _ResolvedFacts:
        owner = resolve_owner(self._files, facts, self._numbers.number, self._units.is_shared, self._ours)
        return _ResolvedFacts(facts, owner)

    def _from_facts(self, facts: ProcessFacts) -> _ResolvedFacts:
        return _ResolvedFacts(facts, resolve_from_facts(facts, self._ours))

    def _check(self, holders: dict[_Identity, _Holder]) -> _OwnerCheck:
        resolutions = []
        for holder in holders.values():
            if holder.attempts > 0:
                holder.attempts -= 1
                resolutions.append(self._resolve(holder.facts))
        watched = {pid: each.watched for (pid, _), each in holders.items() if each.watched is not None}
        starts = {pid: start for pid, start in holders}  # noqa: C416 a dict of its keys' parts
        evidence = ended.check_owners(
            self._files, watched, self._host.cgroup, partial(running_steps, self._host)
        )
        return _OwnerCheck({(pid, starts[pid]): why for pid, why in evidence.items()}, resolutions)


def _keep_notebook(owner: Owner | None, known: _Holder | None) -> Owner | None:
    """Return an owner with the notebook that was known before: once a kernel has ended, nobody names it."""
    before = known.facts.owner if known is not None else None
    if owner is None or before is None or owner.notebook:
        return owner
    return owner._replace(notebook=before.notebook)


LOOK_AGAIN = 60.0
"""Seconds after which a service of one user is looked at again. One of several users stays so."""

_FIRST_PERSON = 1000
_DYNAMIC = range(61184, 65536)
"""Users that systemd makes for a service (DynamicUser), and nobody."""


class UnitUsers:
    """Look at the users of a service's processes, which hidepid may hide: then it has one owner.

    A daemon that gives up root for a user of its own (nginx, MPS) has two users as well, and is one owner:
    only a person can be the owner within a service.
    """

    def __init__(self, host: Host, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._shared: set[str] = set()
        self._looked: dict[str, float] = {}

    def is_shared(self, facts: ProcessFacts, unit: str) -> bool:
        """Tell whether a process is a person's in a service that has processes of other users too."""
        place = _unit_path(facts.cgroup or (), unit)
        if not unit.endswith(".service") or not place or facts.uid is None:
            return False
        if facts.uid < _FIRST_PERSON or facts.uid in _DYNAMIC:
            return False
        now = self._clock()
        if place not in self._shared and now - self._looked.get(place, float("-inf")) >= LOOK_AGAIN:
            self._looked = {each: at for each, at in self._looked.items() if now - at < LOOK_AGAIN}
            self._looked[place] = now
            if any(uid != facts.uid for uid in self._users(place, unit)):
                self._shared.add(place)
        return place in self._shared

    def _users(self, place: str, unit: str) -> set[int]:
        inside = (pid for pid in self._host.pids() if _unit_path(self._host.cgroup(pid) or (), unit) == place)
        return {uid for pid in inside if (uid := self._host.uid(pid)) is not None}


def _unit_path(cgroup: tuple[str, ...], unit: str) -> str:
    for controllers, path in hierarchy_paths(cgroup):
        before, found, _ = f"{path}/".partition(f"/{unit}/")
        if found and controllers in ("", "name=systemd"):
            return before + found
    return ""
