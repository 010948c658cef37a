"""Show one owner or team: what it held, used and wasted, in GiB-hours and in money, and its processes."""

from __future__ import annotations

from dashboards.src.dashboard import (
    OWNER,
    Dashboard,
    Row,
    link_to_team,
    of_series,
    owner_variable,
    price_variables,
    team_variable,
)
from dashboards.src.panels import (
    BYTES,
    GIB_HOURS,
    HOURS,
    ROUNDED,
    Column,
    Panel,
    Query,
    bars,
    ledger_graph,
    stat,
    table,
)
from dashboards.src.queries import (
    CHOSEN_OWNER,
    CHOSEN_TEAM,
    HOLDING_LABELS,
    MEAN_DEVICES_WASTED,
    MEAN_HELD,
    MEAN_WASTED,
    chosen_hours,
    gibibyte_hours,
    holdings,
    hours,
    mean_over_time,
    of_chosen,
    perhaps_wasted_holdings,
    sampled,
    selector,
    state_matcher,
    wasted_holdings,
)
from dashboards.src.reasons import (
    Needs,
)
from dashboards.src.shared_panels import (
    GPU_COLUMN,
    HOLDERS_SAY,
    NODE_COLUMN,
    OWNER_COLUMNS,
    PERHAPS_WASTED,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    TEAM_COLUMN,
    firing_alert_table,
    holdings_table,
    memory_limits,
    usage_table,
    watched_nodes,
)
from vramledger.views.colours import GRAFANA

HOLDS_NOTHING = Needs(nothing="holds nothing")
HELD_NOTHING = Needs(nothing="held nothing")
NOTHING_DRAWN = "nothing held: see Memory"
CHOSEN = (CHOSEN_OWNER, CHOSEN_TEAM)


def held_now() -> Panel:
    held = sampled(selector("vramledger_owner_memory_bytes", CHOSEN_OWNER))
    teams = selector("vramledger_owner:team:last", CHOSEN_TEAM)
    cached = selector("vramledger_torch_reclaimable_bytes")
    return stat(
        "Memory",
        "Bytes that the chosen owners hold now, on all devices; and what of them is held without work, or "
        "perhaps. Reclaimable: what torch.cuda.empty_cache() would free now, where torch's counters tell; "
        "'vramledger reclaim PID' frees it, if the program consents.",
        Query(f"sum({held} and on (instance, owner_type, owner) {teams})", "held"),
        Query(f"sum({wasted_holdings(*CHOSEN)}) or 0 * sum({holdings(*CHOSEN)})", "wasted"),
        Query(f"sum({perhaps_wasted_holdings(*CHOSEN)}) or 0 * sum({holdings(*CHOSEN)})", PERHAPS_WASTED),
        Query(f"sum({cached} and on ({HOLDING_LABELS}) {holdings(*CHOSEN)})", "reclaimable"),
        unit=BYTES, needs=HOLDS_NOTHING, width=7,
        colours={"wasted": GRAFANA["idle"], PERHAPS_WASTED: GRAFANA["stopped"]},
    )  # fmt: skip


def held_in_range() -> Panel:
    held, active = (chosen_hours(MEAN_HELD, *state) for state in ((), [state_matcher("active")]))
    return stat(
        "GiB-hours in time range",
        "What the owners held within the time range; what of it working processes held, where one that may "
        "work counts as working; and what was held without work.",
        Query(f"sum({held}) / 2^30", "held"),
        Query(f"sum({active}) / 2^30", "in active use"),
        Query(f"sum({chosen_hours(MEAN_WASTED)}) / 2^30", "wasted"),
        unit=GIB_HOURS, needs=HELD_NOTHING, width=6,
        colours={"in active use": GRAFANA["active"], "wasted": GRAFANA["idle"]},
    )  # fmt: skip


def cost() -> Panel:
    return stat(
        "Waste in time range, $currency",
        "Hours of whole GPUs whose memory was wasted within the time range, times the chosen price of a "
        "GPU-hour, in the chosen currency. Another price or currency can be typed in.",
        Query(f"$price * sum({chosen_hours(MEAN_DEVICES_WASTED)})"),
        unit=ROUNDED, needs=HELD_NOTHING, colour=GRAFANA["idle"], width=6,
    )  # fmt: skip


