"""Show what needs attention, whose memory is wasted, and what has changed: the first dashboard to open."""

from __future__ import annotations

from dataclasses import replace

from dashboards.src.dashboard import (
    FLEET,
    Dashboard,
    Row,
    choice_variable,
    link_to_model,
    link_to_owner,
    link_to_process,
    of_series,
    price_variables,
)
from dashboards.src.panels import (
    AGE_WIDTH,
    BYTES,
    COUNT,
    GIB_HOURS,
    PART_NAMES,
    ROUNDED,
    SECONDS,
    SHARE,
    Column,
    Panel,
    Query,
    bars,
    ledger_graph,
    scatter,
    stat,
    table,
    time_series,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    HELD,
    HOLDER_LABELS,
    MEAN_DEVICES_WASTED,
    MEAN_WASTED,
    NODE_LABELS,
    UUID_LABELS,
    device_bytes,
    device_utilisation,
    gibibyte_hours,
    growth_rate,
    holdings,
    hours,
    listed,
    mean_of_largest,
    mean_of_others,
    newest_holdings,
    of_teams,
    sampled,
    selector,
    state_matcher,
    time_until_full,
    wasted_bytes,
    wasted_holdings,
)
from dashboards.src.reasons import Needs
from dashboards.src.shared_panels import (
    GPU_COLUMN,
    NODE_COLUMN,
    OWNER_COLUMNS,
    OWNER_LEGEND,
    PERHAPS_WASTED,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    STEP_COLUMN,
    TEAM_COLUMN,
    alert_counts,
    firing_alert_table,
    holdings_table,
    usage_table,
    watched_nodes,
)
from vramledger.views.colours import GRAFANA

NODE_MEMORY = "vramledger_node:memory_bytes:sum"
WHOLE_GPU = 'uuid!~"MIG-.*"'
OWNER = "owner_type, owner"


def reachable_gpus() -> Panel:
    up = selector("vramledger_device_up", WHOLE_GPU)
    asleep = selector("vramledger_device_asleep", WHOLE_GPU)
    held = f"sum by ({NODE_LABELS}, uuid) ({selector('vramledger_device_holders', WHOLE_GPU)})"
    had = selector("vramledger_node:devices:max1d")
    unseen = f"{had} unless on ({NODE_LABELS}) {up}"
    free = selector("vramledger_device:memory_free_bytes:last", WHOLE_GPU)
    unwasted = f"sum by ({NODE_LABELS}, uuid) ({free} or {wasted_bytes(WHOLE_GPU)})"
    return stat(
        "GPUs",
        "Whole GPUs, without MIG instances, of the watched nodes: all that are seen, those of them whose "
        "ledger could be read in the newest sample, those that could not and do not sleep, those that "
        "nobody holds, and those on which a job of the chosen size would find its memory free now, or if "
        "nothing was wasted there; *Capacity* has them by model. Not seen: what nodes had within the last "
        "day that say nothing of their GPUs now; they are in none of the others.",
        Query(f"count({up})", "seen"),
        Query(f"sum({up})", "up"),
        Query(f"count({up} == 0 unless on ({NODE_LABELS}, uuid) {asleep}) or 0 * count({up})", "down"),
        Query(f"count({held} == 0) or 0 * count({held})", "empty"),
        Query(f"sum({unseen}) or 0 * count({had})", "not seen"),
        Query(f"count({free} >= $size * 2^30) or 0 * count({free})", "$size GiB free"),
        Query(f"count({unwasted} >= $size * 2^30) or 0 * count({free})", "if waste freed"),
        unit=COUNT, needs=Needs(nothing="no GPU"), width=12,
        colours={"down": GRAFANA["dead"], "not seen": GRAFANA["unknown"]},
    )  # fmt: skip


def memory() -> Panel:
    ledger = selector("vramledger_device_memory_bytes")
    held = f"sum({sampled(selector('vramledger_device_memory_bytes', HELD))})"
    return stat(
        "Memory",
        "All memory of the devices that answer, what processes hold of it, and what is free.",
        Query(f"sum({sampled(ledger)})", "total"),
        Query(held, "held"),
        Query(f"sum({sampled(device_bytes('free'))})", "free"),
        unit=BYTES, needs=Needs("device"), width=9,
    )  # fmt: skip


