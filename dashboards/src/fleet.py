"""Where memory is wasted, and who wastes it: the dashboard to begin with."""

from __future__ import annotations

from dashboards.src.dashboard import (
    FLEET,
    Dashboard,
    Row,
    to_device,
    to_health,
    to_node,
    to_owner,
    to_process,
)
from dashboards.src.panels import (
    BYTES,
    COUNT,
    HOURS,
    SHARE,
    STATE_NAMES,
    WHEN,
    Column,
    Panel,
    Query,
    ledger,
    stat,
    table,
    trend,
)
from dashboards.src.queries import (
    ABANDONED,
    DEVICE,
    NODE,
    WASTED,
    WATCHING,
    alerts,
    held,
    idle_hours,
    number,
    of,
    owned,
    rules_run,
    since,
    state,
    status,
)
from dashboards.src.shared_panels import PROGRAM_AND_PLACE, abandoned, quiet, working
from vramledger.views.colours import GRAFANA

NO_RULES = "no data: are the recording rules loaded?"


def watched() -> Panel:
    return stat(
        "Exporters",
        "Nodes that are watched: the exporter answers, reads the driver and goes on sampling. Of any other "
        "node nothing on these dashboards is known, and what is known of the fleet is too little by it.",
        Query(f"count({status()} == {WATCHING}) or 0 * count({status()})", "watched"),
        Query(f"count({status()} < {WATCHING}) or 0 * count({status()})", "not watched"),
        unit=COUNT, absent="no exporter is known", links=[to_health()],
    )  # fmt: skip


def capacity() -> Panel:
    total = of("vramledger_device:memory_total_bytes:last")
    return stat(
        "GPU memory",
        "All memory of the devices that answer.",
        Query(f"sum({total})"), unit=BYTES,
    )  # fmt: skip


def loud(severity: str) -> str:
    return f'severity="{severity}"'


def firing() -> Panel:
    return stat(
        "Alerts",
        "Alerts that fire now, by how loud they are. 0 only where the alerting rules are evaluated.",
        *(
            Query(f"count({alerts(loud(severity))}) or {rules_run()}", severity)
            for severity in ("page", "warning")
        ),
        unit=COUNT, absent="the alerting rules are not loaded",
    )  # fmt: skip


def by_owner() -> Panel:
    by = "sum by (owner_type, owner)"
    return table(
        "Waste by owner",
        "Who has memory that nobody works with: GiB-hours held idle within the time range, and bytes idle, "
        "stopped or abandoned now. A click on the owner shows which processes and why.",
        Query(f"{by} ({idle_hours()})"),
        Query(f"{by} ({of('vramledger_owner_memory_bytes', state(WASTED))})"),
        Query(f"{by} ({of('vramledger_owner:memory_held_bytes:sum')})"),
        columns=[
            Column("owner", "Owner", link=to_owner()),
            Column("owner_type", "Kind", width=90),
            Column("Value #A", "Idle in time range", HOURS, bar=True),
            Column("Value #B", "Wasted now", BYTES, width=120),
            Column("Value #C", "Held now", BYTES, width=120),
        ],
        sort="Value #A", absent=NO_RULES,
    )  # fmt: skip


def by_team() -> Panel:
    team = 'label_replace(label_replace({}, "team", "$1", "user", "(.*)"), "team", "$1", "namespace", "(.+)")'
    wasted = owned(state(WASTED))
    return table(
        "Waste by team",
        "The same by team: the namespace of a pod, else the user. GiB-hours idle, stopped or abandoned "
        "within the time range, and bytes now.",
        Query(f"sum by (team) ({team.format(f'sum_over_time({wasted}[$__range:5m])')}) / 12 / 2^30"),
        Query(f"sum by (team) ({team.format(wasted)})"),
        Query(f"sum by (team) ({team.format(owned())})"),
        columns=[
            Column("team", "Team"),
            Column("Value #A", "Wasted in time range", HOURS, bar=True),
            Column("Value #B", "Wasted now", BYTES, width=120),
            Column("Value #C", "Held now", BYTES, width=120),
        ],
        sort="Value #A", absent=NO_RULES,
    )  # fmt: skip


def worst_holdings() -> Panel:
    worst = f"topk(25, {owned(state(WASTED))})"
    return table(
        "Largest holdings that nobody works with",
        "Who to ask first: the process, whose it is, and since when it is in its state. A click on the pid "
        "shows what its framework says, on the GPU everything that shares the device.",
        Query(worst),
        Query(since(worst)),
        columns=[
            Column("owner", "Owner", link=to_owner()),
            Column("state", "State", mappings=[STATE_NAMES], width=100),
            Column("Value #A", "Holds", BYTES, bar=True),
            Column("Value #B", "Since", WHEN, width=140),
            Column("pid", "Pid", link=to_process(), width=90),
            *PROGRAM_AND_PLACE,
        ],
        sort="Value #A", absent="nothing is wasted, or no data: see Exporters", width=24, height=10,
    )  # fmt: skip


