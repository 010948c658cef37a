"""One node: its devices as ledgers, who holds them, and whether the hardware is well."""

from __future__ import annotations

from dashboards.src.dashboard import NODE as UID
from dashboards.src.dashboard import Dashboard, Row, to_device, to_node
from dashboards.src.panels import (
    ANSWERS,
    BYTES,
    COUNT,
    SHARE,
    Column,
    Panel,
    Query,
    bars,
    ledger,
    stat,
    table,
    timeline,
    trend,
)
from dashboards.src.queries import DEVICE, NODE, WASTED, held, of
from dashboards.src.shared_panels import abandoned, exporters, holders, quiet, working


def answering() -> Panel:
    return stat(
        "GPUs that answer",
        "Devices whose whole book could be read in the newest sample, of all that the exporter knows.",
        Query(f"sum({of('vramledger_device_up')})", "answer"),
        Query(f"sum({of('vramledger_node:devices:count')})", "known"),
        unit=COUNT,
    )  # fmt: skip


def full() -> Panel:
    free = of("vramledger_device:memory_free_bytes:last")
    return stat(
        "Full",
        "Share of all device memory that is in use, with the driver's reserve.",
        Query(f"1 - sum({free}) / sum({of('vramledger_device:memory_total_bytes:last')})"), unit=SHARE,
    )  # fmt: skip


def ledgers() -> Panel:
    named = f'label_join(sum by ({DEVICE}, state) ({held(".+")}), "device", " GPU ", "instance", "gpu")'
    return bars(
        "Devices as ledgers",
        "A bar a device: where each of its bytes is now. A device that is missing here does not answer, or "
        "is divided into instances that have bars of their own.",
        Query(f"sum by (device, state) ({named})"),
        row="device",
    )  # fmt: skip


def devices() -> Panel:
    by = f"sum by ({DEVICE})"
    name = of("vramledger_device_info")
    up = of("vramledger_device_up")
    return table(
        "Devices",
        "What the devices are and how they fare. An empty field is not available: the device does not "
        "answer or does not have it. A click on the GPU shows its ledger over time.",
        Query(f"{by} ({up})"),
        Query(f"count by ({DEVICE}, name) ({name})"),
        Query(f"{by} ({of('vramledger_device:memory_used:ratio')})"),
        Query(f"{by} ({held(WASTED)})"),
        Query(f"{by} ({held('unattributed')})"),
        Query(f"{by} ({of('vramledger_device_holders')})"),
        Query(f"{by} ({of('vramledger_device_hidden_holders')})"),
        Query(f"{by} ({of('vramledger_device_utilization_ratio')})"),
        Query(f"{by} ({of('vramledger_device_temperature_celsius')})"),
        columns=[
            Column("instance", "Node", link=to_node()),
            Column("gpu", "GPU", link=to_device(), width=70),
            Column("name", "Product"),
            Column("Value #A", "Answers", mappings=[ANSWERS], width=90),
            Column("Value #C", "Full", SHARE, width=90),
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


def book() -> Panel:
    return ledger(
        "Ledger over time",
        "Where each byte of the chosen nodes is; the parts add up to the total.",
        Query(f"sum by (state) ({held('.+')})", "{{state}}"),
        Query(f"sum({of('vramledger_device_memory_total_bytes')})", "total"),
        total="total",
    )  # fmt: skip


def fullness() -> Panel:
    return trend(
        "Full, by device",
        "Share of each device that is in use.",
        Query(f"sum by ({DEVICE}) ({of('vramledger_device:memory_used:ratio')})", "{{instance}} GPU {{gpu}}"),
        unit=SHARE, maximum=1,
    )  # fmt: skip


def lost() -> Panel:
    return timeline(
        "Devices that answer",
        "Whether each device's whole book could be read. A gap: the exporter itself was not there.",
        Query(f"sum by ({DEVICE}) ({of('vramledger_device_up')})", "{{instance}} GPU {{gpu}}"),
        mappings=[ANSWERS],
    )  # fmt: skip


def short() -> Panel:
    return trend(
        "Holders that run short",
        "Processes that work and want more memory than there is. While somebody else is idle on the node, "
        "that one is in their way.",
        Query(
            f"sum by ({NODE}) ({of('vramledger_node:memory_short:count')})\nor 0 * count by ({NODE}) "
            f"({of('vramledger_device:memory_used:ratio')})",
            "{{instance}}",
        ),
        unit=COUNT,
    )  # fmt: skip


def unreserved() -> Panel:
    return trend(
        "Held without a reservation",
        "Memory on devices that a scheduler has given to somebody else, or to nobody. Available where pods, "
        "Slurm or Nomad reserve GPUs.",
        Query(
            f"sum by ({DEVICE}) ({of('vramledger_device_unreserved_memory_bytes')})",
            "{{instance}} GPU {{gpu}}",
        ),
        unit=BYTES, absent="not available: no scheduler reserves these GPUs",
    )  # fmt: skip


def unheld() -> Panel:
    return trend(
        "Reservations by use",
        "Reservations whose owner holds memory on the device, and those of nobody who uses it.",
        Query(f"sum by (use) ({of('vramledger_device_reservations')})", "{{use}}"),
        unit=COUNT, absent="not available: no scheduler reserves these GPUs",
    )  # fmt: skip


def hardware() -> list[Panel]:
    device = "{{instance}} GPU {{gpu}}"
    return [
        trend(
            "Utilisation",
            "Share of the driver's last sampling period with a kernel running; it misses small work.",
            Query(of("vramledger_device_utilization_ratio"), device),
            unit=SHARE, maximum=1, absent="not available on these devices, or no data", width=8,
        ),
        trend(
            "Power",
            "Power draw of each board.",
            Query(of("vramledger_device_power_watts"), device),
            unit="watt", absent="not available on these devices, or no data", width=8,
        ),
        trend(
            "Temperature",
            "Temperature of each GPU chip.",
            Query(of("vramledger_device_temperature_celsius"), device),
            unit="celsius", absent="not available on these devices, or no data", width=8,
        ),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of a node."""
    return Dashboard(
        UID,
        "Node",
        "The devices of a node as ledgers, and who holds them.",
        [
            Row(
                "Now",
                [
                    exporters(),
                    answering(),
                    full(),
                    working("Share of the held memory whose holders work, or may."),
                    quiet("Memory of holders that exist and do nothing."),
                    abandoned("Memory of orphaned, exited and vanished processes, and of no process at all."),
                    ledgers(),
                    devices(),
                ],
            ),
            Row("Who holds the memory", [holders()]),
            Row("Over time", [book(), fullness(), lost(), short()]),
            Row("Reservations", [unreserved(), unheld()], folded=True),
            Row("Hardware", hardware(), folded=True),
        ],
    )
