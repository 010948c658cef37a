"""Show one node: its devices as ledgers, their holders, and the state of the hardware."""

from __future__ import annotations

from dashboards.src.dashboard import NODE, Dashboard, Row
from dashboards.src.panels import (
    BYTES,
    COUNT,
    DEVICE_LEGEND,
    NODE_LEGEND,
    SHARE,
    YES_OR_NO,
    Column,
    Panel,
    Query,
    bar_chart,
    ledger_graph,
    stat,
    state_timeline,
    table,
    time_series,
)
from dashboards.src.queries import DEVICE_LABELS, NODE_LABELS, device_bytes, selector, wasted_bytes
from dashboards.src.shared_panels import (
    GPU_COLUMN,
    NODE_COLUMN,
    active_share,
    exporters,
    holders,
    idle_or_stopped,
    unowned,
)

NOT_AVAILABLE = "not available on these devices, or no data"


def reachable_gpus() -> Panel:
    return stat(
        "GPUs reachable",
        "Devices whose whole ledger could be read in the newest sample, of all that the exporter knows.",
        Query(f"sum({selector('vramledger_device_up')})", "up"),
        Query(f"sum({selector('vramledger_node:devices:count')})", "known"),
        unit=COUNT,
    )  # fmt: skip


def memory_used() -> Panel:
    free = selector("vramledger_device:memory_free_bytes:last")
    return stat(
        "Memory used",
        "Share of all device memory that is in use, with the driver's reserve.",
        Query(f"1 - sum({free}) / sum({selector('vramledger_device:memory_total_bytes:last')})"), unit=SHARE,
    )  # fmt: skip


def device_ledgers() -> Panel:
    parts = f"sum by ({DEVICE_LABELS}, state) ({device_bytes('.+')})"
    named = f'label_join({parts}, "device", " GPU ", "instance", "gpu")'
    return bar_chart(
        "Devices as ledgers",
        "One bar for each device: where each of its bytes is now. A missing device does "
        "not answer, or is divided into instances that have bars of their own.",
        Query(f"sum by (device, state) ({named})"),
        row="device",
    )  # fmt: skip


def devices() -> Panel:
    by = f"sum by ({DEVICE_LABELS})"
    name = selector("vramledger_device_info")
    up = selector("vramledger_device_up")
    return table(
        "Devices",
        "The devices and their state. An empty field is not available: the device does "
        "not answer or lacks the sensor. A click on the GPU shows its ledger over time.",
        Query(f"{by} ({up})"),
        Query(f"count by ({DEVICE_LABELS}, name) ({name})"),
        Query(f"{by} ({selector('vramledger_device:memory_used:ratio')})"),
        Query(f"{by} ({wasted_bytes()})"),
        Query(f"{by} ({device_bytes('unattributed')})"),
        Query(f"{by} ({selector('vramledger_device_holders')})"),
        Query(f"{by} ({selector('vramledger_device_hidden_holders')})"),
        Query(f"{by} ({selector('vramledger_device_utilization_ratio')})"),
        Query(f"{by} ({selector('vramledger_device_temperature_celsius')})"),
        columns=[
            NODE_COLUMN,
            GPU_COLUMN,
            Column("name", "Product"),
            Column("Value #A", "Answers", mappings=[YES_OR_NO], width=90),
            Column("Value #C", "Memory used", SHARE, width=90),
            Column("Value #D", "Wasted", BYTES, bar=True),
            Column("Value #E", "Unattributed", BYTES, width=120),
            Column("Value #F", "Holders", COUNT, width=90),
            Column("Value #G", "Hidden", COUNT, width=90),
            Column("Value #H", "Utilisation", SHARE, width=110),
            Column("Value #I", "Temperature", "celsius", width=120),
            Column("uuid", "UUID"),
        ],
        sort="Value #D", width=24,
    )  # fmt: skip


