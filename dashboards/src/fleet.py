"""Show what to act on now, whose memory is wasted, and what has changed: the first dashboard to open."""

from __future__ import annotations

from dataclasses import replace

from dashboards.src.dashboard import (
    FLEET,
    Dashboard,
    Row,
    choice_variable,
    link_to_model,
    threshold,
)
from dashboards.src.panels import (
    AGE_WIDTH,
    BYTES,
    COUNT,
    PART_NAMES,
    SECONDS,
    SHARE,
    Column,
    Panel,
    Query,
    counted,
    ledger_graph,
    stat,
    table,
    time_series,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    HELD,
    HOLDING_LABELS,
    MEAN_HELD,
    MEAN_WASTED,
    NODE_LABELS,
    OWNER_NAME,
    UNOWNED,
    USUAL,
    USUAL_UNATTRIBUTED,
    UUID_LABELS,
    age,
    compared_nodes,
    demand_rate,
    device_bytes,
    device_utilisation,
    filling_rate,
    gibibyte_hours,
    holdings,
    mean_of_largest,
    mean_of_others,
    named_owner,
    sampled,
    selector,
    state_matcher,
    uncharged,
    wasted_holdings,
    with_step,
    with_team,
)
from dashboards.src.reasons import (
    NO_DEVICE,
    NO_SENSOR,
    NOT_COMPARABLE,
    Needs,
)
from dashboards.src.shared_panels import (
    FOR,
    GPU_COLUMN,
    NODE_COLUMN,
    OWNER_COLUMN,
    PERHAPS_WASTED,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    STATE_COLUMN,
    STEP_COLUMN,
    TEAM_COLUMN,
    alert_counts,
    busy_without_work,
    firing_alert_table,
    gaps,
    usage_table,
    watched_nodes,
)
from vramledger.views.colours import GRAFANA

NODE_MEMORY = "vramledger_node:memory_bytes:sum"
UNOWNED_TOO = "unowned, partly in wasted"
WHOLE_GPU = 'uuid!~"MIG-.*"'


def reachable_gpus() -> Panel:
    up = selector("vramledger_device_up", WHOLE_GPU)
    asleep = selector("vramledger_device_asleep", WHOLE_GPU)
    held = f"sum by ({NODE_LABELS}, uuid) ({selector('vramledger_device_holders', WHOLE_GPU)})"
    had = selector("vramledger_node:devices:max1d")
    unseen = f"{had} unless on ({NODE_LABELS}) {up}"
    return stat(
        "GPUs",
        "Whole GPUs, without MIG instances, of the watched nodes: all that are seen, those of them whose "
        "ledger could be read in the newest sample, those that could not and do not sleep, and those that "
        "nobody holds. Not seen: what nodes had within the last day that say nothing of their GPUs now; they "
        "are in none of the others.",
        Query(f"count({up})", "seen"),
        Query(f"sum({up})", "up"),
        Query(f"count({up} == 0 unless on ({NODE_LABELS}, uuid) {asleep}) or 0 * count({up})", "down"),
        Query(f"count({held} == 0) or 0 * count({held})", "empty"),
        Query(f"sum({unseen}) or 0 * count({had})", "not seen"),
        unit=COUNT, needs=Needs(nothing="no GPU"), width=8, height=3,
        colours={"down": GRAFANA["dead"], "not seen": GRAFANA["unknown"]},
    )  # fmt: skip


def memory() -> Panel:
    ledger = selector("vramledger_device_memory_bytes")
    held = f"sum({sampled(selector('vramledger_device_memory_bytes', HELD))})"
    beyond = f"(sum({selector('vramledger_node:memory_beyond_need_bytes:sum')}) or vector(0))"
    return stat(
        "Memory",
        "All memory of the devices that answer; what processes hold of it; and what of that they need at "
        "most: without what they hold above their highest need. Where no agent reports a need, all that is "
        "held counts as needed, also what is wasted.",
        Query(f"sum({sampled(ledger)})", "total"),
        Query(held, "held"),
        Query(f"{held} - {beyond}", "needed, at most"),
        unit=BYTES, needs=Needs([NO_DEVICE], rules=True), width=12, height=3,
    )  # fmt: skip


