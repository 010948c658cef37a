"""The metric contract: every family is declared here, once, beside the function that reads its value.

To add or change a metric, edit its entry in one of the tables below, and its section in METRICS.md, which
a test compares. A family's type and unit follow from its name, so they cannot contradict it. A value of
None is a sample that is absent.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vramledger import __version__, metrics_of_agents
from vramledger.families import (
    DEVICE,
    HOLDING,
    PREFIX,
    SAMPLING,
    Collected,
    Family,
    Sample,
    devices_shown,
    ordered,
)
from vramledger.logs import fields, log
from vramledger.readings import FAILURE_REASONS, Owner
from vramledger.revision import revision
from vramledger.snapshot import DeviceSnapshot, Holding, Snapshot, State

OTHER = "other"
"""The ``pid`` label of the bytes of all holdings beyond ``--processes.max``."""

Health = Mapping[str, tuple[bool, float]]
Reads = float | Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class SnapshotFamily(Family):
    """A family of the sample as a whole."""

    read: Callable[[Snapshot], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class DeviceFamily(Family):
    """A family with a sample a device, or one a value of its third label when ``read`` gives a mapping."""

    read: Callable[[DeviceSnapshot], Reads]


@dataclass(frozen=True, slots=True)
class HoldingFamily(Family):
    """A family with a sample a holding."""

    read: Callable[[Holding], float | None]


def _snapshot(
    name: str, read: Callable[[Snapshot], Iterable[Sample]], help_: str, *by: str
) -> SnapshotFamily:
    return SnapshotFamily(PREFIX + name, by, help_, SAMPLING, read)


def _device(
    collector: str, name: str, read: Callable[[DeviceSnapshot], Reads], help_: str, by: str | None = None
) -> DeviceFamily:
    return DeviceFamily(PREFIX + name, (*DEVICE, by) if by else DEVICE, help_, collector, read)


def _hardware(collector: str, name: str, help_: str, by: str | None = None) -> DeviceFamily:
    return _device(collector, name, lambda device: device.reading.hardware.get(name), help_, by)


def _holding(name: str, read: Callable[[Holding], float | None], help_: str, *by: str) -> HoldingFamily:
    return HoldingFamily(PREFIX + name, (*HOLDING, *by), help_, "process", read)


# --- of the sample -------------------------------------------------------------------------------


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _device_info(snapshot: Snapshot) -> Iterable[Sample]:
    for key, device in devices_shown(snapshot):
        reading = device.reading
        about = (
            reading.name,
            reading.pci_bus_id,
            snapshot.driver_version,
            snapshot.cuda_version,
            reading.minor,
            reading.parent,
            reading.mig_profile,
            reading.gpu_instance,
            reading.compute_instance,
        )
        yield (*key, *map(_text, about)), 1


SNAPSHOT_FAMILIES = (
    _snapshot(
        "up",
        lambda snapshot: [((), snapshot.up)],
        "1 when the newest sample read the NVML driver library, 0 when it could not or none has ended yet.",
    ),
    _snapshot(
        "build_info",
        lambda _: [((__version__, revision(), platform.python_version()), 1)],
        "The version of vramledger, the commit it was installed from where known, and its Python.",
        *("version", "revision", "python_version"),
    ),
    _snapshot(
        "source_info",
        lambda snapshot: [((snapshot.source, _text(snapshot.recording)), 1)],
        "Where the data comes from: source is nvml for this host, replay for a recording of another one.",
        *("source", "recording"),
    ),
    _snapshot(
        "sample_timestamp_seconds",
        lambda snapshot: [] if snapshot.time is None else [((), snapshot.time)],
        "Unix time at which the newest sample began, failed or not; a scrape never waits for a newer one.",
    ),
    _snapshot(
        "sample_duration_seconds",
        lambda snapshot: [] if snapshot.time is None else [((), snapshot.duration)],
        "Seconds that the newest sample took, from the first NVML call to the last file of /proc.",
    ),
    _snapshot(
        "sample_failures_total",
        lambda snapshot: [((reason,), snapshot.failures.get(reason, 0)) for reason in FAILURE_REASONS],
        "Samples since the exporter started that could not read the driver at all, by reason.",
        "reason",
    ),
    _snapshot(
        "released_until_timestamp_seconds",
        lambda snapshot: [] if snapshot.released_until is None else [((), snapshot.released_until)],
        "Unix time until which 'vramledger release' keeps us off the GPUs, so that vramledger_up is 0 on "
        "purpose; absent when it does not.",
    ),
    _snapshot(
        "host_pid_namespace",
        lambda snapshot: [] if snapshot.host_pid_namespace is None else [((), snapshot.host_pid_namespace)],
        "1 when the sampler sees the host's processes, 0 in a PID namespace of its own (/proc/self/ns/pid), "
        "where NVML lists no holders.",
    ),
    _snapshot(
        "device_up",
        lambda snapshot: [(device.key, device.up) for device in ordered(snapshot)] if snapshot.up else [],
        "1 when every NVML answer that the device's book needs came in time in the newest sample, else 0 and "
        "nothing more about the device.",
        *DEVICE,
    ),
    _snapshot(
        "device_info",
        _device_info,
        "What the device is, from NVML: product, PCI address, driver, device file number, and for a MIG "
        "instance its GPU, profile and ids.",
        *(*DEVICE, "name", "pci_bus_id", "driver_version", "cuda_version", "minor", "parent_uuid"),
        *("mig_profile", "gpu_instance", "compute_instance"),
    ),
)

COLLECTOR_SUCCESS = Family(
    PREFIX + "collector_success",
    ("collector",),
    "1 when the collector gave everything that it had to in this scrape, 0 when it failed; absent without a "
    "driver.",
    SAMPLING,
)
COLLECTOR_DURATION = Family(
    PREFIX + "collector_duration_seconds",
    ("collector",),
    "Seconds that the collector took in the newest sample, or in rendering where the sampler has no part in "
    "it.",
    SAMPLING,
)

WEB_REFUSALS = ("password", "certificate", "failures", "busy", "rate")
"""Why a request was not let in: no or a wrong password, no allowed name in the client's certificate, an
address that has failed too often, too many passwords waiting to be checked, the file's rate limit."""

