"""Show whether the exporters work: without them no figure is reliable."""

from __future__ import annotations

from dataclasses import replace

from dashboards.src.dashboard import EXPORTER, Dashboard, Row, link_to_exporter_health
from dashboards.src.panels import (
    AGE_WIDTH,
    BYTES,
    CORES,
    COUNT,
    DEVICE_LEGEND,
    NO_FILE,
    NODE_LEGEND,
    SECONDS,
    STATUS_NAMES,
    WEB_CONFIG,
    YES_OR_NO,
    Column,
    Panel,
    Query,
    stat,
    state_timeline,
    table,
    time_series,
)
from dashboards.src.queries import (
    DEVICE_LABELS,
    NODE_LABELS,
    PARTLY_BLIND,
    WATCHING,
    age,
    count_equal,
    increase,
    rate,
    selector,
    ten_largest,
    watch_status,
)
from dashboards.src.shared_panels import HIDDEN, NODE_COLUMN, PROCESS_COLUMN, watched_nodes

NOTHING_HAPPENED = "none"
"""The name of a line that is at 0 where nothing was counted: without it, no event looks like no data."""


def _by_node(figure: str) -> str:
    return f"max by ({NODE_LABELS}) ({figure})"


def _ten_nodes(figure: str) -> str:
    return ten_largest(figure, NODE_LABELS)


def gaps() -> Panel:
    status = watch_status()
    seen = f"0 * ({status} == {PARTLY_BLIND})"
    lost = (
        f"count by ({NODE_LABELS}, gpu) ({selector('vramledger_device_up')} == 0)"  # MIG instances are parts
    )
    blind = f"{selector('vramledger_host_pid_namespace')} == 0"
    silent = f"{selector('vramledger_agent_up')} == 0"
    last = f"max by ({NODE_LABELS}) ({selector('vramledger_node:watched_timestamp_seconds:last')})"
    return table(
        "Nodes that are not fully watched",
        "A row for each node: its status, the age of its newest data where it is not watched, and what is "
        "not seen while it is watched: GPUs that do not answer, the host's processes (without its PID "
        "namespace every holder is unknown), agents that are silent. A dash: not known, as the "
        "node is not watched.",
        Query(f"bottomk(50, {status} != {WATCHING})"),
        Query(f"{age(last)} and on ({NODE_LABELS}) ({status} != {WATCHING})"),
        Query(f"count by ({NODE_LABELS}) ({lost}) or on ({NODE_LABELS}) {seen}"),
        Query(f"count by ({NODE_LABELS}) ({blind}) or on ({NODE_LABELS}) {seen}"),
        Query(f"count by ({NODE_LABELS}) ({silent}) or on ({NODE_LABELS}) {seen}"),
        columns=[
            NODE_COLUMN,
            Column("Value #A", "Status", COUNT, link_to_exporter_health(), [STATUS_NAMES], width=170),
            Column("Value #B", "No data for", SECONDS, width=AGE_WIDTH),
            Column("Value #C", "GPUs lost", COUNT, width=62),
            Column("Value #D", "Processes", COUNT, mappings=[HIDDEN], width=100),
            Column("Value #E", "Agents silent", COUNT, width=70),
        ],
        empty="all nodes are fully watched: good", needs="node",
        sort="Value #A", ascending=True, rows_of="Value #A", width=24, height=6,
    )  # fmt: skip


def exporter_states() -> Panel:
    status = watch_status()
    lowest = f"bottomk(50, min_over_time({status}[$__range] @ end()))"
    return state_timeline(
        "Exporter status",
        "Down: it does not answer Prometheus. Driver does not answer: the exporter runs, but NVML does "
        "not answer. Samples have stopped: it answers with an old sample. Watching in part: a GPU does not "
        "answer, an agent is silent, or the exporter does not see the host's processes. The 50 nodes that "
        "were watched least within the time range: first those that were not watched at some time.",
        Query(f"{status} and on ({NODE_LABELS}) ({lowest} < {WATCHING})", NODE_LEGEND),
        Query(f"{status} and on ({NODE_LABELS}) ({lowest} >= {WATCHING})", NODE_LEGEND),
        mappings=[STATUS_NAMES], width=24, height=9,
    )  # fmt: skip


