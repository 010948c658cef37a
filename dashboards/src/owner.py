"""Show one owner or team: what it held, used and wasted, in GiB-hours and in money, and its processes."""

from __future__ import annotations

from dashboards.src.dashboard import (
    OWNER,
    Dashboard,
    Row,
    choice_variable,
    owner_variable,
    team_variable,
)
from dashboards.src.panels import (
    BYTES,
    GIB_HOURS,
    HOURS,
    ROUNDED,
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
    CHOSEN_OWNER,
    CHOSEN_TEAM,
    HOLDING_LABELS,
    MEAN_HELD,
    MEAN_WASTED,
    NODE_LABELS,
    OWNER_NAME,
    gibibyte_hours,
    gpu_hours_wasted,
    holdings,
    mean_of_largest,
    mean_of_others,
    mean_over_time,
    named_owner,
    of_chosen_teams,
    perhaps_wasted_holdings,
    sampled,
    selector,
    state_matcher,
    wasted_holdings,
    weekly_gibibyte_hours,
)
from dashboards.src.reasons import (
    NO_AGENT,
    Needs,
)
from dashboards.src.shared_panels import (
    GPU_COLUMN,
    HOLDERS_SAY,
    NODE_COLUMN,
    OWNER_COLUMN,
    PERHAPS_WASTED,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    TEAM_COLUMN,
    firing_alert_table,
    holdings_table,
    in_thirds,
    memory_limits,
    usage_table,
    watched_nodes,
)
from vramledger.views.colours import GRAFANA

HOLDS_NOTHING = Needs(rules=True, nothing="holds nothing")
HELD_NOTHING = Needs(rules=True, nothing="held nothing")
NOTHING_DRAWN = "nothing held, or no rules: see Memory"
CHOSEN = (CHOSEN_OWNER, CHOSEN_TEAM)
_COUNTED = of_chosen_teams("vramledger_owner_memory_byte_seconds_total", CHOSEN_OWNER)
NONE = f"0 * (count({_COUNTED}) or count(count_over_time({selector(MEAN_HELD, *CHOSEN)}[$__range])))"
"""0 where the owners are known: one has a figure of waste, or of a state, only after it had some."""


def chosen_holdings() -> str:
    """Return the holdings of the chosen owners of the chosen teams."""
    teams = selector("vramledger_owner:team:last", CHOSEN_TEAM)
    return f"({holdings(CHOSEN_OWNER)} and on ({NODE_LABELS}, owner_type, owner) {teams})"


def held_now() -> Panel:
    wasted = f"{wasted_holdings()} and on ({HOLDING_LABELS}) {chosen_holdings()}"
    perhaps = f"{perhaps_wasted_holdings()} and on ({HOLDING_LABELS}) {chosen_holdings()}"
    return stat(
        "Memory",
        "Bytes that the chosen owners hold now, on all devices; and what of them is held without work, or "
        "perhaps (not proven).",
        Query(f"sum({sampled(of_chosen_teams('vramledger_owner_memory_bytes', CHOSEN_OWNER))})", "held"),
        Query(f"sum({wasted}) or 0 * sum({chosen_holdings()})", "wasted"),
        Query(f"sum({perhaps}) or 0 * sum({chosen_holdings()})", PERHAPS_WASTED),
        unit=BYTES, needs=HOLDS_NOTHING,
        colours={"wasted": GRAFANA["idle"], PERHAPS_WASTED: GRAFANA["stopped"]},
    )  # fmt: skip


def active_share() -> Panel:
    held = f"sum({gibibyte_hours(MEAN_HELD, *CHOSEN)})"
    active = f"sum({gibibyte_hours(MEAN_HELD, state_matcher('active'), *CHOSEN)})"
    share = f"({active} or {NONE}) / ({held} > 0)"
    return stat(
        "In active use in time range",
        "Share of the owners' GiB-hours within the time range that working processes held; one that may "
        "work counts as working.",
        Query(share), unit=SHARE, needs=HELD_NOTHING, colour=GRAFANA["active"],
    )  # fmt: skip


def wasted_in_range() -> Panel:
    return stat(
        "Wasted in time range",
        "GiB-hours that the owners held without work within the time range.",
        Query(f"sum({gibibyte_hours(MEAN_WASTED, *CHOSEN)}) or {NONE}"),
        unit=GIB_HOURS, needs=HELD_NOTHING, colour=GRAFANA["idle"],
    )  # fmt: skip


def cost() -> Panel:
    return stat(
        "Cost of the waste, $currency",
        "Hours of whole GPUs whose memory was wasted within the time range, times the chosen price of a "
        "GPU-hour, in the chosen currency. Another price or currency can be typed in.",
        Query(f"$price * sum({gpu_hours_wasted(*CHOSEN)}) or {NONE}"),
        unit=ROUNDED, needs=HELD_NOTHING, colour=GRAFANA["idle"],
    )  # fmt: skip


def by_state() -> Panel:
    return usage_table(
        "GiB-hours by owner and state",
        "What the 25 largest owners held within the time range, by the state of the holders; what of "
        "it was wasted, and the same in hours of whole GPUs and in money.",
        "owner_type, owner, team", OWNER_COLUMN, TEAM_COLUMN,
        rows=25,
        matchers=CHOSEN,
        more=[
            ("GPU-hours wasted", gpu_hours_wasted(*CHOSEN), HOURS),
            ("Cost, $currency", f"$price * {gpu_hours_wasted(*CHOSEN)}", ROUNDED),
        ],
    )  # fmt: skip