WEB_REFUSED = Family(
    PREFIX + "web_refused_requests_total",
    ("reason",),
    "Requests since the exporter started that were not let in, by reason.",
    "exporter",
)
WEB_CONFIG_LOADED = Family(
    PREFIX + "web_config_last_reload_successful",
    (),
    "1 when the web configuration file and the files that it names are in use as they are now, 0 when their "
    "newest version is wrong and an older one is; absent without such a file.",
    "exporter",
)
WEB_CONFIG_LOADED_TIME = Family(
    PREFIX + "web_config_last_reload_success_timestamp_seconds",
    (),
    "Unix time at which the web configuration in use was read.",
    "exporter",
)


# --- of a device ---------------------------------------------------------------------------------


def _book(device: DeviceSnapshot) -> Mapping[str, float] | None:
    book = device.book
    if book is None:
        return None
    reserved = {} if book.reserved is None else {"reserved": book.reserved}
    states = {state.value: book.states.get(state, 0) for state in State}
    return {"free": book.free, **reserved, **states, "unattributed": book.unattributed}


def _holders(device: DeviceSnapshot) -> Mapping[str, float] | None:
    if device.reading.divided or device.blind or (device.reading.processes is None and not device.holdings):
        return None
    counts = {state.value: 0 for state in State}
    for holding in device.holdings:
        counts[holding.state.value] += 1
    return counts


