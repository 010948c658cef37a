"""Show one device: its ledger over time, its holders with their states, and what happened to it."""

from __future__ import annotations

from dashboards.src.dashboard import DEVICE, Dashboard, Row, annotation, device_variable
from dashboards.src.panels import (
    BYTES,
    COUNT,
    NO_HOLDER,
    SECONDS,
    SHARE,
    STATE_CODES,
    Column,
    Json,
    Panel,
    Query,
    ledger_graph,
    stat,
    state_timeline,
    table,
    time_series,
)
from dashboards.src.queries import (
    CHOSEN_DEVICE,
    DEVICE_LABELS,
    HOLDING_LABELS,
    device_bytes,
    firing_alerts,
    holdings,
    increase,
    rate,
    selector,
    state_codes,
    wasted_bytes,
)
from dashboards.src.shared_panels import OWNER_COLUMN, exporters, holders
from vramledger.views.colours import GRAFANA

HOLDER_LEGEND = "{{command}} {{pid}} of {{owner}}"
NOT_AVAILABLE = "not available on this device, or no data"


def device_selector(metric: str, *matchers: str) -> str:
    """Return a selector of a metric of the chosen device."""
    return selector(metric, CHOSEN_DEVICE, *matchers)


def memory_used() -> Panel:
    return stat(
        "Memory used",
        (
            "Share of the device that is in use, with the driver's reserve; and the highest "
            "share of the last minute."
        ),
        Query(f"max({device_selector('vramledger_device:memory_used:ratio')})", "now"),
        Query(
            f"max({device_selector('vramledger_device_memory_used_peak_bytes')})\n"
            f"/ max({device_selector('vramledger_device_memory_total_bytes')})",
            "highest of a minute, without the reserve",
        ),
        unit=SHARE,
    )  # fmt: skip


def wasted() -> Panel:
    return stat(
        "Wasted",
        "Bytes that are held without work: by idle, stopped, stuck, exited and dead holders, and by "
        "orphans that do not work.",
        Query(f"sum({wasted_bytes(CHOSEN_DEVICE)})"), unit=BYTES, colour=GRAFANA["idle"],
    )  # fmt: skip


def unattributed() -> Panel:
    return stat(
        "Unattributed",
        "Used, and held by no process that NVML lists: CUDA managed memory, a process of another PID "
        "namespace, or memory that the driver has not freed. We measured up to 66 MiB on healthy devices.",
        Query(f"sum({device_bytes('unattributed', CHOSEN_DEVICE)})"),
        unit=BYTES, colour=GRAFANA["unattributed"],
    )  # fmt: skip


def process_count() -> Panel:
    return stat(
        "Processes on it",
        "Processes that NVML lists with memory, and processes that have the device open "
        "but that NVML does not list.",
        Query(f"sum({device_selector('vramledger_device_holders')})", "listed"),
        Query(f"sum({device_selector('vramledger_device_hidden_holders')})", "hidden"),
        unit=COUNT, absent="not available",
    )  # fmt: skip


def time_until_full() -> Panel:
    return stat(
        "Time until full",
        "At the pace of the last 15 minutes, from the minimum of what is in use. Empty "
        "while the minimum does not rise.",
        Query(f"min({device_selector('vramledger_device:time_to_full_seconds:min5m')})"),
        unit=SECONDS, absent="not rising, or no data",
    )  # fmt: skip


def ledger_over_time() -> Panel:
    return ledger_graph(
        "The ledger",
        "Where each byte of the device is, active memory first; the parts add up to the "
        "total exactly. In a gap the device or the exporter did not answer.",
        Query(f"sum by (state) ({device_bytes('.+', CHOSEN_DEVICE)})", "{{state}}"),
        Query(f"sum({device_selector('vramledger_device_memory_total_bytes')})", "total"),
        total="total", width=24, height=10,
    )  # fmt: skip


def holdings_over_time() -> Panel:
    by = f"{HOLDING_LABELS}, command, owner"
    return time_series(
        "Holdings",
        "Bytes of each process, as NVML reports them.",
        Query(f"sum by ({by}) ({holdings(CHOSEN_DEVICE)})", HOLDER_LEGEND),
        unit=BYTES, stacked=True, absent=NO_HOLDER,
    )  # fmt: skip


def holder_states() -> Panel:
    by = f"{HOLDING_LABELS}, command, owner"
    return state_timeline(
        "States of the holders",
        "When each process started, which states it had, and when it ended.",
        Query(f"max by ({by}) ({state_codes(CHOSEN_DEVICE)})", HOLDER_LEGEND),
        mappings=[STATE_CODES], absent=NO_HOLDER,
    )  # fmt: skip


