"""Show one device: its ledger over time, its holders with their states, and what happened to it."""

from __future__ import annotations

from dataclasses import replace

from dashboards.src.dashboard import DEVICE, Dashboard, Row, annotation, device_variable
from dashboards.src.lines import MEAN_STEP, SHADES, joined, mean
from dashboards.src.panels import (
    AGE_WIDTH,
    BYTES,
    COUNT,
    EMPTY,
    EMPTY_CODE,
    HOLDER_CODES,
    SECONDS,
    SHARE,
    Column,
    Json,
    Panel,
    Query,
    counted,
    ledger_graph,
    stat,
    state_timeline,
    table,
    time_series,
)
from dashboards.src.queries import (
    BLOCKER,
    CHOSEN_DEVICE,
    DEVICE_LABELS,
    HOLDING_LABELS,
    NODE_LABELS,
    OWNER_NAME,
    USUAL_UNATTRIBUTED,
    age,
    device_bytes,
    filling_rate,
    firing_alerts,
    holdings,
    increase,
    minimum_demand_of,
    named_in_full,
    named_owner,
    rate,
    selector,
    state_codes,
    sum_of_others,
    ten_largest,
    uncharged,
)
from dashboards.src.reasons import (
    NO_AGENT,
    NO_DEVICE,
    NO_SCHEDULER,
    NOT_YET,
    Needs,
)
from dashboards.src.shared_panels import (
    BLOCKER_COLUMN,
    OWNER_COLUMN,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    UNCHARGED_SAYS,
    VERDICT_COLUMN,
    VERDICT_STEP_COLUMN,
    busy_without_work,
    exporters,
    holders,
    perhaps_more,
    wasted,
    with_verdict_step,
)
from vramledger.views.colours import GRAFANA

HOLDER_LEGEND = f"{{{{command}}}} {{{{pid}}}} of {{{{{OWNER_NAME}}}}}"
NO_GPM = "if the exporter is watching: a GPU before Hopper"
NOT_AVAILABLE = "if the exporter is watching: no such sensor"


def device_selector(metric: str, *matchers: str) -> str:
    """Return a selector of a metric of the chosen device."""
    return selector(metric, CHOSEN_DEVICE, *matchers)


ANSWERS = Needs(
    [(NO_DEVICE, f"count({device_selector('vramledger_device_up')} == 1)")], nothing="not reported"
)
"""What a figure of the device needs."""
ANSWERS_WITH_RULES = replace(ANSWERS, rules=True)


def memory_used() -> Panel:
    return stat(
        "Memory used",
        "Share of the device that is in use, with the driver's reserve; and the highest share within the "
        "time range, with peaks between two scrapes. Where the operating system manages the memory, its page "
        "cache is in the peak only.",
        Query(f"max({device_selector('vramledger_device:memory_used:ratio')})", "now"),
        Query(
            f"(max(max_over_time({device_selector('vramledger_device_memory_used_peak_bytes')}[$__range]))\n"
            f"+ (max({device_bytes('driver_reserved', CHOSEN_DEVICE)}) or vector(0)))\n"
            f"/ max({device_selector('vramledger_device_memory_total_bytes')})",
            "peak",
        ),
        unit=SHARE, needs=ANSWERS_WITH_RULES,
    )  # fmt: skip