DEVICE_FAMILIES = (
    _device(
        "ledger",
        "device_memory_total_bytes",
        lambda device: None if device.book is None else device.book.total,
        "All memory of the device, from nvmlDeviceGetMemoryInfo.",
    ),
    _device(
        "ledger",
        "device_memory_bytes",
        _book,
        "The book: where each byte of the device is, adding up to the total exactly "
        "(nvmlDeviceGetMemoryInfo and the process lists, states from /proc).",
        "state",
    ),
    _device(
        "ledger",
        "device_memory_overlap_bytes",
        lambda device: None if device.book is None else device.book.overlap,
        "What the holdings that NVML lists add up to beyond the used memory (shared memory, readings a "
        "moment apart).",
    ),
    _device(
        "ledger",
        "device_memory_used_peak_bytes",
        lambda device: device.used_peak,
        "Highest used memory over the last minute of samples, without the driver's reserve where NVML tells "
        "it apart.",
    ),
    _device(
        "ledger",
        "device_holders",
        _holders,
        "Processes that NVML lists with memory on the device, by the state that they are in.",
        "state",
    ),
    _device(
        "hidden",
        "device_hidden_holders",
        lambda device: None if device.hidden is None else len(device.hidden),
        "Processes that have the device file open though NVML does not list them, monitors that only use "
        "NVML and forked workers of a listed process left out; from a search of /proc/PID/fd at a slow pace.",
    ),
    _device(
        "xid",
        "device_xid_errors_total",
        lambda device: {str(xid): count for xid, count in sorted(device.xids.items())},
        "XID errors since the exporter started, from NVML events; a number appears with its first error.",
        "xid",
    ),
    _device(
        "hardware",
        "device_utilization_ratio",
        lambda device: (device.reading.utilization or {}).get("gpu"),
        "Share of the driver's last sampling period with a kernel running, from "
        "nvmlDeviceGetUtilizationRates.",
    ),
    _device(
        "hardware",
        "device_memory_bandwidth_utilization_ratio",
        lambda device: (device.reading.utilization or {}).get("memory"),
        "Share of the driver's last sampling period with device memory being read or written, from "
        "nvmlDeviceGetUtilizationRates; not how full it is.",
    ),
)

HARDWARE_FAMILIES = (
    _hardware(
        "hardware",
        "device_temperature_celsius",
        "Temperature of the GPU chip, from nvmlDeviceGetTemperature.",
    ),
    _hardware(
        "hardware",
        "device_power_watts",
        "Power draw of the board, averaged by the driver over about a second, from nvmlDeviceGetPowerUsage.",
    ),
    _hardware(
        "hardware",
        "device_power_limit_watts",
        "Power limit that is enforced now, from nvmlDeviceGetEnforcedPowerLimit, read every 10 seconds.",
    ),
    _hardware(
        "hardware",
        "device_clock_hertz",
        "Current clock by domain, from nvmlDeviceGetClockInfo.",
        "clock",
    ),
    _hardware(
        "hardware",
        "device_throttle_active",
        "1 while the driver holds the clocks down for this reason, from "
        "nvmlDeviceGetCurrentClocksEventReasons.",
        "reason",
    ),
    _hardware(
        "hardware",
        "device_performance_state",
        "Performance state, 0 the fastest to 15 the slowest, from nvmlDeviceGetPerformanceState.",
    ),
    _hardware(
        "hardware",
        "device_fan_speed_ratio",
        "Intended fan speed as a share of its maximum, from nvmlDeviceGetFanSpeed, read every 10 "
        "seconds; absent without a fan.",
    ),
    _hardware(
        "hardware",
        "device_ecc_errors_total",
        "ECC memory errors over the device's life, from nvmlDeviceGetTotalEccErrors.",
        "type",
    ),
    _hardware(
        "hardware",
        "device_remapped_rows",
        "Memory rows that were replaced by spare ones over the device's life, from "
        "nvmlDeviceGetRemappedRows, read every 10 seconds.",
        "type",
    ),
    _hardware(
        "hardware",
        "device_row_remap_pending",
        "1 when a row waits for the next GPU reset to be replaced, from nvmlDeviceGetRemappedRows, read "
        "every 10 seconds.",
    ),
    _hardware(
        "hardware",
        "device_row_remap_failed",
        "1 when a row could not be replaced, from nvmlDeviceGetRemappedRows, read every 10 seconds.",
    ),
    _hardware(
        "hardware",
        "device_encoder_utilization_ratio",
        "Share of time that the video encoder was busy, from nvmlDeviceGetEncoderUtilization.",
    ),
    _hardware(
        "hardware",
        "device_decoder_utilization_ratio",
        "Share of time that the video decoder was busy, from nvmlDeviceGetDecoderUtilization.",
    ),
    _hardware(
        "hardware",
        "device_pcie_link_generation",
        "PCIe generation of the link, current and maximum, from nvmlDeviceGetCurrPcieLinkGeneration and "
        "nvmlDeviceGetMaxPcieLinkGeneration, read every 10 seconds.",
        "kind",
    ),
    _hardware(
        "hardware",
        "device_pcie_link_width",
        "PCIe lanes of the link, current and maximum, from nvmlDeviceGetCurrPcieLinkWidth and "
        "nvmlDeviceGetMaxPcieLinkWidth, read every 10 seconds.",
        "kind",
    ),
    _hardware(
        "hardware",
        "device_bar1_memory_bytes",
        "Address space through which the host and peers reach device memory, from "
        "nvmlDeviceGetBAR1MemoryInfo, read every 10 seconds; no part of the book.",
        "kind",
    ),
    _hardware(
        "energy",
        "device_energy_joules_total",
        "Energy used since the driver was loaded, from nvmlDeviceGetTotalEnergyConsumption, read every 10 "
        "seconds.",
    ),
    _hardware(
        "energy",
        "device_memory_temperature_celsius",
        "Temperature of the device's memory, from nvmlDeviceGetFieldValues, read every 10 seconds.",
    ),
    _hardware(
        "pcie",
        "device_pcie_throughput_bytes_per_second",
        "PCIe traffic over a window of 20 ms, from nvmlDeviceGetPcieThroughput, read every 10 seconds.",
        "direction",
    ),
)

