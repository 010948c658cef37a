"""One device: its ledger over time, who holds it in which state since when, and what happened to it."""

from __future__ import annotations

from dashboards.src.dashboard import DEVICE as UID
from dashboards.src.dashboard import Dashboard, Row, gpu, mark, to_owner
from dashboards.src.panels import (
    BYTES,
    COUNT,
    SECONDS,
    SHARE,
    STATE_CODES,
    Column,
    Json,
    Panel,
    Query,
    ledger,
    stat,
    table,
    timeline,
    trend,
)
from dashboards.src.queries import DEVICE, HOLDING, WASTED, alerts, codes, held, increase, of, owned
from dashboards.src.shared_panels import exporters, holders
from vramledger.views.colours import GRAFANA

THIS = 'uuid=~"$uuid"'
NOT_HERE = "not available on this device, or no data"


def on(metric: str, *matchers: str) -> str:
    """Return a selector of a metric of the chosen device."""
    return of(metric, THIS, *matchers)


def full() -> Panel:
    return stat(
        "Full",
        "Share of the device that is in use, with the driver's reserve; and the highest of the last minute.",
        Query(f"max({on('vramledger_device:memory_used:ratio')})", "now"),
        Query(
            f"max({on('vramledger_device_memory_used_peak_bytes')})\n"
            f"/ max({on('vramledger_device_memory_total_bytes')})",
            "highest of a minute, without the reserve",
        ),
        unit=SHARE,
    )  # fmt: skip


def wasted() -> Panel:
    return stat(
        "Wasted",
        "Bytes of idle, stopped, orphaned, exited and vanished holders.",
        Query(f"sum({held(WASTED, THIS)})"), unit=BYTES, colour=GRAFANA["idle"],
    )  # fmt: skip


def unattributed() -> Panel:
    return stat(
        "Unattributed",
        "Used, and held by no process that NVML lists: CUDA managed memory, a process of another PID "
        "namespace, or memory that the driver has not let go. Up to 66 MiB was measured on healthy devices.",
        Query(f"sum({held('unattributed', THIS)})"), unit=BYTES, colour=GRAFANA["unattributed"],
    )  # fmt: skip


def count() -> Panel:
    return stat(
        "Processes on it",
        "Processes that NVML lists with memory, and those that have the device open though it does not list "
        "them.",
        Query(f"sum({on('vramledger_device_holders')})", "listed"),
        Query(f"sum({on('vramledger_device_hidden_holders')})", "hidden"),
        unit=COUNT, absent="not available",
    )  # fmt: skip


def to_full() -> Panel:
    return stat(
        "Full in",
        "At the pace of the last 15 minutes, by the floor of what is in use. Not there while the floor does "
        "not rise.",
        Query(f"min({on('vramledger_device:time_to_full_seconds:min5m')})"),
        unit=SECONDS, absent="not rising, or no data",
    )  # fmt: skip


def book() -> Panel:
    return ledger(
        "The ledger",
        "Where each byte of the device is, in the order of how well it is used; the parts add up to the "
        "total exactly. A gap: the device or the exporter did not answer.",
        Query(f"sum by (state) ({held('.+', THIS)})", "{{state}}"),
        Query(f"sum({on('vramledger_device_memory_total_bytes')})", "total"),
        total="total", width=24, height=10,
    )  # fmt: skip


def by_holder() -> Panel:
    by = f"{HOLDING}, command, owner"
    return trend(
        "Holdings",
        "Bytes of each process, as NVML has them.",
        Query(f"sum by ({by}) ({owned(THIS)})", "{{command}} {{pid}} of {{owner}}"),
        unit=BYTES, stacked=True, absent="nobody holds memory, or no data",
    )  # fmt: skip


def states() -> Panel:
    by = f"{HOLDING}, command, owner"
    return timeline(
        "States of the holders",
        "When each process came, in which state it was, and when it went.",
        Query(f"max by ({by}) ({codes(THIS)})", "{{command}} {{pid}} of {{owner}}"),
        mappings=[STATE_CODES], absent="nobody holds memory, or no data",
    )  # fmt: skip


