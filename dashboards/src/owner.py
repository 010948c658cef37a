"""Show one owner and its processes: what they hold, what they need of it, and what could be freed."""

from __future__ import annotations

from dashboards.src.dashboard import OWNER, Dashboard, Row, owner_variable, variable
from dashboards.src.panels import (
    BYTES,
    COUNT,
    DEVICE_LEGEND,
    GIB_HOURS,
    NO_RULES,
    PROCESS_LEGEND,
    SECONDS,
    SHARE,
    STATE_CODES,
    TIME_AGO,
    Column,
    Panel,
    Query,
    ledger_graph,
    stat,
    state_timeline,
    table,
    time_series,
)
from dashboards.src.queries import (
    CHOSEN_OWNER,
    CHOSEN_PROCESSES,
    DEVICE_LABELS,
    HOLDING_LABELS,
    bytes_beyond_need,
    holdings,
    holdings_metric,
    idle_hours,
    join_processes,
    selector,
    state_codes,
    utilised_share,
)
from dashboards.src.shared_panels import (
    GPU_COLUMN,
    NODE_COLUMN,
    OWNER_COLUMN,
    OWNER_TYPE_COLUMN,
    PID_COLUMN,
    exporters,
    holdings_table,
)
from vramledger.views.colours import GRAFANA

NO_AGENT = "not available: no agent in these programs"
HOLDS_NOTHING = "holds nothing, or no data"


def processes_metric(metric: str) -> str:
    """Return a metric of the chosen processes of the chosen owner."""
    return holdings_metric(metric, *CHOSEN_PROCESSES)


def held_now() -> Panel:
    return stat(
        "Holds",
        "Bytes that the chosen processes hold now, on all devices.",
        Query(f"sum({holdings(*CHOSEN_PROCESSES)})"), unit=BYTES, absent=HOLDS_NOTHING,
    )  # fmt: skip


def active_share() -> Panel:
    return stat(
        "Share in active use",
        "Share of the owner's memory in processes that work, or may work.",
        Query(utilised_share("owner", CHOSEN_OWNER)),
        unit=SHARE, absent=HOLDS_NOTHING, colour=GRAFANA["active"],
    )  # fmt: skip


def longest_idle() -> Panel:
    return stat(
        "Idle for",
        "The longest idle time of the chosen processes, by the node's own clock; a "
        "restart of the exporter does not reset it.",
        Query(f"max({processes_metric('vramledger_process:idle_seconds:last')})"),
        unit=SECONDS, absent="none is idle, or no data", colour=GRAFANA["idle"],
    )  # fmt: skip


def idle_in_range() -> Panel:
    return stat(
        "Idle in time range",
        "GiB-hours that the owner held idle within the time range.",
        Query(f"sum({idle_hours(CHOSEN_OWNER)})"), unit=GIB_HOURS, absent=NO_RULES, colour=GRAFANA["idle"],
    )  # fmt: skip


def reclaimable() -> Panel:
    return stat(
        "Could be freed",
        "What torch.cuda.empty_cache() would free now, and what the processes hold "
        "above their highest need. 'vramledger reclaim PID' frees the first, if the program consents.",
        Query(f"sum({processes_metric('vramledger_torch_reclaimable_bytes')})", "at once"),
        Query(bytes_beyond_need(*CHOSEN_PROCESSES), "beyond peak need"),
        unit=BYTES, absent=NO_AGENT,
    )  # fmt: skip


def processes() -> Panel:
    return holdings_table(
        "Processes",
        "Every holding: its state and when it began, and how it takes memory.",
        *CHOSEN_PROCESSES,
        columns=[PID_COLUMN, OWNER_COLUMN, OWNER_TYPE_COLUMN],
        absent=HOLDS_NOTHING, height=7,
    )  # fmt: skip


