"""Show one process: what it is, where its memory goes, whether it grows, and why its allocations failed."""

from __future__ import annotations

from dataclasses import replace

from dashboards.src.dashboard import PROCESS, Dashboard, Row, process_variable, threshold
from dashboards.src.lines import MEAN_STEP, SHADES, dashed, joined, mean
from dashboards.src.panels import (
    BYTES,
    COUNT,
    SECONDS,
    SHARE,
    Column,
    Panel,
    Query,
    stat,
    state_timeline,
    table,
    time_series,
    value_mapping,
)
from dashboards.src.queries import (
    CHOSEN_PROCESS,
    DEVICE_LABELS,
    GROWTH_SPANS,
    UUID_LABELS,
    age,
    demand_rate,
    holdings,
    listed,
    minimum_demand_of,
    selector,
    steady_growth_of,
    time_until_full,
    uncharged,
)
from dashboards.src.reasons import (
    NO_HOLDER,
    Needs,
)
from dashboards.src.shared_panels import (
    BLOCKER_COLUMN,
    GPU_COLUMN,
    HOLDERS_SAY,
    NODE_COLUMN,
    OWNER_COLUMNS,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    STATE_COLUMN,
    STEP_COLUMN,
    VERDICT_COLUMN,
    VERDICT_STEP_COLUMN,
    exporters,
    holdings_table,
    with_verdict_step,
)
from vramledger.views.colours import GRAFANA

SILENT = -20
"""The value of a figure whose agent is silent."""
AGENT_SILENT = value_mapping({SILENT: ("agent silent", GRAFANA["unknown"])})
ENDED = "holds nothing, or no data: see Holds"


def of_process(metric: str, *matchers: str) -> str:
    """Return a selector of a metric of the chosen process."""
    return selector(metric, CHOSEN_PROCESS, *matchers)


OTHER_PROCESS = CHOSEN_PROCESS.replace("=~", "!~")
HOLDS = (NO_HOLDER, of_process("vramledger_process_memory_bytes"))
"""Where the process does not hold memory, no figure of it is there."""
AGENT = Needs("agent", nothing="not reported", first=[HOLDS])


def from_agent(figure: str) -> str:
    """Return a figure that an agent reports, or that it is silent."""
    return f"{figure}\nor {SILENT} + 0 * count({of_process('vramledger_agent_up')} == 0)"


def held() -> str:
    """Return what the process holds at the moment of the figures that its agent reports.

    What is recorded of it is older: a program that grows would be charged more than it holds.
    """
    charged = f"sum({of_process('vramledger_process_memory_bytes')})"
    return f"({charged} + (sum({uncharged(CHOSEN_PROCESS)}) or 0 * {charged}))"


def held_now() -> Panel:
    return stat(
        "Holds",
        "What the process holds now, on all devices; and what of it NVML charges to nobody: managed memory, "
        "or memory whose creator has ended.",
        Query(held(), "now"),
        Query(f"sum({uncharged(CHOSEN_PROCESS)}) or 0 * {held()}", "uncharged"),
        unit=BYTES, needs=Needs(nothing="holds nothing"),
    )  # fmt: skip


def need() -> Panel:
    return stat(
        "Peak need",
        "The most that the program has needed: the peaks of its frameworks' own use, plus what is outside "
        "their pools. It could be limited to this and some reserve. Not known: its agent reports no peak, or "
        "what is outside the pools is not known; *Policy and limits* then has the peaks within the pools. "
        "Agent silent: it has one that no longer reports.",
        Query(from_agent(f"sum({of_process('vramledger_process_needed_peak_bytes')})")),
        unit=BYTES, needs=replace(AGENT, nothing="not known"), mappings=[AGENT_SILENT],
    )  # fmt: skip


def could_be_freed() -> Panel:
    return stat(
        "Reclaimable now",
        "What torch.cuda.empty_cache() would free now. 'vramledger reclaim PID' frees it, if the program "
        "consents. It may be more than what is held beyond the peak need: the program takes it again at its "
        "next peak. Not reported: torch's counters do not tell, as with expandable segments or CUDA graphs, "
        "or it is another framework, whatever it has cached.",
        Query(from_agent(f"sum({of_process('vramledger_torch_reclaimable_bytes')})")),
        unit=BYTES, needs=AGENT, mappings=[AGENT_SILENT],
    )  # fmt: skip


def growth() -> Panel:
    return stat(
        "Grows",
        "The rise of the minimum of its demand within 15 minutes; of slower growth, which is in *Steady "
        "growth*, the mean.",
        Query(f"sum({demand_rate(CHOSEN_PROCESS)} {listed(CHOSEN_PROCESS)})"),
        unit="binBps", needs=Needs(nothing="no rise is known"),
    )  # fmt: skip


def full_in() -> Panel:
    rise = of_process("vramledger_process:demand_rise_bytes:delta15m")
    return stat(
        "GPU full in",
        "When the first of its GPUs is full if what is on it grows on as within the last 15 minutes.",
        Query(f"min({time_until_full()} and on ({UUID_LABELS}) {rise})"),
        unit=SECONDS, needs=Needs(nothing="no rise is known"), below=threshold("fill_within"),
    )  # fmt: skip


