"""Join what schedulers have reserved to the holders of memory.

These are pure functions over one reading and what is known of holders. A holder is blamed only for what is
certain. Whether it has a reservation is not known in these cases: its facts are missing; its pod has no name;
a reservation of its owner is for a device whose id does not name it (the instances of DRA's ``gpu-0-mig-…``);
there are grants that we may not see; the schedulers were last read before we first saw the holder.

The limits of cgroups are joined with their holders' owners too, and the kernel's charge with the holdings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from vramledger.model.reading import (
    CgroupLimit,
    DeviceReading,
    Grant,
    ProcessFacts,
    ProcessRow,
    Reading,
    Scheduler,
)
from vramledger.model.snapshot import DeviceSnapshot, Holding, OwnerLimit, Reservation, ReservationStatus
from vramledger.readers.hosts.system_memory import chain_of
from vramledger.readers.owners.cgroups import DELETED, hierarchy_paths

FactsOf = Callable[[int, int | None], ProcessFacts | None]
KnownSince = Callable[[int, int | None], float | None]
"""Return the monotonic time at which a process was first seen, by pid and start; None when it never was."""

_MPS_CONTROL = "nvidia-cuda-mps-control"
"""The daemon that starts the servers of MPS, each as the user of its clients (seen on an H200, driver 580).

A server has a context on the device for its clients; the clients have the reservations.
"""

_EVERY = "*"
_REPLICA = "::"
"""The device plugin's mark of a time slice: ``GPU-…::1``."""
_NUMBERED = re.compile(
    r"(?:nvidia|gpu-)(?P<minor>\d+)(?:/gi(?P<instance>\d+)(?:/ci(?P<compute>\d+))?)?(?:/vgpu\d+)?"
)
_OUTSIDE = re.compile(r"^(?:/\.\.)+(?=/)")
_OLD_MIG = re.compile(r"MIG-(?P<parent>GPU-[\w-]+)/(?P<gpu>\d+)/(?P<compute>\d+)", re.ASCII)


def mps_user(facts: ProcessFacts | None) -> tuple[int, str] | None:
    """Return uid and name of the user whose control daemon started a process as its MPS server; else None.

    A server has its clients' user, and any program may take its name, or be a file with the daemon's name. So
    only root's daemon attests more than that this user has started it.
    """
    parent = facts.parent if facts is not None else None
    if parent is None or parent.uid is None:
        return None
    # Who may not see the file knows a process of root's by the name that root has given to it.
    named = parent.program == _MPS_CONTROL if parent.program else parent.comm == _MPS_CONTROL[:15]
    return (parent.uid, parent.user or str(parent.uid)) if named else None


def is_roots_mps_server(facts: ProcessFacts | None) -> bool:
    """Tell whether root's control daemon has started a process, for clients of any user."""
    user = mps_user(facts)
    return user is not None and user[0] == 0


def mps_clients(device: DeviceReading, rows: Mapping[int, ProcessRow], facts_of: FactsOf) -> frozenset[int]:
    """Return the holders whose work the driver counts for an MPS server, or may count for it.

    A driver without a list of MPS does not name them. Then every holder of a user may be one, if root's
    daemon has started a server for this user.
    """
    holders = device.processes or ()
    if device.mps_listed:
        return frozenset(entry.pid for entry in holders if "M" in entry.kinds)
    known = {each.pid: facts_of(row.pid, row.start) for each in holders if (row := rows.get(each.pid))}
    served = {facts.uid for facts in known.values() if facts and is_roots_mps_server(facts)}
    return frozenset(pid for pid, facts in known.items() if facts and facts.uid in served)