HARDWARE: Mapping[str, DeviceFamily] = {
    family.name.removeprefix(PREFIX): family for family in HARDWARE_FAMILIES
}
"""The keys of ``DeviceReading.hardware`` and what they become."""


# --- of a holding and its process ----------------------------------------------------------------

HOLDING_FAMILIES = (
    _holding(
        "process_memory_bytes",
        lambda holding: holding.memory,
        "Device memory of the process in NVML's own figures (compute, graphics and MPS lists, the largest); "
        "absent where NVML does not say.",
    ),
    _holding(
        "process_memory_peak_bytes",
        lambda holding: holding.peak,
        "Highest device memory of the process in any sample since the exporter first saw it there.",
    ),
    _holding(
        "process_sm_utilization_ratio",
        lambda holding: holding.sm,
        "Share of time that the process kept the SMs busy, from nvmlDeviceGetProcessUtilization, which "
        "misses small work; absent when unknown, never 0 for it.",
    ),
    _holding(
        "process_last_active_timestamp_seconds",
        lambda holding: holding.last_active,
        "Unix time of the last sign of GPU work of the process, by NVML's utilisation or a change of its "
        "bytes; absent before the first.",
    ),
    _holding(
        "process_state_since_timestamp_seconds",
        lambda holding: holding.since,
        "Unix time since when the holding is in this state (from /proc and NVML); one series a holding, and "
        "for idle the last sign of work.",
        "state",
    ),
)
PROCESS_MEMORY = HOLDING_FAMILIES[0]
PROCESS_START = Family(
    PREFIX + "process_start_time_seconds",
    ("pid",),
    "Unix time at which the holder started, from /proc/PID/stat; tells a reused pid from the earlier "
    "process.",
    "process",
)
PROCESS_INFO = Family(
    PREFIX + "process_info",
    (
        *("pid", "user", "command", "framework", "policy", "owner_type", "owner"),
        *("namespace", "pod", "container", "slurm_job", "unit", "notebook"),
    ),
    "Who the holder is, from /proc: the program's name without arguments, its user and owner; an unknown "
    "label is empty.",
    "process",
)
FRAMEWORK_POLICY = Family(
    PREFIX + "framework_policy_info",
    ("pid", "framework", "policy", "source"),
    "How the holder's framework takes memory, by its agent, or judged by its mapped libraries, its "
    "environment and the course of its bytes; unknown without evidence.",
    "process",
)
UNREADABLE = Family(
    PREFIX + "unreadable_processes",
    ("file",),
    "Processes whose file below /proc/PID we may not read, which narrows what is said of them: environ, maps "
    "and cgroup of holders, fd of all processes that were searched for hidden holders.",
    "process",
)
PROCESSES_DROPPED = Family(
    PREFIX + "processes_dropped",
    DEVICE,
    "Holdings beyond the largest --processes.max of the device, which have no series of their own; their "
    "bytes are in pid=other of process_memory_bytes.",
    "process",
)

