"""Show what frameworks take and what their programs need; and the figures that only PyTorch has."""

from __future__ import annotations

from dashboards.src.dashboard import FRAMEWORK, Dashboard, Row, owner_variable
from dashboards.src.panels import (
    BYTES,
    COUNT,
    NO_HOLDER,
    PROCESS_LEGEND,
    SHARE,
    Column,
    Panel,
    Query,
    stat,
    table,
    time_series,
)
from dashboards.src.queries import (
    CHOSEN_OWNER,
    DEVICE_LABELS,
    NODE_LABELS,
    bytes_beyond_need,
    count_equal,
    filtered_by_holdings,
    holdings,
    holdings_metric,
    increase,
    join_processes,
    rate,
    selector,
)
from dashboards.src.shared_panels import GPU_COLUMN, NODE_COLUMN, OWNER_COLUMN, PROCESS_COLUMN, exporters

NO_AGENT = "not available: no agent in any program"
NO_TORCH = "not available: no torch program with an agent"
FRAMEWORK_LEGEND = f"{PROCESS_LEGEND} {{{{framework}}}}"
PREALLOCATING = 'policy=~"preallocate|fraction"'


def owners_metric(metric: str) -> str:
    """Return a metric of the chosen owners' processes."""
    return holdings_metric(metric, CHOSEN_OWNER)


def owners_sum(metric: str) -> str:
    """Return the sum of a metric over the chosen owners' processes."""
    return f"sum{owners_metric(metric)}"


def owners_increase(metric: str) -> str:
    """Return by how much a counter of the chosen owners' processes has risen, from point to point."""
    return filtered_by_holdings(increase(metric), CHOSEN_OWNER)


def agents_reporting() -> Panel:
    """Make the indicator of agents: without one, a framework's figures are not available."""
    return stat(
        "Agents",
        "Programs whose agent reports, and those whose agent is silent. A program without an agent has no "
        "figures here.",
        Query(count_equal("vramledger_agent_up", 1), "report"),
        Query(count_equal("vramledger_agent_up", 0), "silent"),
        unit=COUNT, absent="no program has an agent",
    )  # fmt: skip