class SchedulerGrants(Struct, frozen=True):
    """Hold what the schedulers of one reading have granted, ready for each device.

    ``lost`` are the grants with an id that fits no device of the reading. ``read`` is the monotonic time at
    which the schedulers were read, None in a recording that does not have it.
    """

    schedulers: tuple[Scheduler, ...]
    lost: tuple[Grant, ...]
    read: float | None

    def status_of(
        self,
        device: DeviceReading,
        holdings: Iterable[Holding],
        facts_of: FactsOf,
        known_since: KnownSince,
        *,
        blind: bool,
    ) -> ReservationStatus | None:
        """Join reservations with holdings; None without a scheduler. ``blind``: no holder can be seen."""
        managers = [each for each in self.schedulers if any(fits(name, device) for name in each.managed)]
        grants = [
            (scheduler.name, grant)
            for scheduler in self.schedulers
            for grant in scheduler.grants
            if any(fits(name, device) for name in grant.devices)
        ]
        names = dict.fromkeys([*(each.name for each in managers), *(name for name, _ in grants)])
        if not names or device.divided:
            return None
        holders = [(each, facts_of(each.pid, each.start)) for each in holdings]
        reserved: dict[tuple[str, str], Reservation] = {}
        for name, grant in grants:
            held = None if blind else _any(_belongs(facts, grant) for _, facts in holders)
            key = (grant.type, grant.name)
            if key not in reserved or reserved[key].held is not True:
                reserved[key] = Reservation(grant.type, grant.name, name, held, grant.user, grant.account)
        # A device that only claims give to a scheduler needs no reservation.
        asked = [each for each in self.schedulers if each in managers or not each.managed]
        complete = bool(managers) and not blind and all(each.complete for each in asked)
        mine = [grant for _, grant in grants]
        unreserved = tuple(
            each.pid
            for each, facts in holders
            if complete
            and self._was_read_since(known_since(each.pid, each.start))
            and self._has_none_of(facts, [*mine, *self.lost])
        )
        return ReservationStatus(
            tuple(sorted(reserved.values())), unreserved if complete else None, tuple(names)
        )

    def _was_read_since(self, seen: float | None) -> bool:
        """Tell whether schedulers were read after a holder was seen: not before its job or ``exec``."""
        return self.read is None or (seen is not None and seen <= self.read)

    @staticmethod
    def _has_none_of(facts: ProcessFacts | None, grants: Iterable[Grant]) -> bool:
        if facts is None or facts.owner is None:
            return False
        if is_roots_mps_server(facts):
            return False
        return _any(_belongs(facts, grant) for grant in grants) is False


def join(
    reading: Reading, devices: tuple[DeviceSnapshot, ...], facts_of: FactsOf, known_since: KnownSince
) -> tuple[DeviceSnapshot, ...]:
    """Return the devices with their reservations beside their holders; unchanged without a scheduler."""
    if not reading.schedulers:
        return devices
    grants = _grants(reading, tuple(device.reading for device in devices))

    def with_status(device: DeviceSnapshot) -> DeviceSnapshot:
        if not device.up:
            return device
        blind = device.blind or device.reading.processes is None
        status = grants.status_of(device.reading, device.holdings, facts_of, known_since, blind=blind)
        return replace(device, reservation_status=status)

    return tuple(with_status(device) for device in devices)


def _grants(reading: Reading, known: tuple[DeviceReading, ...]) -> SchedulerGrants:
    lost = tuple(
        grant
        for scheduler in reading.schedulers
        for grant in scheduler.grants
        if not all(any(fits(name, device) for device in known) for name in grant.devices)
    )
    return SchedulerGrants(reading.schedulers, lost, reading.schedulers_read)


def fits(name: str, device: DeviceReading) -> bool:
    """Tell whether a scheduler's id means this device. The id of a whole GPU includes all its instances."""
    name = name.partition(_REPLICA)[0]
    if name in (_EVERY, device.uuid) or (device.parent is not None and name == device.parent):
        return True
    if match := _NUMBERED.fullmatch(name):
        given = (match["instance"], match["compute"])
        own = (str(device.gpu_instance), str(device.compute_instance))
        named = all(number in (None, mine) for number, mine in zip(given, own, strict=True))
        return device.minor == int(match["minor"]) and named
    if match := _OLD_MIG.fullmatch(name):
        ids = (device.gpu_instance, device.compute_instance)
        return device.parent == match["parent"] and ids == (int(match["gpu"]), int(match["compute"]))
    return False


