"""One owner and its processes: what they hold, what they need of it, and what could be given back."""

from __future__ import annotations

from dashboards.src.dashboard import OWNER as UID
from dashboards.src.dashboard import Dashboard, Row, owner, to_device, to_node, to_owner, variable
from dashboards.src.panels import (
    BYTES,
    COUNT,
    HOURS,
    SECONDS,
    SHARE,
    STATE_CODES,
    WHEN,
    Column,
    Panel,
    Query,
    ledger,
    stat,
    table,
    timeline,
    trend,
)
from dashboards.src.queries import (
    DEVICE,
    HOLDING,
    NODE,
    codes,
    idle_hours,
    its,
    of,
    owned,
    since,
    working_share,
)
from dashboards.src.shared_panels import ABOUT_A_HOLDING, exporters
from vramledger.views.colours import GRAFANA

WHO = ('owner=~"$owner"', 'pid=~"$pid"')
OWNED = 'owner=~"$owner"'
NO_AGENT = "not available: no agent in these programs"
NOBODY = "holds nothing, or no data"
PROCESS = "{{instance}} GPU {{gpu}}: {{pid}}"


def theirs(metric: str, *matchers: str) -> str:
    """Return a metric of the chosen processes of the chosen owner."""
    return f"({its(metric, *matchers, *WHO)})"


def either(*figures: str) -> str:
    """Return a figure of the chosen processes, whichever framework gives it."""
    return " or ".join(theirs(f"vramledger_{figure}_bytes") for figure in figures)


def holding() -> Panel:
    return stat(
        "Holds",
        "Bytes that the chosen processes hold now, on all devices.",
        Query(f"sum({owned(*WHO)})"), unit=BYTES, absent=NOBODY,
    )  # fmt: skip


def working() -> Panel:
    return stat(
        "Of it working",
        "Share of what the owner holds in processes that work, or may.",
        Query(working_share("owner", OWNED)), unit=SHARE, absent=NOBODY, colour=GRAFANA["active"],
    )  # fmt: skip


def idle_for() -> Panel:
    return stat(
        "Idle for",
        "The longest idle of the chosen processes, by the node's own clock; the exporter's restart does not "
        "reset it.",
        Query(f"max({theirs('vramledger_process:idle_seconds:last')})"),
        unit=SECONDS, absent="none is idle, or no data", colour=GRAFANA["idle"],
    )  # fmt: skip


def idle_hours_here() -> Panel:
    return stat(
        "Idle in time range",
        "GiB-hours that the owner held idle within the time range.",
        Query(f"sum({idle_hours(OWNED)})"), unit=HOURS, absent="no data: are the recording rules loaded?",
        colour=GRAFANA["idle"],
    )  # fmt: skip


def reclaimable() -> Panel:
    return stat(
        "Could be given back",
        "What torch.cuda.empty_cache() would give back now, and what the processes hold beyond the most "
        "that they have ever needed. 'vramledger reclaim PID' asks a consenting agent for the first.",
        Query(f"sum({theirs('vramledger_torch_reclaimable_bytes')})", "at once"),
        Query(
            f"sum({theirs('vramledger_process_memory_bytes')}\n"
            f"- on ({HOLDING}) {of('vramledger_process:peak_need_bytes:sum')})",
            "beyond peak need",
        ),
        unit=BYTES, absent=NO_AGENT,
    )  # fmt: skip


def processes() -> Panel:
    chosen = owned(*WHO)
    by = f"{DEVICE}, pid, state, user, command, framework, policy, owner_type, owner"
    return table(
        "Processes",
        "Every holding: its state and since when, and how it takes memory.",
        Query(f"sum by ({by}) ({chosen})"),
        Query(f"max by ({by}) ({since(chosen)})"),
        columns=[
            Column("pid", "Pid", width=90),
            Column("owner", "Owner", link=to_owner()),
            Column("owner_type", "Kind", width=90),
            *ABOUT_A_HOLDING,
        ],
        sort="Value #A", absent=NOBODY, width=24, height=7,
    )  # fmt: skip