def wasted_memory() -> Panel:
    none = f"0 * sum({selector(NODE_MEMORY)})"
    return stat(
        "Wasted memory",
        "What is held without work (wasted), or perhaps; and besides, what is used without a known holder "
        "(unattributed), or by processes that cannot be seen (unknown). No byte is in two of them.",
        Query(f"sum({selector('vramledger_node:memory_wasted_bytes:sum')})", "wasted"),
        Query(f"sum({selector('vramledger_node:memory_perhaps_wasted_bytes:sum')})", PERHAPS_WASTED),
        Query(f"sum({selector(NODE_MEMORY, state_matcher('unattributed'))}) or {none}", "unattributed"),
        Query(f"sum({selector(NODE_MEMORY, state_matcher('unknown'))}) or {none}", "unknown"),
        unit=BYTES, needs=Needs("device"), width=9,
        colours={
            "wasted": GRAFANA["idle"], PERHAPS_WASTED: GRAFANA["stopped"],
            "unknown": GRAFANA["unknown"],
        },
    )  # fmt: skip


def cost() -> Panel:
    return stat(
        "Waste in time range, $currency",
        "Hours of whole GPUs whose memory was wasted within the time range, times the chosen price of a "
        "GPU-hour. Another price or currency can be typed in.",
        Query(f"$price * sum({hours(of_teams(MEAN_DEVICES_WASTED))})"),
        unit=ROUNDED, needs=Needs(), colour=GRAFANA["idle"], width=6,
    )  # fmt: skip


def waste_by_owner() -> Panel:
    wasted = f"sum by ({OWNER}) ({gibibyte_hours(MEAN_WASTED)})"
    return bars(
        "Waste by owner",
        "The ten owners that wasted most within the time range, in GiB-hours; right to 4 minutes at each "
        "end. A click on a bar shows everything of its owner.",
        Query(f"topk(10, {wasted} > 0)", OWNER_LEGEND),
        unit=GIB_HOURS, needs=Needs(nothing="nothing was wasted: good"),
        links=[of_series(link_to_owner())], width=4, height=6,
    )  # fmt: skip


def growing() -> Panel:
    until_full = f"{growth_rate()} * 0 + on ({UUID_LABELS}) group_left () {time_until_full()}"
    names = f"{holdings()} and on ({HOLDER_LABELS}) {growth_rate()}"
    return table(
        "Who grows steadily",
        "The ten holders whose need grows fastest, and has grown in each part of some minutes, hours or "
        "days: a leak, or a cache that is not full yet. The rise within 15 minutes, or of slower growth the "
        "mean; and when the GPU is full at the rate of 15 minutes. An alert follows where it goes on. "
        "Nothing is said of a program in its first half hour. A click on a program shows its process.",
        Query(f"topk(10, {growth_rate()} {listed()})"),
        Query(f"max by ({HOLDER_LABELS}) ({until_full})"),
        Query(f"max by ({HOLDER_LABELS}, command) ({names})"),
        columns=[
            replace(PROGRAM_COLUMN, link=link_to_process()),
            GPU_COLUMN,
            Column("Value #A", "Grows", "binBps", width=98),
            Column("Value #B", "Full in", SECONDS, width=AGE_WIDTH),
        ],
        empty="nobody so far", needs="holder",
        sort="Value #A", rows_of="Value #A", width=7, height=6,
    )  # fmt: skip


def held_by_team() -> Panel:
    return bars(
        "Who holds what",
        "What each team holds now: the ten teams that hold most. A team is the namespace of a pod, otherwise "
        "the user.",
        Query(f"topk(10, sum by (team) ({newest_holdings()}))", "{{team}}"),
        unit=BYTES, needs=Needs("holder", nothing="nothing is held"), width=24,
    )  # fmt: skip


def busy_against_held() -> Panel:
    by = f"sum by ({DEVICE_LABELS})"
    return scatter(
        "Busy against held",
        "A point for each GPU: how much of its memory is used, and for which share of 15 minutes kernels "
        "ran. A GPU that is full and idle is at the lower right.",
        Query(f"{by} ({selector('vramledger_device:memory_used:ratio')})", "memory used"),
        Query(f"{by} ({device_utilisation()})", "busy"),
        unit=SHARE, width=8,
    )  # fmt: skip


