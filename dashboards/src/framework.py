"""Show who holds more than it needs, by framework and policy, and which programs could share a GPU."""

from __future__ import annotations

from dashboards.src.dashboard import FRAMEWORK, Dashboard, Row
from dashboards.src.panels import (
    BYTES,
    COUNT,
    NO_HOLDER,
    ROUNDED,
    SHARE,
    Column,
    Panel,
    Query,
    counted,
    stat,
    table,
    time_series,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    HOLDING_LABELS,
    NO_AGENT,
    NO_NEED,
    NODE_LABELS,
    count_equal,
    holdings,
    rate,
    selector,
)
from dashboards.src.shared_panels import (
    FRAMEWORK_COLUMNS,
    GPU_COLUMN,
    NODE_COLUMN,
    OWNER_COLUMN,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    exporters_by_status,
)
from vramledger.views.colours import GRAFANA

WITHOUT_AGENT = "no program has an agent"
NO_TORCH = "no torch program has an agent"
PROCESS = "{{instance}} GPU {{gpu}}: {{command}} {{pid}}"
BY_PROCESS = f"{DEVICE_LABELS}, pid"


def need() -> str:
    """Return the highest need of each program whose agent reports it."""
    return selector("vramledger_process_needed_peak_bytes")


def beyond_need() -> str:
    """Return each holding's bytes above its need, with the labels of its owner."""
    return f"clamp_min({holdings()} - on ({HOLDING_LABELS}) group_left () {need()}, 0)"


def named(figure: str) -> str:
    """Return a figure of processes with the program's name."""
    names = f"sum by ({BY_PROCESS}, command) ({holdings()} * 0)"
    return f"sum by ({BY_PROCESS}) ({figure}) + on ({HOLDING_LABELS}) group_right () {names}"


def agents_reporting() -> Panel:
    """Make the indicator of agents: without one, a framework's figures are not available."""
    return stat(
        "Agents",
        "Programs whose agent reports, and those whose agent is silent. A program without an agent has no "
        "figures here.",
        Query(count_equal("vramledger_agent_up", 1), "report"),
        Query(count_equal("vramledger_agent_up", 0), "silent"),
        unit=COUNT, absent=WITHOUT_AGENT,
    )  # fmt: skip


def need_known() -> Panel:
    known = f"sum({holdings()} and on ({HOLDING_LABELS}) {need()})"
    return stat(
        "Need is known for",
        "Share of the held memory whose program has an agent that reports its need. The rest is not judged "
        "here.",
        Query(f"({known} or 0 * sum({holdings()})) / sum({holdings()})"), unit=SHARE, absent=NO_HOLDER,
    )  # fmt: skip


def held_beyond_need() -> Panel:
    return stat(
        "Held beyond need",
        "The memory that programs hold above their highest need.",
        Query(f"sum({beyond_need()})"), unit=BYTES, absent=WITHOUT_AGENT, colour=GRAFANA["idle"],
    )  # fmt: skip