_OWNER = (*DEVICE, "owner_type", "owner")
OWNER_MEMORY = Family(
    PREFIX + "owner_memory_bytes",
    (*_OWNER, "state"),
    "Device memory of all the owner's processes in NVML's own figures, by the state of the holding; owners "
    "beyond --owners.max are owner=other.",
    "owner",
)
OWNER_BYTE_SECONDS = Family(
    PREFIX + "owner_memory_byte_seconds_total",
    (*_OWNER, "state"),
    "Device memory of the owner times the seconds it was held, added up from sample to sample since the "
    "exporter started; gaps and failed samples add nothing.",
    "owner",
)
OWNER_RETURNED = Family(
    PREFIX + "owner_memory_returned_bytes_total",
    _OWNER,
    "Memory of the owner's holdings that have ended, less what stayed in use, by NVML's used memory and "
    "process lists some seconds later.",
    "owner",
)
OWNER_NOT_RETURNED = Family(
    PREFIX + "owner_memory_not_returned_bytes_total",
    _OWNER,
    "Memory that outlived the owner's processes: still listed for a pid that is gone, or a rise of "
    "unattributed when the holding ended, which several that end together share.",
    "owner",
)
OWNERS_DROPPED = Family(
    PREFIX + "owners_dropped",
    DEVICE,
    "Owners that hold memory on the device and have no series of their own, being beyond --owners.max; their "
    "figures are in owner=other.",
    "owner",
)
OWNER_UNCOUNTED = Family(
    PREFIX + "owner_uncounted_seconds_total",
    DEVICE,
    "Seconds since the first sample that no owner was charged for, as samples were missing or failed.",
    "owner",
)

DEVICE_OWNERS = Family(
    PREFIX + "device_owners",
    DEVICE,
    "Owners that hold memory on the device now, known by name or not; more than 1 share it.",
    "owner",
)

RESERVATION_INFO = Family(
    PREFIX + "device_reservation_info",
    (*DEVICE, "owner_type", "owner"),
    "For whom a scheduler has reserved the device: a pod by the kubelet's pod-resources socket, a Slurm job "
    "or a Nomad task by its processes' environment; read every 20 seconds.",
    "reservations",
)
RESERVATIONS = Family(
    PREFIX + "device_reservations",
    (*DEVICE, "use"),
    "Reservations of the device by a scheduler, by whether their owners hold memory on it now: held, unheld "
    "or unknown; absent where no scheduler gives it away.",
    "reservations",
)
UNRESERVED_HOLDERS = Family(
    PREFIX + "device_unreserved_holders",
    DEVICE,
    "Processes that hold memory on the device and whose owner has no reservation of it; absent where no "
    "scheduler gives it away, or its reservations are not all known.",
    "reservations",
)
UNRESERVED_MEMORY = Family(
    PREFIX + "device_unreserved_memory_bytes",
    DEVICE,
    "Device memory that is held without a reservation of the device, in NVML's own figures; absent where no "
    "scheduler gives it away, or its reservations are not all known.",
    "reservations",
)

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        *SNAPSHOT_FAMILIES,
        COLLECTOR_SUCCESS,
        COLLECTOR_DURATION,
        WEB_REFUSED,
        WEB_CONFIG_LOADED,
        WEB_CONFIG_LOADED_TIME,
        *DEVICE_FAMILIES,
        *HARDWARE_FAMILIES,
        *HOLDING_FAMILIES,
        PROCESS_START,
        PROCESS_INFO,
        FRAMEWORK_POLICY,
        PROCESSES_DROPPED,
        OWNER_MEMORY,
        OWNER_BYTE_SECONDS,
        OWNER_RETURNED,
        OWNER_NOT_RETURNED,
        OWNERS_DROPPED,
        OWNER_UNCOUNTED,
        DEVICE_OWNERS,
        RESERVATION_INFO,
        RESERVATIONS,
        UNRESERVED_HOLDERS,
        UNRESERVED_MEMORY,
        UNREADABLE,
        *metrics_of_agents.FAMILIES,
    )
}
"""The whole contract, by name."""


