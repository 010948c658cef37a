"""Show one device: its ledger over time, its holders with their states, and what happened to it."""

from __future__ import annotations

from dashboards.src.dashboard import DEVICE, Dashboard, Row, annotation, device_variable, threshold
from dashboards.src.lines import MEAN_STEP, joined, mean
from dashboards.src.panels import (
    AGE_WIDTH,
    BYTES,
    COUNT,
    SECONDS,
    SHARE,
    Column,
    Json,
    Panel,
    Query,
    ledger_graph,
    stat,
    table,
    time_series,
)
from dashboards.src.queries import (
    CHOSEN_DEVICE,
    DEVICE_LABELS,
    HOLDING_LABELS,
    age,
    device_bytes,
    firing_alerts,
    holdings,
    increase,
    largest_beside,
    rate,
    selector,
    sum_of_others,
    ten_largest,
    time_until_full,
)
from dashboards.src.reasons import (
    NO_DEVICE,
    Needs,
)
from dashboards.src.shared_panels import (
    BLOCKER_COLUMN,
    OWNER_COLUMNS,
    OWNER_LEGEND,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    VERDICT_COLUMN,
    exporters,
    holders,
    unattributed,
    wasted,
)
from vramledger.views.colours import GRAFANA

HOLDER_LEGEND = f"{{{{command}}}} {{{{pid}}}} of {OWNER_LEGEND}"
NO_GPM = "if the exporter is watching: a GPU before Hopper"
NOT_AVAILABLE = "if the exporter is watching: no such sensor"


def device_selector(metric: str, *matchers: str) -> str:
    """Return a selector of a metric of the chosen device."""
    return selector(metric, CHOSEN_DEVICE, *matchers)


ANSWERS = Needs(
    nothing="not reported", first=[(NO_DEVICE, f"({device_selector('vramledger_device_up')} == 1)")]
)
"""What a figure of the device needs."""


def memory_used() -> Panel:
    total = device_selector("vramledger_device_memory_total_bytes")
    return stat(
        "Memory used",
        "Share of the device that is in use, with the driver's reserve; and the highest share within the "
        "time range, with peaks between two scrapes. Where the operating system manages the memory, its page "
        "cache is in the peak only.",
        Query(f"max({device_selector('vramledger_device:memory_used:ratio')})", "now"),
        Query(
            f"(max(max_over_time({device_selector('vramledger_device_memory_used_peak_bytes')}[$__range]))\n"
            f"+ (max({device_bytes('driver_reserved', CHOSEN_DEVICE)}) or vector(0)))\n"
            f"/ max({total})",
            "peak",
        ),
        unit=SHARE, needs=ANSWERS,
    )  # fmt: skip


def process_count() -> Panel:
    return stat(
        "Holders on it",
        "Processes that NVML lists with memory, and processes that have the device open but that NVML "
        "does not list. Ghost: 1 if the device is busy without any holder.",
        Query(f"sum({device_selector('vramledger_device_holders')})", "listed"),
        Query(f"sum({device_selector('vramledger_device_hidden_holders')})", "hidden"),
        Query(f"max({device_selector('vramledger_device_ghost')})", "ghost"),
        unit=COUNT, needs=ANSWERS,
    )  # fmt: skip


def full_in() -> Panel:
    return stat(
        "Time until full",
        "At the rate at which the minimum of all holders has risen within 15 minutes.",
        Query(f"max({time_until_full(CHOSEN_DEVICE)})"),
        unit=SECONDS, needs=Needs(nothing="no holder grows"), below=threshold("fill_within"),
    )  # fmt: skip


def ledger_over_time() -> Panel:
    return ledger_graph(
        "Ledger",
        "Where each byte of the device is, active memory first; the parts add up to the "
        "total exactly. In a gap the device or the exporter did not answer. Marks on the graphs: red, an "
        "allocation failed, the first of a program within 30 minutes; grey, a holder ended; brown, an XID "
        "error, or an alert where *Alerts* is switched on; blue, the GPUs were released.",
        Query(f"sum by (state) ({device_bytes('.+', CHOSEN_DEVICE)})", "{{state}}"),
        Query(f"sum({device_selector('vramledger_device_memory_total_bytes')})", "total"),
        total="total", width=24, height=8,
    )  # fmt: skip


_BY_HOLDER = "pid, command, owner_type, owner"


def holdings_over_time() -> Panel:
    held = f"sum by ({_BY_HOLDER}) ({holdings(CHOSEN_DEVICE)})"
    return time_series(
        "Holdings",
        "Bytes of the ten holders with the highest memory in the time range, charged by NVML or certainly "
        "their own, and the sum of all others.",
        Query(ten_largest(held, _BY_HOLDER), HOLDER_LEGEND),
        Query(sum_of_others(held, _BY_HOLDER), "all others"),
        unit=BYTES, stacked=True, named=True, absent="no process holds memory, or no data", width=24,
    )  # fmt: skip