def _belongs(facts: ProcessFacts | None, grant: Grant) -> bool | None:
    if facts is None:
        return None
    if grant.place:
        return _inside(facts.cgroup, grant.place)
    owner = facts.owner
    if owner is None:
        return None
    if grant.type == "slurm":
        # One of them may still have the SLUID alone.
        same_form = owner.slurm_job.isdigit() == grant.name.isdigit()
        return owner.slurm_job == grant.name if same_form or not owner.slurm_job else None
    if owner.pod and not owner.namespace:
        return None  # the host's files do not give the pod's name
    return f"{owner.namespace}/{owner.pod}" == grant.name


def _inside(cgroup: tuple[str, ...] | None, place: str) -> bool | None:
    """Tell whether a process is in a cgroup, by the whole path: any user may give a part this name.

    A path from outside our own namespace (``/../..``) lacks parts at its beginning.
    """
    if cgroup is None:
        return None
    paths = [f"{path.removesuffix(DELETED)}/" for _, path in hierarchy_paths(cgroup)]
    ends = [f"{place[at:]}/" for at, letter in enumerate(place) if letter == "/"]
    return any(
        _OUTSIDE.sub("", path).startswith(tuple(ends if _OUTSIDE.match(path) else ends[:1])) for path in paths
    )


def _any(answers: Iterator[bool | None]) -> bool | None:
    found = set(answers)
    return True if True in found else None if None in found else False


class PlacedHolding(NamedTuple):
    """A holding's owner, and the path of its cgroup in version 2; None for what is not known."""

    owner: tuple[str, str] | None
    cgroup: str | None


def owner_limits(
    limits: Sequence[CgroupLimit] | None, holdings: Iterable[PlacedHolding]
) -> tuple[OwnerLimit, ...]:
    """Return for each owner the limit that it reaches first, and what its cgroups are charged.

    A limit above the cgroups of several owners holds for all of them together. What is charged is None where
    another owner's holder, or one of which the owner is not known, is in one of the same cgroups.
    """
    if not limits:
        return ()
    known = {each.cgroup: each for each in limits}
    placed = list(holdings)
    places: dict[tuple[str, str], set[str]] = {}
    for each in placed:
        if each.owner is not None and each.cgroup is not None:
            places.setdefault(each.owner, set()).add(each.cgroup)
    return tuple(
        _owner_limit(owner, paths, known, placed)
        for owner, paths in sorted(places.items())
        if any(above in known for path in paths for above in chain_of(path))
    )


def _owner_limit(
    owner: tuple[str, str], paths: set[str], known: Mapping[str, CgroupLimit], placed: Iterable[PlacedHolding]
) -> OwnerLimit:
    above = {place for path in paths for place in chain_of(path)}
    limited = [known[place] for place in above if place in known and known[place].maximum is not None]
    first = min(
        limited, key=lambda each: ((each.maximum or 0) - (each.current or 0), each.cgroup), default=None
    )
    own = {path for path in paths if path in known}
    top = [path for path in own if not any(other != path and other in chain_of(path) for other in own)]
    foreign = any(
        each.owner != owner and (each.cgroup is None or not own.isdisjoint(chain_of(each.cgroup)))
        for each in placed
    )
    charged = None
    if own == paths and not foreign:
        charged = _sum(known[path].current for path in top)
    return OwnerLimit(
        *owner,
        cgroup=None if first is None else first.cgroup,
        maximum=None if first is None else first.maximum,
        used=None if first is None else first.current,
        minimum=_guaranteed(top, known),
        charged=charged,
    )


def _guaranteed(own: Sequence[str], known: Mapping[str, CgroupLimit]) -> int | None:
    """Return what is guaranteed to cgroups of which none is in another; None if it is not known.

    The kernel guarantees the cgroups in another one together no more than that one has. The driver's own
    backend does not tell of cgroups for which nothing is set, so these bound nothing.
    """
    places = {place for path in own for place in chain_of(path)}
    bounds = {place: known[place].minimum or 0 for place in places if place in known}
    if not own or any(known[place].minimum is None for place in bounds):
        return None

    def guaranteed_in(place: str) -> int:
        if place in own:
            amount = bounds[place]
        else:
            amount = sum(guaranteed_in(each) for each in places if each.rpartition("/")[0] == place)
        return min(amount, bounds.get(place, amount))

    return guaranteed_in("")


def _sum(figures: Iterable[int | None]) -> int | None:
    known = list(figures)
    return None if None in known else sum(each or 0 for each in known)
