"""Declare the families of the owners: what each holds, held and wasted, and its failed allocations."""

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

_OWNER = (*DEVICE, "owner_type", "owner")
_HOLDINGS = "the holdings in every sample, joined to the owners of `vramledger_process_info`"
_NO_HOLDERS = "when MIG divides the GPU, or NVML does not give its holders"


def _family(name: str, labels: Labels, help_: str, *, absent: str, source: str = _HOLDINGS) -> Family:
    return Family(PREFIX + name, labels, help_, "owner", source, absent)


OWNER_MEMORY = _family(
    "owner_memory_bytes",
    (*_OWNER, "state"),
    "Device memory of all the owner's processes, charged by NVML or certainly their own, by the state of "
    "the holding; owners beyond --owners.max are counted in owner=other.",
    absent="when the owner holds nothing in the state",
)
OWNER_BYTE_SECONDS = _family(
    "owner_memory_byte_seconds_total",
    (*_OWNER, "state"),
    "Device memory of the owner times the seconds for which it was held, summed over the "
    "samples since the exporter started; gaps and failed samples add nothing.",
    absent="before the owner has held memory in the state",
)
OWNER_WASTED_SECONDS = _family(
    "owner_memory_wasted_byte_seconds_total",
    _OWNER,
    "Device memory that the owner held without any work times the seconds for which it did, summed over the "
    "samples since the exporter started.",
    absent="before the owner has wasted memory on the device",
)
OWNER_FREED = _family(
    "owner_memory_freed_bytes_total",
    _OWNER,
    "Memory of the owner's holdings that have ended, minus what stayed in use, from "
    "NVML's used memory and process lists some seconds later.",
    source="NVML's process lists, and nvmlDeviceGetMemoryInfo before and after",
    absent="before the owner has held memory on the device; and where the operating system manages the "
    "memory and keeps pages after a program's end",
)
OWNER_NOT_FREED = _family(
    "owner_memory_not_freed_bytes_total",
    _OWNER,
    "Memory that outlived the owner's processes: still listed for a pid that is gone, or "
    "a rise of unattributed when the holding ended; holdings that end together share "
    "this rise.",
    source="NVML's process lists, and nvmlDeviceGetMemoryInfo before and after",
    absent="before the owner has held memory on the device",
)
OWNERS_DROPPED = _family(
    "owners_dropped",
    DEVICE,
    "Owners that hold memory on the device and have no series of their own because of "
    "--owners.max; their figures are in owner=other.",
    source="NVML's process lists and `--owners.max`",
    absent=_NO_HOLDERS,
)
OWNER_UNCOUNTED = _family(
    "owner_uncounted_seconds_total",
    DEVICE,
    "Seconds since the first sample for which no owner was charged, because samples were missing or failed.",
    source="the times of the samples",
    absent=_NO_HOLDERS,
)

DEVICE_OWNERS = _family(
    "device_owners",
    DEVICE,
    "Owners that hold memory on the device now, with or without a known name; if there "
    "are more than 1, they share the device.",
    absent=_NO_HOLDERS,
)
_LIMIT_SOURCE = (
    "`dmem.max`, `dmem.min` and `dmem.current` of cgroups; without `dmem` nvmlDeviceGetMemoryLimits"
)
OWNER_LIMIT = _family(
    "owner_memory_limit_bytes",
    (*_OWNER, "type"),
    "What the owner may take of the device by its cgroups: max, beyond which allocations fail, and min, "
    "which is guaranteed.",
    source=_LIMIT_SOURCE,
    absent="when no cgroup limits the owner",
)
OWNER_LIMIT_USED = _family(
    "owner_memory_limit_used_bytes",
    _OWNER,
    "What the cgroup has whose limit the owner reaches first; other owners may be in it.",
    source=_LIMIT_SOURCE,
    absent="when no cgroup limits the owner, or when its use is not known",
)
OWNER_CHARGED = _family(
    "owner_memory_charged_bytes",
    _OWNER,
    "What the kernel charges to the owner's own cgroups, an account beside NVML's.",
    source=_LIMIT_SOURCE,
    absent="when neither the kernel nor the driver accounts by cgroup, or when another owner is in them",
)
_OOM = ("owner_type", "owner", "framework")
_OOM_SOURCE = "the agents' reports: torch's own count, and the time of the newest failure of other frameworks"
OWNER_OOMS = _family(
    "owner_ooms_total",
    _OOM,
    "Failed allocations of the owner's programs since the exporter started, on devices that could not be "
    "identified too; a program that has ended still counts.",
    source=_OOM_SOURCE,
    absent="before the first failed allocation of the owner in the framework",
)
OWNER_LAST_OOM = _family(
    "owner_last_oom_timestamp_seconds",
    _OOM,
    "Unix time of the newest failed allocation of the owner's programs, also after the program has ended.",
    source=_OOM_SOURCE,
    absent="before the first failed allocation of the owner in the framework",
)

FAMILIES = (
    *(OWNER_MEMORY, OWNER_BYTE_SECONDS, OWNER_WASTED_SECONDS, OWNER_FREED, OWNER_NOT_FREED, OWNERS_DROPPED),
    *(OWNER_UNCOUNTED, DEVICE_OWNERS, OWNER_LIMIT, OWNER_LIMIT_USED, OWNER_CHARGED, OWNER_OOMS),
    OWNER_LAST_OOM,
)


def collect(snapshot: Snapshot) -> Collected:
    """Return the usage of each device's owners; the tracker has kept their number within --owners.max."""
    return group(FAMILIES, _samples(snapshot))


def _samples(snapshot: Snapshot) -> FamilySamples:
    for key, device in devices_shown(snapshot):
        if device.owner_usage is None:
            continue
        named = {(each.type, each.name): (*key, each.type, each.name) for each in device.owner_usage.owners}
        for labels, account in zip(named.values(), device.owner_usage.owners, strict=True):
            for state, memory in sorted(account.held.items()):
                yield OWNER_MEMORY, (*labels, state.value), memory
            for state, seconds in sorted(account.byte_seconds.items()):
                yield OWNER_BYTE_SECONDS, (*labels, state.value), seconds
            yield OWNER_WASTED_SECONDS, labels, account.wasted_byte_seconds
            yield OWNER_FREED, labels, account.freed
            yield OWNER_NOT_FREED, labels, account.not_freed
        yield OWNERS_DROPPED, key, device.owner_usage.dropped
        yield OWNER_UNCOUNTED, key, device.owner_usage.uncounted
        yield DEVICE_OWNERS, key, device.owner_usage.holding
        for each in device.limits:
            if (labels_ := named.get((each.type, each.name))) is not None:  # it has an entry of its own
                yield OWNER_LIMIT, (*labels_, "max"), each.maximum
                yield OWNER_LIMIT, (*labels_, "min"), each.minimum or None
                yield OWNER_LIMIT_USED, labels_, each.used
                yield OWNER_CHARGED, labels_, each.charged
    for oom in snapshot.ooms:
        yield OWNER_OOMS, oom[:3], oom.failures
        yield OWNER_LAST_OOM, oom[:3], oom.last
