"""Show who holds more than it needs, by framework and policy, and which programs could share a GPU."""

from __future__ import annotations

from dashboards.src.dashboard import FRAMEWORK, Dashboard, Row
from dashboards.src.panels import (
    BYTES,
    COUNT,
    PER_MINUTE,
    PER_SECOND,
    ROUNDED,
    SHARE,
    Column,
    Panel,
    Query,
    counted,
    stat,
    table,
    time_series,
    value_mapping,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    HOLDING_LABELS,
    NODE_LABELS,
    UUID_LABELS,
    count_equal,
    holdings,
    named_in_full,
    process_utilisation,
    rate,
    selector,
)
from dashboards.src.reasons import (
    NO_AGENT,
    NO_HOLDER,
    NO_NEED,
    Needs,
)
from dashboards.src.shared_panels import (
    FRAMEWORK_COLUMNS,
    GPU_COLUMN,
    NODE_COLUMN,
    OWNER_COLUMN,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    in_thirds,
    watched_nodes,
)
from vramledger.views.colours import GRAFANA

WITHOUT_AGENT = "no program has an agent"
NO_TORCH = "no torch program has an agent"
OR_NO_RULES = "or the rules are not loaded"
"""The other reason why a recorded series is missing."""
PROCESS = "{{instance}} GPU {{gpu}}: {{command}} {{pid}}"
BY_PROCESS = f"{DEVICE_LABELS}, pid"
FRAGMENTED_BYTES, FRAGMENTED_SHARE = 256 * 2**20, 0.1
"""Free pieces and their share of the pool from which on a setting is worth it, as in verdicts/remedies.py."""
SEGMENTS, SIZES, LITTLE = "segments", "sizes", "little"
FRAGMENTATION_STEPS = value_mapping(
    {
        SEGMENTS: ("expandable segments", "text"),
        SIZES: ("tensors of equal sizes", "text"),
        LITTLE: ("nothing: it is little", "text"),
    }
)


def need() -> str:
    """Return the highest need of each program whose agent reports it."""
    return selector("vramledger_process_needed_peak_bytes")


def beyond_need() -> str:
    """Return each holding's bytes above its need, with the labels of its owner."""
    return f"clamp_min({holdings()} - on ({HOLDING_LABELS}) group_left () {need()}, 0)"


def named(figure: str, *more: str) -> str:
    """Return a figure of processes with the program's name, and with more labels of the holding."""
    names = f"sum by ({', '.join((BY_PROCESS, 'command', *more))}) ({holdings()} * 0)"
    return f"sum by ({BY_PROCESS}) ({figure}) + on ({HOLDING_LABELS}) group_right () {names}"


def agents_reporting() -> Panel:
    """Make the indicator of agents: without one, a framework's figures are not available."""
    return stat(
        "Agents",
        "Programs whose agent reports, and those whose agent is silent. A program without an agent has no "
        "figures here.",
        Query(count_equal("vramledger_agent_up", 1), "report"),
        Query(count_equal("vramledger_agent_up", 0), "silent"),
        unit=COUNT, needs=Needs(nothing="no agent"),
    )  # fmt: skip


def need_known() -> Panel:
    known = f"sum({holdings()} and on ({HOLDING_LABELS}) {need()})"
    return stat(
        "Need is known for",
        "Share of the held memory whose program has an agent that reports its need. The rest is not judged "
        "here.",
        Query(f"({known} or 0 * sum({holdings()})) / sum({holdings()})"), unit=SHARE,
        needs=Needs([NO_HOLDER], rules=True),
    )  # fmt: skip


def held_beyond_need() -> Panel:
    return stat(
        "Held beyond peak need",
        "The memory that programs hold above the highest need that they ever had. What is reclaimable now "
        "may be more: they will need it again at their next peak.",
        Query(f"sum({beyond_need()})"), unit=BYTES,
        needs=Needs([NO_AGENT, NO_NEED], rules=True), colour=GRAFANA["idle"],
    )  # fmt: skip


def reclaimable() -> Panel:
    return stat(
        "Reclaimable now",
        "What torch.cuda.empty_cache() would free now, over all programs whose counters tell. They take "
        "what is below their peak need again at their next peak.",
        Query(f"sum({selector('vramledger_torch_reclaimable_bytes')})"), unit=BYTES,
        needs=Needs([NO_AGENT], nothing="not reported"),
    )  # fmt: skip