def ended_holders() -> Panel:
    by = "instance, pid, command, owner_type, owner"
    here = device_selector("vramledger_process_memory_bytes", 'pid!="other"')
    last = f"max by (instance, pid) (max_over_time(timestamp({here})[$__range:1m]))"
    peak = f"max by ({by}) (max_over_time({holdings(CHOSEN_DEVICE)}[$__range]))"
    return table(
        "Holders that ended",
        "The ten largest holders of the time range that have ended: the peak of each, and how long it has "
        "not been seen.",
        Query(f"topk(10, {peak} unless on (instance, pid) {here})"),
        Query(age(last)),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            *OWNER_COLUMNS,
            Column("Value #A", "Peak", BYTES, width=100),
            Column("Value #B", "Ended for", SECONDS, width=AGE_WIDTH),
        ],
        empty="no holder has ended",
        needs="device", sort="Value #A", rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def failed_allocations() -> Panel:
    process = "instance, pid"
    here = f"and on ({process}) max_over_time({holdings(CHOSEN_DEVICE)}[$__range])"

    def newest(figure: str) -> str:
        return f"last_over_time({figure}[$__range])"

    when = newest(selector("vramledger_framework_last_oom_timestamp_seconds"))
    asked = newest(selector("vramledger_framework_last_oom_requested_bytes"))
    split = newest(device_selector("vramledger_torch_inactive_split_bytes"))
    cached = newest(device_selector("vramledger_torch_reclaimable_bytes"))
    newest_failure = f"{when} {here}"
    return table(
        "Why allocations failed",
        "The newest failed allocation of each program on the device, also of programs that have ended: "
        "what it asked for, and the verdict of its agent. Beside it, within the time "
        "range, who else held most just after it failed, and what of its own pool was last cached or in free "
        "pieces of used blocks.",
        Query(f"bottomk(10, {age(newest_failure)})"),
        Query(f"max by ({process}) ({asked} {here})"),
        Query(f"sum by ({process}) ({cached})"),
        Query(f"sum by ({process}) ({split})"),
        Query(largest_beside()),
        columns=[
            PROCESS_COLUMN,
            Column("Value #A", "Ago", SECONDS, width=98),
            Column("Value #B", "Asked", BYTES, width=80),
            VERDICT_COLUMN,
            BLOCKER_COLUMN,
            Column("Value #E", "It held", BYTES, width=80),
            Column("Value #C", "Its cache", BYTES, width=80),
            Column("Value #D", "Its free pieces", BYTES, width=80),
        ],
        empty="no allocation failed: good",
        needs="agent", sort="Value #A", ascending=True, rows_of="Value #A", width=24, height=6,
    )  # fmt: skip


def xid_errors() -> Panel:
    return time_series(
        "XID errors",
        "The driver's errors by number, since the exporter started. Look into each of "
        "them; 79 is a GPU that fell off the bus.",
        Query(f"sum by (xid) ({device_selector('vramledger_device_xid_errors_total')})", "XID {{xid}}"),
        unit=COUNT, absent="none since the exporter started",
    )  # fmt: skip


def ecc_errors() -> Panel:
    graph = time_series(
        "ECC errors",
        "New ECC memory errors by type, and rows that were replaced by spare ones over the device's "
        "life.",
        Query(increase("vramledger_device_ecc_errors_total", CHOSEN_DEVICE), "{{type}} errors"),
        Query(device_selector("vramledger_device_remapped_rows"), "rows remapped: {{type}}"),
        unit=COUNT, absent=NOT_AVAILABLE,
    )  # fmt: skip
    return joined(graph)


def hardware() -> list[Panel]:
    traffic = mean("vramledger_device_memory_bandwidth_utilization_ratio", CHOSEN_DEVICE)
    throttled = device_selector("vramledger_device_throttle_active")
    ever = f"(max by (reason) (max_over_time({throttled}[$__range] @ end())) > 0)"
    graphs = [
        time_series(
            "Utilisation",
            "Share of time with a kernel running, and with device memory being read or written, as the "
            "driver counts it; means of 2 minutes or more.",
            Query(mean("vramledger_device_utilization_ratio", CHOSEN_DEVICE), "kernels"),
            Query(traffic, "memory traffic"),
            unit=SHARE, maximum=1, absent=NOT_AVAILABLE, step=MEAN_STEP,
        ),
        time_series(
            "Power",
            "Power draw of the board, as a mean of 2 minutes or more, and its limit.",
            Query(mean("vramledger_device_power_watts", CHOSEN_DEVICE), "draw"),
            Query(rate("vramledger_device_energy_joules_total", CHOSEN_DEVICE), "by its count of energy"),
            Query(device_selector("vramledger_device_power_limit_watts"), "limit"),
            unit="watt", absent=NOT_AVAILABLE, step=MEAN_STEP,
        ),
        time_series(
            "Temperature",
            "Temperature of the GPU chip and of its memory.",
            Query(device_selector("vramledger_device_temperature_celsius"), "chip"),
            Query(device_selector("vramledger_device_memory_temperature_celsius"), "memory"),
            unit="celsius", absent=NOT_AVAILABLE,
        ),
        time_series(
            "Clock throttling",
            "1 while the driver throttles the clocks for this reason; only reasons within the time range.",
            Query(f"{throttled}\nand on (reason) {ever}", "{{reason}}"),
            Query(f"max({throttled}) unless on () {ever}", "none"),
            unit=COUNT, absent=NOT_AVAILABLE,
        ),
    ]  # fmt: skip
    return [*map(joined, graphs)]


