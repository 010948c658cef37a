"""Make the panels that are on more than one dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dashboards.src import first_steps
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
    AGE_WIDTH,
    BYTES,
    COUNT,
    GIB_HOURS,
    SECONDS,
    SHARE,
    STATE_NAMES,
    STATUS_NAMES,
    Column,
    Panel,
    Query,
    stat,
    table,
    value_mapping,
)
from dashboards.src.queries import (
    ALERT_MATCHERS,
    DEVICE_LABELS,
    HOLDER_LABELS,
    HOLDING_LABELS,
    MAXIMUM,
    MEAN_HELD,
    MEAN_WASTED,
    NODE_LABELS,
    PARTLY_BLIND,
    RELEASED,
    USUAL_UNATTRIBUTED,
    WATCHING,
    WITHOUT_RULES,
    age,
    demand_rate,
    device_bytes,
    firing_alerts,
    gibibyte_hours,
    holdings,
    newest_bytes,
    of_teams,
    perhaps_wasted_bytes,
    process_utilisation,
    rules_heartbeat,
    selector,
    state_matcher,
    uncharged,
    wasted_bytes,
    watch_status,
)
from dashboards.src.reasons import Needs
from vramledger.views.colours import GRAFANA

NODE_COLUMN = Column("instance", "Node", link=link_to_node(), least=130)
GPU_COLUMN = Column("gpu", "GPU", link=link_to_device(), width=50)
KINDS = value_mapping({"unknown": ("", "text"), "other": ("", "text")})
OWNER_COLUMNS = (
    Column("owner_type", "Kind", mappings=[KINDS], width=66, empty=""),
    Column("owner", "Owner", link=link_to_owner(), least=102),
)
"""An owner with its kind: without that a number is not known to be a job, nor a word to be a user."""
OWNER_LEGEND = "{{owner_type}} {{owner}}"
TEAM_COLUMN = Column("team", "Team", link=link_to_team(), width=100)
PROCESS_COLUMN = Column("pid", "Pid", link=link_to_process(), width=72)
PROGRAM_COLUMN = Column("command", "Program", least=140, empty="")
FRAMEWORK_COLUMNS = (
    Column("framework", "Framework", width=92),
    Column("policy", "Policy", width=110),
)

STEPS = value_mapping({step: (text, "text") for step, text in first_steps.OF_HOLDERS.items()})
ALERT_STEPS = value_mapping({alert: (text, "text") for alert, text in first_steps.OF_ALERTS.items()})
STATE_COLUMN = Column("state", "State", mappings=[STATE_NAMES], width=77)
STEP_COLUMN = Column("step", "First step", mappings=[STEPS], width=172)
BLOCKER_COLUMN = Column("blocker", "Largest other holder then", least=180)
FOR = "For"
HIDDEN = value_mapping({0: ("seen", GRAFANA["active"]), 1: ("hidden", GRAFANA["orphaned"])})
VERDICTS = value_mapping(
    {
        "hoarded": ("held by others", GRAFANA["orphaned"]),
        "fragmented": ("own free pieces", GRAFANA["idle"]),
        "leaking": ("own growth", GRAFANA["dead"]),
        "too_big": ("too big", GRAFANA["stopped"]),
        "unknown": ("not known", GRAFANA["unknown"]),
    }
)
"""The verdicts of agents: what hoarded says is not what the alert of that name says, so it is not shown."""
VERDICT_STEPS = value_mapping(
    {
        "hoarded": ("ask the largest other", "text"),
        "fragmented": ("expandable segments", "text"),
        "leaking": ("vramledger snapshot", "text"),
        "too_big": ("a smaller batch", "text"),
        "unknown": ("see its report", "text"),
    }
)
VERDICT_COLUMN = Column("verdict", "Verdict", mappings=[VERDICTS], width=122)
VERDICT_STEP_COLUMN = Column("step", "First step", mappings=[VERDICT_STEPS], width=168)
SEVERITIES = ("page", "warning", "info")
SEVERITY_RANKS = value_mapping(
    {
        1: ("page", GRAFANA["dead"]),
        2: ("warning", "transparent"),  # yellow is idle
        3: ("info", "transparent"),
    }
)


def watched_nodes(width: int) -> Panel:
    """Make the figure of nodes by whether they are watched: how to read what is missing elsewhere."""
    status = watch_status()
    return stat(
        "Exporters",
        "Nodes by whether they are watched: the exporter answers, reads the driver and keeps sampling. "
        "These dashboards have no data of a node that is not watched, and fleet totals exclude it. In part: "
        "the exporter watches, but does not see all of the node. No rules: nothing is recorded of these.",
        Query(f"count({status} == {WATCHING}) or 0 * count({status})", "watched"),
        Query(f"count({status} == {PARTLY_BLIND}) or 0 * count({status})", "in part"),
        Query(f"count({status} < {PARTLY_BLIND}) or 0 * count({status})", "not watched"),
        Query(f"count({status} == {RELEASED}) or 0 * count({status})", "released"),
        Query(f"count({selector('up')} unless on ({NODE_LABELS}) {status})", "no rules"),
        unit=COUNT, absent="no exporter is known", links=[link_to_exporter_health()],
        colours={
            "watched": GRAFANA["active"], "in part": GRAFANA["idle"], "not watched": GRAFANA["dead"],
            "no rules": GRAFANA["orphaned"],
        },
        width=width,
    )  # fmt: skip


def exporters() -> Panel:
    """Make the indicator of the dashboards of one node: it says how to read a missing figure."""
    return stat(
        "Exporter",
        "Whether the node is watched. Unless it says watching, a missing figure below says nothing about the "
        "GPUs.",
        Query(f"min({watch_status()}) or {WITHOUT_RULES} + 0 * max({selector('up')})"),
        unit=COUNT, absent="no exporter is known", mappings=[STATUS_NAMES], links=[link_to_exporter_health()],
    )  # fmt: skip


def with_verdict_step(failures: str) -> str:
    """Return failed allocations with the label ``step``: their verdict."""
    return f'label_replace({failures}, "step", "$1", "verdict", "(.*)")'


PERHAPS_WASTED = "perhaps wasted"

ANY_DEVICE = Needs("device")
"""What a figure of the chosen devices needs."""


def wasted(*matchers: str, needs: Needs = ANY_DEVICE) -> Panel:
    """Make the figure of wasted memory of the devices that the matchers choose."""
    return stat(
        "Wasted",
        "Memory that is held without work: by idle, stopped, stuck, zombie and dead holders, and by "
        "orphans that do not work. Everywhere in these dashboards wasted means this. Perhaps: idle "
        "and orphaned holders of whom it is not known whether they work.",
        Query(f"sum({wasted_bytes(*matchers)})", "wasted"),
        Query(f"sum({perhaps_wasted_bytes(*matchers)})", "perhaps"),
        unit=BYTES, needs=needs, colours={"wasted": GRAFANA["idle"], "perhaps": GRAFANA["stopped"]},
    )  # fmt: skip


def unattributed(*matchers: str, needs: Needs = ANY_DEVICE) -> Panel:
    """Make the figure of memory that nobody is known to hold; none of it is wasted by somebody."""
    return stat(
        "Unattributed",
        "Used, and held by nobody that the driver or other evidence names: a process of another PID "
        "namespace, or memory that the driver has not freed. We measured up to 66 MiB on healthy devices.",
        Query(f"sum({device_bytes('unattributed', *matchers)})"),
        unit=BYTES, needs=needs, colour=GRAFANA["unattributed"], level=USUAL_UNATTRIBUTED,
    )  # fmt: skip


def alert_counts(width: int = 8) -> Panel:
    """Make the figure of firing alerts, by severity."""
    return stat(
        "Alerts",
        "Alerts that fire now, by severity. One that fires for the same holder as a page and as a warning is "
        "a page. 0 is shown only if the alerting rules are loaded.",
        *(
            Query(f"count({firing_alerts()} == {rank}) or {rules_heartbeat()}", name)
            for rank, name in enumerate(SEVERITIES, 1)
        ),
        unit=COUNT, absent="no rules",
        colours={"page": GRAFANA["dead"]}, width=width,
    )  # fmt: skip


def firing_alert_table(
    title: str = "Firing alerts", *matchers: str, say: str = "", width: int = 24, height: int = 10
) -> Panel:
    """Make the table of firing alerts, pages first, the oldest of them first.

    Args:
        title: in a few words.
        matchers: choose among them.
        say: which these are, for its description.
        width: in columns.
        height: in rows.
    """
    by = "alertname, cluster, instance, gpu, uuid, owner_type, owner, pid, command"
    since = f'ALERTS_FOR_STATE{{{ALERT_MATCHERS}, alertname!="VramLedgerWatchdog"}}'
    ranks = f"min by ({by}) ({firing_alerts(*matchers)})"
    return table(
        title,
        "Pages first, the oldest of them first. A click on the alert opens its runbook, which begins with "
        f"the first step. {say}Each condition that needs somebody has an alert, so an empty table is good.",
        Query(f'bottomk(50, label_replace({ranks}, "step", "$1", "alertname", ".*?((Gpu|Vram)[A-Z].*)"))'),
        Query(f"max by ({by}) ({age(since)})"),
        columns=[
            Column("Value #A", "Severity", COUNT, mappings=[SEVERITY_RANKS], width=110),
            Column("alertname", "Alert", link=link_to_runbook(), width=235),
            Column("Value #B", "Firing for", SECONDS, width=AGE_WIDTH + 20),
            Column("step", "First step", mappings=[ALERT_STEPS], width=244),
            NODE_COLUMN,
            GPU_COLUMN,
            OWNER_COLUMNS[0],
            replace(OWNER_COLUMNS[1], least=205),  # a pod on one line, so that more alerts are seen
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
        ],
        empty="nothing fires: good", needs="node",
        sort=("Value #A", "-Value #B"), ascending=True, rows_of="Value #A", width=width, height=height,
    )  # fmt: skip


def holdings_table(
    title: str,
    description: str,
    chosen: str,
    *,
    columns: Sequence[Column],
    places: Sequence[Column] = (NODE_COLUMN, GPU_COLUMN),
    rows: int = 50,
    alone: bool = False,
    empty: str = "nobody holds memory there",
    width: int = 24,
    height: int,
) -> Panel:
    """Make a table of the largest of the chosen holdings, with what is known of each.

    Args:
        title: in a few words.
        description: what it means.
        chosen: the holdings, from :func:`holdings`.
        columns: come first and name the holder; where the GPU is the first, it sorts the rows.
        places: say where it is.
        rows: at most so many, the largest.
        alone: of one process, whose need and growth other panels show: what NVML charges to nobody instead.
        empty: what no rows mean.
        width: in columns.
        height: in rows.
    """
    by = f"{DEVICE_LABELS}, pid"
    since = selector("vramledger_process:state_since_timestamp_seconds:last")
    worked = selector("vramledger_process_last_active_timestamp_seconds")
    of_those = f"and on ({HOLDING_LABELS}) ({chosen})"
    with_nodes = NODE_COLUMN in places  # names of several nodes' holders need the room of some figures
    if alone:
        say = UNCHARGED_SAYS
        figures = [f"sum by ({by}) ({uncharged()} {of_those})", f"{perhaps_more(by)} {of_those}"]
        middle = [
            Column("Value #E", "Uncharged", BYTES, width=95),
            Column("Value #F", "Perhaps more", BYTES, width=80),
        ]
    else:
        say = (
            "Peak need: the highest need that the program ever had, where its agent reports it; what is "
            "reclaimable now may be more than what it holds beyond that."
        )
        figures = [f"max by ({by}) ({selector('vramledger_process_needed_peak_bytes')} {of_those})"]
        middle = [Column("Value #E", "Peak need", BYTES, width=72)]
        if not with_nodes:
            say += " Grows: the rise of the minimum within 15 minutes, or of slower growth the mean."
            figures.append(f"{demand_rate()} {of_those}")
            middle.append(Column("Value #F", "Grows", "binBps", width=86))

    return table(
        title, f"{description} {say}",
        Query(f"topk({rows}, {chosen}) * 0 + on ({HOLDER_LABELS}) group_left () {newest_bytes()}"),
        Query(age(f"max by ({by}, grade) ({since} {of_those})")),
        Query(f"max by ({by}) ({process_utilisation()} {of_those})"),
        Query(age(f"max by ({by}) ({worked} {of_those})")),
        *map(Query, figures),
        columns=[
            *columns,
            STATE_COLUMN,
            Column("grade", "Evidence", width=84),
            Column("Value #B", FOR, SECONDS, width=AGE_WIDTH),
            Column("Value #A", "Holds", BYTES, width=100),
            *middle,
            *([] if with_nodes else [Column("Value #C", "SMs, 15 min", SHARE, width=62)]),
            Column("Value #D", "No sign of work for", SECONDS, width=AGE_WIDTH),
            STEP_COLUMN,
            *places,
        ],
        empty=empty,
        needs="device", rows_of="Value #A", width=width, height=height,
        sort=("-gpu", "Value #A") if columns[0].field == "gpu" else "Value #A",
    )  # fmt: skip


_SHOWN = 64 * 2**20
"""Bytes below which a range is noise."""

HOLDERS_SAY = (
    "The largest holders, with their state, its evidence and since when. Evidence: proven is counted by the "
    "GPU or attested by the kernel, seen is without another explanation, inferred is from circumstances. "
    "Holds: what NVML charges to the process and what is certainly its own besides, which Device and "
    "Process show apart. First step: to end it, use vramledger end; to continue it, kill -CONT; vramledger "
    "snapshot names the lines that a leak comes from, vramledger fit what a program that blocks others "
    "could be limited to. Of a holder that is idle only by inference, no step ends it: it may work. One "
    "that keeps its GPU busy without work is active, and nothing that it holds counts as wasted: it may "
    "wait for a rank that hangs. An empty cell is not known; in the state unknown, the exporter cannot see "
    "the process."
)
UNCHARGED_SAYS = (
    "Uncharged: what of its memory NVML charges to nobody, which is managed memory or memory whose creator "
    "has ended. Perhaps more: what it can have of the bytes that one of several holders has; they are in no "
    "holder's figure."
)


USAGE_STATES = {
    "Active": "active",
    "Idle": "idle",
    "Stopped": "stopped",
    "Orphaned": "orphaned",
    "Zombie, stuck, dead": "zombie|stuck|dead",
    "Unknown": "unknown",
}
"""The columns of GiB-hours by state: all states of a holding, so that they add up to what was held."""

USAGE_WIDTHS = {"Zombie, stuck, dead": 122}
"""Pixels of the columns whose headings would take three lines."""


def usage_table(
    title: str,
    description: str,
    by: str,
    *first: Column,
    rows: int,
    matchers: Sequence[str] = (),
    more: Sequence[tuple[str, str, str]] = (),
) -> Panel:
    """Make a table of GiB-hours within the time range, by owner or team and by state, from the counters.

    Args:
        title: in a few words.
        description: of its rows.
        by: the labels of a row.
        first: the columns of these labels.
        rows: at most so many, those that held most; sorted by what they wasted.
        matchers: of labels of the owners.
        more: titles, figures and units of further columns.
    """
    means = [MEAN_HELD, MEAN_WASTED] if "owner" in by else [of_teams(MEAN_HELD), of_teams(MEAN_WASTED)]
    held, wasted = (gibibyte_hours(metric, *matchers) for metric in means)

    def column(figure: str) -> str:
        return f"sum by ({by}) ({figure})"

    nothing = column(f"0 * {held}")
    figures = {
        "Held": f"topk({rows}, {column(held)} > 0)",
        "Wasted": f"{column(wasted)} or {nothing}",
        **{name: f"{column(figure)} or {nothing}" for name, figure, _ in more},
        **{
            name: column(gibibyte_hours(means[0], state_matcher(state), *matchers))
            for name, state in USAGE_STATES.items()
        },
    }
    states = [*USAGE_STATES]
    fields = {name: f"Value #{chr(ord('A') + place)}" for place, name in enumerate(figures)}
    return table(
        title,
        f"{description} The states add up to what was held. What is idle or orphaned and not in Wasted is "
        "perhaps wasted, or works: holders that are idle only by inference, and orphans. Of holders that "
        "the exporter cannot see no owner is known: they are in no row. Right to 4 minutes at each end.",
        *(Query(figure) for figure in figures.values()),
        columns=[
            *first,
            Column(fields["Wasted"], "Wasted", GIB_HOURS, width=118),
            Column(fields["Held"], "Held", GIB_HOURS, width=118),
            *(Column(fields[name], name, unit, width=92) for name, _, unit in more),
            # What an owner held in other states is known wherever it has a row.
            *(
                Column(fields[name], name, GIB_HOURS, width=USAGE_WIDTHS.get(name, 92), empty="0")
                for name in states
            ),
        ],
        empty="nobody held memory in the time range",
        needs="node", sort=(fields["Wasted"], fields["Held"]), rows_of=fields["Held"], width=24, height=12,
    )  # fmt: skip


def perhaps_more(by: str) -> str:
    """Return what each holder can have besides of the bytes that one of several holders has."""
    most = f"max by ({by}) ({selector('vramledger_process_uncharged_memory_max_bytes')})"
    return f"({most} - on ({by}) sum by ({by}) ({uncharged()}) > {_SHOWN})"


def holders(
    *matchers: str, places: Sequence[Column] = (replace(GPU_COLUMN, width=72),), height: int = 10
) -> Panel:
    """Make the table of the holders that the matchers choose."""
    return holdings_table(
        "Holders", HOLDERS_SAY, holdings(*matchers),
        columns=[*places, PROCESS_COLUMN, PROGRAM_COLUMN, *OWNER_COLUMNS],
        places=(), height=height,
    )  # fmt: skip


def memory_limits(*matchers: str, but: str = "", places: Sequence[Column] = (GPU_COLUMN,)) -> Panel:
    """Make the table of what owners may take by their cgroups.

    Args:
        matchers: of labels of the owners.
        but: what chooses among them besides, to the right of a metric.
        places: the columns that say where.
    """
    by = "instance, gpu, uuid, owner_type, owner"
    limit, used, charged = (
        f"max by ({by}) ({selector(f'vramledger_owner_memory_{name}_bytes', *chosen, *matchers)})"
        for name, *chosen in (("limit", MAXIMUM), ("limit_used",), ("charged",))
    )
    return table(
        "Limits",
        "What owners may take of a GPU by the cgroup whose limit they reach first, and what that cgroup "
        "has taken; others may be in it. Beyond the limit allocations fail, although the GPU may have "
        "free memory. Charged: what the kernel counts in the owner's own cgroups. The 50 largest limits, "
        "those that are nearly reached first. An empty cell is not known.",
        Query(f"topk(50, {limit} {but})"),
        Query(used),
        Query(f"{used} / ({limit} > 0)"),
        Query(charged),
        columns=[
            *places,
            *OWNER_COLUMNS,
            Column("Value #C", "Share", SHARE, width=100),
            Column("Value #B", "Taken", BYTES, width=100),
            Column("Value #A", "Limit", BYTES, width=100),
            Column("Value #D", "Charged", BYTES, width=100),
        ],
        empty="no owner there has a limit",
        needs="limit", sort="Value #C", rows_of="Value #A", width=24, height=7,
    )  # fmt: skip