def who() -> Panel:
    return holdings_table(
        "The process",
        HOLDERS_SAY,
        holdings(CHOSEN_PROCESS),
        columns=[PROCESS_COLUMN, PROGRAM_COLUMN, *OWNER_COLUMNS],
        places=(GPU_COLUMN,), alone=True, height=5,
    )  # fmt: skip


def where_memory_goes() -> Panel:
    in_use = f"sum({of_process('vramledger_framework_in_use_bytes')})"
    split = f"sum({of_process('vramledger_torch_inactive_split_bytes')})"
    outside = f"sum({of_process('vramledger_framework_overhead_bytes')})"
    pool = f"sum({of_process('vramledger_framework_pool_bytes')})"
    # A pool of managed memory may be larger than what of it is on the device.
    owned = of_process("", '__name__=~"vramledger_process_(uncharged_)?memory_bytes"')
    used = of_process("", '__name__=~"vramledger_(framework_in_use|torch_inactive_split)_bytes"')
    pooled = f"clamp_max({pool}, scalar(sum({owned}) - ({outside} or vector(0))))"
    graph = time_series(
        "Where its memory goes",
        "Over all its devices: memory outside the pools of its frameworks (context, libraries, native "
        "code), what live data uses, free pieces of used blocks (fragmentation, which only expandable "
        "segments or a restart helps), and the rest of the pools, which is cached; what of it could be "
        "freed now is in *Reclaimable now*. The lines are what it holds; what NVML charges to it, where that "
        "is less (the rest is managed memory, or was left by a program that has ended); and, dashed, the "
        "peak need. Without an agent only the first two lines are known.",
        Query(outside, "outside the pools"),
        Query(in_use, "in use"),
        Query(split, "fragmentation"),
        Query(f"clamp_min({pooled} - sum({used}), 0)", "cached"),
        Query(held(), "held"),
        Query(f"sum({of_process('vramledger_process_memory_bytes')}) < {held()}", "charged"),
        Query(f"sum({of_process('vramledger_process_needed_peak_bytes')})", "peak need"),
        unit=BYTES, absent=ENDED, stacked=True,
        order=("outside the pools", "in use", "fragmentation", "cached"),
        lines=("held", "charged", "peak need"),
        colours={
            "outside the pools": SHADES[0], "in use": SHADES[1], "fragmentation": SHADES[2],
            "cached": SHADES[3],
        },
        newest=True, width=24, height=8,
    )  # fmt: skip
    return dashed(graph, "peak need", "charged")


def minimum_demand() -> Panel:
    demand = minimum_demand_of(CHOSEN_PROCESS)
    return time_series(
        "Minimum demand",
        "The lowest demand of each few minutes: a leak lifts it, a sawtooth does not. One line for each "
        "source: framework and native if an agent reports, otherwise driver, where a leak looks the same "
        "as a cache.",
        Query(f"sum by (source) ({demand})", "{{source}}"),
        unit=BYTES, absent=ENDED,
    )  # fmt: skip


_SPANS = (
    ("6 min", 360),
    ("30 min", 1800),
    ("3 h", 10_800),
    ("12 h", 43_200),
    ("1 day", 86_400),
    ("6 days", 518_400),
)
"""The spans of steady growth in words and in seconds, in the order of the records."""


def steady_growth() -> Panel:
    return time_series(
        "Steady growth",
        "How fast the minimum has grown, the mean of 6 and 30 minutes, 3 and 12 hours, a day and 6 days, if "
        "it grew steadily over all of that time: the leak alerts use these figures. The source is that of "
        "*Minimum demand*. In a gap it did not grow steadily.",
        *(
            Query(
                f"sum by (source) ({steady_growth_of(span, CHOSEN_PROCESS)}) / {seconds}",
                f"over {said}, by {{{{source}}}}",
            )
            for span, (said, seconds) in zip(GROWTH_SPANS, _SPANS, strict=True)
        ),
        unit="binBps", absent="no steady growth over any of these times",
    )  # fmt: skip


def states() -> Panel:
    return state_timeline(
        "State",
        "When the process was in which state, since it started: a row for each state.",
        Query(f"max by (state) (0 * {holdings(CHOSEN_PROCESS)} + 1)", "{{state}}"),
        mappings=[value_mapping({1: ("there", "text")})], few=True, colours=GRAFANA, height=6,
    )  # fmt: skip


def sm_utilisation() -> Panel:
    busy = mean("vramledger_process_sm_utilization_ratio", CHOSEN_PROCESS)
    graph = time_series(
        "SM utilisation",
        "Share of time in which the process kept each GPU's processors (SMs) busy, as a mean of 2 minutes or "
        "more. Beside other holders it is the figure of the whole GPU. Small kernels do not show; a gap is "
        "unknown, not idle.",
        Query(f"max by (gpu) ({busy})", "GPU {{gpu}}"),
        unit=SHARE, maximum=1, absent="not known at any time", step=MEAN_STEP, height=6,
    )  # fmt: skip
    return joined(graph)