def longest_sample() -> Panel:
    return stat(
        "Sample time",
        "Duration of the slowest node's newest sample. It should stay well below the "
        "sampling interval, 1 s by default.",
        Query(f"max({selector('vramledger_sample_duration_seconds')})"), unit=SECONDS, width=3,
    )  # fmt: skip


def failing_collectors() -> Panel:
    return stat(
        "Failing collectors",
        "Collectors that did not give all their data; only their own figures are missing.",
        Query(count_equal("vramledger_collector_success", 0)), unit=COUNT,
    )  # fmt: skip


def versions() -> Panel:
    versions = selector("vramledger_build_info")
    # A sample that failed has a time, too, and nothing else.
    up = f"and on ({NODE_LABELS}) {selector('vramledger_up')} == 1"
    answered = f"{selector('vramledger_sample_timestamp_seconds')} {up}"
    return table(
        "Versions and sources",
        "Which version runs on which node, whether it reads the driver or plays a recording, and how old its "
        "newest data is. A dash: its driver does not answer.",
        Query(f"topk(100, count by (instance, version, python_version) ({versions}))"),
        Query(f"count by (instance, source) ({selector('vramledger_source_info')})"),
        Query(age(f"max by (instance) ({answered})")),
        columns=[
            NODE_COLUMN,
            Column("version", "Version"),
            Column("python_version", "Python"),
            Column("source", "Source"),
            Column("Value #C", "Age of its newest data", SECONDS),
        ],
        empty="no exporter answers: see Exporters",
        sort="instance", ascending=True, rows_of="Value #A", width=24, height=8,
    )  # fmt: skip


def failed_samples() -> Panel:
    failures = increase("vramledger_sample_failures_total")
    ever = f"(sum(increase({selector('vramledger_sample_failures_total')}[$__range] @ end())) > 0)"
    return time_series(
        "Failed samples",
        "Samples that could not read the driver at all, by reason.",
        Query(f"sum by (reason) ({failures}) > 0", "{{reason}}"),
        Query(f"sum({failures}) == 0 unless on () {ever}", NOTHING_HAPPENED),
        unit=COUNT, stacked=True, lines=(NOTHING_HAPPENED,),
    )  # fmt: skip


def sample_durations() -> Panel:
    by = f"max by ({NODE_LABELS})"
    sample = f"{by} ({selector('vramledger_sample_duration_seconds')})"
    return time_series(
        "Samples and scrapes",
        "Duration of a sample, and of a scrape by Prometheus, on the ten slowest nodes each.",
        Query(_ten_nodes(sample), f"{NODE_LEGEND} sample"),
        Query(_ten_nodes(f"{by} ({selector('scrape_duration_seconds')})"), f"{NODE_LEGEND} scrape"),
        unit=SECONDS, named=True,
    )  # fmt: skip


def collector_success() -> Panel:
    recorded = selector("vramledger_node:collector_success:min4m")
    success = f"min by (collector) ({recorded})"
    failed = f"(min by (collector) (min_over_time({recorded}[$__range] @ end())) == 0)"
    return state_timeline(
        "Collector success",
        "No means that the collector failed on a chosen node within 4 minutes. Those that failed within the "
        "time range come first.",
        Query(f"{success}\nand on (collector) {failed}", "{{collector}}"),
        Query(f"{success}\nunless on (collector) {failed}", "{{collector}}"),
        mappings=[YES_OR_NO], width=24,
    )  # fmt: skip


def exporter_memory() -> Panel:
    return time_series(
        "The exporter's own memory",
        "Resident memory of the serving process.",
        Query(_ten_nodes(_by_node(selector("process_resident_memory_bytes"))), NODE_LEGEND),
        unit=BYTES, absent="not available: collector exporter is off, or no data",
    )  # fmt: skip


def exporter_cpu() -> Panel:
    return time_series(
        "The exporter's own CPU time",
        "Cores that the serving process keeps busy; the sampler is a separate process.",
        Query(_ten_nodes(f"max by ({NODE_LABELS}) ({rate('process_cpu_seconds_total')})"), NODE_LEGEND),
        unit=CORES, absent="not available: collector exporter is off, or no data",
    )  # fmt: skip


