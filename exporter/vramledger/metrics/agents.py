"""Declare the families of agents' reports, joined to NVML's bytes where both are known, and their socket."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vramledger.accounting.agent_figures import needed, overhead
from vramledger.metrics.families import (
    HOLDING,
    PREFIX,
    Collected,
    Family,
    FamilySamples,
    Labels,
    devices_shown,
    group,
    split_largest,
)
from vramledger.model.agent_report import REASONS, AgentReport
from vramledger.model.snapshot import AgentSnapshot, Holding, Snapshot
from vramledger_agent.protocol.frameworks import COUNTER_FIGURES, POOL_FIGURES, REPORTING_FRAMEWORKS
from vramledger_agent.protocol.messages import ALLOCATOR_SETTINGS, CATEGORIES

COLLECTOR = "agent"


_REPORT = "the agent's report"
_SILENT = "when the agent has not reported"
_NOT_SAID = "when the agent does not report it"


def _family(name: str, labels: Labels, help_: str, *, source: str = _REPORT, absent: str = _SILENT) -> Family:
    return Family(PREFIX + name, labels, help_, COLLECTOR, source, absent)


# --- of the socket ---------------------------------------------------------------------------------

_NO_SOCKET = "when the source is a replay"

SOCKET_UP = _family(
    "agent_socket_up",
    (),
    "1 when the exporter listens for agents at --agent.socket, 0 when it cannot; absent in a replay.",
    source="the exporter's socket",
    absent=_NO_SOCKET,
)
CONNECTIONS = _family(
    "agent_connections",
    (),
    "Processes that are connected to the agents' socket, whether they hold GPU memory or not.",
    source="the exporter's socket",
    absent=_NO_SOCKET,
)
REJECTED = _family(
    "agent_rejected_total",
    ("reason",),
    "Messages and connections that the agents' socket rejected since the exporter started, by reason.",
    source="the exporter's own count",
    absent=_NO_SOCKET,
)

# --- of an agent -----------------------------------------------------------------------------------

UP = _family(
    "agent_up",
    ("pid", "reason"),
    "1 when the holder's agent reports and nothing in it failed in the last minute, "
    "otherwise 0, with the reason.",
    source="the agent's reports, their sender as the kernel gives it, and the holder's environment",
    absent="when the holder has no agent and was not started with one",
)
INFO = _family(
    "agent_info",
    ("pid", "version", "python_version"),
    "The version of the holder's agent and of its Python, as the agent reports them.",
)
TIMESTAMP = _family(
    "agent_report_timestamp_seconds",
    ("pid",),
    "Unix time at which the newest report of the holder's agent arrived.",
    source="the exporter's clock",
)
UNMAPPED = _family(
    "agent_unmapped_devices",
    ("pid",),
    "Devices of the newest report that could not be assigned to one GPU with certainty, "
    "so that their figures are not shown.",
    source="the agent's report, `CUDA_VISIBLE_DEVICES` in it, and NVML's process lists",
)


TORCH_ALLOCATOR = _family(
    "torch_allocator_info",
    ("pid", "backend", *ALLOCATOR_SETTINGS),
    "The backend and settings of PyTorch's allocator in the holder, as its agent first reported them.",
    absent="when no PyTorch with an initialised allocator is reported",
)
PINNED, PINNED_IN_USE = (
    _family(
        f"torch_pinned{name}_bytes",
        ("pid",),
        f"Host memory that PyTorch's allocator has pinned for the GPUs{use}.",
        source="`torch.cuda.host_memory_stats()`",
        absent="before PyTorch 2.7, and when PyTorch does not use its own allocator",
    )
    for name, use in (("", ", in use or cached"), ("_in_use", " and that the program uses"))
)

_BACKENDS = ("native", "cudaMallocAsync", "pluggable")


ERRORS = _family(
    "agent_errors_total",
    ("pid", "provider"),
    "Failures inside the holder's agent, by the part that failed, as the agent counts them.",
)
_AGENT_FIGURES: Mapping[Family, Callable[[AgentSnapshot], int | None]] = {
    _family(
        "agent_dropped_reports_total",
        ("pid",),
        "Reports that the holder's agent could not send, as the agent counts them.",
    ): lambda agent: agent.dropped,
    _family(
        "python_collections_total",
        ("pid",),
        "Runs of Python's cyclic garbage collector in the holder, as its agent reports them.",
        absent=_NOT_SAID,
    ): lambda agent: agent.collections,
    _family(
        "python_collector_enabled",
        ("pid",),
        "1 when Python's cyclic garbage collector is on in the holder, 0 when it is "
        "off, as its agent reports it.",
        absent=_NOT_SAID,
    ): lambda agent: agent.report.collector.enabled if agent.report and agent.report.collector else None,
}
OOM_TIME = _family(
    "framework_last_oom_timestamp_seconds",
    ("pid", "framework", "verdict"),
    "Unix time of the holder's newest failed allocation, with the agent's verdict on its cause.",
    absent="before the first failed allocation",
)
OOM_REQUESTED = _family(
    "framework_last_oom_requested_bytes",
    ("pid", "framework"),
    "Bytes that the holder's newest failed allocation requested, as its agent reports them.",
    absent="before the first failed allocation, and when the framework does not report the requested bytes",
)

# --- of a framework on a device ----------------------------------------------------------------------


def _absent(figure: str) -> str:
    """Say when a general figure is absent, with the frameworks that never give it."""
    lacking = [
        framework.title
        for framework in REPORTING_FRAMEWORKS.values()
        if framework.general.get(figure, figure) not in framework.figures
    ]
    never = f"; {', '.join(lacking)} never {'do' if len(lacking) > 1 else 'does'}" if lacking else ""
    return f"when the framework does not report it{never}"


_GENERAL: Mapping[str, Family] = {
    name: _family(
        f"framework_{name}_bytes",
        (*HOLDING, "framework"),
        f"{meaning}, as the framework in the label reports it.",
        source="the framework's own statistics",
        absent=_absent(name),
    )
    for name, meaning in POOL_FIGURES.items()
}
"""The families that serve every framework, by the figure."""

_OWN_ABSENT = {
    ("torch", "reclaimable"): "when the counters do not show it",
    ("torch", "largest_free_block"): "before the agent has taken a snapshot of the heap",
    ("torch", "private_pools"): "before PyTorch 2.13, until the agent has taken a snapshot of the heap",
}

_OWN: Mapping[tuple[str, str], Family] = {
    (framework.name, name): _family(
        f"{framework.name}_{name}_{'total' if name in COUNTER_FIGURES else 'bytes'}",
        HOLDING,
        f"{meaning}, as {framework.title} reports it ({framework.source}).",
        source=f"`{framework.source}`",
        absent=_OWN_ABSENT.get((framework.name, name), "when it does not use its own allocator"),
    )
    for framework in REPORTING_FRAMEWORKS.values()
    for name, meaning in framework.figures.items()
    if name not in POOL_FIGURES
}
"""The families of what only one framework has, by framework and figure."""

CATEGORY = _family(
    "torch_category_bytes",
    (*HOLDING, "category"),
    "Memory of live tensors by their purpose, counted from the optimizer at most every 10 seconds.",
    source="the tensors of the optimizer, and PyTorch's `memory_stats`",
    absent="when the program has no optimizer",
)
OVERHEAD = _family(
    "framework_overhead_bytes",
    HOLDING,
    "All that the process holds minus the pools of its frameworks: the context, libraries and other code.",
    source="`vramledger_process_memory_bytes` and `vramledger_process_uncharged_memory_bytes`, minus the "
    "pools of the agent's report",
    absent="when a framework does not report its pool, and when the pools exceed what the process holds "
    "(they are read a moment apart; a pool of managed memory is partly on the host)",
)
NEEDED = _family(
    "process_needed_peak_bytes",
    HOLDING,
    "The most memory that the process has needed: the sum of its frameworks' peaks of "
    "memory in use, plus the overhead.",
    source="the peaks of the agent's report, and `vramledger_framework_overhead_bytes`",
    absent="when a framework does not report its peak, and when the overhead is not known",
)

FAMILIES = (
    *(SOCKET_UP, CONNECTIONS, REJECTED, UP, INFO, TIMESTAMP, UNMAPPED, ERRORS, *_AGENT_FIGURES, OOM_TIME),
    *(OOM_REQUESTED, TORCH_ALLOCATOR, PINNED, PINNED_IN_USE, *_GENERAL.values(), *_OWN.values(), CATEGORY),
    *(OVERHEAD, NEEDED),
)


def collect(snapshot: Snapshot, most: int) -> Collected:
    """Return the agents' figures of the ``most`` largest holdings of a device (0: all), and the socket's."""
    return group(FAMILIES, _samples(snapshot, most))


def _samples(snapshot: Snapshot, most: int) -> FamilySamples:
    pids: set[int] = set()
    for key, device in devices_shown(snapshot):
        for holding in split_largest(device.holdings, most)[0]:
            pids.add(holding.pid)
            agent = snapshot.agents.get(holding.pid)
            if agent is not None and agent.pools.get(key[1]):
                yield from _holding_samples(agent, key, holding)
    for pid in sorted(pids & snapshot.agents.keys()):
        yield from _process_samples(str(pid), snapshot.agents[pid])
    socket = snapshot.agent_socket
    if socket is not None:
        yield SOCKET_UP, (), socket.listening
        yield CONNECTIONS, (), socket.connections
        for reason in REASONS:
            yield REJECTED, (reason,), socket.rejected.get(reason, 0)


def _holding_samples(agent: AgentSnapshot, key: tuple[str, str], holding: Holding) -> FamilySamples:
    labels = (*key, str(holding.pid))
    for pool in agent.pools[key[1]]:
        for name, value in pool.general.items():
            yield _GENERAL[name], (*labels, pool.framework), value
        for name, value in pool.figures.items():
            if (family := _OWN.get((pool.framework, name))) is not None:
                yield family, labels, value
        for category in CATEGORIES:
            if category in pool.categories:
                yield CATEGORY, (*labels, category), pool.categories[category]
    yield OVERHEAD, labels, overhead(agent, key[1], holding)
    yield NEEDED, labels, needed(agent, key[1], holding)


def _process_samples(pid: str, agent: AgentSnapshot) -> FamilySamples:
    yield UP, (pid, agent.problem), agent.up
    yield TIMESTAMP, (pid,), agent.received
    report = agent.report
    if report is None:
        return
    yield INFO, (pid, report.agent or "", report.python or ""), 1
    yield UNMAPPED, (pid,), agent.unmapped
    for provider, errors in sorted(agent.errors.items()):
        yield ERRORS, (pid, provider), errors
    for family, read in _AGENT_FIGURES.items():
        yield family, (pid,), read(agent)
    yield from _torch_samples(pid, report)
    oom = report.last_oom
    if oom is not None:
        yield OOM_TIME, (pid, oom.framework, oom.verdict), oom.time
        yield OOM_REQUESTED, (pid, oom.framework), oom.requested


def _torch_samples(pid: str, report: AgentReport) -> FamilySamples:
    for each in report.frameworks:
        if each.framework == "torch" and each.allocator is not None:
            backend = each.allocator if each.allocator in _BACKENDS else "other"
            yield TORCH_ALLOCATOR, (pid, backend, *(each.settings.get(n, "") for n in ALLOCATOR_SETTINGS)), 1
        yield PINNED, (pid,), each.pinned
        yield PINNED_IN_USE, (pid,), each.pinned_in_use