def owners_over_time() -> Panel:
    held = device_selector("vramledger_owner_memory_bytes")
    return time_series(
        "Owners",
        "Bytes by owner; these few series are cheap to keep for a long time.",
        Query(f"sum by (owner_type, owner) ({held})", "{{owner}}"),
        unit=BYTES, stacked=True, absent=NO_HOLDER,
    )  # fmt: skip


def overlap() -> Panel:
    return time_series(
        "Overlap",
        "The excess of the sum of the holdings over the used memory: processes share "
        "memory, or the figures are a moment apart.",
        Query(f"max({device_selector('vramledger_device_memory_overlap_bytes')})", "overlap"),
        unit=BYTES,
    )  # fmt: skip


def freed_on_exit() -> Panel:
    freed = increase("vramledger_owner_memory_freed_bytes_total", CHOSEN_DEVICE)
    not_freed = increase("vramledger_owner_memory_not_freed_bytes_total", CHOSEN_DEVICE)
    return time_series(
        "Freed on exit",
        "When a holding ends: how many of its bytes were freed, and how many stayed in use without a holder.",
        Query(f"sum by (owner) ({freed})", "{{owner}}: freed"),
        Query(f"sum by (owner) ({not_freed})", "{{owner}}: not freed"),
        unit=BYTES, absent="no owner has held memory, or no data",
    )  # fmt: skip


def started_and_ended() -> Panel:
    memory = device_selector("vramledger_process_memory_bytes", 'pid!="other"')
    before = f"{memory} offset $__interval"
    by = f"count by ({DEVICE_LABELS})"
    none = f"0 * count by ({DEVICE_LABELS}) ({device_selector('vramledger_device_up')})"
    return time_series(
        "Processes started and ended",
        "Holders that appeared and disappeared between two points of the graph.",
        Query(f"{by} ({memory}\nunless on ({HOLDING_LABELS}) {before}) or {none}", "came"),
        Query(f"{by} ({before}\nunless on ({HOLDING_LABELS}) {memory}) or {none}", "went"),
        unit=COUNT,
    )  # fmt: skip


def failed_allocations() -> Panel:
    failures = increase("vramledger_torch_ooms_total", CHOSEN_DEVICE)
    retries = increase("vramledger_torch_alloc_retries_total", CHOSEN_DEVICE)
    return time_series(
        "Failed allocations",
        "Allocations of torch that failed for lack of memory, and those that torch could "
        "serve only after it had emptied its cache. Only programs with an agent report "
        "them.",
        Query(f"sum by (pid) ({failures})", "{{pid}} out of memory"),
        Query(f"sum by (pid) ({retries})", "{{pid}} retried"),
        unit=COUNT, absent="not available: no torch program with an agent",
    )  # fmt: skip


def xid_errors() -> Panel:
    return time_series(
        "XID errors",
        "The driver's errors by number, since the exporter started. Look into each of "
        "them; 79 is a GPU that fell off the bus.",
        Query(f"sum by (xid) ({device_selector('vramledger_device_xid_errors_total')})", "XID {{xid}}"),
        unit=COUNT, absent="none since the exporter started",
    )  # fmt: skip


def reservation_owners() -> Panel:
    return table(
        "Reserved for",
        "The owners for whom a scheduler has reserved the device.",
        Query(f"count by (owner_type, owner) ({device_selector('vramledger_device_reservation_info')})"),
        columns=[OWNER_COLUMN, Column("owner_type", "Kind")],
        absent="no reservation, or no scheduler reserves this GPU", height=8,
    )  # fmt: skip


def held_without_reservation() -> Panel:
    return time_series(
        "Held without a reservation",
        "Bytes and processes of owners that have no reservation of the device.",
        Query(f"sum({device_selector('vramledger_device_unreserved_memory_bytes')})", "bytes"),
        unit=BYTES, absent="not available: no scheduler reserves this GPU",
    )  # fmt: skip


