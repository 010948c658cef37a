"""Show who holds more than it needs, by framework and policy, and which programs could share a GPU."""

from __future__ import annotations

from dataclasses import replace

from dashboards.src.dashboard import FRAMEWORK, Dashboard, Row
from dashboards.src.first_steps import OF_HOLDERS
from dashboards.src.panels import (
    BYTES,
    COUNT,
    SHARE,
    Column,
    Panel,
    Query,
    bars,
    stat,
    table,
    time_series,
    value_mapping,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    FRAGMENTED,
    HOLDING_LABELS,
    NODE_LABELS,
    count_equal,
    device_bytes,
    holdings,
    listed,
    newest_bytes,
    process_utilisation,
    selector,
)
from dashboards.src.reasons import (
    Needs,
)
from dashboards.src.shared_panels import (
    FRAMEWORK_COLUMNS,
    GPU_COLUMN,
    NODE_COLUMN,
    OWNER_COLUMNS,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    watched_nodes,
)
from vramledger.views.colours import GRAFANA

WITHOUT_AGENT = "no program has an agent"
NO_TORCH = "no torch program has an agent"
OR_NO_RULES = "or the rules are not loaded"
"""The other reason why a recorded series is missing."""
PROCESS = "{{instance}} GPU {{gpu}}: {{command}} {{pid}}"
BY_PROCESS = f"{DEVICE_LABELS}, pid"


LASTING = value_mapping(
    {0: ("none: comes and goes", "transparent"), 1: (OF_HOLDERS[FRAGMENTED], GRAFANA["idle"])}
)
SET_OR_NOT = value_mapping({0: ("no", "text"), 1: ("yes", "text")})


def need() -> str:
    """Return the highest need of each program whose agent reports it."""
    return selector("vramledger_process_needed_peak_bytes")


def beyond_need() -> str:
    """Return each holding's bytes above its peak need, with the labels of its owner (a record)."""
    return selector("vramledger_process:memory_bytes:unneeded")


def perhaps_unneeded() -> str:
    """Return each holding's bytes above its highest use, where its need is not known (a record)."""
    return selector("vramledger_process:memory_bytes:perhaps_unneeded")


def agents_reporting() -> Panel:
    """Make the indicator of agents: without one, a framework's figures are not available."""
    return stat(
        "Agents",
        "Programs whose agent reports, and those whose agent is silent. A program without an agent has no "
        "figures here.",
        Query(count_equal("vramledger_agent_up", 1), "report"),
        Query(count_equal("vramledger_agent_up", 0), "silent"),
        unit=COUNT, needs=Needs(nothing="no agent"), width=3,
    )  # fmt: skip


def need_known() -> Panel:
    known = f"sum({holdings()} and on ({HOLDING_LABELS}) {need()})"
    return stat(
        "Need known",
        "Share of the held memory whose program has an agent that reports its need. The rest is not judged "
        "here.",
        Query(f"({known} or 0 * sum({holdings()})) / sum({holdings()})"), unit=SHARE,
        needs=Needs("holder"), width=3,
    )  # fmt: skip


def not_used() -> Panel:
    cached, split = (
        f"sum({selector(f'vramledger_torch_{name}_bytes')})" for name in ("reclaimable", "inactive_split")
    )
    return stat(
        "Held, but not used",
        "Above the highest need that programs ever had; the same of programs whose need is known only "
        "without context and libraries, as TensorFlow's (perhaps beyond); what torch.cuda.empty_cache() "
        "would free now, where torch's counters tell, which they take again later; and fragmentation: "
        "free pieces of used blocks, which nothing frees. The last two overlap with the first.",
        Query(f"sum({beyond_need()})", "beyond need"),
        Query(f"sum({perhaps_unneeded()}) or 0 * sum({beyond_need()})", "perhaps beyond"),
        Query(cached, "reclaimable now"),
        Query(split, "fragmentation"),
        unit=BYTES, needs=Needs("need"), width=8,
        colours={"beyond need": GRAFANA["idle"], "perhaps beyond": GRAFANA["stopped"]},
    )  # fmt: skip