def worst_nodes() -> Panel:
    by = f"sum by ({NODE})"
    used = of("vramledger_device:memory_used:ratio")
    return table(
        "Worst nodes",
        "Where most memory is idle, stopped, abandoned or of no process now, and how full the node is.",
        Query(f"topk(20, {by} ({held(WASTED)}))"),
        Query(f"{by} ({held(ABANDONED)})"),
        Query(f"avg by ({NODE}) ({used})"),
        Query(f"sum by ({NODE}) ({of('vramledger_node:memory_short:count')})"),
        columns=[
            Column("instance", "Node", link=to_node()),
            Column("Value #A", "Wasted now", BYTES, bar=True),
            Column("Value #B", "Nobody's", BYTES, width=120),
            Column("Value #C", "Full", SHARE, width=90),
            Column("Value #D", "Holders that run short", COUNT, width=170),
        ],
        sort="Value #A",
    )  # fmt: skip


def firing_list() -> Panel:
    by = "alertname, severity, cluster, instance, gpu, uuid, owner, pid"
    return table(
        "Alerts that fire",
        "What, where and whose. The runbook of the same name says what to do.",
        Query(f"count by ({by}) ({alerts()})"),
        columns=[
            Column("severity", "Severity", width=100),
            Column("alertname", "Alert"),
            Column("instance", "Node", link=to_node()),
            Column("gpu", "GPU", link=to_device(), width=70),
            Column("owner", "Owner", link=to_owner()),
            Column("pid", "Pid", link=to_process(), width=90),
        ],
        sort="severity", absent="none fires, or the alerting rules are not loaded",
    )  # fmt: skip


def book() -> Panel:
    return ledger(
        "The fleet's ledger",
        "Where every byte of every device is; the parts add up to all there is. A step down is a device "
        "that no longer answers.",
        Query(f"sum by (state) ({held('.+')})", "{{state}}"),
        width=24,
    )


def waste_trend() -> Panel:
    return ledger(
        "Wasted over time",
        "Memory that nobody works with, by why.",
        Query(f"sum by (state) ({held(WASTED + '|unattributed')})", "{{state}}"),
    )


def owners_trend() -> Panel:
    wasted = of("vramledger_owner_memory_bytes", state(WASTED))
    return trend(
        "Wasted over time, by owner",
        "The ten owners with the most at each moment.",
        Query(f"topk(10, sum by (owner) ({wasted}))", "{{owner}}"),
        unit=BYTES, stacked=True,
    )  # fmt: skip


def gpus() -> Panel:
    return stat(
        "GPUs that answer",
        "Devices whose whole book could be read in the newest sample, and those that could not.",
        Query(f"sum({of('vramledger_device_up')})", "answer"),
        Query(number("vramledger_device_up", 0), "do not"),
        unit=COUNT,
    )  # fmt: skip


def idle_total() -> Panel:
    return stat(
        "Idle in time range",
        "GiB-hours that all owners held idle within the time range.",
        Query(f"sum({idle_hours()})"), unit=HOURS, absent=NO_RULES, colour=GRAFANA["idle"],
    )  # fmt: skip


def fullest() -> Panel:
    full = of("vramledger_device:memory_used:ratio")
    named = f"sum by ({DEVICE}) ({full})"
    return trend(
        "Fullest GPUs",
        "The ten fullest at each moment, with the driver's reserve. Full is no fault of itself: servers and "
        "TensorFlow work so.",
        Query(f"topk(10, {named})", "{{instance}} GPU {{gpu}}"),
        unit=SHARE, maximum=1,
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of all nodes."""
    return Dashboard(
        FLEET,
        "Fleet",
        "Where GPU memory is wasted and who wastes it. From an owner to its processes, from a node to its "
        "devices.",
        [
            Row(
                "Now",
                [
                    watched(),
                    gpus(),
                    working(
                        "Share of the held memory whose holders work, or may. The rest is idle, stopped or "
                        "abandoned."
                    ),
                    quiet(
                        "Memory of holders that exist and do nothing: no GPU work was seen for a long time, "
                        "or they are stopped. Ask their owners."
                    ),
                    abandoned(
                        "Memory that nobody answers for: of workers whose program is gone (orphaned), of "
                        "exited or vanished processes (zombie, dead), and of no process at all "
                        "(unattributed)."
                    ),
                    firing(),
                ],
            ),
            Row("Who wastes it", [by_owner(), by_team(), worst_holdings()]),
            Row("Where", [worst_nodes(), firing_list()]),
            Row("Over time", [capacity(), idle_total(), book(), waste_trend(), owners_trend(), fullest()]),
        ],
        span="now-24h",
    )