def hardware() -> list[Panel]:
    return [
        time_series(
            "Utilisation",
            "Share of the driver's last sampling period with a kernel running, and with device memory being "
            "read or written.",
            Query(device_selector("vramledger_device_utilization_ratio"), "kernels"),
            Query(device_selector("vramledger_device_memory_bandwidth_utilization_ratio"), "memory traffic"),
            unit=SHARE, maximum=1, absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "Power",
            "Power draw of the board, and its limit.",
            Query(device_selector("vramledger_device_power_watts"), "draw"),
            Query(device_selector("vramledger_device_power_limit_watts"), "limit"),
            unit="watt", absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "Temperature",
            "Temperature of the GPU chip and of its memory.",
            Query(device_selector("vramledger_device_temperature_celsius"), "chip"),
            Query(device_selector("vramledger_device_memory_temperature_celsius"), "memory"),
            unit="celsius", absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "Clocks",
            "Current clock by domain.",
            Query(device_selector("vramledger_device_clock_hertz"), "{{clock}}"),
            unit="hertz", absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "Clock throttling",
            "1 while the driver throttles the clocks for this reason.",
            Query(device_selector("vramledger_device_throttle_active"), "{{reason}}"),
            unit=COUNT, absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "PCIe traffic",
            "Traffic over a window of 20 ms, read every 10 seconds.",
            Query(device_selector("vramledger_device_pcie_throughput_bytes_per_second"), "{{direction}}"),
            unit="Bps", absent="not available: collector pcie is off, or no data", width=8,
        ),
        time_series(
            "ECC errors",
            "New ECC memory errors by type, and rows that were replaced by spare ones over the device's "
            "life.",
            Query(increase("vramledger_device_ecc_errors_total", CHOSEN_DEVICE), "{{type}} errors"),
            Query(device_selector("vramledger_device_remapped_rows"), "rows remapped: {{type}}"),
            unit=COUNT, absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "BAR1",
            "Address space through which host and peers reach device memory; not part of the ledger.",
            Query(device_selector("vramledger_device_bar1_memory_bytes"), "{{kind}}"),
            unit=BYTES, absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "Energy",
            "Mean power, from the driver's count of energy.",
            Query(rate("vramledger_device_energy_joules_total", CHOSEN_DEVICE), "mean power"),
            unit="watt", absent=NOT_AVAILABLE, width=8,
        ),
    ]  # fmt: skip


def device_annotations() -> list[Json]:
    """Return what happened on the device, as marks on every graph."""
    memory = device_selector("vramledger_process_memory_bytes", 'pid!="other"')
    errors = device_selector("vramledger_device_xid_errors_total")
    return [
        annotation(
            "Out of memory", GRAFANA["dead"],
            f"increase({device_selector('vramledger_torch_ooms_total')}[1m]) > 0",
            "out of memory", "pid {{pid}} on GPU {{gpu}} of {{instance}}",
        ),
        annotation(
            "Holders that ended", GRAFANA["unknown"],
            f"{memory} offset 30s\nunless on ({HOLDING_LABELS}) {memory}",
            "holder gone", "pid {{pid}} on GPU {{gpu}} of {{instance}}",
        ),
        annotation(
            "XID errors", GRAFANA["orphaned"],
            # A number's series begins with its first error, which `increase()` does not count.
            f"increase({errors}[1m]) > 0\nor ({errors} unless {errors} offset 1m)",
            "XID {{xid}}", "GPU {{gpu}} of {{instance}}",
        ),
        annotation(
            "Alerts", GRAFANA["orphaned"],
            firing_alerts('uuid=~"$uuid|"'),
            "{{alertname}}", "{{severity}}: {{owner}} {{pid}} on GPU {{gpu}} of {{instance}}",
        ),
        annotation(
            "Released", GRAFANA["stopped"],
            selector("vramledger_released_until_timestamp_seconds"),
            "released for a reset", "the exporter of {{instance}} has released its GPUs on request",
        ),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of a device."""
    return Dashboard(
        DEVICE,
        "Device",
        "The ledger of one GPU or MIG instance over time, its holders, and what happened to it.",
        [
            Row(
                "Now",
                [
                    exporters(),
                    memory_used(),
                    wasted(),
                    unattributed(),
                    process_count(),
                    time_until_full(),
                    ledger_over_time(),
                ],
            ),
            Row(
                "Holders",
                [
                    holders(CHOSEN_DEVICE, height=9),
                    holdings_over_time(),
                    holder_states(),
                    owners_over_time(),
                    overlap(),
                ],
            ),
            Row("What happened", [started_and_ended(), freed_on_exit(), failed_allocations(), xid_errors()]),
            Row("Reservations", [reservation_owners(), held_without_reservation()], collapsed=True),
            Row("Hardware", hardware(), collapsed=True),
        ],
        [device_variable()],
        device_annotations(),
    )