def wasted_memory() -> Panel:
    none = f"0 * sum({selector(NODE_MEMORY)})"
    return stat(
        "Wasted memory",
        "What is held without work (wasted), or perhaps (not proven), has no owner to ask (unowned), or "
        "belongs to processes that cannot be seen (unknown). Wasted and unowned overlap: an orphan that does "
        "not work, a zombie and a dead process are in both.",
        Query(f"sum({selector('vramledger_node:memory_wasted_bytes:sum')})", "wasted"),
        Query(f"sum({selector('vramledger_node:memory_perhaps_wasted_bytes:sum')})", PERHAPS_WASTED),
        Query(f"sum({selector(NODE_MEMORY, state_matcher(UNOWNED))}) or {none}", UNOWNED_TOO),
        Query(f"sum({selector(NODE_MEMORY, state_matcher('unknown'))}) or {none}", "unknown"),
        unit=BYTES, needs=Needs([NO_DEVICE], rules=True), width=12, height=3,
        colours={
            "wasted": GRAFANA["idle"], PERHAPS_WASTED: GRAFANA["stopped"],
            UNOWNED_TOO: GRAFANA["orphaned"], "unknown": GRAFANA["unknown"],
        },
    )  # fmt: skip


def growing() -> Panel:
    rate = demand_rate()
    by = f"{DEVICE_LABELS}, pid"
    free = f"sum by ({UUID_LABELS}) ({selector('vramledger_device:memory_free_bytes:last')})"
    named = with_team(holdings())
    return table(
        "Growing",
        "The ten holders whose minimum memory has risen fastest within 15 minutes, and how long until their "
        "GPU is full at this rate. Only a rise above the highest minimum of the hour before counts. A "
        "preallocated pool does not fill its GPU. The table is empty if no holder grows.",
        Query(f"topk(10, {rate})"),
        Query(f"{free}\n/ on ({UUID_LABELS}) group_right () {filling_rate()}"),
        Query(f"sum by ({by}, command, owner_type, owner, team) ({named} and on ({HOLDING_LABELS}) {rate})"),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            Column("Value #A", "Grows", "binBps", width=100),
            Column("Value #B", "Full in", SECONDS, width=95),
            Column("Value #C", "Holds", BYTES, width=90),
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=8,
    )  # fmt: skip


def waste_by_owner() -> Panel:
    return usage_table(
        "Waste by owner",
        "The ten owners that wasted most within the time range, in GiB-hours. The table is empty if nothing "
        "was wasted, or if the recording rules are not loaded.",
        "owner_type, owner", OWNER_COLUMN,
        rows=10, worst=True,
    )  # fmt: skip


def usage_by_team() -> Panel:
    return usage_table(
        "GiB-hours by team and state",
        "What each team held within the time range, by the state of the holders, and what of it was wasted; "
        "the 50 largest teams, and the sums of all teams in the row All.",
        "team", replace(TEAM_COLUMN, width=None, least=100),
        rows=50, total="team",
    )  # fmt: skip