def processes() -> Panel:
    return holdings_table(
        "Processes", HOLDERS_SAY, chosen_holdings(),
        columns=[PROCESS_COLUMN, PROGRAM_COLUMN, OWNER_COLUMN], height=12,
    )  # fmt: skip


def owners_alerts() -> Panel:
    other_teams = selector("vramledger_owner:team:last", 'team!~"$team"', 'team!=""')
    return firing_alert_table(
        CHOSEN_OWNER, 'owner!=""', but=f"unless on (cluster, instance, owner) {other_teams}", width=24,
        say="Alerts about a GPU, a node or an exporter have no owner, and are not here. ",
    )  # fmt: skip


def limits() -> Panel:
    teams = selector("vramledger_owner:team:last", CHOSEN_TEAM)
    return memory_limits(
        CHOSEN_OWNER,
        but=f"and on ({NODE_LABELS}, owner_type, owner) {teams}",
        places=[NODE_COLUMN, GPU_COLUMN],
    )


def held_by_state() -> Panel:
    return ledger_graph(
        "Held, by state, 4-minute means",
        "What all processes of the owners have held, by the state of the holders; means of 4 minutes.",
        Query(f"sum by (state) ({mean_over_time(MEAN_HELD, *CHOSEN)})", "{{state}}"),
        absent=NOTHING_DRAWN,
        width=24,
    )


def held_by_owner() -> Panel:
    by = "owner_type, owner"
    return time_series(
        "Held, by owner, 4-minute means",
        "The ten owners that held most within the time range, and the sum of all others; means of 4 "
        "minutes. A colour stands for an owner here, not for a state.",
        Query(named_owner(mean_of_largest(MEAN_HELD, by, *CHOSEN)), f"{{{{{OWNER_NAME}}}}}"),
        Query(mean_of_others(MEAN_HELD, by, *CHOSEN), "all others"),
        unit=BYTES, stacked=True, named=True, absent=NOTHING_DRAWN, width=24,
    )  # fmt: skip


def could_be_freed() -> Panel:
    of_those = f"and on ({HOLDING_LABELS}) {chosen_holdings()}"
    cached = selector("vramledger_torch_reclaimable_bytes")
    return stat(
        "Reclaimable now",
        "What torch.cuda.empty_cache() would free now in the owners' programs, where torch's counters tell. "
        "'vramledger reclaim PID' frees it, if the program consents.",
        Query(f"sum({cached} {of_those})"),
        unit=BYTES, needs=Needs([NO_AGENT], rules=True, nothing="not reported"),
    )  # fmt: skip


def trend() -> Panel:
    by_owner = "sum by (owner_type, owner) ({})"
    weeks = [by_owner.format(weekly_gibibyte_hours(MEAN_WASTED, *CHOSEN, weeks=back)) for back in range(4)]
    watched = selector("vramledger_node:devices:max1d")
    some = f"sum by (owner_type, owner) (count_over_time({selector(MEAN_WASTED, *CHOSEN)}[7d]))"
    none = [
        f"0 * {some} and on () count(count_over_time({watched}[7d:1d] offset {7 * back}d))"
        for back in range(4)
    ]
    return table(
        "Wasted, week by week",
        "GiB-hours that the ten worst of the owners wasted within the last 7 days, and within each of the "
        "three weeks before. A dash: no node was watched in that week.",
        Query(f"topk(10, {weeks[0]})"),
        *(Query(f"{weeks[back]}\nor {none[back]}") for back in range(1, 4)),
        columns=[
            OWNER_COLUMN,
            Column("Value #A", "These 7 days", GIB_HOURS),
            Column("Value #B", "Last week", GIB_HOURS),
            Column("Value #C", "2 weeks ago", GIB_HOURS),
            Column("Value #D", "3 weeks ago", GIB_HOURS),
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=9,
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of an owner."""
    return Dashboard(
        OWNER,
        "Owner",
        "What an owner or a team held, used and wasted, in GiB-hours and in money; its processes, and its "
        "alerts.",
        [
            Row(
                "Now",
                [
                    watched_nodes(),
                    *in_thirds(
                        held_now(),
                        active_share(),
                        could_be_freed(),
                        wasted_in_range(),
                        cost(),
                    ),
                ],
            ),
            Row(
                "GiB-hours",
                [counted(by_state(), "owners"), counted(trend(), "owners with waste")],
            ),
            Row(
                "Its processes",
                [
                    counted(processes(), "processes"),
                    counted(owners_alerts(), "firing alerts", alerting=True),
                    limits(),
                ],
            ),
            Row("Over time", [held_by_state(), held_by_owner()]),
        ],
        [
            team_variable(),
            owner_variable(),
            choice_variable("price", "Price of a GPU-hour", ("1", "2", "3", "4", "6", "10"), "2"),
            choice_variable("currency", "Currency", ("USD", "EUR", "GBP", "CNY", "JPY", "KRW"), "USD"),
        ],
    )