def more_jobs_fit() -> Panel:
    return stat(
        "More jobs would fit",
        "How many more jobs like the running ones would fit, by memory and by SMs, if each program held "
        "only what it needs. The free memory of a GPU counts once.",
        Query(f"sum({selector('vramledger_device:more_jobs_fit:floor')})"), unit=COUNT,
        needs=Needs([NO_AGENT], rules=True, nothing="no need known"),
    )  # fmt: skip


def by_policy() -> Panel:
    by = "framework, policy"
    known = f"{holdings()} and on ({HOLDING_LABELS}) {need()}"

    def of_framework(figure: str) -> str:
        return f'label_replace({figure}, "framework", "not known", "framework", "")'

    return table(
        "Held and needed, by policy",
        "What the programs of each framework hold by the way in which it takes memory, for how much of "
        "that the need is known, and what of that is above the need.",
        Query(f"topk(20, {of_framework(f'sum by ({by}) ({holdings()})')})"),
        Query(of_framework(f"count by ({by}) ({holdings()})")),
        Query(of_framework(f"sum by ({by}) ({known})")),
        Query(of_framework(f"sum by ({by}) ({beyond_need()})")),
        columns=[
            *FRAMEWORK_COLUMNS,
            Column("Value #B", "Holdings", COUNT, width=85),
            Column("Value #A", "Held", BYTES),
            Column("Value #C", "Need known for", BYTES, width=110),
            Column("Value #D", "Beyond peak need", BYTES),
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def room() -> str:
    """Return what would be free on each GPU if its holders held only their need, where a need is known."""
    free = f"sum by ({UUID_LABELS}, gpu) ({selector('vramledger_device:memory_free_bytes:last')})"
    beyond = f"clamp_min({holdings()} - on ({HOLDING_LABELS}) group_left () {most_needed()}, 0)"
    return f"({free} + on ({UUID_LABELS}) group_left () sum by ({UUID_LABELS}) ({beyond}))"


def most_needed() -> str:
    """Return what each program needs at most: a whole pool where no agent reports its peak."""
    return f"max by ({HOLDING_LABELS}) ({selector('vramledger_process:peak_need_bytes:sum')})"


def room_for_more() -> Panel:
    by = f"{UUID_LABELS}, gpu"
    fit = f"sum by ({by}) ({selector('vramledger_device:more_jobs_fit:floor')}) > 0"
    needs = f"{holdings()} * 0 + on ({HOLDING_LABELS}) group_left () {most_needed()}"
    job = named_in_full(f"topk by ({UUID_LABELS}) (1, {needs})", "like")
    busy = process_utilisation()
    used = f"sum by ({by}) ({busy})"
    return table(
        "GPUs with room for more jobs",
        "The ten GPUs on which most more jobs would fit, by memory and by SMs, if each program held only "
        "what it needs: jobs like the one there that needs most. Its need is at most this: without a "
        "reported peak its whole pool counts. All GPUs add up to *More jobs would fit*. The table is empty "
        "if none would fit, or without agents.",
        Query(f"topk(10, {fit})"),
        Query(f"sum by ({by}, like) ({job} and on ({UUID_LABELS}) ({fit}))"),
        Query(f"{room()} and on ({UUID_LABELS}) ({fit})"),
        Query(f"{used} and on ({UUID_LABELS}) ({fit})"),
        columns=[
            NODE_COLUMN,
            GPU_COLUMN,
            Column("Value #A", "More jobs fit", COUNT, width=85),
            Column("like", "Jobs like", least=204),
            Column("Value #B", "Needs, at most", BYTES, width=90),
            Column("Value #C", "Room, if limited", BYTES, width=90),
            Column("Value #D", "SMs, 15 min", SHARE, width=100),
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def could_move() -> Panel:
    by = f"{BY_PROCESS}, command, owner_type, owner"
    busy = process_utilisation()
    best = f"topk by ({NODE_LABELS}) (1, {room()})"
    used = f"sum by ({UUID_LABELS}) ({busy})"
    idle_there = f"max by ({NODE_LABELS}) (1 - ({used} and on ({UUID_LABELS}) {best}))"
    sm = f"max by ({HOLDING_LABELS}) ({busy})"
    room_there = f'label_replace({best}, "to", "$1", "gpu", "(.*)")'
    elsewhere = f"({holdings()} unless on ({UUID_LABELS}) {best})"
    jobs = f"{elsewhere} * 0 + on ({HOLDING_LABELS}) group_left () {most_needed()}"
    fitting = (
        f"(sum by ({by}) ({jobs}) <= on ({NODE_LABELS}) group_left () {best})\n"
        f"and on ({HOLDING_LABELS}) ({sm} <= on ({NODE_LABELS}) group_left () {idle_there})"
    )
    there = f"topk by ({NODE_LABELS}) (1, {holdings()} and on ({UUID_LABELS}) {best})"
    beside = named_in_full(there, "beside")
    return table(
        "Jobs that could move to another GPU",
        "The ten jobs that need least of those that would fit, by memory and by SMs, on another GPU of their "
        "node: the one with most room if each program there held only what it needs, and who is there. "
        "*GPUs with room for more jobs* counts more jobs of the kind that is there already, so that one may "
        "have rows while the other has none. Limit the program there first: vramledger fit says to what. "
        "Needs is at most this: without a reported peak a whole pool counts. The table is empty if there is "
        "none, or without agents.",
        Query(f"bottomk(10, {fitting})"),
        Query(f"0 * ({fitting}) + on ({NODE_LABELS}) group_left (to) {room_there}"),
        Query(f"0 * ({fitting}) + on ({NODE_LABELS}) group_left (beside) {beside}"),
        Query(f"max by ({BY_PROCESS}) ({holdings()} * 0 + on ({HOLDING_LABELS}) group_left () {sm})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            Column("Value #A", "Needs, at most", BYTES, width=96),
            Column("Value #D", "SMs, 15 min", SHARE, width=70),
            NODE_COLUMN,
            GPU_COLUMN,
            Column("to", "To GPU", width=60),
            Column("Value #B", "Room there", BYTES, width=90),
            Column("beside", "Beside", least=204),
            Column("Value #C", "It holds", BYTES, width=90),
        ],
        sort="Value #A", ascending=True, rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def hoarding_factors() -> Panel:
    by = f"{BY_PROCESS}, command, framework, policy, owner_type, owner"
    return table(
        "Held beyond peak need, by program",
        "The ten programs that hold most above their peak need, how many times their need they hold, and "
        "what torch.cuda.empty_cache() would free now, where torch's counters tell. This may be far more "
        "than is beyond the peak need: a program that needs little now will take it again at its next peak."
        " The table is empty if no agent reports a need.",
        Query(f"topk(10, sum by ({by}) ({beyond_need()}))"),
        Query(f"sum by ({BY_PROCESS}) ({holdings()})"),
        Query(f"max by ({BY_PROCESS}) ({need()})"),
        Query(f"max by ({BY_PROCESS}) ({selector('vramledger_process:hoarding_factor:ratio')})"),
        Query(f"max by ({BY_PROCESS}) ({selector('vramledger_torch_reclaimable_bytes')})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            Column("Value #A", "Beyond peak need", BYTES, width=100),
            Column("Value #B", "Holds", BYTES, width=95),
            Column("Value #C", "Peak need", BYTES, width=95),
            Column("Value #D", "Holds, times need", ROUNDED, width=95),
            Column("Value #E", "Reclaimable now", BYTES, width=108),
            *FRAMEWORK_COLUMNS,
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=9,
    )  # fmt: skip


def fragmentation() -> Panel:
    split = selector("vramledger_torch_inactive_split_bytes")
    pool = selector("vramledger_torch_reserved_bytes")
    retries = f"increase({selector('vramledger_torch_alloc_retries_total')}[$__range])"
    share = f"sum by ({BY_PROCESS}) ({split} / on ({BY_PROCESS}) {pool})"
    much = f"({split} >= {FRAGMENTED_BYTES} and on ({HOLDING_LABELS}) ({share} >= {FRAGMENTED_SHARE}))"
    expandable = selector("vramledger_torch_allocator_info", 'expandable_segments="true"')
    pieces = f"({named(split, 'owner_type', 'owner')} > 0)"
    helped = {
        SEGMENTS: f"{pieces} and on ({HOLDING_LABELS}) {much} unless on ({NODE_LABELS}, pid) {expandable}",
        SIZES: f"{pieces} and on ({HOLDING_LABELS}) {much} and on ({NODE_LABELS}, pid) {expandable}",
        LITTLE: f"{pieces} unless on ({HOLDING_LABELS}) {much}",
    }
    stepped = "\nor ".join(
        f'label_replace({chosen}, "step", "{step}", "", "")' for step, chosen in helped.items()
    )
    return table(
        "torch: fragmentation",
        "The ten programs with the most memory in free pieces of used blocks, which cannot be freed to "
        "the driver, and what helps at the next start: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or "
        "where that is set, tensors of the same sizes in every step. Nothing is worth it below 256 MiB or a "
        "tenth of the pool. It matters where allocations were retried within the time range: those programs "
        "come first. The largest free block may also be one that is wholly free, which is cached and in no "
        "piece. The table is empty without a torch agent.",
        Query(f"topk(10, {stepped})"),
        Query(share),
        Query(f"round(sum by ({BY_PROCESS}) ({retries}))"),
        Query(f"max by ({BY_PROCESS}) ({selector('vramledger_torch_largest_free_block_bytes')})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            Column("Value #A", "In free pieces", BYTES, width=100),
            Column("Value #B", "Of its pool", SHARE, width=85),
            Column("step", "What helps", mappings=[FRAGMENTATION_STEPS], width=185),
            Column("Value #C", "Retries", COUNT, width=102),
            Column("Value #D", "Largest free block", BYTES, width=105),
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value #C", rows_of="Value #A", width=24, height=8,
    )  # fmt: skip


def unneeded_cache() -> Panel:
    return table(
        "Cache not needed for an hour",
        "The ten largest parts of a pool that were not in use at any time within the hour, if the pool is "
        "many times larger than that use; only for frameworks whose cache the program can empty. It may have "
        "been needed before: the peak need is that of the program's whole life. Free pieces of used blocks "
        "are in it, which only a restart frees. The table is empty if there is none, or without agents.",
        Query(
            f"topk(10, {named(selector('vramledger_process:cache_unneeded_bytes:max1h'))})"
        ),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            Column("Value", "Not needed", BYTES, width=100),
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value", width=12, height=8,
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
        unit=BYTES, absent=f"{WITHOUT_AGENT}, {OR_NO_RULES}", width=8,
    )  # fmt: skip


def torch_totals() -> Panel:
    names = ("reserved", "allocated", "active", "requested")
    return time_series(
        "torch: pools and tensors",
        "Over all programs, every 4 minutes: memory taken from the driver, used by live tensors, the same "
        "with what streams may still use, and requested before rounding.",
        *(Query(f"sum({selector(f'vramledger_node:torch_{name}_bytes:sum')})", name) for name in names),
        unit=BYTES, absent=f"{NO_TORCH}, {OR_NO_RULES}", width=8,
    )  # fmt: skip


def torch_retries() -> Panel:
    def per_minute(counter: str) -> str:
        return f"60 * sum({rate(counter)})"

    return time_series(
        "torch: retries and failures",
        "Allocations per minute that were served only after the cache was flushed, and those that failed for "
        "lack of memory.",
        Query(per_minute("vramledger_torch_alloc_retries_total"), "retries"),
        Query(per_minute("vramledger_torch_ooms_total"), "out of memory"),
        unit=PER_MINUTE, absent=NO_TORCH, step="2m",
    )  # fmt: skip


def private_pools() -> Panel:
    return time_series(
        "Private pools of torch",
        "Memory in private pools, such as those of CUDA graphs, every 4 minutes.",
        Query(f"sum({selector('vramledger_node:torch_private_pools_bytes:sum')})", "private pools"),
        unit=BYTES, absent="no torch agent reports any", width=8,
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
        unit=PER_SECOND, absent=WITHOUT_AGENT, named=True, step="2m", width=24,
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
                    watched_nodes(),
                    *in_thirds(
                        agents_reporting(),
                        need_known(),
                        held_beyond_need(),
                        reclaimable(),
                        more_jobs_fit(),
                    ),
                ],
            ),
            Row(
                "Programs that hold more than they need",
                [
                    counted(by_policy(), "policies"),
                    counted(room_for_more(), "GPUs with room", NO_AGENT),
                    counted(could_move(), "jobs that could move", NO_AGENT),
                    counted(hoarding_factors(), "programs beyond need", NO_NEED),
                ],
            ),
            Row(
                "Fragmentation and caches",
                [
                    counted(fragmentation(), "programs with free pieces", NO_AGENT),
                    counted(unneeded_cache(), "caches not needed", NO_AGENT),
                    torch_retries(),
                ],
            ),
            Row("Over time", [pools_by_framework(), torch_totals(), private_pools()]),
            Row("Garbage collector", [collector_runs()], collapsed=True),
        ],
    )