def needs() -> Panel:
    by = f"{DEVICE}, pid"
    grown = f"delta({of('vramledger_process_memory_bytes')}[15m])"
    return table(
        "Held against needed",
        "With an agent inside: what the framework has taken, what the program uses of it, the most that it "
        "ever needed, how many times that it holds, and how many more jobs like it would fit. Growth is "
        "from outside, of the last 15 minutes. An empty field is not available.",
        Query(f"sum by ({by}) ({owned(*WHO)})"),
        Query(f"sum by ({by}) ({either('torch_reserved', 'jax_pool', 'tensorflow_limit')})"),
        Query(f"sum by ({by}) ({either('torch_allocated', 'jax_in_use', 'tensorflow_in_use')})"),
        Query(f"sum by ({by}) ({theirs('vramledger_process:peak_need_bytes:sum')})"),
        Query(f"sum by ({by}) ({theirs('vramledger_process:hoarding_factor:ratio')})"),
        Query(f"sum by ({by}) ({theirs('vramledger_process:more_jobs_fit:floor')})"),
        Query(f"sum by ({by}) ({theirs('vramledger_torch_reclaimable_bytes')})"),
        Query(f"sum by ({by}) ({grown} and on ({HOLDING}) {owned(*WHO)})"),
        columns=[
            Column("pid", "Pid", width=90),
            Column("instance", "Node", link=to_node()),
            Column("gpu", "GPU", link=to_device(), width=70),
            Column("Value #A", "Holds", BYTES, bar=True),
            Column("Value #B", "Framework has", BYTES, width=130),
            Column("Value #C", "In use", BYTES, width=110),
            Column("Value #D", "Most needed", BYTES, width=120),
            Column("Value #E", "Holds, times need", COUNT, width=150),
            Column("Value #F", "More would fit", COUNT, width=130),
            Column("Value #G", "Back at once", BYTES, width=120),
            Column("Value #H", "Growth in 15 min", BYTES, width=140),
        ],
        sort="Value #A", absent=NOBODY, width=24, height=7,
    )  # fmt: skip


def by_state() -> Panel:
    return ledger(
        "Holding by state",
        "What the owner has held, by the state of the holders; of all its processes.",
        Query(f"sum by (state) ({of('vramledger_owner_memory_bytes', OWNED)})", "{{state}}"),
        absent=NOBODY,
    )


def states() -> Panel:
    by = f"{DEVICE}, pid, command"
    return timeline(
        "States",
        "When each process came, in which state it was, and when it went.",
        Query(f"max by ({by}) ({codes(*WHO)})", "{{command}} {{pid}} on {{instance}} GPU {{gpu}}"),
        mappings=[STATE_CODES], absent=NOBODY,
    )  # fmt: skip


def course() -> Panel:
    return trend(
        "Held, taken by the framework, in use",
        "The driver's figure of the process, what its framework has taken, and what its live data uses. "
        "Between the last two is the framework's cache, between the first two context and libraries.",
        Query(f"sum by ({DEVICE}, pid) ({owned(*WHO)})", f"{PROCESS} held"),
        Query(theirs("vramledger_torch_reserved_bytes"), f"{PROCESS} torch reserved"),
        Query(theirs("vramledger_torch_allocated_bytes"), f"{PROCESS} torch allocated"),
        Query(theirs("vramledger_tensorflow_in_use_bytes"), f"{PROCESS} TensorFlow in use"),
        Query(theirs("vramledger_jax_pool_bytes"), f"{PROCESS} JAX pool"),
        Query(theirs("vramledger_jax_in_use_bytes"), f"{PROCESS} JAX in use"),
        unit=BYTES, absent=NOBODY,
    )  # fmt: skip


def growth() -> Panel:
    return trend(
        "Floor of what is wanted",
        "The lowest demand of each few minutes: a leak lifts it, a sawtooth does not. By source: framework "
        "and native with an agent, else the driver's figure, in which leak and cache cannot be told apart.",
        Query(theirs("vramledger_process:demand_bytes:min3m"), f"{PROCESS} {{{{source}}}}"),
        unit=BYTES, absent=NOBODY,
    )  # fmt: skip