def sampling(snapshot: Snapshot, health: Health) -> Collected:
    """Say how sampling fares; ``health`` is per collector (succeeded, seconds)."""
    collected: Collected = [(family, list(family.read(snapshot))) for family in SNAPSHOT_FAMILIES]
    collected.append((COLLECTOR_SUCCESS, [((name,), ok) for name, (ok, _) in health.items()]))
    collected.append((COLLECTOR_DURATION, [((name,), seconds) for name, (_, seconds) in health.items()]))
    return collected


def devices(snapshot: Snapshot, collector: str) -> Collected:
    """Give the device families of one collector; of a device that is down only its XID errors.

    They come from the driver's events, and the XID 79 that took a GPU off the bus is why it is down.
    """
    shown = devices_shown(snapshot, down=collector == "xid")
    collected: Collected = []
    for family in (*DEVICE_FAMILIES, *HARDWARE_FAMILIES):
        if family.collector != collector:
            continue
        samples: list[Sample] = []
        for key, device in shown:
            value = family.read(device)
            if value is None or isinstance(value, Mapping) != (family.labels != DEVICE):
                continue
            if isinstance(value, Mapping):
                samples += [((*key, label), each) for label, each in value.items()]
            else:
                samples.append((key, value))
        collected.append((family, samples))
    return collected


def hardware(snapshot: Snapshot) -> Collected:
    """Give the hardware context; name keys that the contract does not know in the debug log."""
    for _, device in devices_shown(snapshot):
        if unknown := device.reading.hardware.keys() - HARDWARE.keys():
            about = fields(uuid=device.reading.uuid, keys=",".join(sorted(unknown)))
            log.debug("Ignored hardware readings", extra=about)
    return devices(snapshot, "hardware")


def processes(snapshot: Snapshot, most: int) -> Collected:
    """Give the series of the ``most`` largest holdings of each device (0: all), the rest as one."""
    samples: dict[HoldingFamily, list[Sample]] = {family: [] for family in HOLDING_FAMILIES}
    readers = [(family.read, rows.append, "state" in family.labels) for family, rows in samples.items()]
    dropped: list[Sample] = []
    pids: set[int] = set()
    for key, device in devices_shown(snapshot):
        holdings = sorted(device.holdings, key=lambda each: (-(each.memory or 0), each.pid))
        kept, rest = (holdings[:most], holdings[most:]) if most else (holdings, [])
        for holding in sorted(kept, key=lambda each: each.pid):
            pids.add(holding.pid)
            labels = (*key, str(holding.pid))
            for read, append, stated in readers:
                if (value := read(holding)) is not None:
                    append(((*labels, holding.state.value) if stated else labels, value))
        known = [holding.memory for holding in rest if holding.memory is not None]
        if known:
            samples[PROCESS_MEMORY].append(((*key, OTHER), sum(known)))
        if device.holdings or device.reading.processes is not None:
            dropped.append((key, len(rest)))
    starts: list[Sample] = []
    info: list[Sample] = []
    policies: list[Sample] = []
    for pid in sorted(pids):
        process = snapshot.processes.get(pid)
        if process is not None:
            starts.append(((str(pid),), process.start_time))
            if process.facts is not None:
                policies.append(((str(pid), *process.policy[:3]), 1))
        # A holder that /proc no longer shows has a row too, or a join would lose exactly the dead.
        facts = process and process.facts
        user = (facts and facts.user) or ""
        command = (facts and facts.command) or ""
        owner = (facts and facts.owner) or (Owner("user", user) if user else Owner("", ""))
        settled = process.settled if process is not None else ("", "")
        info.append(((str(pid), user, command, *settled, *owner), 1))
    return [
        *samples.items(),
        (UNREADABLE, list(_unreadable(snapshot))),
        (PROCESS_START, starts),
        (PROCESS_INFO, info),
        (FRAMEWORK_POLICY, policies),
        (PROCESSES_DROPPED, dropped),
    ]


