"""Declare the families of a device: its ledger, its holders, its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from vramledger.metrics.families import (
    DEVICE,
    PREFIX,
    PROCESS_LISTS,
    Collected,
    Family,
    Sample,
    devices_shown,
)
from vramledger.model.reading import ASLEEP, NodeMemory
from vramledger.model.snapshot import DeviceSnapshot, Ledger, Snapshot, State

Value = float | Mapping[str, float] | None


_WITHOUT_LEDGER = "when MIG divides the GPU, or NVML does not give its memory and holders"
_NOT_COUNTED_TWICE = f"{_WITHOUT_LEDGER}; and for a compute instance whose memory is counted under another"


class DeviceFamily(Family, frozen=True):
    """A family with a sample for each device, or for each key (third label) of what ``read`` gives."""

    read: Callable[[DeviceSnapshot], Value]
    down: bool = False
    """Whether it also has samples of a device that is down."""


def _device(  # noqa: PLR0913 - one argument a fact
    name: str,
    read: Callable[[DeviceSnapshot], Value],
    help_: str,
    by: str | None = None,
    *,
    source: str,
    absent: str = _NOT_COUNTED_TWICE,
    collector: str = "ledger",
    down: bool = False,
) -> DeviceFamily:
    labels = (*DEVICE, by) if by else DEVICE
    return DeviceFamily(PREFIX + name, labels, help_, collector, source, absent, read, down)


def _counted(device: DeviceSnapshot) -> Ledger | None:
    """Return the ledger of a device, unless the same memory is counted under another one."""
    return device.ledger if device.memory_counted_under is None else None


def _ledger(device: DeviceSnapshot) -> Mapping[str, float] | None:
    ledger = _counted(device)
    if ledger is None:
        return None
    reserve = {} if ledger.driver_reserved is None else {"driver_reserved": ledger.driver_reserved}
    system = {} if ledger.operating_system is None else {"operating_system": ledger.operating_system}
    states = {state.value: ledger.states.get(state, 0) for state in State}
    return {"free": ledger.free, **reserve, **system, **states, "unattributed": ledger.unattributed}


def _node(device: DeviceSnapshot) -> Mapping[str, float] | None:
    node = device.reading.node
    if node is None:
        return None
    figures = {name: getattr(node, name) for name in NodeMemory._fields[1:]}
    return {name: value for name, value in figures.items() if value is not None}


def _holders(device: DeviceSnapshot) -> Mapping[str, float] | None:
    if device.reading.divided or device.blind or (device.reading.processes is None and not device.holdings):
        return None
    counts = {state.value: 0 for state in State}
    for holding in device.holdings:
        counts[holding.state.value] += 1
    return counts


def _reset_required(device: DeviceSnapshot) -> float | None:
    """Return whether the driver refuses queries; of a device that is down only if that is why."""
    refused = device.reading.reset_required
    return None if refused is None or not (device.up or refused) else float(refused)


FAMILIES = (
    _device(
        "device_memory_total_bytes",
        lambda device: None if (ledger := _counted(device)) is None else ledger.total,
        "All memory of the device, from nvmlDeviceGetMemoryInfo.",
        source="nvmlDeviceGetMemoryInfo",
    ),
    _device(
        "device_memory_bytes",
        _ledger,
        "The ledger: where each byte of the device is, adding up to the total exactly "
        "(nvmlDeviceGetMemoryInfo and the process lists, states from /proc).",
        "state",
        source=f"nvmlDeviceGetMemoryInfo, {PROCESS_LISTS}, `/proc`; of unified memory `/proc/meminfo`",
    ),
    _device(
        "device_node_memory_bytes",
        _node,
        "Memory of the NUMA node that is the device's memory, as the kernel counts it: in total, free, and "
        "used for each purpose (from the node's meminfo).",
        "type",
        source="nvmlDeviceGetNumaNodeId, `/sys/devices/system/node/nodeN/meminfo`",
        absent="when the device's memory is not a NUMA node, or its figures are not readable",
    ),
    _device(
        "device_memory_overlap_bytes",
        lambda device: None if (ledger := _counted(device)) is None else ledger.overlap,
        "By how much the sum of the memory that NVML lists per process exceeds the used "
        "memory of the device (processes share memory, or the readings are a moment apart).",
        source="the sum of NVML's process lists minus the used memory of nvmlDeviceGetMemoryInfo",
    ),
    _device(
        "device_memory_uncharged_bytes",
        lambda device: None if (ledger := _counted(device)) is None else ledger.uncharged,
        "Used memory that NVML charges to no process, whether its holder is known or not "
        "(nvmlDeviceGetMemoryInfo minus the process lists).",
        source=f"nvmlDeviceGetMemoryInfo, {PROCESS_LISTS}",
    ),
    _device(
        "device_memory_undivided_bytes",
        lambda device: (
            None if _counted(device) is None or device.undivided is None else device.undivided.bytes
        ),
        "Uncharged memory that belongs to one or more of several holders, and it is not known to which; the "
        "ledger counts it under the mildest state of these holders.",
        source="the sources of `vramledger_process_uncharged_memory_bytes`",
        absent=f"when there is none, and {_NOT_COUNTED_TWICE}",
    ),
    _device(
        "device_memory_wasted_bytes",
        lambda device: device.wasted,
        "Memory that is held without any work: by holders that are stopped, stuck, zombie or dead, and by "
        "idle and orphaned ones if it is proven or seen that they do not work (NVML's process lists and the "
        "states).",
        source="the evidence of `vramledger_process_state_since_timestamp_seconds`",
        absent=_WITHOUT_LEDGER,
    ),
    _device(
        "device_memory_perhaps_wasted_bytes",
        lambda device: device.perhaps_wasted,
        "Memory of idle and orphaned holders of whom it is not known whether they work: it is in no figure "
        "of wasted memory (NVML's process lists and the states).",
        source="the evidence of `vramledger_process_state_since_timestamp_seconds`",
        absent=_WITHOUT_LEDGER,
    ),
    _device(
        "device_memory_used_peak_bytes",
        lambda device: None if _counted(device) is None else device.used_peak,
        "Highest used memory over the last minute of samples, without the driver's "
        "reserve where NVML reports it separately.",
        source="nvmlDeviceGetMemoryInfo, each sample",
    ),
    _device(
        "device_holders",
        _holders,
        "Processes that NVML lists with memory on the device, by state.",
        "state",
        source=f"{PROCESS_LISTS}, `/proc`",
        absent="when MIG divides the GPU, NVML gives no list, or the host's processes are not seen",
    ),
    _device(
        "device_hidden_holders",
        lambda device: None if device.hidden is None else len(device.hidden),
        "Processes that have the device file open but that NVML does not list, from a "
        "slow search of /proc/PID/fd; monitors that only use NVML and forked workers of "
        "a listed process do not count.",
        source="open device files in `/proc/PID/fd`, mappings in `/proc/PID/maps`, and NVML's process lists",
        absent="before the first search has ended, and when we do not see the host's processes",
        collector="hidden",
    ),
    _device(
        "device_ghost",
        lambda device: None if device.ghost is None else float(device.ghost),
        "1 if the device has been busy for 3 minutes at idle power without a listed or hidden holder; "
        "otherwise 0.",
        source="nvmlDeviceGetUtilizationRates, nvmlDeviceGetPowerUsage, nvmlDeviceGetEnforcedPowerLimit, "
        "NVML's process lists, and the search of `vramledger_device_hidden_holders`",
        absent="when one of its sources is not known",
        collector="hidden",
    ),
    _device(
        "device_xid_errors_total",
        lambda device: {str(xid): count for xid, count in sorted(device.xids.items())},
        "XID errors since the exporter started, from NVML events; a number appears with its first error.",
        "xid",
        source="nvmlEventSetWait",
        absent="before the first error with the number",
        down=True,
        collector="xid",
    ),
    _device(
        "device_asleep",
        lambda device: 1.0 if device.reading.error == ASLEEP else None,
        "1 while the device is not asked because it sleeps, or is to fall asleep (runtime power management).",
        source="`/sys/bus/pci/devices/ADDRESS/power`, `/proc/driver/nvidia/gpus/ADDRESS/power`",
        absent="when the device is asked",
        down=True,
    ),
    _device(
        "device_reset_required",
        _reset_required,
        "1 while the driver refuses a query of the device until it is reset (NVML_ERROR_RESET_REQUIRED).",
        source="every query of the device",
        absent="when the device was not asked: it is lost, or a MIG instance",
        down=True,
    ),
)


def collect(snapshot: Snapshot, collector: str, families: Iterable[DeviceFamily] = FAMILIES) -> Collected:
    """Return the collector's samples; for a device that is down only what says why."""
    shown = devices_shown(snapshot, down=True)
    collected: Collected = []
    for family in families:
        if family.collector != collector:
            continue
        samples: list[Sample] = []
        for key, device in shown:
            value = family.read(device) if device.up or family.down else None
            if value is None or isinstance(value, Mapping) != (family.labels != DEVICE):
                continue
            if isinstance(value, Mapping):
                samples += [((*key, label), each) for label, each in value.items()]
            else:
                samples.append((key, value))
        collected.append((family, samples))
    return collected