def torch_caches() -> Panel:
    reserved = owners_sum("vramledger_torch_reserved_bytes")
    allocated = owners_sum("vramledger_torch_allocated_bytes")
    return stat(
        "In torch's caches",
        "Memory that torch has taken from the driver but that no live tensor uses.",
        Query(f"{reserved} - {allocated}"), unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def reclaimable() -> Panel:
    return stat(
        "Could be freed",
        "What torch.cuda.empty_cache() would free now, over all programs.",
        Query(owners_sum("vramledger_torch_reclaimable_bytes")), unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def held_beyond_need() -> Panel:
    return stat(
        "Held beyond need",
        "The memory that programs hold above their highest need.",
        Query(bytes_beyond_need(CHOSEN_OWNER)), unit=BYTES, absent=NO_AGENT,
    )  # fmt: skip


def preallocating() -> Panel:
    return stat(
        "Preallocated pools",
        "Memory of programs whose framework preallocates the device or a fraction of it.",
        Query(f"sum({holdings(CHOSEN_OWNER, PREALLOCATING)})"), unit=BYTES,
        absent="none, or no data",
    )  # fmt: skip


def more_jobs_fit() -> Panel:
    return stat(
        "More jobs would fit",
        "How many more jobs like the running ones would fit, by memory and by SMs, if each program held "
        "only what it needs. The free memory of a GPU counts once.",
        Query(
            f"sum({selector('vramledger_device:more_jobs_fit:floor')}\n"
            f"and on ({NODE_LABELS}, uuid) {holdings(CHOSEN_OWNER)})"
        ),
        unit=COUNT, absent=NO_AGENT,
    )  # fmt: skip


def torch_totals() -> Panel:
    names = ("reserved", "allocated", "active", "requested")
    return time_series(
        "torch: reserved, allocated, active, requested",
        "Over all programs: memory taken from the driver, used by live tensors, the same "
        "with what streams may still use, and requested before rounding.",
        *(Query(owners_sum(f"vramledger_torch_{name}_bytes"), name) for name in names),
        unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def torch_fragmentation() -> Panel:
    split = owners_metric("vramledger_torch_inactive_split_bytes")
    return time_series(
        "torch: fragmentation",
        "Share of the pool that is free and cannot be freed to the driver; 0 with expandable segments, where "
        "it is not known. It matters when retries also rise.",
        Query(
            f"{split}\n/ on ({DEVICE_LABELS}, pid) {selector('vramledger_torch_reserved_bytes')}",
            PROCESS_LEGEND,
        ),
        unit=SHARE, maximum=1, absent=NO_TORCH,
    )  # fmt: skip


def torch_split_blocks() -> Panel:
    return time_series(
        "torch: free parts of used blocks",
        "They cannot be freed to the driver; 0 with expandable segments.",
        Query(owners_metric("vramledger_torch_inactive_split_bytes"), PROCESS_LEGEND),
        unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def torch_retries() -> Panel:
    return time_series(
        "torch: retries and failures",
        "Allocations that were served only after the cache was flushed, and those that failed for lack of "
        "memory.",
        Query(owners_increase("vramledger_torch_alloc_retries_total"), f"{PROCESS_LEGEND} retries"),
        Query(owners_increase("vramledger_torch_ooms_total"), f"{PROCESS_LEGEND} out of memory"),
        unit=COUNT, absent=NO_TORCH,
    )  # fmt: skip


def policy_counts() -> Panel:
    policies = selector("vramledger_framework_policy_info")
    return table(
        "Frameworks and how they take memory",
        "How many programs take memory by which policy, and how that is known.",
        Query(f"count by (framework, policy, source) ({policies}\n{join_processes(CHOSEN_OWNER)})"),
        columns=[
            Column("framework", "Framework"),
            Column("policy", "Policy"),
            Column("source", "Known by"),
            Column("Value", "Programs", COUNT, bar=True),
        ],
        sort="Value", absent=NO_HOLDER, height=8,
    )  # fmt: skip


def hoarding_factors() -> Panel:
    by = f"{DEVICE_LABELS}, pid"
    labels = f"{by}, command, framework, policy, owner"
    return table(
        "Hoarding factor",
        "For each program: the held memory divided by its peak need, how many more jobs "
        "with that need would fit on its device, and how many such jobs the SMs could "
        "serve.",
        Query(f"max by ({labels}) ({holdings(CHOSEN_OWNER)})"),
        Query(f"max by ({by}) ({owners_metric('vramledger_process:peak_need_bytes:sum')})"),
        Query(f"max by ({by}) ({owners_metric('vramledger_process:hoarding_factor:ratio')})"),
        Query(f"max by ({by}) ({owners_metric('vramledger_process:more_jobs_fit:floor')})"),
        Query(f"max by ({by}) ({owners_metric('vramledger_process:jobs_fit_sms:floor')})"),
        columns=[
            OWNER_COLUMN,
            PROCESS_COLUMN,
            Column("command", "Program"),
            Column("framework", "Framework", width=110),
            Column("policy", "Policy", width=110),
            Column("Value #A", "Holds", BYTES, width=110),
            Column("Value #B", "Most needed", BYTES, width=120),
            Column("Value #C", "Holds, times need", COUNT, bar=True),
            Column("Value #D", "More would fit", COUNT, width=130),
            Column("Value #E", "Jobs by SMs", COUNT, width=120),
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value #C", absent=NO_AGENT, width=24,
    )  # fmt: skip


def pools_by_framework() -> Panel:
    return time_series(
        "Pools and use, by framework",
        "Over all programs: what each framework has taken from the driver, and what the programs use of it.",
        *(
            Query(f"sum by (framework) {owners_metric(f'vramledger_framework_{name}_bytes')}", legend)
            for name, legend in (("pool", "{{framework}} pool"), ("in_use", "{{framework}} in use"))
        ),
        unit=BYTES, absent=NO_AGENT,
    )  # fmt: skip


def need_by_program() -> Panel:
    return time_series(
        "Pool and need, by program",
        "What each framework has taken in each program, the program's highest use of it, and what it "
        "uses now. If they differ for a long time, a preallocation or a cache is larger than necessary.",
        Query(owners_metric("vramledger_framework_pool_bytes"), f"{FRAMEWORK_LEGEND} pool"),
        Query(owners_metric("vramledger_framework_in_use_peak_bytes"), f"{FRAMEWORK_LEGEND} peak"),
        Query(owners_metric("vramledger_framework_in_use_bytes"), f"{FRAMEWORK_LEGEND} in use"),
        unit=BYTES, absent=NO_AGENT,
    )  # fmt: skip


def limits() -> Panel:
    return time_series(
        "Limits",
        "The maximum that each framework may take in each program, if it reports a limit.",
        Query(owners_metric("vramledger_framework_limit_bytes"), f"{FRAMEWORK_LEGEND} limit"),
        unit=BYTES, absent="no framework reports a limit, or no agent in any program",
    )  # fmt: skip


def unneeded_cache() -> Panel:
    return time_series(
        "Cache not needed for an hour",
        "The part of the pool that was not in use at any time within the hour, if the "
        "pool is many times larger than that use; only for frameworks whose cache the "
        "program can empty.",
        Query(owners_metric("vramledger_process:cache_unneeded_bytes:max1h"), FRAMEWORK_LEGEND),
        unit=BYTES, absent="no cache is that large, or no agent in any program",
    )  # fmt: skip


def rarely_needed() -> list[Panel]:
    return [
        time_series(
            "Private pools of torch",
            "Memory in private pools, such as those of CUDA graphs.",
            Query(owners_metric("vramledger_torch_private_pools_bytes"), PROCESS_LEGEND),
            unit=BYTES, absent=NO_TORCH,
        ),
        time_series(
            "Runs of Python's garbage collector",
            "Number of runs in a second. Tensors in reference cycles stay until a run, "
            "so a long time without one looks like a leak.",
            Query(rate("vramledger_python_collections_total"), "{{instance}}: {{pid}}"),
            unit="cps", absent=NO_AGENT,
        ),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of frameworks."""
    return Dashboard(
        FRAMEWORK,
        "Frameworks",
        "What frameworks take and what their programs need, and how many more jobs would fit.",
        [
            Row(
                "Now",
                [
                    exporters(),
                    agents_reporting(),
                    torch_caches(),
                    reclaimable(),
                    held_beyond_need(),
                    more_jobs_fit(),
                ],
            ),
            Row(
                "Programs that hold more than they need",
                [hoarding_factors(), policy_counts(), pools_by_framework()],
            ),
            Row(
                "Every framework",
                [need_by_program(), limits(), unneeded_cache(), preallocating()],
            ),
            Row(
                "torch",
                [
                    torch_totals(),
                    torch_fragmentation(),
                    torch_split_blocks(),
                    torch_retries(),
                ],
            ),
            Row("Private pools, garbage collector", rarely_needed(), collapsed=True),
        ],
        [owner_variable()],
    )
