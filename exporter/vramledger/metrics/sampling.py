"""Declare the families of the sample as a whole: whether it succeeded, its source, and its devices."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import vramledger
from vramledger import __version__
from vramledger.metrics.families import (
    DEVICE,
    PREFIX,
    SAMPLING,
    Collected,
    Family,
    Sample,
    devices_shown,
    ordered_devices,
)
from vramledger.model.reading import FAILURE_REASONS
from vramledger.model.snapshot import Snapshot

CollectorHealth = Mapping[str, tuple[bool, float]]


class SnapshotFamily(Family, frozen=True):
    """A family of the sample as a whole."""

    read: Callable[[Snapshot], Iterable[Sample]]


@functools.cache
def revision() -> str:
    """Return the commit of PEP 610's record; ``importlib.metadata`` would find it, for 0.7 MiB of memory."""
    packages = Path(vramledger.__file__).parents[1]
    record = packages / f"vramledger-{vramledger.__version__}.dist-info" / "direct_url.json"
    try:
        return str(json.loads(record.read_bytes())["vcs_info"]["commit_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _snapshot(
    name: str,
    read: Callable[[Snapshot], Iterable[Sample]],
    help_: str,
    *by: str,
    source: str,
    absent: str = "never",
) -> SnapshotFamily:
    return SnapshotFamily(PREFIX + name, by, help_, SAMPLING, source, absent, read)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _device_info(snapshot: Snapshot) -> Iterable[Sample]:
    for key, device in devices_shown(snapshot):
        reading = device.reading
        about = (
            *(reading.name, reading.pci_bus_id, snapshot.driver_version, snapshot.cuda_version),
            *(reading.minor, reading.parent, reading.mig_profile, reading.gpu_instance),
            *(reading.compute_instance, reading.mig_placement),
            reading.memory_kind or ("dedicated" if reading.memory is not None else None),
            *(reading.addressing_mode, reading.virtualization),
        )
        yield (*key, *map(_text, about)), 1


SNAPSHOT_FAMILIES = (
    _snapshot(
        "up",
        lambda snapshot: [((), snapshot.up)],
        "1 when the newest sample read the NVML driver library, 0 when it could not, or "
        "before the first sample has ended.",
        source="nvmlInit and the calls that list the devices",
    ),
    _snapshot(
        "build_info",
        lambda _: [((__version__, revision(), platform.python_version()), 1)],
        "The version of vramledger, the commit from which it was installed where known, and its Python.",
        *("version", "revision", "python_version"),
        source="the package, its `direct_url.json`, Python's `platform`",
    ),
    _snapshot(
        "source_info",
        lambda snapshot: [((snapshot.source, _text(snapshot.recording)), 1)],
        "The source of the data: nvml for this host, replay for a recording.",
        *("source", "recording"),
        source="`--source`",
    ),
    _snapshot(
        "sample_timestamp_seconds",
        lambda snapshot: [] if snapshot.time is None else [((), snapshot.time)],
        "Unix time at which the newest sample began, failed or not; a scrape never waits for a newer one.",
        source="the host's clock; in a replay the recording",
        absent="before the first sample has finished",
    ),
    _snapshot(
        "sample_duration_seconds",
        lambda snapshot: [] if snapshot.time is None else [((), snapshot.duration)],
        "Duration of the newest sample, from the first NVML call to the last file of /proc.",
        source="the sampler's clock",
        absent="before the first sample has finished",
    ),
    _snapshot(
        "sample_failures_total",
        lambda snapshot: [((reason,), snapshot.failures.get(reason, 0)) for reason in FAILURE_REASONS],
        "Samples since the exporter started that could not use the driver at all, by reason.",
        "reason",
        source="the exporter's own count",
    ),
    _snapshot(
        "released_until_timestamp_seconds",
        lambda snapshot: [] if snapshot.released_until is None else [((), snapshot.released_until)],
        "Unix time until which the exporter uses no GPU because of 'vramledger release', "
        "so that vramledger_up is 0 on purpose; absent without a release.",
        source="the request of `vramledger release`",
        absent="when no release is in force",
    ),
    _snapshot(
        "host_pid_namespace",
        lambda snapshot: [] if snapshot.host_pid_namespace is None else [((), snapshot.host_pid_namespace)],
        "1 when the sampler sees the host's processes, 0 when it is in another PID "
        "namespace (/proc/self/ns/pid), where NVML lists no holders.",
        source="`/proc/self/ns/pid`",
        absent="when the namespace is not known",
    ),
    _snapshot(
        "device_up",
        lambda snapshot: (
            [(device.key, device.up) for device in ordered_devices(snapshot)] if snapshot.up else []
        ),
        "1 when NVML answered every query that the device's ledger needs in time in the "
        "newest sample, otherwise 0; the device then has no other series than its XID errors.",
        *DEVICE,
        source="every NVML call about the device, and `--sample.timeout`",
        absent="when `vramledger_up` is 0",
    ),
    _snapshot(
        "device_info",
        _device_info,
        "Identity of the device, from NVML: product, PCI address, driver, device file number, for a MIG "
        "instance its GPU, profile, ids and place; and the kind of its memory: dedicated, coherent or "
        "unified.",
        *(*DEVICE, "name", "pci_bus_id", "driver_version", "cuda_version", "minor", "parent_uuid"),
        *("mig_profile", "gpu_instance", "compute_instance", "mig_placement"),
        *("memory", "addressing_mode", "virtualization"),
        source="nvmlDeviceGetUUID, nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlDeviceGetMinorNumber, "
        "nvmlSystemGetDriverVersion, nvmlSystemGetCudaDriverVersion; for MIG "
        "nvmlDeviceGetMigDeviceHandleByIndex, nvmlDeviceGetGpuInstanceId, nvmlDeviceGetComputeInstanceId, "
        "nvmlGpuInstanceGetInfo; nvmlDeviceGetNumaNodeId, nvmlDeviceGetAddressingMode, "
        "nvmlDeviceGetVirtualizationMode",
        absent="when `vramledger_device_up` is 0",
    ),
)

COLLECTOR_SUCCESS = Family(
    PREFIX + "collector_success",
    ("collector",),
    "1 when the collector gave all its data in this scrape, 0 when it failed; without a driver only the "
    "collector exporter has it.",
    SAMPLING,
    source="the collector itself",
    absent="when `vramledger_up` is 0, except for the collector `exporter`",
)
COLLECTOR_DURATION = Family(
    PREFIX + "collector_duration_seconds",
    ("collector",),
    "Duration of the collector in the newest sample, or in rendering if the sampler does not run it.",
    SAMPLING,
    source="the clock of the sampler or of the exporter",
    absent="when `vramledger_up` is 0, except for the collector `exporter`",
)

FAMILIES = (*SNAPSHOT_FAMILIES, COLLECTOR_SUCCESS, COLLECTOR_DURATION)


def collect(snapshot: Snapshot, health: CollectorHealth) -> Collected:
    """Return the samples about sampling itself; ``health`` is per collector (succeeded, seconds)."""
    collected: Collected = [(family, list(family.read(snapshot))) for family in SNAPSHOT_FAMILIES]
    collected.append((COLLECTOR_SUCCESS, [((name,), ok) for name, (ok, _) in health.items()]))
    collected.append((COLLECTOR_DURATION, [((name,), seconds) for name, (_, seconds) in health.items()]))
    return collected