def rise() -> Panel:
    return trend(
        "Steady growth",
        "By how much the floor has grown within 30 minutes, where it grew steadily: what the leak alerts "
        "look at.",
        Query(theirs("vramledger_process:demand_growth_bytes:delta30m"), f"{PROCESS} {{{{source}}}}"),
        unit=BYTES, absent="no steady growth, or no data",
    )  # fmt: skip


def categories() -> Panel:
    return trend(
        "What the tensors are for",
        "Live tensors of torch by category, where an agent could look at the optimizer.",
        Query(f"sum by (category) ({theirs('vramledger_torch_category_bytes')})", "{{category}}"),
        unit=BYTES, stacked=True, absent="not available: no agent that knows an optimizer",
    )  # fmt: skip


def overhead() -> Panel:
    return trend(
        "Outside the framework",
        "The driver's figure less what the framework has taken: context, libraries and code that takes "
        "memory by itself. It should not grow.",
        Query(theirs("vramledger_framework_overhead_bytes"), PROCESS),
        unit=BYTES, absent=NO_AGENT,
    )  # fmt: skip


def policies() -> Panel:
    chosen = f"max by ({NODE}, pid) ({owned(*WHO)})"
    policy = of("vramledger_framework_policy_info")
    return table(
        "How they take memory",
        "Each process's framework and its policy, and how that is known: by the agent, from its "
        "environment, or by the course of its bytes. Preallocation takes what the program may never need.",
        Query(
            f"count by (instance, pid, framework, policy, source) ({policy}\n"
            f"and on ({NODE}, pid) {chosen})"
        ),
        columns=[
            Column("pid", "Pid", width=90),
            Column("framework", "Framework"),
            Column("policy", "Policy"),
            Column("source", "Known by"),
            Column("instance", "Node", link=to_node()),
        ],
        absent=NOBODY, height=8,
    )  # fmt: skip


def ooms() -> Panel:
    chosen = f"max by ({NODE}, pid) ({owned(*WHO)})"
    when = of("vramledger_framework_last_oom_timestamp_seconds")
    asked = of("vramledger_framework_last_oom_requested_bytes")
    return table(
        "Newest failed allocations",
        "When a program last failed to get memory, how much it asked for, and the agent's verdict on why.",
        Query(f"1000 * max by (instance, pid, framework, verdict) ({when} and on ({NODE}, pid) {chosen})"),
        Query(f"max by (instance, pid, framework) ({asked} and on ({NODE}, pid) {chosen})"),
        columns=[
            Column("pid", "Pid", width=90),
            Column("framework", "Framework", width=110),
            Column("verdict", "Why"),
            Column("Value #A", "When", WHEN, width=140),
            Column("Value #B", "Asked for", BYTES, width=120),
            Column("instance", "Node", link=to_node()),
        ],
        sort="Value #A", absent="none, or no agent in these programs", height=8,
    )  # fmt: skip


def peaks() -> Panel:
    return trend(
        "Highest and now",
        "The most that each process has held since the exporter first saw it, beside what it holds.",
        Query(theirs("vramledger_process_memory_peak_bytes"), f"{PROCESS} highest"),
        Query(theirs("vramledger_process_memory_bytes"), f"{PROCESS} now"),
        unit=BYTES, absent=NOBODY,
    )  # fmt: skip


def work() -> Panel:
    return trend(
        "Work on the GPU",
        "Share of time that each process kept the GPU's processors busy. Small work is missed; a gap is "
        "unknown, not idle.",
        Query(theirs("vramledger_process_sm_utilization_ratio"), PROCESS),
        unit=SHARE, maximum=1, absent="not known, or no data",
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of an owner and its processes."""
    pids = f"label_values({owned(OWNED)}, pid)"
    return Dashboard(
        UID,
        "Owner and process",
        "What an owner's processes hold, what they need of it, whether it grows, and what could be given "
        "back.",
        [
            Row("Now", [exporters(), holding(), working(), idle_for(), idle_hours_here(), reclaimable()]),
            Row("Its processes", [processes(), needs()]),
            Row("Over time", [by_state(), states(), course(), work()]),
            Row("Does it grow", [growth(), rise(), overhead(), peaks()]),
            Row("Why", [policies(), ooms(), categories()]),
        ],
        [
            owner(),
            variable("pid", "Process", pids),
        ],
    )  # fmt: skip