def owners() -> Panel:
    return trend(
        "Owners",
        "Bytes by who answers for them; cheap to keep for long.",
        Query(f"sum by (owner_type, owner) ({on('vramledger_owner_memory_bytes')})", "{{owner}}"),
        unit=BYTES, stacked=True, absent="nobody holds memory, or no data",
    )  # fmt: skip


def overlap() -> Panel:
    return trend(
        "Overlap",
        "What the holdings add up to beyond the used memory: memory that processes share, or figures a "
        "moment apart.",
        Query(f"max({on('vramledger_device_memory_overlap_bytes')})", "overlap"),
        unit=BYTES,
    )  # fmt: skip


def returned() -> Panel:
    increase = "sum by (owner) (increase({}[$__rate_interval]))"
    return trend(
        "Given back at the end",
        "When a holding ends, how many of its bytes came back, and how many stayed in use without a holder.",
        Query(increase.format(on("vramledger_owner_memory_returned_bytes_total")), "{{owner}}: back"),
        Query(increase.format(on("vramledger_owner_memory_not_returned_bytes_total")), "{{owner}}: not back"),
        unit=BYTES, absent="nobody has held memory, or no data",
    )  # fmt: skip


def exits() -> Panel:
    memory = on("vramledger_process_memory_bytes", 'pid!="other"')
    before = f"{memory} offset $__interval"
    by = f"count by ({DEVICE})"
    none = f"0 * count by ({DEVICE}) ({on('vramledger_device_up')})"
    return trend(
        "Came and went",
        "Holders that appeared and disappeared between two points of the graph.",
        Query(f"{by} ({memory}\nunless on ({HOLDING}) {before}) or {none}", "came"),
        Query(f"{by} ({before}\nunless on ({HOLDING}) {memory}) or {none}", "went"),
        unit=COUNT,
    )  # fmt: skip


def failures() -> Panel:
    increase = "sum by (pid) (increase({}[$__rate_interval]))"
    return trend(
        "Failed allocations",
        "Allocations of torch that failed for lack of memory, and those that it could serve only after it "
        "had emptied its cache. Known of programs with an agent.",
        Query(increase.format(on("vramledger_torch_ooms_total")), "{{pid}} out of memory"),
        Query(increase.format(on("vramledger_torch_alloc_retries_total")), "{{pid}} retried"),
        unit=COUNT, absent="not available: no torch program with an agent",
    )  # fmt: skip


def xids() -> Panel:
    return trend(
        "XID errors",
        "The driver's errors by number, since the exporter started. Any is worth a look; 79 is a GPU that "
        "fell off the bus.",
        Query(f"sum by (xid) ({on('vramledger_device_xid_errors_total')})", "XID {{xid}}"),
        unit=COUNT, absent="none since the exporter started",
    )  # fmt: skip


def reserved_for() -> Panel:
    return table(
        "Reserved for",
        "For whom a scheduler has reserved the device.",
        Query(f"count by (owner_type, owner) ({on('vramledger_device_reservation_info')})"),
        columns=[Column("owner", "Owner", link=to_owner()), Column("owner_type", "Kind")],
        absent="nobody, or no scheduler reserves this GPU", height=8,
    )  # fmt: skip


def unreserved() -> Panel:
    return trend(
        "Held without a reservation",
        "Bytes and processes of owners that have no reservation of the device.",
        Query(f"sum({on('vramledger_device_unreserved_memory_bytes')})", "bytes"),
        unit=BYTES, absent="not available: no scheduler reserves this GPU",
    )  # fmt: skip


