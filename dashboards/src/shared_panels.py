"""Panels that stand on more than one dashboard."""

from __future__ import annotations

from dashboards.src.dashboard import to_device, to_health, to_node, to_owner, to_process
from dashboards.src.panels import (
    BYTES,
    COUNT,
    GOOD,
    SHARE,
    STATE_NAMES,
    STATUS,
    WHEN,
    Column,
    Panel,
    Query,
    stat,
    table,
)
from dashboards.src.queries import ABANDONED, DEVICE, QUIET, held, owned, since, status, working_share
from vramledger.views.colours import GRAFANA

PROGRAM_AND_PLACE = (
    Column("user", "User", width=100),
    Column("command", "Program"),
    Column("framework", "Framework", width=110),
    Column("policy", "Takes memory by", width=130),
    Column("instance", "Node", link=to_node()),
    Column("gpu", "GPU", link=to_device(), width=70),
)
"""The last columns of every table of holdings."""

ABOUT_A_HOLDING = (
    Column("state", "State", mappings=[STATE_NAMES], width=100),
    Column("Value #B", "Since", WHEN, width=140),
    Column("Value #A", "Holds", BYTES, bar=True),
    *PROGRAM_AND_PLACE,
)
"""The columns of a table of all holdings, after those that say whose it is."""


def exporters() -> Panel:
    """Make the indicator that is on every dashboard: what to think of a figure that is not there."""
    return stat(
        "Exporters",
        "The worst of the chosen nodes. Unless it says watching, a figure that is missing below says "
        "nothing about the GPUs.",
        Query(f"min({status()})"),
        unit=COUNT, absent="no exporter is known", mappings=[STATUS], links=[to_health()],
    )  # fmt: skip


def working(about: str) -> Panel:
    """Make the share of the held memory that works, with a description for its dashboard."""
    return stat(
        "Held by who works", about, Query(working_share("node")),
        unit=SHARE, absent="nobody holds memory, or no data", colour=GOOD,
    )  # fmt: skip


def quiet(about: str) -> Panel:
    """Make the memory of those who do nothing, with a description for its dashboard."""
    return stat("Idle or stopped", about, Query(f"sum({held(QUIET)})"), unit=BYTES, colour=GRAFANA["idle"])


def abandoned(about: str) -> Panel:
    """Make the memory that nobody answers for, with a description for its dashboard."""
    return stat("Nobody's", about, Query(f"sum({held(ABANDONED)})"), unit=BYTES, colour=GRAFANA["orphaned"])


def holders(*matchers: str, height: int = 10) -> Panel:
    """Make the table of the holdings that the matchers choose."""
    chosen = owned(*matchers)
    by = f"{DEVICE}, pid, state, user, command, framework, policy, owner_type, owner"
    return table(
        "Holders",
        "Who holds memory now, in which state and since when. A state of unknown: the process cannot be "
        "seen from where the exporter runs.",
        Query(f"sum by ({by}) ({chosen})"),
        Query(f"max by ({by}) ({since(chosen)})"),
        columns=[
            Column("owner", "Owner", link=to_owner()),
            Column("owner_type", "Kind", width=90),
            Column("pid", "Pid", link=to_process(), width=90),
            *ABOUT_A_HOLDING,
        ],
        sort="Value #A", absent="nobody holds memory, or no data: see Exporters", width=24, height=height,
    )  # fmt: skip