def _unreadable(snapshot: Snapshot) -> Iterable[Sample]:
    if not snapshot.up:
        return
    for name in ("environ", "maps", "cgroup"):
        known = (each.facts for each in snapshot.processes.values() if each.facts is not None)
        yield (name,), sum(1 for facts in known if name in facts.denied)
    if snapshot.hidden_unreadable is not None:
        yield ("fd",), snapshot.hidden_unreadable


def owners(snapshot: Snapshot) -> Collected:
    """Give the owners' accounts of each device; the history has kept them within --owners.max."""
    held: list[Sample] = []
    seconds: list[Sample] = []
    returned: list[Sample] = []
    kept: list[Sample] = []
    dropped: list[Sample] = []
    uncounted: list[Sample] = []
    holding: list[Sample] = []
    for key, device in devices_shown(snapshot):
        if device.owners is None:
            continue
        for account in device.owners.accounts:
            labels = (*key, account.type, account.name)
            held += [((*labels, state.value), memory) for state, memory in sorted(account.held.items())]
            seconds += [
                ((*labels, state.value), sum_) for state, sum_ in sorted(account.byte_seconds.items())
            ]
            returned.append((labels, account.returned))
            kept.append((labels, account.not_returned))
        dropped.append((key, device.owners.dropped))
        uncounted.append((key, device.owners.uncounted))
        holding.append((key, device.owners.holding))
    return [
        (OWNER_MEMORY, held),
        (OWNER_BYTE_SECONDS, seconds),
        (OWNER_RETURNED, returned),
        (OWNER_NOT_RETURNED, kept),
        (OWNERS_DROPPED, dropped),
        (OWNER_UNCOUNTED, uncounted),
        (DEVICE_OWNERS, holding),
    ]


def reservations(snapshot: Snapshot) -> Collected:
    """Say for whom each device is reserved, and who holds it without; nothing where nobody reserves."""
    info: list[Sample] = []
    uses: list[Sample] = []
    holders: list[Sample] = []
    memory: list[Sample] = []
    for key, device in devices_shown(snapshot):
        standing = device.standing
        if standing is None:
            continue
        info += [((*key, each.type, each.name), 1) for each in standing.reserved]
        for use, held in (("held", True), ("unheld", False), ("unknown", None)):
            uses.append(((*key, use), sum(1 for each in standing.reserved if each.held is held)))
        if standing.unreserved is None:
            continue
        known = [each.memory for each in device.holdings if each.pid in standing.unreserved]
        holders.append((key, len(known)))
        if None not in known:
            memory.append((key, sum(each or 0 for each in known)))
    return [
        (RESERVATION_INFO, info),
        (RESERVATIONS, uses),
        (UNRESERVED_HOLDERS, holders),
        (UNRESERVED_MEMORY, memory),
    ]


def collectors(most: int) -> dict[str, Callable[[Snapshot], Collected]]:
    """Return the collectors that read the snapshot; ``exporter``, which does not, is exposition's own."""
    return {
        "ledger": lambda snapshot: devices(snapshot, "ledger"),
        "process": lambda snapshot: processes(snapshot, most),
        "owner": owners,
        "reservations": reservations,
        "agent": lambda snapshot: metrics_of_agents.agents(snapshot, most),
        "hardware": hardware,
        "energy": lambda snapshot: devices(snapshot, "energy"),
        "xid": lambda snapshot: devices(snapshot, "xid"),
        "hidden": lambda snapshot: devices(snapshot, "hidden"),
        "pcie": lambda snapshot: devices(snapshot, "pcie"),
    }