def hardware() -> list[Panel]:
    return [
        trend(
            "Utilisation",
            "Share of the driver's last sampling period with a kernel running, and with device memory being "
            "read or written.",
            Query(on("vramledger_device_utilization_ratio"), "kernels"),
            Query(on("vramledger_device_memory_bandwidth_utilization_ratio"), "memory traffic"),
            unit=SHARE, maximum=1, absent=NOT_HERE, width=8,
        ),
        trend(
            "Power",
            "Power draw of the board, and its limit.",
            Query(on("vramledger_device_power_watts"), "draw"),
            Query(on("vramledger_device_power_limit_watts"), "limit"),
            unit="watt", absent=NOT_HERE, width=8,
        ),
        trend(
            "Temperature",
            "Of the GPU chip and of its memory.",
            Query(on("vramledger_device_temperature_celsius"), "chip"),
            Query(on("vramledger_device_memory_temperature_celsius"), "memory"),
            unit="celsius", absent=NOT_HERE, width=8,
        ),
        trend(
            "Clocks",
            "Current clock by domain.",
            Query(on("vramledger_device_clock_hertz"), "{{clock}}"),
            unit="hertz", absent=NOT_HERE, width=8,
        ),
        trend(
            "Clocks held down",
            "1 while the driver holds the clocks down for a reason.",
            Query(on("vramledger_device_throttle_active"), "{{reason}}"),
            unit=COUNT, absent=NOT_HERE, width=8,
        ),
        trend(
            "PCIe traffic",
            "Over a window of 20 ms, read every 10 seconds.",
            Query(on("vramledger_device_pcie_throughput_bytes_per_second"), "{{direction}}"),
            unit="Bps", absent="not available: collector pcie is off, or no data", width=8,
        ),
        trend(
            "ECC errors",
            "New ECC memory errors by type, and rows that were replaced by spare ones over the device's "
            "life.",
            Query(increase("vramledger_device_ecc_errors_total", THIS), "{{type}} errors"),
            Query(on("vramledger_device_remapped_rows"), "rows remapped: {{type}}"),
            unit=COUNT, absent=NOT_HERE, width=8,
        ),
        trend(
            "BAR1",
            "Address space through which host and peers reach device memory; no part of the ledger.",
            Query(on("vramledger_device_bar1_memory_bytes"), "{{kind}}"),
            unit=BYTES, absent=NOT_HERE, width=8,
        ),
        trend(
            "Energy",
            "Mean power by the driver's count of energy.",
            Query(f"rate({on('vramledger_device_energy_joules_total')}[$__rate_interval])", "mean power"),
            unit="watt", absent=NOT_HERE, width=8,
        ),
    ]  # fmt: skip


def marks() -> list[Json]:
    """Return what happened on the device, as marks on every graph."""
    memory = on("vramledger_process_memory_bytes", 'pid!="other"')
    errors = on("vramledger_device_xid_errors_total")
    return [
        mark(
            "Out of memory", GRAFANA["dead"],
            f"increase({on('vramledger_torch_ooms_total')}[1m]) > 0",
            "out of memory", "pid {{pid}} on GPU {{gpu}} of {{instance}}",
        ),
        mark(
            "Holders that ended", GRAFANA["unknown"],
            f"{memory} offset 30s\nunless on ({HOLDING}) {memory}",
            "holder gone", "pid {{pid}} on GPU {{gpu}} of {{instance}}",
        ),
        mark(
            "XID errors", GRAFANA["orphaned"],
            # A number's series begins with its first error, which is no increase.
            f"increase({errors}[1m]) > 0\nor ({errors} unless {errors} offset 1m)",
            "XID {{xid}}", "GPU {{gpu}} of {{instance}}",
        ),
        mark(
            "Alerts", GRAFANA["orphaned"],
            alerts('uuid=~"$uuid|"'),
            "{{alertname}}", "{{severity}}: {{owner}} {{pid}} on GPU {{gpu}} of {{instance}}",
        ),
        mark(
            "Released", GRAFANA["stopped"],
            of("vramledger_released_until_timestamp_seconds"),
            "released for a reset", "the exporter of {{instance}} has let go of its GPUs on purpose",
        ),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of a device."""
    return Dashboard(
        UID,
        "Device",
        "The ledger of one GPU or MIG instance over time, its holders, and what happened to it.",
        [
            Row("Now", [exporters(), full(), wasted(), unattributed(), count(), to_full(), book()]),
            Row("Who holds it", [holders(THIS, height=9), by_holder(), states(), owners(), overlap()]),
            Row("What happened", [exits(), returned(), failures(), xids()]),
            Row("Reservations", [reserved_for(), unreserved()], folded=True),
            Row("Hardware", hardware(), folded=True),
        ],
        [gpu()],
        marks(),
    )
