"""Declare the families of what schedulers have reserved, and of holders without a reservation."""

from __future__ import annotations

from vramledger.metrics.families import (
    DEVICE,
    PREFIX,
    Collected,
    Family,
    FamilySamples,
    Labels,
    devices_shown,
    group,
)
from vramledger.model.snapshot import Snapshot

_SCHEDULERS = "what the schedulers tell"
_UNCERTAIN = "when no scheduler assigns the device, or when its reservations or holders are not all known"


def _family(
    name: str,
    labels: Labels,
    help_: str,
    *,
    absent: str,
    source: str = f"{_SCHEDULERS}; NVML's process lists",
) -> Family:
    return Family(PREFIX + name, labels, help_, "reservations", source, absent)


RESERVATION_INFO = _family(
    "device_reservation_info",
    (*DEVICE, "owner_type", "owner"),
    "The owner for whom a scheduler has reserved the device: a pod, from the kubelet's "
    "pod-resources socket, or a Slurm job or Nomad task, from the prolog's record or its "
    "processes' environment; read every 20 seconds.",
    source=_SCHEDULERS,
    absent="when no scheduler has reserved the device",
)
RESERVATIONS = _family(
    "device_reservations",
    (*DEVICE, "use"),
    "Reservations of the device by a scheduler, by whether their owners hold memory on it now: held, unheld "
    "or unknown; absent where no scheduler assigns the device.",
    absent="when no scheduler assigns the device",
)
UNRESERVED_HOLDERS = _family(
    "device_unreserved_holders",
    DEVICE,
    "Processes that hold memory on the device and whose owner has no reservation of it; "
    "absent where no scheduler assigns the device, or its reservations are not all known.",
    absent=_UNCERTAIN,
)
UNRESERVED_MEMORY = _family(
    "device_unreserved_memory_bytes",
    DEVICE,
    "Device memory that is held without a reservation of the device, in NVML's own "
    "figures; absent where no scheduler assigns the device, or its reservations are not "
    "all known.",
    absent=_UNCERTAIN + "; when NVML does not report the bytes of one of the holders",
)
RESERVATION_ACCOUNT_INFO = _family(
    "reservation_account_info",
    ("owner_type", "owner", "user", "account"),
    "The user and the account for which a job with a reservation runs, as slurmd has told the prolog of "
    "deploy/slurm; account is empty where Slurm has none.",
    source="the records in `/run/vramledger-slurm` that the prolog makes and the epilog removes",
    absent="when the job has no record, and with other schedulers",
)

FAMILIES = (RESERVATION_INFO, RESERVATIONS, UNRESERVED_HOLDERS, UNRESERVED_MEMORY, RESERVATION_ACCOUNT_INFO)


def collect(snapshot: Snapshot) -> Collected:
    """Return the owners for whom each device is reserved, and holders without; nothing without schedulers."""
    return group(FAMILIES, _samples(snapshot))


def _samples(snapshot: Snapshot) -> FamilySamples:
    accounts: dict[tuple[str, ...], None] = {}
    for key, device in devices_shown(snapshot):
        status = device.reservation_status
        if status is None:
            continue
        for each in status.reservations:
            yield RESERVATION_INFO, (*key, each.type, each.name), 1
            if each.user or each.account:
                accounts[each.type, each.name, each.user, each.account] = None
        for use, held in (("held", True), ("unheld", False), ("unknown", None)):
            yield RESERVATIONS, (*key, use), sum(1 for each in status.reservations if each.held is held)
        if status.unreserved_pids is None:
            continue
        known = [each.held for each in device.holdings if each.pid in status.unreserved_pids]
        yield UNRESERVED_HOLDERS, key, len(known)
        yield UNRESERVED_MEMORY, key, None if None in known else sum(each or 0 for each in known)
    for labels in accounts:
        yield RESERVATION_ACCOUNT_INFO, labels, 1