def usage_by_team() -> Panel:
    return usage_table(
        "GiB-hours by team and state",
        "What the 50 largest teams held within the time range, by the state of the holders, and what of it "
        "was wasted.",
        "team", replace(TEAM_COLUMN, width=None, least=100),
        rows=50,
    )  # fmt: skip


def unowned_and_unknown() -> Panel:
    held = holdings(state_matcher("orphaned|zombie|dead"))
    return table(
        "Unowned and unknown memory",
        "Memory without an owner to ask, the 50 largest parts: holders "
        "that are orphaned, zombie or dead, and without a pid what no process holds "
        "(unattributed) or what holders have that the exporter cannot see (unknown). Healthy devices "
        "have some unattributed memory, too: we measured up to 66 MiB.",
        Query(f"topk(50, {held} or {device_bytes('unattributed|unknown')} > 0)"),
        columns=[
            Column("state", "State", mappings=[PART_NAMES], width=110),
            Column("Value", "Holds", BYTES, width=100),
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            *OWNER_COLUMNS,
            STEP_COLUMN,
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        empty="all memory has an owner: good",
        needs="device", sort="Value", rows_of="Value", width=24, height=12,
    )  # fmt: skip


def largest_wasted_holdings() -> Panel:
    return holdings_table(
        "Largest wasted holdings",
        "The first owners to ask, and the first step. A click on the pid shows where its memory goes.",
        wasted_holdings(),
        columns=[PROCESS_COLUMN, PROGRAM_COLUMN, *OWNER_COLUMNS], rows=10,
        empty="nobody wastes memory: good", height=12,
    )  # fmt: skip


def changed() -> Panel:
    held = selector("vramledger_owner:memory_held_bytes:sum")
    seen = selector("vramledger_node:devices_watched:count")
    same = f"and on ({NODE_LABELS}) ({seen} == {seen} offset $__range)"
    now, then = (f"sum by ({OWNER}) ({held}{at} {same})" for at in ("", " offset $__range"))
    ended, began = (f'label_replace({each}, "at", "{at}", "", "")' for at, each in (
        ("end", held), ("begin", f"-({held} offset $__range)"),
    ))  # fmt: skip
    change = f"abs(sum by ({OWNER}) (({ended} or {began}) {same}))"
    return table(
        "Changed, up to 4 min old",
        "The ten owners whose memory has changed most between the beginning and the end of the time range, "
        "on the nodes that were watched with as many GPUs at both moments. Each figure was recorded up to 4 "
        "minutes before its moment.",
        Query(f"topk(10, {change} > 2^20)"),
        Query(then),
        Query(now),
        columns=[
            OWNER_COLUMNS[0],
            OWNER_COLUMNS[1],
            Column("Value #A", "By", BYTES, width=82),
            Column("Value #B", "Before", BYTES, width=82),
            Column("Value #C", "After", BYTES, width=82),
        ],
        empty="nothing, where watched all the time",
        sort="Value #A", rows_of="Value #A", width=8, height=6,
    )  # fmt: skip


def capacity_by_model() -> Panel:
    place = selector("vramledger_device:place:info")
    whole = selector("vramledger_device:place:info", WHOLE_GPU)
    parts = selector("vramledger_device:place:info", 'uuid=~"MIG-.*"')
    free = f"{selector('vramledger_device:memory_free_bytes:last')} >= $size * 2^30"
    none = f"0 * count by (name) ({place})"
    used, needed = (
        f"quantile_over_time(0.95, (sum by (name) ({selector(recorded)}))[$__range:$__interval])"
        for recorded in ("vramledger_node:memory_used_bytes:sum", "vramledger_node:memory_needed_bytes:sum")
    )
    return table(
        "Capacity by GPU model",
        "Whole GPUs, which add up to *GPUs* above, and MIG instances; all memory of those that answer, what "
        "was used at the 95th percentile of the time range, what of it was needed at most, and on how many "
        "of both a job of the chosen size would find its memory free now.",
        Query(f"sum by (name) ({selector(NODE_MEMORY)})"),
        Query(f"count by (name) ({whole}) or {none}"),
        Query(used),
        Query(needed),
        Query(f"count by (name) ({place} and on ({UUID_LABELS}) ({free})) or {none}"),
        Query(f"count by (name) ({parts}) or {none}"),
        columns=[
            Column("name", "Model", link=link_to_model(), least=190),
            Column("Value #B", "GPUs", COUNT, width=60),
            Column("Value #F", "MIG instances", COUNT, width=92),
            Column("Value #A", "Memory", BYTES, width=100),
            Column("Value #C", "Used, 95th percentile", BYTES, width=100),
            Column("Value #D", "Needed, 95th percentile", BYTES, width=100),
            Column("Value #E", "Room for $size GiB", COUNT, width=70),
        ],
        empty="no GPU is known: see Exporters",
        sort="Value #A", width=24, height=8,
    )  # fmt: skip


def most_free_gpus() -> Panel:
    by = f"sum by ({DEVICE_LABELS})"
    free = f"topk(10, {by} ({selector('vramledger_device:memory_free_bytes:last')}))"
    name = f"max by ({DEVICE_LABELS}, name) ({selector('vramledger_device_info')})"
    return table(
        "GPUs with most free memory",
        "The ten GPUs and MIG instances on which the largest job would find its memory free now, the empty "
        "ones too. A scheduler may have given them to somebody: see *Reservations and holdings* of Node.",
        Query(f"{name} * 0 + on ({DEVICE_LABELS}) group_left () {free}"),
        Query(f"{by} ({selector('vramledger_device:memory_used:ratio')})"),
        Query(f"{by} ({selector('vramledger_device_holders')})"),
        Query(f"{by} ({device_utilisation()})"),
        columns=[
            NODE_COLUMN,
            GPU_COLUMN,
            Column("name", "Model", link=link_to_model(), least=190),
            Column("Value #A", "Free", BYTES, width=100),
            Column("Value #B", "Memory used", SHARE, width=100),
            Column("Value #C", "Holders", COUNT, width=80),
            Column("Value #D", "Utilisation, 15 min", SHARE, width=116),
        ],
        needs="device", empty="no GPU is known", sort="Value #A", rows_of="Value #A", width=24, height=12,
    )  # fmt: skip


def ledger_over_time() -> Panel:
    return ledger_graph(
        "Fleet ledger",
        "Where every byte of every device is; the parts add up to the total. Where the graph steps down, "
        "a device has stopped answering.",
        Query(f"sum by (state) ({selector(NODE_MEMORY)})", "{{state}}"),
        Query(f"sum({selector(NODE_MEMORY)})", "total"),
        total="total",
        width=5,
        height=6,
    )


def waste_over_time() -> Panel:
    return time_series(
        "Wasted, by owner, 4-minute means",
        "The ten owners that wasted most within the time range, and the sum of all others; means of 4 "
        "minutes. A colour stands for an owner here, not for a state.",
        Query(mean_of_largest(MEAN_WASTED, OWNER), OWNER_LEGEND),
        Query(mean_of_others(MEAN_WASTED, OWNER), "all others"),
        unit=BYTES, stacked=True, named=True, width=16,
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of all nodes."""
    return Dashboard(
        FLEET,
        "Fleet",
        "What needs attention, whose GPU memory is wasted, and what has changed. Click an owner, a team, a "
        "node or a process to see more.",
        [
            Row(
                "",
                [
                    watched_nodes(width=7),
                    alert_counts(width=5),
                    reachable_gpus(),
                    memory(),
                    wasted_memory(),
                    cost(),
                    ledger_over_time(),
                    waste_by_owner(),
                    growing(),
                    changed(),
                    firing_alert_table("Needs attention", height=8),
                    held_by_team(),
                ],
            ),
            Row(
                "Waste",
                [
                    largest_wasted_holdings(),
                    usage_by_team(),
                    unowned_and_unknown(),
                    busy_against_held(),
                    waste_over_time(),
                ],
                collapsed=True,
            ),
            Row(
                "Capacity",
                [capacity_by_model(), most_free_gpus()],
                collapsed=True,
            ),
        ],
        [
            choice_variable("size", "Job size in GiB", ("10", "20", "40", "70", "130"), "40"),
            *price_variables(),
        ],
        time_range="now-24h",
    )