def held_against_needed() -> Panel:
    by = f"{DEVICE_LABELS}, pid"
    taken = processes_metric("vramledger_framework_pool_bytes")
    in_use = processes_metric("vramledger_framework_in_use_bytes")
    grown = f"delta({selector('vramledger_process_memory_bytes')}[15m])"
    return table(
        "Held and needed",
        "If an agent reports: the framework's pool, the memory in use, the peak need, "
        "the held memory divided by the peak need, and how many more such jobs would "
        "fit. Growth is the driver's figure over the last 15 minutes. An empty field is "
        "not available.",
        Query(f"sum by ({by}) ({holdings(*CHOSEN_PROCESSES)})"),
        Query(f"sum by ({by}) {taken}"),
        Query(f"sum by ({by}) {in_use}"),
        Query(f"sum by ({by}) ({processes_metric('vramledger_process:peak_need_bytes:sum')})"),
        Query(f"sum by ({by}) ({processes_metric('vramledger_process:hoarding_factor:ratio')})"),
        Query(f"sum by ({by}) ({processes_metric('vramledger_process:more_jobs_fit:floor')})"),
        Query(f"sum by ({by}) ({processes_metric('vramledger_torch_reclaimable_bytes')})"),
        Query(f"sum by ({by}) ({grown} and on ({HOLDING_LABELS}) {holdings(*CHOSEN_PROCESSES)})"),
        columns=[
            PID_COLUMN,
            NODE_COLUMN,
            GPU_COLUMN,
            Column("Value #A", "Holds", BYTES, bar=True),
            Column("Value #B", "Framework has", BYTES, width=130),
            Column("Value #C", "In use", BYTES, width=110),
            Column("Value #D", "Most needed", BYTES, width=120),
            Column("Value #E", "Holds, times need", COUNT, width=150),
            Column("Value #F", "More would fit", COUNT, width=130),
            Column("Value #G", "Free at once", BYTES, width=120),
            Column("Value #H", "Growth in 15 min", BYTES, width=140),
        ],
        sort="Value #A", absent=HOLDS_NOTHING, width=24, height=7,
    )  # fmt: skip


def bytes_by_state() -> Panel:
    return ledger_graph(
        "Holding by state",
        "What all processes of the owner have held, by the state of the holders.",
        Query(f"sum by (state) ({selector('vramledger_owner_memory_bytes', CHOSEN_OWNER)})", "{{state}}"),
        absent=HOLDS_NOTHING,
    )


def process_states() -> Panel:
    by = f"{DEVICE_LABELS}, pid, command"
    return state_timeline(
        "States",
        "When each process started, which states it had, and when it ended.",
        Query(
            f"max by ({by}) ({state_codes(*CHOSEN_PROCESSES)})",
            f"{{{{command}}}} {{{{pid}}}} on {DEVICE_LEGEND}",
        ),
        mappings=[STATE_CODES], absent=HOLDS_NOTHING,
    )  # fmt: skip


def memory_over_time() -> Panel:
    return time_series(
        "Held, pool, in use",
        "The driver's figure of the process, the pool of its framework, and what its "
        "live data uses. The difference of the last two is the framework's cache; the "
        "difference of the first two is the context and libraries.",
        Query(f"sum by ({DEVICE_LABELS}, pid) ({holdings(*CHOSEN_PROCESSES)})", f"{PROCESS_LEGEND} held"),
        *(
            Query(
                processes_metric(f"vramledger_framework_{name}_bytes"),
                f"{PROCESS_LEGEND} {{{{framework}}}} {words}",
            )
            for name, words in (("pool", "pool"), ("in_use", "in use"))
        ),
        unit=BYTES, absent=HOLDS_NOTHING,
    )  # fmt: skip


def minimum_demand() -> Panel:
    return time_series(
        "Minimum demand",
        "The lowest demand of each few minutes: a leak lifts it, a sawtooth does not. "
        "There is one line for each source: framework and native if an agent reports, "
        "otherwise driver. In the driver's figure a leak looks the same as a cache.",
        Query(processes_metric("vramledger_process:demand_bytes:min3m"), f"{PROCESS_LEGEND} {{{{source}}}}"),
        unit=BYTES, absent=HOLDS_NOTHING,
    )  # fmt: skip


def steady_growth() -> Panel:
    return time_series(
        "Steady growth",
        "How much the minimum has grown within 30 minutes, where it grew steadily: the "
        "leak alerts use this figure.",
        Query(
            processes_metric("vramledger_process:demand_growth_bytes:delta30m"),
            f"{PROCESS_LEGEND} {{{{source}}}}",
        ),
        unit=BYTES, absent="no steady growth, or no data",
    )  # fmt: skip