def by_state() -> Panel:
    return usage_table(
        "GiB-hours by owner and state",
        "What the 25 largest owners held within the time range, by the state of the holders; what of "
        "it was wasted, and the same in hours of whole GPUs and in money.",
        "owner_type, owner, team", *OWNER_COLUMNS, TEAM_COLUMN,
        rows=25,
        matchers=CHOSEN,
        more=[
            ("GPU-hours wasted", hours(MEAN_DEVICES_WASTED, *CHOSEN), HOURS),
            ("Cost, $currency", f"$price * {hours(MEAN_DEVICES_WASTED, *CHOSEN)}", ROUNDED),
        ],
    )  # fmt: skip


def processes() -> Panel:
    return holdings_table(
        "Processes", HOLDERS_SAY, holdings(*CHOSEN),
        columns=[PROCESS_COLUMN, PROGRAM_COLUMN, TEAM_COLUMN, *OWNER_COLUMNS], height=10,
    )  # fmt: skip


def owners_alerts() -> Panel:
    return firing_alert_table(
        "Firing alerts", CHOSEN_OWNER, 'owner!=""', CHOSEN_TEAM, height=7,
        say="Alerts about a GPU, a node or an exporter have no owner, and are not here. ",
    )  # fmt: skip


def limits() -> Panel:
    teams = selector("vramledger_owner:team:last", CHOSEN_TEAM)
    return memory_limits(
        CHOSEN_OWNER,
        but=f"and on (instance, owner_type, owner) {teams}",
        places=[NODE_COLUMN, GPU_COLUMN],
    )


def held_by_state() -> Panel:
    return ledger_graph(
        "Held, by state, 4-minute means",
        "What all processes of the owners have held, by the state of the holders; means of 4 minutes.",
        Query(f"sum by (state) ({of_chosen(mean_over_time, MEAN_HELD)})", "{{state}}"),
        absent=NOTHING_DRAWN,
        width=14,
        height=8,
    )


def held_by_team() -> Panel:
    held = f"sum by (team) ({chosen_hours(MEAN_HELD)}) / 2^30"
    return bars(
        "GiB-hours by team",
        "The ten teams that held most within the time range; right to 4 minutes at each end. A team is the "
        "namespace of a pod, otherwise the user. Those of each owner are in the row below.",
        Query(f"topk(10, {held} > 0)", "{{team}}"),
        unit=GIB_HOURS, needs=HELD_NOTHING, links=[of_series(link_to_team())], width=10,
    )  # fmt: skip


def trend() -> Panel:
    weeks = [
        gibibyte_hours(MEAN_WASTED, *CHOSEN, span="7d", ago=f" offset {7 * back}d" if back else "")
        for back in range(4)
    ]
    first, *before = [f"sum by (owner_type, owner) ({week})" for week in weeks]
    return table(
        "Wasted, week by week",
        "GiB-hours that the ten worst of the owners wasted within the last 7 days, and within each of the "
        "three weeks before. A dash: nothing is recorded of that week.",
        Query(f"topk(10, {first})"),
        *map(Query, before),
        columns=[
            *OWNER_COLUMNS,
            Column("Value #A", "These 7 days", GIB_HOURS),
            Column("Value #B", "Last week", GIB_HOURS),
            Column("Value #C", "2 weeks ago", GIB_HOURS),
            Column("Value #D", "3 weeks ago", GIB_HOURS),
        ],
        empty="nobody wasted memory in these 7 days: good",
        needs="node", sort="Value #A", rows_of="Value #A", width=24, height=9,
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
                "",
                [
                    watched_nodes(width=5),
                    held_now(),
                    held_in_range(),
                    cost(),
                    held_by_state(),
                    held_by_team(),
                    processes(),
                    owners_alerts(),
                ],
            ),
            Row("GiB-hours and money", [by_state(), trend()], collapsed=True),
            Row("Limits", [limits()], collapsed=True),
        ],
        [
            team_variable(),
            owner_variable(),
            *price_variables(),
        ],
    )
