"""Show where memory is wasted, and which owners waste it: the first dashboard to open."""

from __future__ import annotations

from dashboards.src.dashboard import FLEET, Dashboard, Row, link_to_exporter_health
from dashboards.src.panels import (
    BYTES,
    COUNT,
    DEVICE_LEGEND,
    GIB_HOURS,
    NO_RULES,
    SHARE,
    STATE_NAMES,
    TIME_AGO,
    Column,
    Panel,
    Query,
    ledger_graph,
    stat,
    table,
    time_series,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    NODE_LABELS,
    UNOWNED,
    WATCHING,
    count_equal,
    device_bytes,
    exporter_status,
    firing_alerts,
    gibibyte_hours,
    holdings,
    idle_hours,
    rules_heartbeat,
    selector,
    state_since,
    wasted_bytes,
    wasted_holdings,
)
from dashboards.src.shared_panels import (
    GPU_COLUMN,
    NODE_COLUMN,
    OWNER_COLUMN,
    OWNER_TYPE_COLUMN,
    PROCESS_COLUMN,
    PROGRAM_COLUMNS,
    active_share,
    idle_or_stopped,
    unowned,
)
from vramledger.views.colours import GRAFANA


def watched_nodes() -> Panel:
    return stat(
        "Exporters",
        "Nodes that are watched: the exporter answers, reads the driver and keeps "
        "sampling. These dashboards have no data of any other node: fleet totals exclude "
        "it.",
        Query(f"count({exporter_status()} == {WATCHING}) or 0 * count({exporter_status()})", "watched"),
        Query(f"count({exporter_status()} < {WATCHING}) or 0 * count({exporter_status()})", "not watched"),
        unit=COUNT, absent="no exporter is known", links=[link_to_exporter_health()],
    )  # fmt: skip


def capacity() -> Panel:
    total = selector("vramledger_device:memory_total_bytes:last")
    return stat(
        "GPU memory",
        "All memory of the devices that answer.",
        Query(f"sum({total})"), unit=BYTES,
    )  # fmt: skip


def severity_matcher(severity: str) -> str:
    return f'severity="{severity}"'


def alert_counts() -> Panel:
    return stat(
        "Alerts",
        "Alerts that fire now, by severity. 0 is shown only if the alerting rules are loaded.",
        *(
            Query(f"count({firing_alerts(severity_matcher(severity))}) or {rules_heartbeat()}", severity)
            for severity in ("page", "warning")
        ),
        unit=COUNT, absent="the alerting rules are not loaded",
    )  # fmt: skip


def waste_by_owner() -> Panel:
    by = "sum by (owner_type, owner)"
    return table(
        "Waste by owner",
        "Owners of unused memory: GiB-hours held idle within the time range, and bytes "
        "that are held without work now. A click on the owner shows which processes "
        "and why.",
        Query(f"{by} ({idle_hours()})"),
        Query(f"{by} ({wasted_holdings()})"),
        Query(f"{by} ({selector('vramledger_owner:memory_held_bytes:sum')})"),
        columns=[
            OWNER_COLUMN,
            OWNER_TYPE_COLUMN,
            Column("Value #A", "Idle in time range", GIB_HOURS, bar=True),
            Column("Value #B", "Wasted now", BYTES, width=120),
            Column("Value #C", "Held now", BYTES, width=120),
        ],
        sort="Value #A", absent=NO_RULES,
    )  # fmt: skip


def waste_by_team() -> Panel:
    team = 'label_replace(label_replace({}, "team", "$1", "user", "(.*)"), "team", "$1", "namespace", "(.+)")'
    wasted = wasted_holdings()
    return table(
        "Waste by team",
        "The same by team: the namespace of a pod, otherwise the user. GiB-hours without work "
        "within the time range, and bytes now.",
        Query(f"sum by (team) ({team.format(gibibyte_hours(wasted))})"),
        Query(f"sum by (team) ({team.format(wasted)})"),
        Query(f"sum by (team) ({team.format(holdings())})"),
        columns=[
            Column("team", "Team"),
            Column("Value #A", "Wasted in time range", GIB_HOURS, bar=True),
            Column("Value #B", "Wasted now", BYTES, width=120),
            Column("Value #C", "Held now", BYTES, width=120),
        ],
        sort="Value #A", absent=NO_RULES,
    )  # fmt: skip


def largest_wasted_holdings() -> Panel:
    worst = f"topk(25, {wasted_holdings()})"
    return table(
        "Largest unused holdings",
        "The first owners to ask: the process, its owner, and since when it has its "
        "state. A click on the pid shows its framework's figures; a click on the GPU "
        "shows all holders of that device.",
        Query(worst),
        Query(state_since(worst)),
        columns=[
            OWNER_COLUMN,
            Column("state", "State", mappings=[STATE_NAMES], width=100),
            Column("Value #A", "Holds", BYTES, bar=True),
            Column("Value #B", "Since", TIME_AGO, width=140),
            PROCESS_COLUMN,
            *PROGRAM_COLUMNS,
        ],
        sort="Value #A", absent="nothing is wasted, or no data: see Exporters", width=24, height=10,
    )  # fmt: skip