def unattributed() -> Panel:
    return stat(
        "Unattributed",
        "Used, and held by nobody that the driver or other evidence names: a process of another PID "
        "namespace, or memory that the driver has not freed. We measured up to 66 MiB on healthy devices.",
        Query(f"sum({device_bytes('unattributed', CHOSEN_DEVICE)})"),
        unit=BYTES, needs=ANSWERS, colour=GRAFANA["unattributed"], level=USUAL_UNATTRIBUTED,
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


def time_until_full() -> Panel:
    free = f"sum({device_selector('vramledger_device:memory_free_bytes:last')})"
    rise = f"sum({filling_rate(CHOSEN_DEVICE)})"
    nobody = f"sum({device_selector('vramledger_device_holders')}) == 0"
    known = f"count({minimum_demand_of(CHOSEN_DEVICE)}) or {nobody}"
    return stat(
        "Time until full",
        "At the rate at which the minimum of all holders has risen within 15 minutes.",
        Query(f"{free} / {rise}"),
        unit=SECONDS,
        needs=Needs([*ANSWERS.sources, (NOT_YET, known)], rules=True, nothing="no holder grows"),
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
        total="total", width=24, height=10,
    )  # fmt: skip


_BY_HOLDER = f"{HOLDING_LABELS}, command, owner_type, owner"


def holdings_over_time() -> Panel:
    held = f"sum by ({_BY_HOLDER}) ({holdings(CHOSEN_DEVICE)})"
    return time_series(
        "Holdings",
        "Bytes of the ten holders with the highest memory in the time range, charged by NVML or certainly "
        "their own, and the sum of all others.",
        Query(named_owner(ten_largest(held, _BY_HOLDER)), HOLDER_LEGEND),
        Query(sum_of_others(held, _BY_HOLDER), "all others"),
        unit=BYTES, stacked=True, named=True, absent="no process holds memory, or no data", width=24,
    )  # fmt: skip


def uncharged_memory() -> Panel:
    """Make the graph of what NVML charges to no process, by what is known of its holders."""
    known = f"sum({uncharged(CHOSEN_DEVICE)})"
    managed = f"sum({device_selector('vramledger_process_managed_memory_bytes')})"
    undivided = f"sum({device_selector('vramledger_device_memory_undivided_bytes')})"
    unattributed = f"sum({device_bytes('unattributed', CHOSEN_DEVICE)})"
    return time_series(
        "Uncharged memory",
        "Used memory that NVML charges to no process. Managed memory gives way to other programs; left: its "
        "creator has ended, and another process still has it. Both have a holder, in whose figure they are. "
        "Undivided: one of several holders has it. Unattributed: nobody is known to have it; this part alone "
        "is in the figure *Unattributed*. Total is the whole GPU.",
        Query(managed, "managed"),
        Query(f"{known} - {managed}", "left"),
        Query(undivided, "undivided"),
        Query(unattributed, "unattributed"),
        # Without the whole GPU the 14 MiB of a healthy one would fill the graph, as an alarm does.
        Query(f"sum({device_selector('vramledger_device_memory_total_bytes')})", "total"),
        unit=BYTES, stacked=True, order=("managed", "left", "undivided", "unattributed"), lines=("total",),
        colours={
            "managed": SHADES[1], "left": SHADES[2], "undivided": SHADES[0],
            "unattributed": GRAFANA["unattributed"],
        },
        height=7,
    )  # fmt: skip


def uncharged_holders() -> Panel:
    by = f"{DEVICE_LABELS}, pid"
    named = f"sum by ({by}, command, owner_type, owner) ({holdings(CHOSEN_DEVICE)})"
    own = f"sum by ({by}) ({uncharged(CHOSEN_DEVICE)}) > 0"
    more = perhaps_more(by)
    some = f"({own}\nor on ({by}) {more})"
    return table(
        "Uncharged memory, by holder",
        f"The ten largest holders that have such memory, or perhaps have. {UNCHARGED_SAYS} The table is "
        "empty if there is none.",
        Query(f"topk(10, {named} and on ({by}) {some})"),
        Query(own),
        Query(more),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            Column("Value #B", "Uncharged", BYTES, width=118),
            Column("Value #C", "Perhaps more", BYTES, width=80),
        ],
        sort="Value #B", rows_of="Value #A", width=12, height=7,
    )  # fmt: skip


def holder_states() -> Panel:
    largest = f"topk(30, max_over_time({holdings(CHOSEN_DEVICE)}[$__range] @ end()))"
    codes, listed = state_codes(CHOSEN_DEVICE), device_selector("vramledger_device_holders")
    return state_timeline(
        "States of the holders",
        "When each of the 30 largest processes of the time range started, which states it had, and when "
        "it ended; and when nobody held memory there.",
        Query(f"max by ({_BY_HOLDER}) ({codes})\nand on ({HOLDING_LABELS}) {largest}", "{{command}} {{pid}}"),
        # Without any row Grafana says that a time field is missing. A GPU that does not answer is not empty.
        Query(f"{EMPTY_CODE} + (sum({listed}) == 0)", EMPTY),
        mappings=[HOLDER_CODES], width=24, height=9,
    )  # fmt: skip