def more_jobs_fit() -> Panel:
    return stat(
        "More copies fit",
        "How many more copies of running programs would fit beside them on their GPUs, by memory and by SMs, "
        "if each program held only what it needs. The free memory of a GPU counts once.",
        Query(f"sum({selector('vramledger_device:more_jobs_fit:floor')})"), unit=COUNT,
        needs=Needs("agent", nothing="no need known"), width=4,
    )  # fmt: skip


def by_policy() -> Panel:
    return bars(
        "Held, by framework and policy",
        "What the programs of each framework hold now, by the way in which it takes memory. Without a name: "
        "no framework is known.",
        Query(f"topk(12, sum by (framework, policy) ({holdings()}))", "{{framework}} {{policy}}"),
        unit=BYTES, needs=Needs("holder", nothing="nothing is held"),
    )  # fmt: skip


def room_for_more() -> Panel:
    return table(
        "Room on each GPU",
        "The ten GPUs with most free memory; what limits to their peak need would free of programs there "
        "besides; and what is perhaps beyond a need that is known only without context and libraries. The "
        "last two are recorded every 4 minutes.",
        Query(f"topk(10, sum by ({DEVICE_LABELS}) ({device_bytes('free')}))"),
        Query(f"sum by ({DEVICE_LABELS}) ({beyond_need()} {listed()})"),
        Query(f"sum by ({DEVICE_LABELS}) ({perhaps_unneeded()} {listed()})"),
        Query(f"max by ({DEVICE_LABELS}) ({process_utilisation()})"),
        columns=[
            NODE_COLUMN,
            GPU_COLUMN,
            Column("Value #A", "Free now", BYTES, width=104),
            Column("Value #B", "Beyond need", BYTES, width=90),
            Column("Value #C", "Perhaps beyond", BYTES, width=90),
            Column("Value #D", "SMs, 15 min", SHARE, width=66),
        ],
        empty="no GPU is known",
        needs="device", sort="Value #A", rows_of="Value #A", width=11, height=7,
    )  # fmt: skip


def could_move() -> Panel:
    fits = selector("vramledger_process:movable_bytes:need")
    names = f"sum by ({BY_PROCESS}, command) ({holdings()})"
    return table(
        "Jobs that could move to another GPU",
        "The ten jobs that need least of those that would fit, by memory and by SMs, on another GPU of their "
        "node: the one with most room if each program there held only what it needs. "
        "Limit the programs there first: vramledger fit says to what. "
        "Needs is at most this: without a reported peak a whole pool counts.",
        Query(f"bottomk(10, {fits})"),
        Query(f"{names} and on ({HOLDING_LABELS}) {fits}"),
        Query(f"max by ({BY_PROCESS}) ({process_utilisation()} and on ({HOLDING_LABELS}) {fits})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            Column("Value #A", "Needs, at most", BYTES, width=98),
            Column("Value #C", "SMs, 15 min", SHARE, width=66),
            replace(NODE_COLUMN, least=128),
            GPU_COLUMN,
            Column("to", "To GPU", width=60),
        ],
        empty="none fits by memory and SMs",
        needs="agent", sort="Value #A", ascending=True, rows_of="Value #A", width=13, height=7,
    )  # fmt: skip