def work() -> list[Panel]:
    """Make the graphs of GPM's counters, which show whether a busy GPU computes and moves anything."""
    pipes = mean("vramledger_device_pipe_active_ratio", CHOSEN_DEVICE)
    bandwidth = mean("vramledger_device_memory_bandwidth_used_ratio", CHOSEN_DEVICE)
    graphs = [
        time_series(
            "SMs and pipes",
            "Share of the time in which the SMs had a kernel, and in which their pipes computed: tensor for "
            "matrices; means of 2 minutes or more. A GPU whose SMs are busy while all pipes and the memory "
            "are at 0 waits. Memory bandwidth is a share of its maximum.",
            Query(mean("vramledger_device_sm_active_ratio", CHOSEN_DEVICE), "SMs"),
            Query(mean("vramledger_device_sm_occupancy_ratio", CHOSEN_DEVICE), "occupancy"),
            Query(pipes, "{{pipe}}"),
            Query(bandwidth, "memory bandwidth"),
            unit=SHARE, maximum=1, absent=NO_GPM, step=MEAN_STEP, width=24,
        ),
    ]  # fmt: skip
    return [*map(joined, graphs)]


_TWO_SCRAPES = "90s"
"""Marks are asked for each 30 s. Of two that follow each other, one finds two scrapes a minute apart in this
range, wherever the scrapes lie."""


def device_annotations() -> list[Json]:
    """Return what happened on the device, as marks on every graph."""
    memory = device_selector("vramledger_process_memory_bytes", 'pid!="other"')
    errors = device_selector("vramledger_device_xid_errors_total")
    up = device_selector("vramledger_device_up")
    ooms = device_selector("vramledger_torch_ooms_total")
    return [
        annotation(
            "Out of memory", GRAFANA["dead"],
            # A program that tries again all the time would shade the whole graph.
            f"increase({ooms}[{_TWO_SCRAPES}]) > 0 unless increase({ooms}[30m] offset {_TWO_SCRAPES}) > 0",
            "out of memory", "pid {{pid}} on GPU {{gpu}} of {{instance}}",
        ),
        annotation(
            "Holders that ended", GRAFANA["unknown"],
            # A failed scrape ends every series: a holder has ended only where its device still has a ledger.
            f"({memory} offset 30s\nunless on ({HOLDING_LABELS}) {memory})\n"
            f"and on ({DEVICE_LABELS}) {up} == 1",
            "holder gone", "pid {{pid}} on GPU {{gpu}} of {{instance}}",
        ),
        annotation(
            "XID errors", GRAFANA["orphaned"],
            # A number's series begins with its first error, which `increase()` does not count. After a
            # failed scrape it begins again, but then it was there within the hour before.
            f"increase({errors}[{_TWO_SCRAPES}]) > 0\n"
            f"or ({errors} unless last_over_time({errors}[1h] offset 1m)\n"
            f"and on ({DEVICE_LABELS}) last_over_time({up}[5m] offset 1m))",
            "XID {{xid}}", "GPU {{gpu}} of {{instance}}",
        ),
        annotation(
            "Alerts", GRAFANA["orphaned"],
            firing_alerts('uuid=~"$uuid|"'),
            "{{alertname}}", "{{owner}} {{pid}} on GPU {{gpu}} of {{instance}}", shown=False,
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
                "",
                [
                    exporters(),
                    memory_used(),
                    wasted(CHOSEN_DEVICE, needs=ANSWERS),
                    unattributed(CHOSEN_DEVICE, needs=ANSWERS),
                    process_count(),
                    full_in(),
                    ledger_over_time(),
                    holders(CHOSEN_DEVICE, places=(), height=8),
                    failed_allocations(),
                ],
            ),
            Row(
                "Holders over time",
                [holdings_over_time(), ended_holders()],
                collapsed=True,
            ),
            Row("Work", [*work()], collapsed=True),
            Row("Errors", [xid_errors(), ecc_errors()], collapsed=True),
            Row("Hardware", hardware(), collapsed=True),
        ],
        [device_variable()],
        device_annotations(),
        one_node=True,
    )
