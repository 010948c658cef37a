"""The whole contract: every family by name, and the collectors that give their samples.

To add or change a metric, edit its declaration in the module of its subject and its section in
``exporter/docs/src/metrics/``, and call ``make docs``. A family's type and unit follow from its name, so they
cannot contradict it. A value of None is a sample that is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from vramledger.metrics import (
    access,
    agents,
    devices,
    hardware,
    owners,
    processes,
    reservations,
    sampling,
)
from vramledger.metrics.families import Collected, Family
from vramledger.model.snapshot import Snapshot

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for subject in (sampling, access, devices, hardware, processes, owners, reservations, agents)
    for family in subject.FAMILIES
}


def collectors(most: int) -> dict[str, Callable[[Snapshot], Collected]]:
    """Return the collectors that read the snapshot; ``exporter``, which does not, is exposition's own."""
    return {
        "ledger": partial(devices.collect, collector="ledger"),
        "process": partial(processes.collect, most=most),
        "owner": owners.collect,
        "reservations": reservations.collect,
        "agent": partial(agents.collect, most=most),
        "hardware": partial(hardware.collect, collector="hardware"),
        "energy": partial(hardware.collect, collector="energy"),
        "xid": partial(devices.collect, collector="xid"),
        "hidden": partial(devices.collect, collector="hidden"),
        "pcie": partial(hardware.collect, collector="pcie"),
    }