def hoarding_factors() -> Panel:
    return table(
        "Held beyond peak need, by program",
        "The ten programs that hold most above their peak need, and what torch.cuda.empty_cache() would "
        "free now, where torch's counters tell. This may be far more than is beyond the peak need: a "
        "program that needs little now will take it again at its next peak. At most: of a program without "
        "a peak need only the highest use inside its framework is known, and not its context and "
        "libraries. It is recorded every 4 minutes; the other figures are of now.",
        Query(f"topk(10, {beyond_need()} or {perhaps_unneeded()})"),
        Query(f"sum by ({BY_PROCESS}) ({newest_bytes()})"),
        Query(f"max by ({BY_PROCESS}) ({need()})"),
        Query(f"sum by ({BY_PROCESS}) ({selector('vramledger_framework_in_use_peak_bytes')})"),
        Query(f"max by ({BY_PROCESS}) ({selector('vramledger_torch_reclaimable_bytes')})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            *OWNER_COLUMNS,
            Column("Value #A", "Beyond need, at most", BYTES, width=110),
            Column("Value #B", "Holds", BYTES, width=95),
            Column("Value #C", "Peak need", BYTES, width=95),
            Column("Value #D", "Used at the peak", BYTES, width=95),
            Column("Value #E", "Reclaimable now", BYTES, width=108),
            *FRAMEWORK_COLUMNS,
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        empty="no program holds more than it ever needed: good",
        needs="need", sort="Value #A", rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def fragmentation() -> Panel:
    split = selector("vramledger_torch_inactive_split_bytes")
    pool = selector("vramledger_torch_reserved_bytes")
    retries = f"increase({selector('vramledger_torch_alloc_retries_total')}[$__range])"
    lasting = selector("vramledger_process:torch_fragmented_bytes:min30m")
    expandable = selector("vramledger_torch_allocator_info", 'expandable_segments="true"')
    others = f"0 * count by ({NODE_LABELS}, pid) ({selector('vramledger_torch_allocator_info')})"
    return table(
        "Fragmentation: free, but not usable",
        "The ten torch programs with the most memory in free pieces of used blocks, which cannot be freed to "
        "the driver. At the next start PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps; where that is "
        "set, tensors of the same sizes in every step. A step is named where for half an hour so much was in "
        "pieces that the alert GpuMemoryFragmented counts it; elsewhere pieces are few, or come and go with "
        "each step. Retries: allocations that first failed within the time range, whatever the reason.",
        Query(f"topk(10, {holdings()} * 0 + on ({HOLDING_LABELS}) group_left () ({split} > 0))"),
        Query(f"sum by ({BY_PROCESS}) ({split} / on ({BY_PROCESS}) {pool})"),
        Query(f"round(sum by ({BY_PROCESS}) ({retries}))"),
        Query(f"count by ({BY_PROCESS}) ({lasting}) or 0 * count by ({BY_PROCESS}) ({split})"),
        Query(f"count by ({NODE_LABELS}, pid) ({expandable}) or {others}"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            *OWNER_COLUMNS,
            Column("Value #A", "In free pieces", BYTES, width=100),
            Column("Value #B", "Of its pool", SHARE, width=85),
            Column("Value #E", "Expandable segments", COUNT, mappings=[SET_OR_NOT], width=110),
            Column("Value #C", "Retries", COUNT, width=102),
            Column("Value #D", "First step", COUNT, mappings=[LASTING], width=200),
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        empty="no torch program has free pieces: good",
        needs="agent", sort=("Value #D", "Value #A"), rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def pools_by_framework() -> Panel:
    def total(figure: str) -> str:
        return f"sum by (framework) ({selector(f'vramledger_node:framework_{figure}_bytes:sum')})"

    return time_series(
        "Pools and use, by framework",
        "Over all programs, every 4 minutes: what each framework has taken from the driver, and what the "
        "programs use of it.",
        Query(total("pool"), "{{framework}} pool"),
        Query(total("in_use"), "{{framework}} in use"),
        unit=BYTES, absent=f"{WITHOUT_AGENT}, {OR_NO_RULES}",
    )  # fmt: skip


def torch_totals() -> Panel:
    names = ("reserved", "allocated", "active", "requested", "private_pools")
    return time_series(
        "torch: pools and tensors",
        "Over all programs, every 4 minutes: memory taken from the driver, used by live tensors, the same "
        "with what streams may still use, and requested before rounding.",
        *(
            Query(f"sum({selector(f'vramledger_node:torch_{name}_bytes:sum')})", name.replace("_", " "))
            for name in names
        ),
        unit=BYTES, absent=f"{NO_TORCH}, {OR_NO_RULES}", width=24,
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
                "",
                [
                    watched_nodes(width=6),
                    agents_reporting(),
                    need_known(),
                    not_used(),
                    more_jobs_fit(),
                    fragmentation(),
                    could_move(),
                    room_for_more(),
                    hoarding_factors(),
                    by_policy(),
                    pools_by_framework(),
                ],
            ),
            Row("torch over time", [torch_totals()], collapsed=True),
        ],
    )