def failed_allocations() -> Panel:
    # Also of a process that has ended within the time range.
    newest, asked, failures = (
        f"last_over_time({of_process(metric)}[$__range])"
        for metric in (
            "vramledger_framework_last_oom_timestamp_seconds",
            "vramledger_framework_last_oom_requested_bytes",
            "vramledger_torch_ooms_total",
        )
    )
    newest_one = f"topk by (framework) (1, max by (framework, verdict) ({newest}))"
    beside = of_process("vramledger_process:memory_bytes:blocker")
    at_failure = f"max by (blocker) (max_over_time({beside}[$__range]))"
    return table(
        "Newest failed allocation",
        "When an allocation last failed, how many have failed since the program started (torch counts "
        "them), how much the newest requested, the agent's verdict on the cause, and what helps first; and "
        "who else held most on its GPUs just after that, if it was within the time range.",
        Query(with_verdict_step(f"bottomk(10, {age(newest_one)})")),
        Query(f"max by (framework) ({asked})"),
        Query(f"0 * max by (framework) ({newest}) + on () group_left (blocker) topk(1, {at_failure})"),
        Query(f'label_replace(sum({failures}), "framework", "torch", "", "")'),
        columns=[
            Column("framework", "Framework", width=110),
            Column("Value #A", "Ago", SECONDS, width=98),
            Column("Value #D", "Failures", COUNT, width=88),
            Column("Value #B", "Asked", BYTES, width=90),
            VERDICT_COLUMN,
            VERDICT_STEP_COLUMN,
            BLOCKER_COLUMN,
            Column("Value #C", "Other held", BYTES, width=90),
        ],
        empty="no allocation failed: good",
        needs="agent", sort="Value #A", ascending=True, rows_of="Value #A", width=24, height=5,
    )  # fmt: skip


def neighbours() -> Panel:
    mine = holdings(CHOSEN_PROCESS)
    others = f"{holdings(OTHER_PROCESS)} and on (uuid) {mine}"
    ever = f"max_over_time({holdings()}[$__range]) and on ({UUID_LABELS}) {mine}"
    return table(
        "Neighbours",
        "The ten largest other holders of its GPUs now, and of each the peak within the time range.",
        Query(f"topk(10, {others})"),
        Query(f"max by ({DEVICE_LABELS}, pid) ({ever})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            *OWNER_COLUMNS,
            STATE_COLUMN,
            Column("Value #A", "Holds", BYTES, width=100),
            Column("Value #B", "Peak", BYTES, width=90),
            STEP_COLUMN,
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        empty="nobody else holds memory there",
        needs="device", sort="Value #A", rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def policies() -> Panel:
    by = "framework, policy, source"
    policies = of_process("vramledger_framework_policy_info")
    return table(
        "Policy and limits",
        "How each of its frameworks takes memory and how that is known; its pool, its peak use and its "
        "limit. A limit a little above the peak use would be enough.",
        Query(f"topk(10, count by ({by}) ({policies}))"),
        Query(f"sum by (framework) ({of_process('vramledger_framework_pool_bytes')})"),
        Query(f"sum by (framework) ({of_process('vramledger_framework_in_use_peak_bytes')})"),
        Query(f"sum by (framework) ({of_process('vramledger_framework_limit_bytes')})"),
        columns=[
            Column("framework", "Framework", width=92),
            Column("policy", "Policy", width=100),
            Column("Value #A", "GPUs", COUNT, width=98),
            Column("source", "Known by"),
            Column("Value #B", "Pool", BYTES, width=90),
            Column("Value #C", "Peak use", BYTES, width=90),
            Column("Value #D", "Limit", BYTES, width=90),
        ],
        empty="it uses no framework that is known",
        needs="node", sort="Value #B", rows_of="Value #A", height=8,
    )  # fmt: skip


def tensor_categories() -> Panel:
    return time_series(
        "What the tensors are for",
        "Live tensors of torch by category, where an agent could read the optimizer.",
        Query(f"sum by (category) ({of_process('vramledger_torch_category_bytes')})", "{{category}}"),
        unit=BYTES, stacked=True, absent="no agent that knows an optimizer",
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of a process."""
    return Dashboard(
        PROCESS,
        "Process",
        "One process: where its memory goes, whether it grows, why its allocations failed, and who is "
        "beside it.",
        [
            Row(
                "",
                [
                    *(exporters(), held_now(), need(), could_be_freed(), growth(), full_in()),
                    where_memory_goes(),
                    who(),
                    failed_allocations(),
                    neighbours(),
                ],
            ),
            Row("Growth", [minimum_demand(), steady_growth()], collapsed=True),
            Row("State and work", [states(), sm_utilisation()], collapsed=True),
            Row("What it is made of", [policies(), tensor_categories()], collapsed=True),
        ],
        [process_variable()],
        one_node=True,
    )
