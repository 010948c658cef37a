"""Make the panels that are on more than one dashboard."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.src.dashboard import (
    link_to_device,
    link_to_exporter_health,
    link_to_node,
    link_to_owner,
    link_to_process,
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
    stat,
    table,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    IDLE_OR_STOPPED,
    UNOWNED,
    device_bytes,
    exporter_status,
    holdings,
    state_since,
    utilised_share,
)
from vramledger.views.colours import GRAFANA

NODE_COLUMN = Column("instance", "Node", link=link_to_node())
GPU_COLUMN = Column("gpu", "GPU", link=link_to_device(), width=70)
OWNER_COLUMN = Column("owner", "Owner", link=link_to_owner())
OWNER_TYPE_COLUMN = Column("owner_type", "Kind", width=90)
PROCESS_COLUMN = Column("pid", "Pid", link=link_to_process(), width=90)
PID_COLUMN = Column("pid", "Pid", width=90)
"""The pid without a link to its process."""

PROGRAM_COLUMNS = (
    Column("user", "User", width=100),
    Column("command", "Program"),
    Column("framework", "Framework", width=110),
    Column("policy", "Takes memory by", width=130),
    NODE_COLUMN,
    GPU_COLUMN,
)
"""The last columns of every table of holdings."""


def exporters() -> Panel:
    """Make the indicator that is on every dashboard: it says how to read a missing figure."""
    return stat(
        "Exporters",
        "The worst of the chosen nodes. Unless it says watching, a missing figure below "
        "says nothing about the GPUs.",
        Query(f"min({exporter_status()})"),
        unit=COUNT, absent="no exporter is known", mappings=[STATUS_NAMES], links=[link_to_exporter_health()],
    )  # fmt: skip


def active_share(about: str) -> Panel:
    """Make the figure of the share of held memory in active use; ``about`` describes it on its dashboard."""
    return stat(
        "Share in active use", about, Query(utilised_share("node")),
        unit=SHARE, absent=NO_HOLDER, colour=GOOD,
    )  # fmt: skip


def idle_or_stopped(about: str) -> Panel:
    """Make the figure of memory that is idle or stopped; ``about`` describes it on its dashboard."""
    return stat(
        "Idle or stopped", about, Query(f"sum({device_bytes(IDLE_OR_STOPPED)})"),
        unit=BYTES, colour=GRAFANA["idle"],
    )  # fmt: skip


def unowned(about: str) -> Panel:
    """Make the figure of memory without an owner to ask; ``about`` describes it on its dashboard."""
    return stat(
        "Unowned", about, Query(f"sum({device_bytes(UNOWNED)})"),
        unit=BYTES, colour=GRAFANA["orphaned"],
    )  # fmt: skip


def holdings_table(
    title: str,
    description: str,
    *matchers: str,
    columns: Sequence[Column],
    absent: str,
    height: int,
) -> Panel:
    """Make a table of the holdings that the matchers choose; ``columns`` come first and name the owner."""
    chosen = holdings(*matchers)
    by = f"{DEVICE_LABELS}, pid, state, user, command, framework, policy, owner_type, owner"
    return table(
        title, description,
        Query(f"sum by ({by}) ({chosen})"),
        Query(f"max by ({by}) ({state_since(chosen)})"),
        columns=[
            *columns,
            Column("state", "State", mappings=[STATE_NAMES], width=100),
            Column("Value #B", "Since", TIME_AGO, width=140),
            Column("Value #A", "Holds", BYTES, bar=True),
            *PROGRAM_COLUMNS,
        ],
        sort="Value #A", absent=absent, width=24, height=height,
    )  # fmt: skip


def holders(*matchers: str, height: int = 10) -> Panel:
    """Make the table of the holders that the matchers choose."""
    return holdings_table(
        "Holders",
        "The holders of memory now, with their state and since when. In the state "
        "unknown, the exporter cannot see the process.",
        *matchers,
        columns=[OWNER_COLUMN, OWNER_TYPE_COLUMN, PROCESS_COLUMN],
        absent="no process holds memory, or no data: see Exporters", height=height,
    )  # fmt: skip
