"""Make the panels that are on more than one dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dashboards.src.dashboard import (
    link_to_device,
    link_to_exporter_health,
    link_to_node,
    link_to_owner,
    link_to_process,
    link_to_runbook,
    link_to_team,
)
from dashboards.src.panels import (
    BYTES,
    COUNT,
    GOOD,
    NO_HOLDER,
    SHARE,
    STATE_NAMES,
    STATUS_NAMES,
    TIME_AGO,
    Column,
    Panel,
    Query,
    counted,
    stat,
    table,
    value_mapping,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    DOWN,
    DRIVER_LOST,
    HOLDING_LABELS,
    MAXIMUM,
    NO_COUNTERS,
    NO_LIMIT,
    NODE_LABELS,
    RELEASED,
    STALLED,
    STATES,
    UNOWNED,
    WATCHING,
    alerts_since,
    demand_rate,
    device_bytes,
    exporter_status,
    firing_alerts,
    holdings,
    rules_heartbeat,
    selector,
    uncharged,
    utilised_share,
    wasted_bytes,
)
from vramledger.views.colours import GRAFANA

NODE_COLUMN = Column("instance", "Node", link=link_to_node())
GPU_COLUMN = Column("gpu", "GPU", link=link_to_device(), width=50)
OWNER_COLUMN = Column("owner", "Owner", link=link_to_owner())
OWNER_TYPE_COLUMN = Column("owner_type", "Kind", width=85)
TEAM_COLUMN = Column("team", "Team", link=link_to_team(), width=100)
PROCESS_COLUMN = Column("pid", "Pid", link=link_to_process(), width=70)
PROGRAM_COLUMN = Column("command", "Program")
FRAMEWORK_COLUMNS = (
    Column("framework", "Framework", width=105),
    Column("policy", "Policy", width=110),
)

FIRST_STEPS = {
    "active": "none",
    "idle": "ask its user, or end it",
    "stopped": "ask, or continue it",
    "orphaned": "ask its user, or end it",
    "zombie": "end it",
    "stuck": "drain, reset the GPU",
    "dead": "reset the GPU, or drain",
    "unknown": "run vramledger doctor",
}
"""What to do first about a holder, by its state; a longer text pushes the GPU off the page."""
STEPS = value_mapping({state: (FIRST_STEPS[state], "text") for state in STATES})
STATE_COLUMN = Column("state", "State", mappings=[STATE_NAMES], width=80)
STEP_COLUMN = Column("step", "First step", mappings=[STEPS], width=150)
SINCE = "Since"
WORKS = value_mapping({0: ("no", GRAFANA["orphaned"]), 1: ("yes", GOOD)})
SEVERITIES = ("page", "warning", "info")
SEVERITY_RANKS = value_mapping(
    {
        1: ("page", GRAFANA["dead"]),
        2: ("warning", GRAFANA["idle"]),
        3: ("info", GRAFANA["unknown"]),
    }
)


def watched_nodes(width: int = 8, height: int = 3) -> Panel:
    """Make the figure of nodes by whether they are watched."""
    status = exporter_status()
    return stat(
        "Exporters",
        "Nodes by whether they are watched: the exporter answers, reads the driver and keeps sampling. "
        "These dashboards have no data of a node that is not watched, and fleet totals exclude it. Partly "
        "blind: the other nodes in *Nodes that are not fully watched*.",
        Query(f"count({status} == {WATCHING}) or 0 * count({status})", "watched"),
        Query(f"count({status} < {WATCHING}) or 0 * count({status})", "not watched"),
        Query(f"count({status} == {RELEASED}) or 0 * count({status})", "released"),
        Query(
            f"count(count by ({NODE_LABELS}) ({_partly_blind()})) or 0 * count({status})",
            "partly blind",
        ),
        unit=COUNT, absent="no exporter is known", links=[link_to_exporter_health()],
        colours={"watched": GRAFANA["active"], "not watched": GRAFANA["dead"]}, width=width, height=height,
    )  # fmt: skip


def _partly_blind() -> str:
    """Return the nodes of which something is not seen, with the label ``reason``."""
    causes = {
        "host PID namespace missing": f"{selector('vramledger_host_pid_namespace')} == 0",
        "GPU not reachable": f"{selector('vramledger_device_up')} == 0",
        "agent silent": f"{selector('vramledger_agent_up')} == 0",
    }
    return "\nor\n".join(
        f'label_replace(count by ({NODE_LABELS}) ({expr}), "reason", "{reason}", "", "")'
        for reason, expr in causes.items()
    )


def gaps(width: int = 12) -> Panel:
    """Make the table of nodes of which something is not seen, and why."""
    names = {
        DOWN: "exporter down",
        DRIVER_LOST: "driver lost",
        STALLED: "samples stopped",
        RELEASED: "released",
    }
    status = exporter_status()
    unwatched = "\nor\n".join(
        f'label_replace({status} == {code}, "reason", "{reason}", "", "")' for code, reason in names.items()
    )
    since = f"timestamp({selector('vramledger_up')} == 1)"
    return table(
        "Nodes that are not fully watched",
        "Why, and when the node's driver was last seen to answer (to a 300th of the time range). "
        "The table is empty if all nodes are watched; Exporters counts them.",
        Query(f"topk(50, count by ({NODE_LABELS}, reason) ({unwatched}\nor\n{_partly_blind()}))"),
        Query(f"1000 * max by ({NODE_LABELS}) (max_over_time(({since})[$__range:$__interval]))"),
        columns=[
            NODE_COLUMN,
            Column("reason", "Reason", link=link_to_exporter_health(), width=200),
            Column("Value #B", "Last seen", TIME_AGO, width=115),
        ],
        sort="Value #B", ascending=True, rows_of="Value #A", width=width, height=8,
    )  # fmt: skip


def exporters() -> Panel:
    """Make the indicator that is on every dashboard: it says how to read a missing figure."""
    return stat(
        "Exporters",
        "The worst of the chosen nodes. Unless it says watching, a missing figure below "
        "says nothing about the GPUs.",
        Query(f"min({exporter_status()})"),
        unit=COUNT, absent="no exporter is known", mappings=[STATUS_NAMES], links=[link_to_exporter_health()],
    )  # fmt: skip


def exporters_by_status() -> Panel:
    """Make the indicator of a dashboard about several nodes: one that is down is not all of them."""
    status = exporter_status()
    return stat(
        "Exporters",
        "Nodes that are watched, and those that are not. The figures below are of the watched nodes alone. "
        "A click shows which, and why.",
        Query(f"count({status} == {WATCHING}) or 0 * count({status})", "watched"),
        Query(f"count({status} != {WATCHING}) or 0 * count({status})", "not watched"),
        unit=COUNT, absent="no exporter is known", links=[link_to_exporter_health()],
        colours={"watched": GRAFANA["active"], "not watched": GRAFANA["dead"]},
    )  # fmt: skip


def active_share(about: str) -> Panel:
    """Make the figure of the share of held memory in active use; ``about`` describes it on its dashboard."""
    return stat(
        "Share in active use", about, Query(utilised_share("node")),
        unit=SHARE, absent=NO_HOLDER, colour=GOOD,
    )  # fmt: skip


def wasted(*matchers: str) -> Panel:
    """Make the figure of wasted memory of the devices that the matchers choose."""
    return stat(
        "Wasted",
        "Memory that is held without work: by idle, stopped, stuck, zombie and dead holders, and by "
        "orphans that do not work. Everywhere in these dashboards wasted means this.",
        Query(f"sum({wasted_bytes(*matchers)})"), unit=BYTES, colour=GRAFANA["idle"],
    )  # fmt: skip


def unowned(*matchers: str) -> Panel:
    """Make the figure of memory without an owner to ask."""
    return stat(
        "Unowned",
        "Memory of orphaned, zombie and dead processes, and of no process at all (unattributed). Holders "
        "says what may be ended.",
        Query(f"sum({device_bytes(UNOWNED, *matchers)})"),
        unit=BYTES, colour=GRAFANA["orphaned"],
    )  # fmt: skip


def alert_counts(width: int = 8) -> Panel:
    """Make the figure of firing alerts, by severity."""
    return stat(
        "Alerts",
        "Alerts that fire now, by severity. 0 is shown only if the alerting rules are loaded.",
        *(
            Query(
                f"count({firing_alerts(_severity(severity))}) or {rules_heartbeat()}",
                severity,
            )
            for severity in SEVERITIES
        ),
        unit=COUNT, absent="the alerting rules are not loaded",
        colours={"page": GRAFANA["dead"], "warning": GRAFANA["idle"]}, width=width, height=3,
    )  # fmt: skip


def firing_alert_table(*matchers: str, but: str = "", width: int = 24, height: int = 8) -> Panel:
    """Make the table of firing alerts, pages first, the oldest of them first.

    Args:
        matchers: choose among them.
        but: an expression of those that are left out, begins with ``unless``.
        width: in columns.
        height: in rows.
    """
    by = "alertname, cluster, job, instance, gpu, uuid, owner, pid, command"
    ranks = "\nor\n".join(
        f"{rank} * max by ({by}) (({firing_alerts(_severity(severity), *matchers)} {but}) > bool 0)"
        for rank, severity in enumerate(SEVERITIES, 1)
    )
    return table(
        "Firing alerts",
        "Pages first, the oldest of them first. A click on the alert opens its runbook. The table is "
        "empty if no alert fires, or if the rules are not loaded.",
        Query(f"bottomk(50, {ranks})"),
        Query(f"min by ({by}) ({alerts_since(*matchers)})"),
        columns=[
            Column("Value #A", "Severity", COUNT, mappings=[SEVERITY_RANKS], width=105),
            Column("alertname", "Alert", link=link_to_runbook(), width=235),
            Column("Value #B", SINCE, TIME_AGO, width=120),
            NODE_COLUMN,
            GPU_COLUMN,
            OWNER_COLUMN,
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
        ],
        sort=("Value #A", "Value #B"), ascending=True, rows_of="Value #A", width=width, height=height,
    )  # fmt: skip


def holdings_table(
    title: str,
    description: str,
    chosen: str,
    *,
    columns: Sequence[Column],
    places: Sequence[Column] = (NODE_COLUMN, GPU_COLUMN),
    rows: int = 50,
    width: int = 21,
    height: int,
) -> Panel:
    """Make a table of the largest of the chosen holdings, with what is known of each.

    Args:
        title: in a few words.
        description: what it means.
        chosen: the holdings, from :func:`holdings`.
        columns: come first and name the holder.
        places: say where it is.
        rows: at most so many, the largest.
        width: in columns.
        height: in rows.
    """
    by = f"{DEVICE_LABELS}, pid"
    labels = f"{by}, state, step, command, owner_type, owner"
    largest = f"topk({rows}, {chosen})"
    stepped = f'label_replace({largest}, "step", "$1", "state", "(.*)")'
    since = selector("vramledger_process:state_since_timestamp_seconds:last")
    worked = selector("vramledger_process_last_active_timestamp_seconds")
    of_those = f"and on ({HOLDING_LABELS}) ({chosen})"
    sm = Column("Value #C", "SM", SHARE, width=50)
    several_nodes = NODE_COLUMN in places  # then there is no room for all
    most = f"max by ({by}) ({selector('vramledger_process_uncharged_memory_max_bytes')})"
    return table(
        title, description,
        Query(f"sum by ({labels}) ({stepped})"),
        Query(f"1000 * max by ({by}, grade) ({since} {of_those})"),
        Query(f"max by ({by}) ({selector('vramledger_process_sm_utilization_ratio')} {of_those})"),
        Query(f"1000 * max by ({by}) ({worked} {of_those})"),
        Query(f"{demand_rate()} {of_those}"),
        Query(f"max by ({by}) ({selector('vramledger_process_needed_peak_bytes')} {of_those})"),
        Query(f"max by ({by}) ({selector('vramledger_process_orphan_working')} {of_those})"),
        Query(f"sum by ({by}) ({uncharged()} {of_those})"),
        Query(f"({most} - on ({by}) sum by ({by}) ({uncharged()}) > {_SHOWN}) {of_those}"),
        columns=[
            *(replace(column, width=_TEXT_WIDTHS.get(column.field, column.width)) for column in columns),
            STATE_COLUMN,
            Column("grade", "Evidence", width=75),
            Column("Value #B", SINCE, TIME_AGO, width=124),
            Column("Value #A", "Holds", BYTES, bar=True, width=110),
            Column("Value #F", "Needs", BYTES, width=75),
            Column("Value #E", "Grows", "Bps", width=80),
            *([] if several_nodes else [sm]),
            Column("Value #D", "Last work", TIME_AGO, width=124),
            STEP_COLUMN,
            *places,
            *([sm] if several_nodes else []),
            Column("Value #H", "Uncharged", BYTES, width=90),
            Column("Value #I", "Perhaps more", BYTES, width=90),
            Column("Value #G", "Orphan works", COUNT, mappings=[WORKS], width=80),
        ],
        sort="Value #A", rows_of="Value #A", width=width, height=height,
    )  # fmt: skip


_TEXT_WIDTHS = {"command": 100, "owner": 110, "pid": 70}
"""Pixels of texts in a table that is wider than its panel: without a width they would shrink to nothing."""

_SHOWN = 64 * 2**20
"""Bytes below which a range is noise."""

HOLDERS_SAY = (
    "The largest holders, with their state, its evidence and since when. Holds: what NVML charges to the "
    "process and what is certainly its own besides. Uncharged: the second part alone, which is managed "
    "memory or memory whose creator has ended. Perhaps more: what it can have of the bytes that one of "
    "several holders has; they are in no holder's figure. First step: to end it, use vramledger end; to "
    "continue it, kill -CONT. Needs: the highest need of the program, where its "
    "agent reports it. Grows: the rise of the minimum within 15 minutes. An empty cell is not known; in the "
    "state unknown, the exporter cannot see the process."
)


def busy_without_work(*matchers: str) -> list[Panel]:
    """Make the table of holders that keep their GPU busy and compute nothing, and what no rows mean."""
    by = f"{DEVICE_LABELS}, pid"
    since = selector("vramledger_process_busy_without_work_since_timestamp_seconds", *matchers)
    named = f"{holdings(*matchers)} * 0 + on ({HOLDING_LABELS}) group_left () {since}"
    power = selector("vramledger_device_power_watts")
    shown = table(
            "Busy without work",
            "Holders that keep their GPU busy while it computes and moves nothing, as a collective does that "
            "waits for a lost rank; the ten that have waited longest. Their GPU says 100 % and draws little "
            "power. The table is empty if there is none; GPUs before Hopper do not report it.",
            Query(f"1000 * bottomk(10, sum by ({by}, command, owner) ({named}))"),
            Query(f"sum by ({by}) ({holdings(*matchers)} and on ({HOLDING_LABELS}) {since})"),
            Query(f"sum by ({by}) (({since} * 0) + on ({DEVICE_LABELS}) group_left () {power})"),
            columns=[
                PROCESS_COLUMN,
                PROGRAM_COLUMN,
                OWNER_COLUMN,
                Column("Value #A", SINCE, TIME_AGO, width=120),
                Column("Value #B", "Holds", BYTES, width=95),
                Column("Value #C", "GPU draws", "watt", width=90),
                NODE_COLUMN,
                GPU_COLUMN,
            ],
            sort="Value #A", ascending=True, rows_of="Value #A", width=21, height=6,
        )  # fmt: skip
    return counted(shown, NO_COUNTERS)


def holders(*matchers: str, places: Sequence[Column] = (GPU_COLUMN,), height: int = 10) -> Panel:
    """Make the table of the holders that the matchers choose."""
    return holdings_table(
        "Holders", HOLDERS_SAY, holdings(*matchers),
        columns=[PROCESS_COLUMN, PROGRAM_COLUMN, OWNER_COLUMN],
        places=places, height=height,
    )  # fmt: skip


def memory_limits(*matchers: str, but: str = "", places: Sequence[Column] = (GPU_COLUMN,)) -> list[Panel]:
    """Make the table of what owners may take by their cgroups, and its count.

    Args:
        matchers: of labels of the owners.
        but: what chooses among them besides, to the right of a metric.
        places: the columns that say where.
    """
    by = f"{DEVICE_LABELS}, owner_type, owner"
    limit, used, charged = (
        f"max by ({by}) ({selector(f'vramledger_owner_memory_{name}_bytes', *chosen, *matchers)} {but})"
        for name, *chosen in (("limit", MAXIMUM), ("limit_used",), ("charged",))
    )
    share = f"{used} / ({limit} > 0)"
    return counted(
        table(
            "Limits",
            "What owners may take of a GPU by the cgroup whose limit they reach first, and what that cgroup "
            "has taken; others may be in it. Beyond the limit allocations fail, although the GPU may have "
            "free memory. Charged: what the kernel counts in the owner's own cgroups. The 50 nearest to "
            "their limit. An empty cell is not known; the table is empty if no limit is known.",
            Query(f"{limit} and topk(50, {share} or 0 * {limit})"),
            Query(used),
            Query(share),
            Query(charged),
            columns=[
                *places,
                OWNER_COLUMN,
                OWNER_TYPE_COLUMN,
                Column("Value #C", "Share", SHARE, bar=True, width=140),
                Column("Value #B", "Taken", BYTES, width=100),
                Column("Value #A", "Limit", BYTES, width=100),
                Column("Value #D", "Charged", BYTES, width=100),
            ],
            sort="Value #C", rows_of="Value #A", width=21, height=8,
        ),
        NO_LIMIT,
    )  # fmt: skip


def _severity(severity: str) -> str:
    return f'severity="{severity}"'