def ended_holders() -> Panel:
    by = f"{DEVICE_LABELS}, pid, command, owner_type, owner"
    held = holdings(CHOSEN_DEVICE)
    here = device_selector("vramledger_process_memory_bytes", 'pid!="other"')
    highest = f"max by ({by}) (max_over_time({held}[$__range]))"
    ended = f"({highest}\nunless on ({HOLDING_LABELS}) {held} unless on ({HOLDING_LABELS}) {here})"
    growth = f"max by ({by}) (max_over_time(deriv({held}[5m])[$__range:2m])) > 0"
    last = f"max by ({by}) (max_over_time(timestamp({held})[$__range:1m]))"
    return table(
        "Holders that ended",
        "The ten largest holders of the time range that have ended: the peak of each, its fastest "
        "growth over 5 minutes, and how long it has not been seen. The table is empty if none has ended.",
        Query(f"topk(10, {ended})"),
        Query(growth),
        Query(age(last)),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            Column("Value #A", "Peak", BYTES, width=100),
            Column("Value #B", "Fastest growth", "binBps", width=110),
            Column("Value #C", "Ended for", SECONDS, width=AGE_WIDTH),
        ],
        sort="Value #A", rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def failed_allocations() -> Panel:
    process = f"{NODE_LABELS}, pid"
    held = f"sum by ({process}) ({holdings(CHOSEN_DEVICE)})"
    ever = f"max_over_time(({held})[$__range:1m])"
    here = f"and on ({process}) {ever}"
    total = f"sum by ({NODE_LABELS}) ({holdings(CHOSEN_DEVICE)})"
    others = f"max_over_time((-({held} - on ({NODE_LABELS}) group_left () {total}))[$__range:1m])"

    def newest(figure: str) -> str:
        return f"last_over_time({figure}[$__range])"

    when = newest(selector("vramledger_framework_last_oom_timestamp_seconds"))
    asked = newest(selector("vramledger_framework_last_oom_requested_bytes"))
    split = newest(device_selector("vramledger_torch_inactive_split_bytes"))
    cached = newest(device_selector("vramledger_torch_reclaimable_bytes"))
    least = f"min_over_time({device_bytes('free', CHOSEN_DEVICE)}[$__range])"
    moment = selector("vramledger_framework_last_oom_timestamp_seconds")
    recent = f"max by ({process}) (time() - {moment} < 120)"
    largest = f"topk by ({NODE_LABELS}) (1, {holdings(CHOSEN_DEVICE)} unless on ({process}) {recent})"
    named = named_in_full(largest, BLOCKER)
    beside = f"0 * {recent} + on ({NODE_LABELS}) group_left ({BLOCKER}) {named}"
    blocker = (
        f"topk by ({process}) (1, max by ({process}, {BLOCKER}) (max_over_time(({beside})[$__range:1m])))"
    )
    free = f"{ever} * 0 + on ({NODE_LABELS}) group_left () sum by ({NODE_LABELS}) ({least})"
    newest_failure = f"max by ({process}, framework, verdict) ({when} {here})"
    return table(
        "Why allocations failed",
        "The newest failed allocation of each program on the device, also of programs that have ended: "
        "what it asked for, the verdict of its agent, and what helps first. Beside it, within the time "
        "range, who else held most just after it failed, the highest that others held together, the least "
        "that was free, and what of its own pool was last cached or in free pieces of used blocks. The table "
        "is empty if none failed, or if no program has an agent.",
        Query(with_verdict_step(f"bottomk(10, {age(newest_failure)})")),
        Query(f"max by ({process}, framework) ({asked} {here})"),
        Query(free),
        Query(others),
        Query(f"sum by ({process}) ({cached})"),
        Query(f"sum by ({process}) ({split})"),
        Query(blocker),
        columns=[
            PROCESS_COLUMN,
            Column("framework", "Framework", width=95),
            Column("Value #A", "Ago", SECONDS, width=AGE_WIDTH),
            Column("Value #B", "Asked", BYTES, width=80),
            VERDICT_COLUMN,
            VERDICT_STEP_COLUMN,
            BLOCKER_COLUMN,
            Column("Value #G", "It held", BYTES, width=80),
            Column("Value #D", "Others, at most", BYTES, width=80),
            Column("Value #C", "Free, at least", BYTES, width=80),
            Column("Value #E", "Its cache", BYTES, width=80),
            Column("Value #F", "Its free pieces", BYTES, width=80),
        ],
        sort="Value #A", ascending=True, rows_of="Value #A", width=24, height=6,
    )  # fmt: skip


