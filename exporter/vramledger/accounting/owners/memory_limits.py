"""Join the limits of cgroups with their holders' owners, and the kernel's charge with the holdings; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vramledger.model.reading import CgroupLimit
from vramledger.model.snapshot import OwnerLimit
from vramledger.readers.hosts.system_memory import chain_of


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
    first = min(limited, key=lambda each: (_room(each), each.cgroup), default=None)
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


def _room(limit: CgroupLimit) -> int:
    return (limit.maximum or 0) - (limit.current or 0)
