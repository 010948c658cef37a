"""Show one process: what it is, where its memory goes, whether it grows, and why its allocations failed."""

from __future__ import annotations

from dashboards.src.dashboard import PROCESS, Dashboard, Row, process_variable
from dashboards.src.panels import (
    BYTES,
    SECONDS,
    SHARE,
    STATE_CODES,
    TIME_AGO,
    Column,
    Panel,
    Query,
    counted,
    stat,
    state_timeline,
    table,
    time_series,
)
from dashboards.src.queries import (
    CHOSEN_PROCESS,
    DEVICE_LABELS,
    NO_AGENT,
    UUID_LABELS,
    demand_rate,
    filling_rate,
    holdings,
    selector,
    state_codes,
    uncharged,
)
from dashboards.src.shared_panels import (
    GPU_COLUMN,
    HOLDERS_SAY,
    OWNER_COLUMN,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    STATE_COLUMN,
    exporters,
    holdings_table,
)
from vramledger.views.colours import GRAFANA

WITHOUT_AGENT = "no agent"
ENDED = "holds nothing, or no data"


def of_process(metric: str, *matchers: str) -> str:
    """Return a selector of a metric of the chosen process."""
    return selector(metric, CHOSEN_PROCESS, *matchers)


def held_now() -> Panel:
    return stat(
        "Holds",
        "What the process holds now, on all devices; and what of it NVML charges to nobody: managed memory, "
        "or memory whose creator has ended.",
        Query(f"sum({holdings(CHOSEN_PROCESS)})", "now"),
        Query(f"sum({uncharged(CHOSEN_PROCESS)}) or 0 * sum({holdings(CHOSEN_PROCESS)})", "uncharged"),
        unit=BYTES, absent=ENDED,
    )  # fmt: skip


def need() -> Panel:
    return stat(
        "Needs",
        "The most that the program has needed: the peaks of its frameworks' own use, plus what is outside "
        "their pools. It could be limited to this and some reserve.",
        Query(f"sum({of_process('vramledger_process_needed_peak_bytes')})"),
        unit=BYTES, absent=WITHOUT_AGENT,
    )  # fmt: skip


def could_be_freed() -> Panel:
    return stat(
        "Could be freed",
        "What torch.cuda.empty_cache() would free now. 'vramledger reclaim PID' frees it, if the program "
        "consents.",
        Query(f"sum({of_process('vramledger_torch_reclaimable_bytes')})"),
        unit=BYTES, absent="no torch agent",
    )  # fmt: skip


def growth() -> Panel:
    return stat(
        "Grows",
        "The rise of the minimum of its demand within 15 minutes.",
        Query(f"sum({demand_rate(CHOSEN_PROCESS)})"),
        unit="Bps", absent="it does not",
    )  # fmt: skip


def time_until_full() -> Panel:
    free = selector("vramledger_device:memory_free_bytes:last")
    rise = filling_rate(CHOSEN_PROCESS)
    return stat(
        "Its GPU is full in",
        "At the rate of this process alone.",
        Query(f"min(sum by ({UUID_LABELS}) ({free}) / on ({UUID_LABELS}) group_right () {rise})"),
        unit=SECONDS, absent="it does not grow",
    )  # fmt: skip


def who() -> Panel:
    return holdings_table(
        "The process", HOLDERS_SAY, holdings(CHOSEN_PROCESS),
        columns=[PROCESS_COLUMN, PROGRAM_COLUMN, OWNER_COLUMN],
        places=(GPU_COLUMN,), height=5,
    )  # fmt: skip


def where_memory_goes() -> Panel:
    pool = f"sum({of_process('vramledger_framework_pool_bytes')})"
    in_use = f"sum({of_process('vramledger_framework_in_use_bytes')})"
    split = f"sum({of_process('vramledger_torch_inactive_split_bytes')})"
    return time_series(
        "Where its memory goes",
        "Over all its devices: memory outside the pools of its frameworks (context, libraries, native "
        "code), what live data uses, free pieces of used blocks (fragmentation, which only expandable "
        "segments or a restart helps), and what is cached and could be freed. The lines are what it "
        "holds, what NVML charges to it of that (the rest is managed memory, or was left by a program that "
        "has ended), and the peak need. Without an agent only the first two lines are known.",
        Query(f"sum({of_process('vramledger_framework_overhead_bytes')})", "outside the pools"),
        Query(in_use, "in use"),
        Query(split, "fragments"),
        Query(f"{pool} - {in_use} - ({split} or 0 * {pool})", "cached"),
        Query(f"sum({holdings(CHOSEN_PROCESS)})", "held"),
        Query(f"sum({of_process('vramledger_process_memory_bytes')})", "charged"),
        Query(f"sum({of_process('vramledger_process_needed_peak_bytes')})", "peak need"),
        unit=BYTES, absent=ENDED, stacked=True,
        order=("outside the pools", "in use", "fragments", "cached"), lines=("held", "charged", "peak need"),
        colours={
            "outside the pools": GRAFANA["driver_reserved"], "in use": GRAFANA["active"],
            "fragments": GRAFANA["unattributed"], "cached": GRAFANA["idle"],
            "peak need": GRAFANA["stopped"], "charged": GRAFANA["unknown"],
        },
        width=24, height=10,
    )  # fmt: skip