def freed_on_exit() -> Panel:
    freed = increase("vramledger_owner_memory_freed_bytes_total", CHOSEN_DEVICE)
    not_freed = increase("vramledger_owner_memory_not_freed_bytes_total", CHOSEN_DEVICE)
    return time_series(
        "Freed on exit",
        "When holdings end: how many of their bytes were freed, and how many stayed in use without a "
        "holder.",
        Query(f"sum({freed})", "freed"),
        Query(f"sum({not_freed})", "not freed"),
        unit=BYTES, absent="no owner has held memory, or no data", width=8,
    )  # fmt: skip


def overlap() -> Panel:
    return time_series(
        "Overlap",
        "The excess of the sum of the holdings over the used memory: processes share "
        "memory, or the figures are a moment apart.",
        Query(f"max({device_selector('vramledger_device_memory_overlap_bytes')})", "overlap"),
        unit=BYTES, width=8,
    )  # fmt: skip


def xid_errors() -> Panel:
    return time_series(
        "XID errors",
        "The driver's errors by number, since the exporter started. Look into each of "
        "them; 79 is a GPU that fell off the bus.",
        Query(f"sum by (xid) ({device_selector('vramledger_device_xid_errors_total')})", "XID {{xid}}"),
        unit=COUNT, absent="none since the exporter started", width=8,
    )  # fmt: skip


def reservations() -> Panel:
    by = "owner_type, owner"
    reserved = device_selector("vramledger_device_reservation_info")
    held = device_selector("vramledger_owner_memory_bytes")
    return table(
        "Reserved for",
        "The owners for whom a scheduler has reserved the device, and what each holds of it. The table is "
        "empty if no scheduler reserves this GPU.",
        Query(f"topk(20, count by ({by}) ({reserved}))"),
        Query(f"sum by ({by}) ({held})"),
        columns=[OWNER_COLUMN, Column("Value #B", "Holds", BYTES)],
        sort="Value #B", rows_of="Value #A", width=12, height=8,
    )  # fmt: skip


def held_without_reservation() -> Panel:
    return time_series(
        "Held without a reservation",
        "Bytes of owners that have no reservation of the device.",
        Query(f"sum({device_selector('vramledger_device_unreserved_memory_bytes')})", "bytes"),
        unit=BYTES, absent="not available: no scheduler reserves this GPU",
    )  # fmt: skip


