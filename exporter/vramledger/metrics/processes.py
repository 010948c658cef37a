"""Declare the families of a holding and of the process that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vramledger.metrics.families import (
    DEVICE,
    HOLDING,
    PREFIX,
    PROCESS_LISTS,
    Collected,
    Family,
    Labels,
    Sample,
    devices_shown,
    split_largest,
)
from vramledger.model.reading import Owner, ProcessFacts
from vramledger.model.snapshot import Holding, ProcessSnapshot, Snapshot, State

OTHER = "other"
"""The ``pid`` label of the bytes of all holdings beyond ``--processes.max``."""

_UNKNOWN_BYTES = "when NVML does not report the bytes of the process"


class HoldingFamily(Family, frozen=True):
    """A family with one sample for each holding."""

    read: Callable[[Holding], float | None]


def _holding(
    name: str, read: Callable[[Holding], float | None], help_: str, *by: str, source: str, absent: str
) -> HoldingFamily:
    return HoldingFamily(PREFIX + name, (*HOLDING, *by), help_, "process", source, absent, read)


HOLDING_FAMILIES = (
    _holding(
        "process_memory_bytes",
        lambda holding: holding.memory,
        "Device memory of the process as NVML reports it (the largest of its compute, "
        "graphics and MPS lists); absent where NVML does not report it.",
        source=PROCESS_LISTS,
        absent=_UNKNOWN_BYTES,
    ),
    _holding(
        "process_memory_peak_bytes",
        lambda holding: holding.peak,
        "Highest device memory of the process in any sample since the exporter first saw it there.",
        source="the bytes of `vramledger_process_memory_bytes` in every sample",
        absent=_UNKNOWN_BYTES,
    ),
    _holding(
        "process_uncharged_memory_bytes",
        lambda holding: None if holding.uncharged is None else holding.uncharged.least,
        "Device memory that is certainly the process' own although NVML charges it to no process (managed "
        "memory, memory whose creator has ended), from its mappings and from what ended holders left; the "
        "grade says how good the evidence is.",
        "grade",
        source="used memory beyond NVML's process lists, `/proc/PID/maps`",
        absent="when the process can have none, or nothing is known of it",
    ),
    _holding(
        "process_uncharged_memory_max_bytes",
        lambda holding: None if holding.uncharged is None else holding.uncharged.most,
        "Device memory that NVML charges to no process and that the process can have at most; more than "
        "process_uncharged_memory_bytes where another process can have it too.",
        source="those of `vramledger_process_uncharged_memory_bytes`",
        absent="when the process can have none, or nothing is known of it",
    ),
    _holding(
        "process_managed_memory_bytes",
        lambda holding: None if holding.uncharged is None else holding.uncharged.managed,
        "Part of process_uncharged_memory_bytes that is managed memory, which the driver moves to the host "
        "when another program allocates; it is not free, but no allocation fails because of it.",
        source="used memory beyond NVML's process lists, `/proc/PID/maps`",
        absent="when the process can have none, or nothing is known of it",
    ),
    _holding(
        "process_sm_utilization_ratio",
        lambda holding: holding.sm,
        "Share of time in which the process kept the SMs busy, from "
        "nvmlDeviceGetProcessUtilization, which misses small kernels; beside other holders it is the "
        "whole device's figure, and no share of this process; absent when unknown, never 0.",
        source="nvmlDeviceGetProcessUtilization",
        absent="when NVML has no row for the process, which is not a sign of idleness",
    ),
    _holding(
        "process_last_active_timestamp_seconds",
        lambda holding: holding.last_active,
        "Unix time of the last sign of GPU work of the process, from NVML's utilisation or a change of its "
        "bytes; absent before the first sign.",
        source="nvmlGpmMetricsGet, nvmlDeviceGetProcessUtilization and the process lists",
        absent="before the first sign of work",
    ),
    _holding(
        "process_busy_without_work_since_timestamp_seconds",
        lambda holding: holding.busy_without_work_since,
        "Unix time since which the process has kept the device busy while it computed and moved nothing, as "
        "in a collective that waits for a lost rank, from GPM's counters; absent before 2 minutes of it.",
        source="nvmlGpmMetricsGet, nvmlDeviceGetUtilizationRates, nvmlDeviceGetProcessUtilization",
        absent="when the device works or does nothing, before 2 minutes of it, and before Hopper",
    ),
    _holding(
        "process_orphan_working",
        lambda holding: (
            None if holding.state is not State.ORPHANED or holding.working is None else float(holding.working)
        ),
        "1 if an orphaned holder still works on the GPU, 0 if it is proven or seen that it has not for "
        "--idle-after, from GPM's counters, NVML's utilisation and changes of its bytes.",
        source="the signs of `vramledger_process_last_active_timestamp_seconds`",
        absent="when the holder is not orphaned, and before either is known",
    ),
    _holding(
        "process_state_since_timestamp_seconds",
        lambda holding: holding.since,
        "Unix time at which the holding entered this state, from /proc and NVML, one series for each "
        "holding; for idle the time since which evidence of this grade shows no work.",
        "state",
        "grade",
        source="NVML's process lists, `/proc/PID/stat`, nvmlGpmMetricsGet, nvmlDeviceGetProcessUtilization, "
        "the agent's report",
        absent="never",
    ),
)
SUMMED_FAMILIES = tuple(each for each in HOLDING_FAMILIES if each.name.endswith("_memory_bytes"))
"""Those whose sum over all holdings must be complete: with a series for all holdings without their own."""
PROCESS_START = Family(
    PREFIX + "process_start_time_seconds",
    ("pid",),
    "Unix time at which the holder started, from /proc/PID/stat; it distinguishes a "
    "reused pid from the earlier process.",
    "process",
    source="`/proc/PID/stat`",
    absent="when `/proc` does not show the holder (states `dead` and `unknown`)",
)
PROCESS_INFO = Family(
    PREFIX + "process_info",
    (
        *("pid", "user", "command", "framework", "policy", "owner_type", "owner"),
        *("namespace", "pod", "container", "slurm_job", "unit", "notebook"),
    ),
    "Identity of the holder, from /proc: the program's name without arguments, its user "
    "and owner; an unknown label is empty.",
    "process",
    source="`status`, `cmdline`, `cgroup` and `environ` below `/proc/PID`; files of the container runtime",
    absent="never",
)
RANK_INFO = Family(
    PREFIX + "process_rank_info",
    ("pid", "rank", "ranks", "job_id"),
    "Rank of the holder in a distributed job, how many ranks there are, and the identity that they have in "
    "common, from its agent or its environment.",
    "process",
    source="the agent's report (`torch.distributed`, `jax.distributed`, `os.environ`), `/proc/PID/environ`",
    absent="when neither names all three, for a job of a single rank, and when the agent of one process has "
    "reported more than 8 ranks",
)
FRAMEWORK_POLICY = Family(
    PREFIX + "framework_policy_info",
    ("pid", "framework", "policy", "source"),
    "How the holder's framework takes memory, from its agent, or judged from its mapped "
    "libraries, its environment and its memory pattern; unknown without evidence.",
    "process",
    source="the agent's report, or `/proc/PID/maps`, `/proc/PID/environ` and the bytes in every sample",
    absent="when nothing is known of the holder from `/proc`",
)
UNREADABLE = Family(
    PREFIX + "unreadable_processes",
    ("file",),
    "Processes whose file below /proc/PID we may not read, so that less is known of "
    "them: environ, maps and cgroup of holders, fd of all processes that were searched "
    "for hidden holders.",
    "process",
    source="files below `/proc/PID` that could not be opened",
    absent="never; `fd` before the first search for hidden holders has ended",
)
PROCESSES_DROPPED = Family(
    PREFIX + "processes_dropped",
    DEVICE,
    "Holdings beyond the --processes.max largest of the device, which have no series of "
    "their own; their bytes are in pid=other of process_memory_bytes and process_uncharged_memory_bytes.",
    "process",
    source="NVML's process lists and `--processes.max`",
    absent="when NVML did not give the process list",
)
FAMILIES = (
    *HOLDING_FAMILIES, PROCESS_START, PROCESS_INFO, RANK_INFO, FRAMEWORK_POLICY, UNREADABLE,
    PROCESSES_DROPPED,
)  # fmt: skip


def collect(snapshot: Snapshot, most: int) -> Collected:
    """Return the series of the ``most`` largest holdings of each device (0: all), and one for the rest."""
    samples: dict[HoldingFamily, list[Sample]] = {family: [] for family in HOLDING_FAMILIES}
    readers = [(family.read, rows.append, family.labels[len(HOLDING) :]) for family, rows in samples.items()]
    dropped: list[Sample] = []
    pids: set[int] = set()
    for key, device in devices_shown(snapshot):
        kept, rest = split_largest(device.holdings, most)
        for holding in sorted(kept, key=lambda each: each.pid):
            pids.add(holding.pid)
            labels = (*key, str(holding.pid))
            for read, append, by in readers:
                if (value := read(holding)) is not None:
                    append(((*labels, *_labels(holding, by)) if by else labels, value))
        for family in SUMMED_FAMILIES:
            samples[family] += _sum_of_others(family, (*key, OTHER), rest)
        if device.holdings or device.reading.processes is not None:
            dropped.append((key, len(rest)))
    return [
        *samples.items(),
        (UNREADABLE, list(_unreadable(snapshot))),
        *_about_processes(snapshot, sorted(pids)),
        (PROCESSES_DROPPED, dropped),
    ]


def _about_processes(snapshot: Snapshot, pids: Iterable[int]) -> Collected:
    """Return what is known of these processes, also of the dead that /proc no longer shows."""
    rows: Collected = [(PROCESS_START, []), (PROCESS_INFO, []), (RANK_INFO, []), (FRAMEWORK_POLICY, [])]
    (_, starts), (_, info), (_, ranks), (_, policies) = rows
    for pid in pids:
        process, facts = snapshot.processes.get(pid), snapshot.facts_of(pid)
        info.append(((str(pid), *_described(facts, process)), 1))
        if process is not None:
            starts.append(((str(pid),), process.start_time))
            if process.rank is not None:
                ranks.append(((str(pid), *map(str, process.rank)), 1))
            if process.facts is not None:
                policies.append(((str(pid), *process.policy[:3]), 1))
    return rows


def _described(facts: ProcessFacts | None, process: ProcessSnapshot | None) -> Labels:
    settled = process.settled if process is not None else ("", "")
    if facts is None:
        return ("", "", *settled, *Owner("", ""))
    return (facts.user or "", facts.command or "", *settled, *(facts.owner_or_user or Owner("", "")))


def _sum_of_others(family: HoldingFamily, labels: Labels, rest: Iterable[Holding]) -> Iterable[Sample]:
    by = family.labels[len(HOLDING) :]
    sums: dict[Labels, float] = {}
    for holding in rest:
        if (value := family.read(holding)) is not None:
            more = _labels(holding, by) if by else ()
            sums[more] = sums.get(more, 0) + value
    return [((*labels, *more), value) for more, value in sums.items()]


def _labels(holding: Holding, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of the labels that a family has besides those of the holding."""
    if names == ("grade",):  # of its uncharged memory
        return (holding.uncharged.grade.value if holding.uncharged is not None else "",)
    return (holding.state.value, holding.grade.value)


def _unreadable(snapshot: Snapshot) -> Iterable[Sample]:
    if not snapshot.up:
        return
    for name in ("environ", "maps", "cgroup"):
        known = (each.facts for each in snapshot.processes.values() if each.facts is not None)
        yield (name,), sum(1 for facts in known if name in facts.denied)
    if snapshot.hidden_unreadable is not None:
        yield ("fd",), snapshot.hidden_unreadable