def worst_nodes() -> Panel:
    by = f"sum by ({NODE_LABELS})"
    used = selector("vramledger_device:memory_used:ratio")
    return table(
        "Worst nodes",
        (
            "Nodes with the most memory that is unused or without a "
            "process now, and how full each node is."
        ),
        Query(f"topk(20, {by} ({wasted_bytes()}))"),
        Query(f"{by} ({device_bytes(UNOWNED)})"),
        Query(f"avg by ({NODE_LABELS}) ({used})"),
        Query(f"sum by ({NODE_LABELS}) ({selector('vramledger_node:memory_short:count')})"),
        columns=[
            NODE_COLUMN,
            Column("Value #A", "Wasted now", BYTES, bar=True),
            Column("Value #B", "Unowned", BYTES, width=120),
            Column("Value #C", "Memory used", SHARE, width=90),
            Column("Value #D", "Holders that lack memory", COUNT, width=170),
        ],
        sort="Value #A",
    )  # fmt: skip


def alert_list() -> Panel:
    by = "alertname, severity, cluster, instance, gpu, uuid, owner, pid"
    return table(
        "Firing alerts",
        "The alert, its place and its owner. The runbook with the name of the alert says what to do.",
        Query(f"count by ({by}) ({firing_alerts()})"),
        columns=[
            Column("severity", "Severity", width=100),
            Column("alertname", "Alert"),
            NODE_COLUMN,
            GPU_COLUMN,
            OWNER_COLUMN,
            PROCESS_COLUMN,
        ],
        sort="severity", absent="none fires, or the alerting rules are not loaded",
    )  # fmt: skip


def ledger_over_time() -> Panel:
    return ledger_graph(
        "The fleet's ledger",
        "Where every byte of every device is; the parts add up to the total. Where "
        "the graph steps down, a device has stopped answering.",
        Query(f"sum by (state) ({device_bytes('.+')})", "{{state}}"),
        width=24,
    )


def waste_over_time() -> Panel:
    return ledger_graph(
        "Wasted over time",
        "Unused memory, by state.",
        Query(f"sum by (state) ({wasted_holdings()} or {device_bytes('unattributed')})", "{{state}}"),
    )


def waste_over_time_by_owner() -> Panel:
    return time_series(
        "Wasted over time, by owner",
        "The ten owners with the most at each moment.",
        Query(f"topk(10, sum by (owner) ({wasted_holdings()}))", "{{owner}}"),
        unit=BYTES, stacked=True,
    )  # fmt: skip


def reachable_gpus() -> Panel:
    return stat(
        "GPUs reachable",
        "Devices whose whole ledger could be read in the newest sample, and those that could not.",
        Query(f"sum({selector('vramledger_device_up')})", "up"),
        Query(count_equal("vramledger_device_up", 0), "down"),
        unit=COUNT,
    )  # fmt: skip


def idle_hours_total() -> Panel:
    return stat(
        "Idle in time range",
        "GiB-hours that all owners held idle within the time range.",
        Query(f"sum({idle_hours()})"), unit=GIB_HOURS, absent=NO_RULES, colour=GRAFANA["idle"],
    )  # fmt: skip


def fullest_gpus() -> Panel:
    full = selector("vramledger_device:memory_used:ratio")
    named = f"sum by ({DEVICE_LABELS}) ({full})"
    return time_series(
        "Fullest GPUs",
        "The ten fullest at each moment, with the driver's reserve. A full device is not "
        "wrong by itself: servers and TensorFlow fill it on purpose.",
        Query(f"topk(10, {named})", DEVICE_LEGEND),
        unit=SHARE, maximum=1,
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of all nodes."""
    return Dashboard(
        FLEET,
        "Fleet",
        "Where GPU memory is wasted, and by whom. Click an owner to see its processes, a "
        "node to see its devices.",
        [
            Row(
                "Now",
                [
                    watched_nodes(),
                    reachable_gpus(),
                    active_share(
                        "Share of the held memory whose holders work, or may work. The "
                        "rest is idle, stopped, orphaned, exited or dead."
                    ),
                    idle_or_stopped(
                        "Memory of holders that exist but do nothing: they showed no GPU "
                        "work for a long time, or they are stopped. Ask their owners."
                    ),
                    unowned(
                        "Memory without an owner to ask: it belongs to workers whose "
                        "program has ended (orphaned), to processes that have exited or "
                        "do not exist (zombie, dead), or to no process at all "
                        "(unattributed)."
                    ),
                    alert_counts(),
                ],
            ),
            Row("Waste by owner and team", [waste_by_owner(), waste_by_team(), largest_wasted_holdings()]),
            Row("Where", [worst_nodes(), alert_list()]),
            Row(
                "Over time",
                [
                    capacity(),
                    idle_hours_total(),
                    ledger_over_time(),
                    waste_over_time(),
                    waste_over_time_by_owner(),
                    fullest_gpus(),
                ],
            ),
        ],
        time_range="now-24h",
    )
