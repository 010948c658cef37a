"""Show one node: the ledger of each GPU, their holders, what happened, reservations and sensors."""

from __future__ import annotations

from dataclasses import replace

from dashboards.src.dashboard import NODE, Dashboard, Row, gpu_variable
from dashboards.src.lines import MEAN_STEP, joined, mean
from dashboards.src.panels import (
    BAD,
    BYTES,
    COUNT,
    GOOD,
    SECONDS,
    SHARE,
    YES_OR_NO,
    Column,
    Panel,
    Query,
    ledger_graph,
    repeated,
    stat,
    state_timeline,
    table,
    time_series,
    value_mapping,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    NODE_LABELS,
    age,
    device_bytes,
    device_utilisation,
    holdings,
    largest_beside,
    placed,
    selector,
    ten_largest,
    wasted_bytes,
)
from dashboards.src.reasons import Needs
from dashboards.src.shared_panels import (
    ANY_DEVICE,
    BLOCKER_COLUMN,
    GPU_COLUMN,
    OWNER_COLUMNS,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    VERDICT_COLUMN,
    VERDICT_STEP_COLUMN,
    exporters,
    firing_alert_table,
    holders,
    memory_limits,
    unattributed,
    wasted,
    with_verdict_step,
)

NOT_AVAILABLE = "if the exporter is watching: no such sensor"
NOT_RESERVED = "not available: no scheduler reserves these GPUs"
DEVICE = "GPU {{device}}"
GHOST = value_mapping({0: ("no", GOOD), 1: ("yes: try it", BAD)})


def reachable_gpus() -> Panel:
    up = selector("vramledger_device_up", 'uuid!~"MIG-.*"')
    asleep = selector("vramledger_device_asleep", 'uuid!~"MIG-.*"')
    return stat(
        "GPUs reachable",
        "Whole GPUs whose ledger could be read in the newest sample; those that could not and do not sleep.",
        Query(f"sum({up})", "up"),
        Query(f"count({up} == 0 unless on ({NODE_LABELS}, uuid) {asleep}) or 0 * count({up})", "down"),
        unit=COUNT, needs=Needs(nothing="no GPU"),
    )  # fmt: skip


def memory_used() -> Panel:
    total = selector("vramledger_device_memory_total_bytes")
    return stat(
        "Memory used",
        "Share of all device memory that is in use, with the driver's reserve; and the share whose holders "
        "work, or may work.",
        Query(f"1 - sum({device_bytes('free')}) / sum({total})", "used"),
        Query(f"sum({device_bytes('active')}) / sum({total})", "active"), unit=SHARE,
        needs=ANY_DEVICE,
    )  # fmt: skip


def gpu_ledgers() -> Panel:
    chosen = 'gpu=~"$gpu"'
    graph = ledger_graph(
        "GPU $gpu",
        "Where each byte of the GPU is, over time; the parts add up to the total. Where it is divided into "
        "MIG instances, they are added. In a gap it does not answer.",
        Query(f"sum by (state) ({device_bytes('.+', chosen)})", "{{state}}"),
        Query(f"sum({selector('vramledger_device_memory_total_bytes', chosen)})", "total"),
        total="total", width=24, height=6,
    )  # fmt: skip
    return repeated(graph, "gpu")


def failures_by_program() -> Panel:
    process = f"{NODE_LABELS}, pid"
    newest = f"last_over_time({selector('vramledger_framework_last_oom_timestamp_seconds')}[$__range])"
    asked = f"last_over_time({selector('vramledger_framework_last_oom_requested_bytes')}[$__range])"
    names = f"max by ({process}, command, owner_type, owner) (last_over_time({holdings()}[$__range]))"
    ages = with_verdict_step(f"bottomk(10, {age(f'max by ({process}, verdict) ({newest})')})")
    return table(
        "Programs that ran out of memory",
        "The newest failed allocation of each program, also of programs that have ended: what it asked for, "
        "the verdict of its agent, what helps first, and who else held most on its GPUs just after it "
        "failed.",
        Query(ages),
        Query(f"topk by ({process}) (1, {names})"),
        Query(f"max by ({process}) ({asked})"),
        Query(largest_beside()),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            *OWNER_COLUMNS,
            Column("Value #A", "Ago", SECONDS, width=98),
            Column("Value #C", "Asked", BYTES, width=80),
            VERDICT_COLUMN,
            VERDICT_STEP_COLUMN,
            BLOCKER_COLUMN,
            Column("Value #D", "Other held", BYTES, width=84),
        ],
        empty="no allocation failed: good",
        needs="agent", sort="Value #A", ascending=True, rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def devices() -> Panel:
    by = f"sum by ({DEVICE_LABELS})"
    up = selector("vramledger_device_up")
    return table(
        "Devices",
        "The devices and their state. An empty cell is not available: the device does not answer or lacks "
        "the sensor. Busy without a holder: a CUDA program may clear it. A click on the GPU shows its ledger "
        "over time.",
        Query(f"{by} ({up})"),
        Query(f"count by ({DEVICE_LABELS}, name, device) ({selector('vramledger_device:place:info')})"),
        Query(f"{by} ({selector('vramledger_device:memory_used:ratio')})"),
        Query(f"{by} ({wasted_bytes()})"),
        Query(f"{by} ({device_bytes('unattributed')})"),
        Query(f"{by} ({selector('vramledger_device_holders')})"),
        Query(f"{by} ({selector('vramledger_device_hidden_holders')})"),
        Query(f"{by} ({device_utilisation()})"),
        Query(f"{by} ({selector('vramledger_device_temperature_celsius')})"),
        Query(f"{by} ({selector('vramledger_device_ghost')})"),
        columns=[
            replace(GPU_COLUMN, width=72),
            Column("name", "Product", least=190),
            Column("device", "Place", width=92),
            Column("Value #A", "Answers", COUNT, mappings=[YES_OR_NO], width=85),
            Column("Value #C", "Memory used", SHARE, width=100),
            Column("Value #D", "Wasted", BYTES, width=100),
            Column("Value #E", "Unattributed", BYTES, width=118),
            Column("Value #F", "Holders", COUNT, width=80),
            Column("Value #G", "Hidden holders", COUNT, width=85),
            Column("Value #H", "Utilisation, 15 min", SHARE, width=116),
            Column("Value #I", "Temperature", "celsius", width=110),
            Column("Value #J", "Busy without a holder", COUNT, mappings=[GHOST], width=110),
        ],
        empty="no GPU is known: see Exporter",
        sort="gpu", ascending=True, width=24, height=8,
    )  # fmt: skip