def minimum_demand() -> Panel:
    demand = of_process("vramledger_process:demand_bytes:min3m")
    return time_series(
        "Minimum demand",
        "The lowest demand of each few minutes: a leak lifts it, a sawtooth does not. One line for each "
        "source: framework and native if an agent reports, otherwise driver, where a leak looks the same "
        "as a cache.",
        Query(f"sum by (source) ({demand})", "{{source}}"),
        unit=BYTES, absent=ENDED,
    )  # fmt: skip


def steady_growth() -> Panel:
    grown = of_process("vramledger_process:demand_growth_bytes:delta30m")
    return time_series(
        "Steady growth",
        "How much the minimum has grown within 30 minutes, where it grew steadily: the leak alerts use "
        "this figure.",
        Query(f"sum by (source) ({grown})", "{{source}}"),
        unit=BYTES, absent="no steady growth of 30 minutes",
    )  # fmt: skip


def states() -> Panel:
    return state_timeline(
        "State",
        "Which states the process had on each device, since it started.",
        Query(f"max by (gpu) ({state_codes(CHOSEN_PROCESS)})", "GPU {{gpu}}"),
        mappings=[STATE_CODES], height=6,
    )  # fmt: skip


def sm_utilisation() -> Panel:
    return time_series(
        "SM utilisation",
        "Share of time that the process kept each GPU's processors busy. Small kernels do not show; a gap "
        "means unknown, not idle.",
        Query(f"max by (gpu) ({of_process('vramledger_process_sm_utilization_ratio')})", "GPU {{gpu}}"),
        unit=SHARE, maximum=1, absent="not known, or no data", height=6,
    )  # fmt: skip


def failed_allocations() -> Panel:
    by = "framework, verdict"
    when = of_process("vramledger_framework_last_oom_timestamp_seconds")
    asked = of_process("vramledger_framework_last_oom_requested_bytes")
    return table(
        "Newest failed allocation",
        "When an allocation last failed, how much it requested, and the agent's verdict on the cause. "
        "Neighbours shows who else held the GPU's memory. The table is empty if none failed, or without "
        "an agent.",
        Query(f"1000 * topk(10, max by ({by}) ({when}))"),
        Query(f"max by (framework) ({asked})"),
        columns=[
            Column("framework", "Framework", width=110),
            Column("Value #A", "When", TIME_AGO, width=130),
            Column("Value #B", "Asked", BYTES, width=110),
            Column("verdict", "Verdict"),
        ],
        sort="Value #A", rows_of="Value #A", width=9, height=7,
    )  # fmt: skip


def neighbours() -> Panel:
    by = f"{DEVICE_LABELS}, pid, command, owner, state"
    mine = holdings(CHOSEN_PROCESS)
    others = f"{holdings()} and on ({UUID_LABELS}) {mine} unless on ({UUID_LABELS}, pid) {mine}"
    at_failure = f"max by ({by}) (max_over_time(({others})[$__range:1m]))"
    return table(
        "Neighbours",
        "The ten largest other holders of its GPUs now, and the peak of each within the time "
        "range. The table is empty if nobody else holds memory there.",
        Query(f"topk(10, max by ({by}) ({others}))"),
        Query(at_failure),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            STATE_COLUMN,
            Column("Value #A", "Holds", BYTES, bar=True),
            Column("Value #B", "Peak", BYTES, width=75),
            GPU_COLUMN,
        ],
        sort="Value #A", rows_of="Value #A", width=9, height=7,
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
            Column("framework", "Framework", width=110),
            Column("policy", "Policy", width=120),
            Column("source", "Known by"),
            Column("Value #B", "Pool", BYTES, width=105),
            Column("Value #C", "Peak use", BYTES, width=105),
            Column("Value #D", "Limit", BYTES, width=105),
        ],
        rows_of="Value #A", height=8,
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
                "Now",
                [
                    exporters(),
                    held_now(),
                    need(),
                    could_be_freed(),
                    growth(),
                    time_until_full(),
                    *counted(who()),
                ],
            ),
            Row("Where its memory goes", [where_memory_goes(), minimum_demand(), steady_growth()]),
            Row(
                "Failures and neighbours",
                [
                    *counted(failed_allocations(), NO_AGENT),
                    *counted(neighbours()),
                ],
            ),
            Row("State and work", [states(), sm_utilisation()]),
            Row("What it is made of", [policies(), tensor_categories()]),
        ],
        [process_variable()],
        one_node=True,
    )
