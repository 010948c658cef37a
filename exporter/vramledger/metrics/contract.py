"""Hold the whole contract: every family by name, and the collectors that give their samples.

To add or change a metric, edit its declaration in the module of its subject and its section in
``exporter/docs/metrics/``, and run ``make generate``. A family's type and unit follow from its name, so they
cannot contradict it. A sample with the value None is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from vramledger.metrics import (
    access,
    agents,
    devices,
    hardware,
    inference,
    owners,
    pods,
    processes,
    reservations,
    sampling,
    storage,
)
from vramledger.metrics.families import Collected, Family, HolderFactFamily, collect_holder_facts
from vramledger.model.holder_facts import HOLDER_FACTS
from vramledger.model.snapshot import Snapshot

SUBJECTS: Mapping[str, tuple[Family, ...]] = {
    "sampling": sampling.FAMILIES,
    "devices": devices.FAMILIES,
    "processes": processes.FAMILIES,
    "owners": owners.FAMILIES,
    "pods": pods.FAMILIES,
    "inference": inference.FAMILIES,
    "reservations": reservations.FAMILIES,
    "agents": agents.FAMILIES,
    "hardware": hardware.FAMILIES,
    "access": access.FAMILIES,
    "storage": storage.FAMILIES,
}
"""The families by subject: each is a module of this package and a page of the documents, in their order."""

FAMILIES: Mapping[str, Family] = {
    family.name: family for families in SUBJECTS.values() for family in families
}


def collectors(most: int) -> dict[str, Callable[[Snapshot], Collected]]:
    """Return the collectors that read the snapshot; ``exporter`` reads none, and belongs to exposition."""
    return {
        "ledger": lambda snapshot: [
            *devices.collect(snapshot, "ledger"),
            *hardware.collect(snapshot, "ledger"),
        ],
        "process": partial(processes.collect, most=most),
        "owner": owners.collect,
        "pods": pods.collect,
        "reservations": reservations.collect,
        "agent": partial(agents.collect, most=most),
        "hardware": partial(hardware.collect, collector="hardware"),
        "energy": partial(hardware.collect, collector="energy"),
        "xid": partial(devices.collect, collector="xid"),
        "hidden": partial(devices.collect, collector="hidden"),
        "threads": lambda _: [],  # what it finds is in the states
        "pcie": partial(hardware.collect, collector="pcie"),
        **{fact.collector: _about_holders(fact.collector) for fact in HOLDER_FACTS},
    }


def _about_holders(collector: str) -> Callable[[Snapshot], Collected]:
    families = [
        family
        for family in FAMILIES.values()
        if isinstance(family, HolderFactFamily) and family.collector == collector
    ]
    return partial(collect_holder_facts, families=families)