def device_reachability() -> Panel:
    return state_timeline(
        "Devices reachable",
        "Whether each device's whole ledger could be read. In a gap the exporter itself did not answer.",
        Query(
            f"topk(64, {placed(selector('vramledger_device_up'))})", DEVICE
        ),
        mappings=[YES_OR_NO],
    )  # fmt: skip


def failed_allocations() -> Panel:
    when = selector("vramledger_owner_last_oom_timestamp_seconds")
    by = "owner_type, owner, framework"
    return table(
        "Owners that ran out of memory",
        "The ten newest failed allocations, by owner, also of programs that have ended.",
        Query(f"bottomk(10, {age(f'max by ({by}) ({when})')})"),
        Query(f"sum by ({by}) ({selector('vramledger_owner_ooms_total')})"),
        columns=[
            *OWNER_COLUMNS,
            Column("framework", "Framework", width=95),
            Column("Value #A", "Ago", SECONDS, width=98),
            Column("Value #B", "Failed", COUNT, width=70),
        ],
        empty="no allocation failed: good",
        needs="agent", sort="Value #A", ascending=True, rows_of="Value #A", width=12, height=8,
    )  # fmt: skip


def reservations() -> Panel:
    by = "instance, gpu, uuid, owner_type, owner"
    reserved = selector("vramledger_device_reservation_info")
    held = selector("vramledger_owner_memory_bytes")
    scheduled = f"and on (uuid) {selector('vramledger_device_reservations')}"
    return table(
        "Reservations and holdings",
        "For each GPU that a scheduler assigns: for whom it is reserved, and what each owner holds of it. "
        "An owner without a reservation has no business there; one without a holding blocks the GPU.",
        Query(f"topk(50, {reserved} or 0 * {held} {scheduled})"),
        Query(f"sum by ({by}) ({held} {scheduled})"),
        columns=[
            GPU_COLUMN,
            *OWNER_COLUMNS,
            Column("Value #A", "Reservation", COUNT, mappings=[YES_OR_NO], width=110),
            Column("Value #B", "Holds", BYTES, width=100),
        ],
        empty="nobody has reserved or holds one",
        needs="scheduler", sort="Value #B", rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def hardware() -> list[Panel]:
    def ten(figure: str) -> str:
        return placed(f"({ten_largest(f'sum by ({DEVICE_LABELS}) ({figure})', DEVICE_LABELS)})")

    return [
        joined(
            time_series(
                title, about,
                Query(ten(figure), DEVICE),
                unit=unit, maximum=maximum, absent=NOT_AVAILABLE, step=step,
            )
        )
        for title, about, figure, unit, maximum, step in (
            (
                "Utilisation",
                "Share of time with a kernel running, as a mean of 2 minutes or more, without small ones.",
                mean("vramledger_device_utilization_ratio"),
                SHARE,
                1,
                MEAN_STEP,
            ),
            (
                "Temperature",
                "Temperature of each GPU chip.",
                selector("vramledger_device_temperature_celsius"),
                "celsius",
                None,
                "",
            ),
        )
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of a node."""
    return Dashboard(
        NODE,
        "Node",
        "The ledger of each GPU of one node, who holds them, and what happened.",
        [
            Row(
                "",
                [
                    *(replace(figure, width=5) for figure in (exporters(), reachable_gpus(), memory_used())),
                    wasted(),
                    replace(unattributed(), width=5),
                    gpu_ledgers(),
                    holders(height=10),
                    firing_alert_table(height=8),
                ],
            ),
            Row(
                "What happened",
                [failures_by_program(), failed_allocations(), device_reachability()],
                collapsed=True,
            ),
            Row("Devices", [devices()], collapsed=True),
            Row(
                "Reservations and limits",
                [reservations(), memory_limits()],
                collapsed=True,
            ),
            Row("Hardware", hardware(), collapsed=True),
        ],
        [gpu_variable()],
        one_node=True,
    )