def unowned_and_unknown() -> Panel:
    by = f"{DEVICE_LABELS}, pid, command, owner_type, owner, state, step"
    states = f"{UNOWNED}|unknown".replace("|unattributed", "")
    since = selector("vramledger_process:state_since_timestamp_seconds:last", state_matcher(states))
    held = selector("vramledger_process_memory_bytes", 'pid!="other"')
    uncharged_too = f"({held} + on ({HOLDING_LABELS}) {uncharged()} or on ({HOLDING_LABELS}) {held})"
    stated = f"{uncharged_too} * on ({HOLDING_LABELS}) group_left (state) (1 + 0 * {since})"
    names = f"topk by ({HOLDING_LABELS}) (1, {holdings()})"
    named = f"({stated}) * on ({HOLDING_LABELS}) group_left (command, owner_type, owner) (1 + 0 * {names})"
    listed = f"({named}\nor on ({HOLDING_LABELS}) {stated})"
    unseen = f"({device_bytes('unknown')} unless on ({UUID_LABELS}) {since})"
    nobody = device_bytes("unattributed")
    usual = f'label_replace({nobody} > 0 < {USUAL_UNATTRIBUTED}, "step", "{USUAL}", "", "")'
    more = f'label_replace({nobody} >= {USUAL_UNATTRIBUTED} or {unseen} > 0, "step", "$1", "state", "(.*)")'
    return table(
        "Unowned and unknown memory",
        "Where the memory is that *Wasted memory* calls unowned or unknown, the 50 largest parts: holders "
        "that are orphaned, zombie, dead or unknown, and without a pid what no process holds "
        "(unattributed) or what holders have that the exporter cannot see at all (unknown). Healthy devices "
        "have some unattributed memory, too: we measured up to 66 MiB. The table is empty if there is none.",
        Query(f"topk(50, sum by ({by}) ({with_step(listed)} or {usual} or {more}))"),
        columns=[
            Column("state", "State", mappings=[PART_NAMES], width=110),
            Column("Value", "Holds", BYTES, width=100),
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            STEP_COLUMN,
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value", rows_of="Value", width=24, height=13,
    )  # fmt: skip


def largest_wasted_holdings() -> Panel:
    worst = f"topk(10, {wasted_holdings()})"
    stepped = with_step(with_team(worst))
    labels = f"{DEVICE_LABELS}, pid, state, step, team, command, owner_type, owner"
    stamps = selector("vramledger_process:state_since_timestamp_seconds:last")
    return table(
        "Largest wasted holdings",
        "The first owners to ask, and the first step. A click on the pid shows where the process' memory "
        "goes. The table is empty if nothing is wasted.",
        Query(f"sum by ({labels}) ({stepped})"),
        Query(age(f"max by ({DEVICE_LABELS}, pid) ({stamps} and on ({HOLDING_LABELS}) {worst})")),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            TEAM_COLUMN,
            STATE_COLUMN,
            Column("Value #B", FOR, SECONDS, width=AGE_WIDTH),
            Column("Value #A", "Holds", BYTES, width=100),
            STEP_COLUMN,
            NODE_COLUMN,
            GPU_COLUMN,
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=12,
    )  # fmt: skip


def changed() -> Panel:
    compared = compared_nodes()
    held = selector("vramledger_owner:memory_held_bytes:sum")
    now, then = (
        f"sum by (owner_type, owner) ({held}{at} and on ({NODE_LABELS}) {compared})"
        for at in ("", " offset $__range")
    )
    week = f"sum by (owner_type, owner) ({held} offset 1w)"
    began, ended = f"({then} or 0 * {now})", f"({now} or 0 * {then})"
    change = f"({ended} - {began})"
    watched = selector("vramledger_node:exporter_status:code")
    none = f"0 * {ended} and on () count({watched} offset 1w)"
    return table(
        "Changed",
        "The ten owners whose memory has changed most between the beginning and the end of the time "
        "range, on the nodes that were watched with as many GPUs at both moments; and what they held at "
        "this hour a week ago on all nodes that were watched then. A dash: none was.",
        Query(f"{change}\nand on (owner_type, owner) topk(10, abs({change}) > 2^20)"),
        Query(began),
        Query(ended),
        Query(f"{week}\nor {none}"),
        columns=[
            OWNER_COLUMN,
            Column("Value #A", "Change", BYTES),
            Column("Value #B", "At the beginning, same nodes", BYTES),
            Column("Value #C", "At the end, same nodes", BYTES),
            Column("Value #D", "A week ago", BYTES),
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=10,
    )  # fmt: skip


def held_but_unused() -> Panel:
    by = f"sum by ({DEVICE_LABELS})"
    full = f"{by} ({selector('vramledger_device:memory_used:ratio')})"
    busy = f"{by} ({device_utilisation()})"
    much, little = threshold("full_share"), threshold("unused_share")
    return table(
        "Held but unused GPUs",
        f"The ten fullest of the GPUs of whose memory more than {much:.0%} is used and on which, over 15 "
        f"minutes, kernels ran for less than {little:.0%} of the time (both from alerts/thresholds.yml). "
        "The table is empty if there is none, or if the GPUs do not "
        "report utilisation.",
        Query(f"topk(10, {full} > {much} and on ({UUID_LABELS}) ({busy} < {little}))"),
        Query(busy),
        Query(f"{by} ({selector('vramledger_device_memory_wasted_bytes')})"),
        columns=[
            NODE_COLUMN,
            GPU_COLUMN,
            Column("Value #A", "Memory used", SHARE, width=100),
            Column("Value #B", "Utilisation, 15 min", SHARE, width=116),
            Column("Value #C", "Wasted", BYTES, width=84),
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=10,
    )  # fmt: skip


def capacity_by_model() -> Panel:
    memory = selector(NODE_MEMORY)
    name = f"max by ({NODE_LABELS}, uuid, name) ({selector('vramledger_device_info')})"
    up = selector("vramledger_device_up", WHOLE_GPU)
    # A GPU that is down says no name; it had one before, unless it was down for all of the time range.
    lately = f"last_over_time({selector('vramledger_device_info')}[$__range])"
    known = f"topk by ({NODE_LABELS}, uuid) (1, max by ({NODE_LABELS}, uuid, name) ({lately}))"
    unnamed = f'label_replace({up} unless on ({NODE_LABELS}, uuid) {known}, "name", "not known", "", "")'
    of_gpus = f"({known} and on ({NODE_LABELS}, uuid) {up} or {unnamed})"
    free = f"{selector('vramledger_device:memory_free_bytes:last')} >= $size * 2^30"
    none = f"0 * count by (name) ({name})"
    room = f"count by (name) ({name} and on ({NODE_LABELS}, uuid) ({free}))"
    used, needed = (
        f"quantile_over_time(0.95, (sum by (name) ({selector(recorded)}))[$__range:$__interval])"
        for recorded in ("vramledger_node:memory_used_bytes:sum", "vramledger_node:memory_needed_bytes:sum")
    )
    return table(
        "Capacity by GPU model",
        "Whole GPUs, which add up to *GPUs* above, and MIG instances; all memory of those that answer, what "
        "was used at the 95th percentile of the time range, what of it was needed at most, and on how many "
        "of both a job of the chosen size would find its memory free now.",
        Query(f"sum by (name) ({memory})"),
        Query(f"count by (name) ({of_gpus}) or {none}"),
        Query(used),
        Query(needed),
        Query(f"{room} or {none}"),
        Query(f"count by (name) ({name} unless on ({NODE_LABELS}, uuid) {up}) or {none}"),
        columns=[
            Column("name", "Model", link=link_to_model(), least=190),
            Column("Value #B", "GPUs", COUNT, width=60),
            Column("Value #F", "MIG instances", COUNT, width=92),
            Column("Value #A", "Memory", BYTES, width=100),
            Column("Value #C", "Used, 95th percentile", BYTES, width=100),
            Column("Value #D", "Needed, 95th percentile", BYTES, width=100),
            Column("Value #E", "Room for $size GiB", COUNT, width=70),
        ],
        sort="Value #A", width=13, height=10,
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
        sort="Value #A", rows_of="Value #A", width=24, height=12,
    )  # fmt: skip


def worst_nodes() -> Panel:
    by = f"sum by ({NODE_LABELS})"
    total = f"{by} ({selector(NODE_MEMORY)})"
    unowned = f"{by} ({selector(NODE_MEMORY, state_matcher(UNOWNED))})"
    free = f"{by} ({selector(NODE_MEMORY, state_matcher('free'))})"
    agents = f"{by} ({selector('vramledger_agent_up')} == 1)"
    return table(
        "Worst nodes",
        "The ten nodes with the most wasted memory, what of their memory has no owner, and how full they "
        "are.",
        Query(f"topk(10, {by} ({selector('vramledger_node:memory_wasted_bytes:sum')}))"),
        Query(f"{unowned} or 0 * {total}"),
        Query(f"1 - {free} / {total}"),
        Query(f"{by} ({selector('vramledger_node:memory_short:count')}) or 0 * {agents}"),
        columns=[
            NODE_COLUMN,
            Column("Value #A", "Wasted", BYTES, width=100),
            Column("Value #B", "Unowned", BYTES, width=100),
            Column("Value #C", "Memory used", SHARE, width=90),
            Column("Value #D", "Holders that lack memory", COUNT, width=110),
        ],
        sort="Value #A", rows_of="Value #A", width=11, height=10,
    )  # fmt: skip


def ledger_over_time() -> Panel:
    return ledger_graph(
        "Fleet ledger",
        "Where every byte of every device is; the parts add up to the total. Where the graph steps down, "
        "a device has stopped answering.",
        Query(f"sum by (state) ({selector(NODE_MEMORY)})", "{{state}}"),
        Query(f"sum({selector(NODE_MEMORY)})", "total"),
        total="total",
        width=24,
        height=10,
    )


def waste_over_time() -> Panel:
    by = "owner_type, owner"
    return time_series(
        "Wasted, by owner, 4-minute means",
        "The ten owners that wasted most within the time range, and the sum of all others; means of 4 "
        "minutes. A colour stands for an owner here, not for a state.",
        Query(named_owner(mean_of_largest(MEAN_WASTED, by)), f"{{{{{OWNER_NAME}}}}}"),
        Query(mean_of_others(MEAN_WASTED, by), "all others"),
        unit=BYTES, stacked=True, named=True, width=24,
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of all nodes."""
    return Dashboard(
        FLEET,
        "Fleet",
        "What to act on now, whose GPU memory is wasted, and what has changed. Click an owner, a team, a "
        "node or a process to see more.",
        [
            Row("Now", [watched_nodes(), reachable_gpus(), alert_counts(), memory(), wasted_memory()]),
            Row(
                "Act now",
                [
                    counted(firing_alert_table(width=24, height=12), "firing alerts", alerting=True),
                    counted(growing(), "growing holders"),
                    busy_without_work(),
                    gaps(),
                    counted(held_but_unused(), "held but unused GPUs", NO_SENSOR),
                ],
            ),
            Row(
                "Waste",
                [
                    counted(waste_by_owner(), "owners with waste"),
                    counted(usage_by_team(), "teams", every=f"sum by (team) ({gibibyte_hours(MEAN_HELD)})"),
                    counted(largest_wasted_holdings(), "wasted holdings"),
                    counted(unowned_and_unknown(), "unowned and unknown parts"),
                    waste_over_time(),
                ],
            ),
            Row(
                "Capacity and change",
                [
                    capacity_by_model(),
                    worst_nodes(),
                    most_free_gpus(),
                    counted(changed(), "owners with a change", NOT_COMPARABLE),
                ],
            ),
            Row("Over time", [ledger_over_time()]),
        ],
        [choice_variable("size", "Job size in GiB", ("10", "20", "40", "70", "130"), "40")],
        time_range="now-24h",
    )