def hardware() -> list[Panel]:
    traffic = mean("vramledger_device_memory_bandwidth_utilization_ratio", CHOSEN_DEVICE)
    throttled = device_selector("vramledger_device_throttle_active")
    ever = f"(max by (reason) (max_over_time({throttled}[$__range] @ end())) > 0)"
    pcie = mean("vramledger_device_pcie_throughput_bytes_per_second", CHOSEN_DEVICE)
    graphs = [
        time_series(
            "Utilisation",
            "Share of time with a kernel running, and with device memory being read or written, as the "
            "driver counts it; means of 2 minutes or more.",
            Query(mean("vramledger_device_utilization_ratio", CHOSEN_DEVICE), "kernels"),
            Query(traffic, "memory traffic"),
            unit=SHARE, maximum=1, absent=NOT_AVAILABLE, step=MEAN_STEP, width=8,
        ),
        time_series(
            "Power",
            "Power draw of the board, as a mean of 2 minutes or more, and its limit.",
            Query(mean("vramledger_device_power_watts", CHOSEN_DEVICE), "draw"),
            Query(device_selector("vramledger_device_power_limit_watts"), "limit"),
            unit="watt", absent=NOT_AVAILABLE, step=MEAN_STEP, width=8,
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
            "1 while the driver throttles the clocks for this reason; only reasons within the time range.",
            Query(f"{throttled}\nand on (reason) {ever}", "{{reason}}"),
            Query(f"max({throttled}) unless on () {ever}", "none"),
            unit=COUNT, absent=NOT_AVAILABLE, width=8,
        ),
        time_series(
            "PCIe traffic",
            "Traffic as a mean of 2 minutes or more; before Hopper of windows of 20 ms within them. It needs "
            "--collector.pcie.",
            Query(pcie, "{{direction}}"),
            unit="Bps", absent="if the exporter is watching: no --collector.pcie", step=MEAN_STEP,
            width=8,
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
    return [*map(joined, graphs)]


def work() -> list[Panel]:
    """Make the graphs of GPM's counters, which show whether a busy GPU computes and moves anything."""
    pipes = mean("vramledger_device_pipe_active_ratio", CHOSEN_DEVICE)
    nvlink = mean("vramledger_device_nvlink_throughput_bytes_per_second", CHOSEN_DEVICE)
    graphs = [
        time_series(
            "SMs and pipes",
            "Share of the time in which the SMs had a kernel, and in which their pipes computed: tensor for "
            "matrices; means of 2 minutes or more. A GPU whose SMs are busy while all pipes and the memory "
            "are at 0 waits.",
            Query(mean("vramledger_device_sm_active_ratio", CHOSEN_DEVICE), "SMs"),
            Query(mean("vramledger_device_sm_occupancy_ratio", CHOSEN_DEVICE), "occupancy"),
            Query(pipes, "{{pipe}}"),
            unit=SHARE, maximum=1, absent=NO_GPM, step=MEAN_STEP, width=8,
        ),
        time_series(
            "Memory bandwidth",
            "Traffic of the device's memory as a share of its maximum, as a mean of 2 minutes or more.",
            Query(mean("vramledger_device_memory_bandwidth_used_ratio", CHOSEN_DEVICE), "DRAM"),
            unit=SHARE, maximum=1, absent=NO_GPM, step=MEAN_STEP, width=8,
        ),
        time_series(
            "NVLink traffic",
            "Traffic over all NVLinks of the device, as a mean of 2 minutes or more.",
            Query(nvlink, "{{direction}}"),
            unit="Bps", absent="if the exporter is watching: no NVLink in use", step=MEAN_STEP, width=8,
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
            "{{alertname}}", "{{severity}}: {{owner}} {{pid}} on GPU {{gpu}} of {{instance}}", shown=False,
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
                    wasted(CHOSEN_DEVICE, needs=ANSWERS),
                    unattributed(),
                    process_count(),
                    time_until_full(),
                    ledger_over_time(),
                ],
            ),
            Row(
                "Holders",
                [
                    counted(holders(CHOSEN_DEVICE, places=(), height=10), "holders"),
                    holdings_over_time(),
                    holder_states(),
                    uncharged_memory(),
                    counted(uncharged_holders(), "holders of uncharged memory"),
                ],
            ),
            Row(
                "Work",
                [busy_without_work(CHOSEN_DEVICE), *work()],
            ),
            Row(
                "What happened",
                [
                    counted(failed_allocations(), "programs with failures", NO_AGENT),
                    counted(ended_holders(), "ended holders"),
                    freed_on_exit(),
                    xid_errors(),
                    overlap(),
                ],
            ),
            Row(
                "Reservations",
                [
                    counted(reservations(), "owners of reservations", NO_SCHEDULER),
                    held_without_reservation(),
                ],
                collapsed=True,
            ),
            Row("Hardware", hardware(), collapsed=True),
        ],
        [device_variable()],
        device_annotations(),
        one_node=True,
    )