def ledger_over_time() -> Panel:
    return ledger_graph(
        "Ledger over time",
        "Where each byte of the chosen nodes is; the parts add up to the total.",
        Query(f"sum by (state) ({device_bytes('.+')})", "{{state}}"),
        Query(f"sum({selector('vramledger_device_memory_total_bytes')})", "total"),
        total="total",
    )  # fmt: skip


def memory_used_by_device() -> Panel:
    return time_series(
        "Memory used, by device",
        "Share of each device that is in use.",
        Query(f"sum by ({DEVICE_LABELS}) ({selector('vramledger_device:memory_used:ratio')})", DEVICE_LEGEND),
        unit=SHARE, maximum=1,
    )  # fmt: skip


def device_reachability() -> Panel:
    return state_timeline(
        "Devices reachable",
        "Whether each device's whole ledger could be read. In a gap the exporter itself did not answer.",
        Query(f"sum by ({DEVICE_LABELS}) ({selector('vramledger_device_up')})", DEVICE_LEGEND),
        mappings=[YES_OR_NO],
    )  # fmt: skip


def holders_short_of_memory() -> Panel:
    return time_series(
        "Holders that lack memory",
        "Processes that work and need more memory than there is. An idle holder on the "
        "same node then blocks them.",
        Query(
            f"sum by ({NODE_LABELS}) ({selector('vramledger_node:memory_short:count')})\n"
            f"or 0 * count by ({NODE_LABELS}) ({selector('vramledger_device:memory_used:ratio')})",
            NODE_LEGEND,
        ),
        unit=COUNT,
    )  # fmt: skip


def held_without_reservation() -> Panel:
    return time_series(
        "Held without a reservation",
        "Memory on devices that a scheduler has reserved for another owner, or for no "
        "owner. Available where pods, Slurm or Nomad reserve GPUs.",
        Query(
            f"sum by ({DEVICE_LABELS}) ({selector('vramledger_device_unreserved_memory_bytes')})",
            DEVICE_LEGEND,
        ),
        unit=BYTES, absent="not available: no scheduler reserves these GPUs",
    )  # fmt: skip


def reservations_by_use() -> Panel:
    return time_series(
        "Reservations by use",
        "Reservations by whether their owner holds memory on the device.",
        Query(f"sum by (use) ({selector('vramledger_device_reservations')})", "{{use}}"),
        unit=COUNT, absent="not available: no scheduler reserves these GPUs",
    )  # fmt: skip


def hardware() -> list[Panel]:
    device = DEVICE_LEGEND
    return [
        time_series(
            "Utilisation",
            "Share of the driver's last sampling period with a kernel running; it misses small kernels.",
            Query(selector("vramledger_device_utilization_ratio"), device),
            unit=SHARE, maximum=1, absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "Power",
            "Power draw of each board.",
            Query(selector("vramledger_device_power_watts"), device),
            unit="watt", absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "Temperature",
            "Temperature of each GPU chip.",
            Query(selector("vramledger_device_temperature_celsius"), device),
            unit="celsius", absent=NOT_AVAILABLE, width=8,
        ),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of a node."""
    return Dashboard(
        NODE,
        "Node",
        "The devices of a node as ledgers, and who holds them.",
        [
            Row(
                "Now",
                [
                    exporters(),
                    reachable_gpus(),
                    memory_used(),
                    active_share("Share of the held memory whose holders work, or may work."),
                    idle_or_stopped("Memory of holders that exist but do nothing."),
                    unowned("Memory of orphaned, exited and dead processes, and of no process at all."),
                    device_ledgers(),
                    devices(),
                ],
            ),
            Row("Holders", [holders()]),
            Row(
                "Over time",
                [
                    ledger_over_time(),
                    memory_used_by_device(),
                    device_reachability(),
                    holders_short_of_memory(),
                ],
            ),
            Row("Reservations", [held_without_reservation(), reservations_by_use()], collapsed=True),
            Row("Hardware", hardware(), collapsed=True),
        ],
    )