def incomplete_data() -> list[Panel]:
    unaccounted_by = f"sum by ({DEVICE_LABELS}) ({{}} > 0)"
    uncounted = increase("vramledger_owner_uncounted_seconds_total")
    holders, owners = (
        f"max by ({DEVICE_LABELS}) ({selector(f'vramledger_device:{what}_dropped:max4m')})"
        for what in ("processes", "owners")
    )
    watched = f"0 * count({selector('vramledger_node:exporter_status:code')} == {WATCHING})"
    return [
        time_series(
            "Unreadable /proc files",
            "Processes whose files below /proc the exporter may not read, so that less "
            "is known about them. 'vramledger doctor' says how to fix it.",
            Query(f"sum by (file) ({selector('vramledger_unreadable_processes')})", "{{file}}"),
            unit=COUNT, width=8,
        ),
        time_series(
            "Unaccounted time",
            (
                "Seconds without samples since the exporter started, by device: they are "
                "missing in the owners' GiB-hours."
            ),
            Query(ten_largest(unaccounted_by.format(uncounted), DEVICE_LABELS), DEVICE_LEGEND),
            Query(f"sum({uncounted}) == 0", NOTHING_HAPPENED),
            unit=SECONDS, width=8,
        ),
        time_series(
            "Series dropped, by device",
            "Holders and owners beyond the limits; the most within 4 minutes.",
            Query(ten_largest(holders, DEVICE_LABELS), f"{DEVICE_LEGEND} holders"),
            Query(ten_largest(owners, DEVICE_LABELS), f"{DEVICE_LEGEND} owners"),
            Query(f"{watched}\nunless on () (count({holders}) or count({owners}))", NOTHING_HAPPENED),
            unit=COUNT, width=8,
        ),
    ]  # fmt: skip


def web_config_in_use() -> Panel:
    used = selector("vramledger_web_config_last_reload_successful")
    told = selector("vramledger_collector_success", 'collector="exporter"')  # it would say it
    return state_timeline(
        "Web configuration in use",
        "Whether the newest version of the file and of its certificates is in use; no: it is wrong, and an "
        "older one is in use. No file: none of the exporters has a --web.config.file.",
        Query(f"bottomk(20, {used})", NODE_LEGEND),
        # Without any row Grafana says that a time field is missing.
        Query(f"max({NO_FILE} + 0 * {told}) unless on () {used}", "every node"),
        mappings=[WEB_CONFIG], width=24,
    )  # fmt: skip


def agents() -> list[Panel]:
    none = "not available: no agent, or collector agent is off"
    up = selector("vramledger_agent_up")
    return [
        table(
            "Agents",
            "For each agent: whether it reports, why not, and when it last reported.",
            Query(f"bottomk(50, max by (instance, pid, reason) ({up}))"),
            Query(age(f"max by (instance, pid) ({selector('vramledger_agent_report_timestamp_seconds')})")),
            columns=[
                NODE_COLUMN,
                PROCESS_COLUMN,
                Column("Value #A", "Reports", COUNT, mappings=[YES_OR_NO], width=102),
                Column("reason", "Why not"),
                Column("Value #B", "Age of its newest report", SECONDS),
            ],
            empty="no program has an agent",
            needs="socket", sort="Value #A", ascending=True, rows_of="Value #A", width=24, height=8,
        ),
        time_series(
            "Failures of agents",
            (
                "Failures by the part that failed, as the agents count them, reports that they could not "
                "send, and messages and connections that the socket refused, by reason."
            ),
            Query(f"sum by (reason) ({increase('vramledger_agent_rejected_total')})", "refused: {{reason}}"),
            Query(f"sum by (provider) ({increase('vramledger_agent_errors_total')})", "{{provider}}"),
            Query(f"sum({increase('vramledger_agent_dropped_reports_total')})", "dropped reports"),
            unit=COUNT, absent=none, width=24,
        ),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of the exporters' status."""
    return Dashboard(
        EXPORTER,
        "Exporter health",
        "Whether the exporters answer, read the driver, keep sampling, and see all that they should.",
        [
            Row(
                "",
                [
                    watched_nodes(width=12),
                    *(replace(each, width=6) for each in (longest_sample(), failing_collectors())),
                    gaps(),
                    exporter_states(),
                ],
            ),
            Row(
                "Sampling",
                [versions(), failed_samples(), sample_durations(), collector_success()],
                collapsed=True,
            ),
            Row("What it cannot see", incomplete_data(), collapsed=True),
            Row("Agents", agents(), collapsed=True),
            Row(
                "Exporter process",
                [exporter_memory(), exporter_cpu(), web_config_in_use()],
                collapsed=True,
            ),
        ],
    )