def reclaimable() -> Panel:
    return stat(
        "Could be freed",
        "What torch.cuda.empty_cache() would free now, over all programs.",
        Query(f"sum({selector('vramledger_torch_reclaimable_bytes')})"), unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def more_jobs_fit() -> Panel:
    return stat(
        "More jobs would fit",
        "How many more jobs like the running ones would fit, by memory and by SMs, if each program held "
        "only what it needs. The free memory of a GPU counts once.",
        Query(f"sum({selector('vramledger_device:more_jobs_fit:floor')})"), unit=COUNT, absent=WITHOUT_AGENT,
    )  # fmt: skip


def by_policy() -> Panel:
    by = "framework, policy"
    known = f"{holdings()} and on ({HOLDING_LABELS}) {need()}"
    return table(
        "Held and needed, by framework and policy",
        "What the programs of each framework hold by the way in which it takes memory, for how much of "
        "that the need is known, and what of that is above the need.",
        Query(f"topk(20, sum by ({by}) ({holdings()}))"),
        Query(f"count by ({by}) ({holdings()})"),
        Query(f"sum by ({by}) ({known})"),
        Query(f"sum by ({by}) ({beyond_need()})"),
        columns=[
            *FRAMEWORK_COLUMNS,
            Column("Value #B", "Holdings", COUNT, width=85),
            Column("Value #A", "Held", BYTES, bar=True),
            Column("Value #C", "Need known for", BYTES, width=110),
            Column("Value #D", "Beyond need", BYTES, bar=True),
        ],
        sort="Value #A", rows_of="Value #A", height=9,
    )  # fmt: skip


def could_share() -> Panel:
    by = f"{BY_PROCESS}, command, owner"
    fit = selector("vramledger_process:more_jobs_fit:floor")
    chosen = f"topk(10, {fit} > 0)"
    of_those = f"and on ({HOLDING_LABELS}) ({fit} > 0)"
    return table(
        "Jobs that could share a GPU",
        "The ten programs beside which most others with the same need would fit on their GPU, if each "
        "held only what it needs; and how many of them its SMs could serve. The table is empty if none "
        "would fit, or without agents.",
        Query(f"sum by ({BY_PROCESS}) ({chosen})"),
        Query(f"sum by ({by}) ({holdings()} {of_those})"),
        Query(f"sum by ({BY_PROCESS}) ({need()} {of_those})"),
        Query(f"max by ({BY_PROCESS}) ({selector('vramledger_process:jobs_fit_sms:floor')} {of_those})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            Column("Value #B", "Holds", BYTES, width=90),
            Column("Value #C", "Needs", BYTES, width=90),
            Column("Value #A", "More fit by memory", COUNT, width=95),
            Column("Value #D", "SMs serve", COUNT, width=85),
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value #A", rows_of="Value #A", height=9,
    )  # fmt: skip


def hoarding_factors() -> Panel:
    by = f"{BY_PROCESS}, command, framework, policy, owner"
    return table(
        "Held beyond need, by program",
        "The ten programs that hold most above their peak need, how many times their need they hold, and "
        "what their agent could free at once. The table is empty if no agent reports a need.",
        Query(f"topk(10, sum by ({by}) ({beyond_need()}))"),
        Query(f"sum by ({BY_PROCESS}) ({holdings()})"),
        Query(f"max by ({BY_PROCESS}) ({need()})"),
        Query(f"max by ({BY_PROCESS}) ({selector('vramledger_process:hoarding_factor:ratio')})"),
        Query(f"max by ({BY_PROCESS}) ({selector('vramledger_torch_reclaimable_bytes')})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            Column("Value #A", "Beyond need", BYTES, bar=True),
            Column("Value #B", "Holds", BYTES, width=95),
            Column("Value #C", "Peak need", BYTES, width=95),
            Column("Value #D", "Holds, times need", ROUNDED, width=95),
            Column("Value #E", "Frees at once", BYTES, width=95),
            *FRAMEWORK_COLUMNS,
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value #A", rows_of="Value #A", width=21, height=9,
    )  # fmt: skip


def fragmentation() -> Panel:
    split = selector("vramledger_torch_inactive_split_bytes")
    pool = selector("vramledger_torch_reserved_bytes")
    retries = f"increase({selector('vramledger_torch_alloc_retries_total')}[$__range])"
    return table(
        "torch: fragmentation",
        "The ten programs with the most memory in free pieces of used blocks, which cannot be freed to "
        "the driver (0 with expandable segments, which help). It matters where allocations were retried "
        "within the time range. The table is empty without a torch agent.",
        Query(f"topk(10, {named(split)} > 0)"),
        Query(f"sum by ({BY_PROCESS}) ({split} / on ({BY_PROCESS}) {pool})"),
        Query(f"sum by ({BY_PROCESS}) ({retries})"),
        Query(f"max by ({BY_PROCESS}) ({selector('vramledger_torch_largest_free_block_bytes')})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            Column("Value #A", "In free pieces", BYTES, bar=True, width=140),
            Column("Value #B", "Of its pool", SHARE, width=85),
            Column("Value #C", "Retries", COUNT, width=80),
            Column("Value #D", "Largest free block", BYTES, width=105),
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value #A", rows_of="Value #A", width=21, height=8,
    )  # fmt: skip


def unneeded_cache() -> Panel:
    return table(
        "Cache not needed for an hour",
        "The ten largest parts of a pool that were not in use at any time within the hour, if the pool is "
        "many times larger than that use; only for frameworks whose cache the program can empty. The "
        "table is empty if there is none, or without agents.",
        Query(
            f"topk(10, {named(selector('vramledger_process:cache_unneeded_bytes:max1h'))})"
        ),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            Column("Value", "Not needed", BYTES, bar=True),
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value", width=9, height=8,
    )  # fmt: skip


def pools_by_framework() -> Panel:
    def total(figure: str) -> str:
        return f"sum by (framework) ({selector(f'vramledger_framework_{figure}_bytes')})"

    return time_series(
        "Pools and use, by framework",
        "Over all programs: what each framework has taken from the driver, and what the programs use of "
        "it.",
        Query(total("pool"), "{{framework}} pool"),
        Query(total("in_use"), "{{framework}} in use"),
        unit=BYTES, absent=WITHOUT_AGENT, width=8,
    )  # fmt: skip


def torch_totals() -> Panel:
    names = ("reserved", "allocated", "active", "requested")
    return time_series(
        "torch: reserved, allocated, active, requested",
        "Over all programs: memory taken from the driver, used by live tensors, the same "
        "with what streams may still use, and requested before rounding.",
        *(Query(f"sum({selector(f'vramledger_torch_{name}_bytes')})", name) for name in names),
        unit=BYTES, absent=NO_TORCH, width=8,
    )  # fmt: skip


def torch_retries() -> Panel:
    def increase(counter: str) -> str:
        return f"sum(increase({selector(counter)}[$__rate_interval]))"

    return time_series(
        "torch: retries and failures",
        "Allocations that were served only after the cache was flushed, and those that failed for lack of "
        "memory.",
        Query(increase("vramledger_torch_alloc_retries_total"), "retries"),
        Query(increase("vramledger_torch_ooms_total"), "out of memory"),
        unit=COUNT, absent=NO_TORCH,
    )  # fmt: skip


def private_pools() -> Panel:
    return time_series(
        "Private pools of torch",
        "Memory in private pools, such as those of CUDA graphs.",
        Query(f"sum({selector('vramledger_torch_private_pools_bytes')})", "private pools"),
        unit=BYTES, absent=NO_TORCH, width=8,
    )  # fmt: skip


def collector_runs() -> Panel:
    by = f"{NODE_LABELS}, pid"
    runs = f"sum by ({by}) ({rate('vramledger_python_collections_total')})"
    total = f"sum by ({by}) (increase({selector('vramledger_python_collections_total')}[$__range] @ end()))"
    return time_series(
        "Runs of Python's garbage collector",
        "Runs in a second, of the ten programs with the most in the time range. Tensors in reference cycles "
        "stay until a run, so a long time without one looks like a leak.",
        Query(f"{runs}\nand on ({by}) topk(10, {total})", "{{instance}}: {{pid}}"),
        unit="cps", absent=WITHOUT_AGENT, named=True, width=24,
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of frameworks."""
    return Dashboard(
        FRAMEWORK,
        "Frameworks",
        "Who holds more than it needs, by framework and policy; which programs could share a GPU; what is "
        "fragmentation.",
        [
            Row(
                "Now",
                [
                    exporters_by_status(),
                    agents_reporting(),
                    need_known(),
                    held_beyond_need(),
                    reclaimable(),
                    more_jobs_fit(),
                ],
            ),
            Row(
                "Programs that hold more than they need",
                [by_policy(), could_share(), *counted(hoarding_factors(), NO_NEED)],
            ),
            Row(
                "Fragmentation and caches",
                [
                    *counted(fragmentation(), NO_AGENT),
                    *counted(unneeded_cache(), NO_AGENT),
                    torch_retries(),
                ],
            ),
            Row("Over time", [pools_by_framework(), torch_totals(), private_pools()]),
            Row("Garbage collector", [collector_runs()], collapsed=True),
        ],
    )