def tensor_categories() -> Panel:
    return time_series(
        "What the tensors are for",
        "Live tensors of torch by category, where an agent could read the optimizer.",
        Query(f"sum by (category) ({processes_metric('vramledger_torch_category_bytes')})", "{{category}}"),
        unit=BYTES, stacked=True, absent="not available: no agent that knows an optimizer",
    )  # fmt: skip


def overhead() -> Panel:
    return time_series(
        "Outside the framework",
        "The driver's figure minus the framework's pool: the context, libraries and code "
        "that allocates directly. It should not grow.",
        Query(processes_metric("vramledger_framework_overhead_bytes"), PROCESS_LEGEND),
        unit=BYTES, absent=NO_AGENT,
    )  # fmt: skip


def policies() -> Panel:
    policies = selector("vramledger_framework_policy_info")
    chosen = join_processes(*CHOSEN_PROCESSES)
    return table(
        "How they take memory",
        "Each process's framework and its policy, and how that is known: from the agent, "
        "from its environment, or from its memory pattern. Preallocation takes what the "
        "program may never need.",
        Query(f"count by (instance, pid, framework, policy, source) ({policies}\n{chosen})"),
        columns=[
            PID_COLUMN,
            Column("framework", "Framework"),
            Column("policy", "Policy"),
            Column("source", "Known by"),
            NODE_COLUMN,
        ],
        absent=HOLDS_NOTHING, height=8,
    )  # fmt: skip


def failed_allocations() -> Panel:
    chosen = join_processes(*CHOSEN_PROCESSES)
    when = selector("vramledger_framework_last_oom_timestamp_seconds")
    asked = selector("vramledger_framework_last_oom_requested_bytes")
    return table(
        "Newest failed allocations",
        (
            "When an allocation of a program last failed, how much it requested, and the "
            "agent's verdict on the cause."
        ),
        Query(f"1000 * max by (instance, pid, framework, verdict) ({when} {chosen})"),
        Query(f"max by (instance, pid, framework) ({asked} {chosen})"),
        columns=[
            PID_COLUMN,
            Column("framework", "Framework", width=110),
            Column("verdict", "Why"),
            Column("Value #A", "When", TIME_AGO, width=140),
            Column("Value #B", "Asked for", BYTES, width=120),
            NODE_COLUMN,
        ],
        sort="Value #A", absent="none, or no agent in these programs", height=8,
    )  # fmt: skip


def peak_and_current() -> Panel:
    return time_series(
        "Peak and current",
        "The highest memory of each process since the exporter first saw it, and what it holds now.",
        Query(processes_metric("vramledger_process_memory_peak_bytes"), f"{PROCESS_LEGEND} peak"),
        Query(processes_metric("vramledger_process_memory_bytes"), f"{PROCESS_LEGEND} current"),
        unit=BYTES, absent=HOLDS_NOTHING,
    )  # fmt: skip


def sm_utilisation() -> Panel:
    return time_series(
        "Work on the GPU",
        "Share of time that each process kept the GPU's processors busy. Small kernels "
        "do not show; a gap means unknown, not idle.",
        Query(processes_metric("vramledger_process_sm_utilization_ratio"), PROCESS_LEGEND),
        unit=SHARE, maximum=1, absent="not known, or no data",
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of an owner and its processes."""
    pids = f"label_values({holdings(CHOSEN_OWNER)}, pid)"
    return Dashboard(
        OWNER,
        "Owner and process",
        "What an owner's processes hold, what they need of it, whether it grows, and "
        "what could be freed.",
        [
            Row(
                "Now",
                [exporters(), held_now(), active_share(), longest_idle(), idle_in_range(), reclaimable()],
            ),
            Row("Its processes", [processes(), held_against_needed()]),
            Row("Over time", [bytes_by_state(), process_states(), memory_over_time(), sm_utilisation()]),
            Row("Growth", [minimum_demand(), steady_growth(), overhead(), peak_and_current()]),
            Row("Why", [policies(), failed_allocations(), tensor_categories()]),
        ],
        [
            owner_variable(),
            variable("pid", "Process", pids),
        ],
    )  # fmt: skip
