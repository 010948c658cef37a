"""Whether the exporters themselves are well: without them, no figure means anything."""

from __future__ import annotations

from dashboards.src.dashboard import EXPORTER as UID
from dashboards.src.dashboard import Dashboard, Row, to_node
from dashboards.src.panels import (
    ANSWERS,
    BYTES,
    COUNT,
    SECONDS,
    STATUS,
    WHEN,
    Column,
    Panel,
    Query,
    stat,
    table,
    timeline,
    trend,
)
from dashboards.src.queries import DEVICE, NODE, increase, number, of, rate, status
from dashboards.src.shared_panels import exporters

NODE_NAME = "{{instance}}"


def course() -> Panel:
    return timeline(
        "How each exporter fares",
        "Down: it does not answer Prometheus. Driver does not answer: the exporter runs, and NVML does not. "
        "Samples have stopped: it answers with an old sample.",
        Query(status(), NODE_NAME), mappings=[STATUS], absent="no exporter is known", width=24,
    )  # fmt: skip


def sampling() -> Panel:
    return stat(
        "Longest sample",
        "What the slowest node's newest sample took. It should stay well below the interval of sampling, 1 "
        "s unless told otherwise.",
        Query(f"max({of('vramledger_sample_duration_seconds')})"), unit=SECONDS,
    )  # fmt: skip


def scraping() -> Panel:
    return stat(
        "Longest scrape",
        "What Prometheus waited for the slowest page. It never waits for a GPU.",
        Query(f"max({of('scrape_duration_seconds')})"), unit=SECONDS,
    )  # fmt: skip


def blind() -> Panel:
    return stat(
        "Blind nodes",
        "Nodes whose exporter does not see the host's processes: every holder there is unknown. Run it with "
        "the host's PID namespace.",
        Query(
            number("vramledger_host_pid_namespace", 0)
        ),
        unit=COUNT,
    )  # fmt: skip


def failing() -> Panel:
    return stat(
        "Failing collectors",
        "Collectors that did not give all that they had to; each costs its own figures only.",
        Query(number("vramledger_collector_success", 0)), unit=COUNT,
    )  # fmt: skip


def dropped() -> Panel:
    return stat(
        "Left out",
        "Holders and owners that have no series of their own, being beyond --processes.max and --owners.max.",
        Query(f"sum({of('vramledger_processes_dropped')})", "holders"),
        Query(f"sum({of('vramledger_owners_dropped')})", "owners"),
        unit=COUNT,
    )  # fmt: skip


def versions() -> Panel:
    return table(
        "Versions and sources",
        "What runs where, and whether it reads the driver or plays a recording.",
        Query(f"count by (instance, version, python_version) ({of('vramledger_build_info')})"),
        Query(f"count by (instance, source) ({of('vramledger_source_info')})"),
        Query(f"1000 * max by (instance) ({of('vramledger_sample_timestamp_seconds')})"),
        columns=[
            Column("instance", "Node", link=to_node()),
            Column("version", "Version"),
            Column("python_version", "Python"),
            Column("source", "Source"),
            Column("Value #C", "Newest sample", WHEN),
        ],
    )  # fmt: skip


def failures() -> Panel:
    return trend(
        "Failed samples",
        "Samples that could not read the driver at all, by reason.",
        Query(f"sum by (reason) ({increase('vramledger_sample_failures_total')})", "{{reason}}"),
        unit=COUNT, stacked=True,
    )  # fmt: skip


def durations() -> Panel:
    return trend(
        "Samples and scrapes",
        "What a sample takes, and what Prometheus waits for a page.",
        Query(f"max by ({NODE}) ({of('vramledger_sample_duration_seconds')})", f"{NODE_NAME} sample"),
        Query(f"max by ({NODE}) ({of('scrape_duration_seconds')})", f"{NODE_NAME} scrape"),
        unit=SECONDS,
    )  # fmt: skip


def skew() -> Panel:
    return trend(
        "Clock against Prometheus",
        "By how much the newest sample is older than the scrape. Steadily above the interval: samples have "
        "stopped, or the clocks disagree.",
        Query(
            f"abs(timestamp({of('vramledger_sample_timestamp_seconds')}) - on ({NODE}) "
            f"{of('vramledger_sample_timestamp_seconds')})",
            NODE_NAME,
        ),
        unit=SECONDS,
    )  # fmt: skip


def collectors() -> Panel:
    return timeline(
        "Collectors that give all they have to",
        "Where one fails on any chosen node it is no.",
        Query(f"min by (collector) ({of('vramledger_collector_success')})", "{{collector}}"),
        mappings=[ANSWERS],
    )  # fmt: skip


def collector_durations() -> Panel:
    return trend(
        "What collectors take",
        "The slowest node's, by collector.",
        Query(f"max by (collector) ({of('vramledger_collector_duration_seconds')})", "{{collector}}"),
        unit=SECONDS,
    )  # fmt: skip


def pages() -> Panel:
    return trend(
        "Series a scrape",
        "Samples on each node's page.",
        Query(f"max by ({NODE}) ({of('scrape_samples_scraped')})", NODE_NAME), unit=COUNT, width=8,
    )  # fmt: skip


def own_memory() -> Panel:
    return trend(
        "The exporter's own memory",
        "Resident memory of the serving process.",
        Query(f"max by ({NODE}) ({of('process_resident_memory_bytes')})", NODE_NAME),
        unit=BYTES, absent="not available: collector exporter is off, or no data", width=8,
    )  # fmt: skip


def own_cpu() -> Panel:
    return trend(
        "The exporter's own CPU time",
        "Cores that the serving process keeps busy; the sampler is a process of its own.",
        Query(rate("process_cpu_seconds_total"), NODE_NAME),
        unit=COUNT, absent="not available: collector exporter is off, or no data", width=8,
    )  # fmt: skip


def narrowed() -> list[Panel]:
    dropped_by = f"sum by ({DEVICE}) ({{}})"
    return [
        trend(
            "Files that may not be read",
            "Processes whose files below /proc the exporter may not read: what is said of them is less. "
            "'vramledger doctor' says how to mend it.",
            Query(f"sum by (file) ({of('vramledger_unreadable_processes')})", "{{file}}"),
            unit=COUNT, width=8,
        ),
        trend(
            "Time that nobody was charged for",
            "Seconds without samples since the exporter began, by device: owners' GiB-hours lack them.",
            Query(
                increase("vramledger_owner_uncounted_seconds_total"),
                "{{instance}} GPU {{gpu}}",
            ),
            unit=SECONDS, width=8,
        ),
        trend(
            "Left out, by device",
            "Holders and owners beyond the limits.",
            Query(dropped_by.format(of("vramledger_processes_dropped")), "{{instance}} GPU {{gpu}} holders"),
            Query(dropped_by.format(of("vramledger_owners_dropped")), "{{instance}} GPU {{gpu}} owners"),
            unit=COUNT, width=8,
        ),
    ]  # fmt: skip


def refused() -> Panel:
    return trend(
        "Requests that were not let in",
        "Without a password or certificate, or with a wrong one, and above the rate limit, by reason.",
        Query(
            f"sum by (reason) ({increase('vramledger_web_refused_requests_total')})",
            "{{reason}}",
        ),
        unit=COUNT, absent="not available: no --web.config.file, or collector exporter is off", width=8,
    )  # fmt: skip


def web_config() -> Panel:
    return timeline(
        "Web configuration in use",
        "Whether the newest version of the file and of its certificates is in use; no: it is wrong, and an "
        "older one is.",
        Query(of("vramledger_web_config_last_reload_successful"), NODE_NAME),
        mappings=[ANSWERS], absent="not available: no --web.config.file", width=8,
    )  # fmt: skip


def agents() -> list[Panel]:
    none = "not available: no agent, or collector agent is off"
    up = of("vramledger_agent_up")
    return [
        stat(
            "Agents' sockets",
            "Nodes on which the exporter listens for agents, and on which it cannot.",
            Query(number("vramledger_agent_socket_up", 1), "listen"),
            Query(number("vramledger_agent_socket_up", 0), "cannot"),
            unit=COUNT, absent=none, width=6, height=8,
        ),
        table(
            "Agents",
            "Each agent: whether it reports, why not, and when it last did.",
            Query(f"max by (instance, pid, reason) ({up})"),
            Query(f"1000 * max by (instance, pid) ({of('vramledger_agent_report_timestamp_seconds')})"),
            columns=[
                Column("instance", "Node", link=to_node()),
                Column("pid", "Pid", width=90),
                Column("Value #A", "Reports", mappings=[ANSWERS], width=90),
                Column("reason", "Why not"),
                Column("Value #B", "Newest report", WHEN),
            ],
            absent="no program has an agent", width=18, height=8,
        ),
        trend(
            "Connections",
            "Processes that are connected to the agents' socket.",
            Query(f"max by ({NODE}) ({of('vramledger_agent_connections')})", NODE_NAME),
            unit=COUNT, absent=none,
            width=8,
        ),
        trend(
            "Refused",
            "Messages and connections that the socket refused, by reason.",
            Query(f"sum by (reason) ({increase('vramledger_agent_rejected_total')})", "{{reason}}"),
            unit=COUNT, absent=none, width=8,
        ),
        trend(
            "Failures inside agents",
            "By the part that failed, in the agents' own count, and reports that they could not hand over.",
            Query(f"sum by (provider) ({increase('vramledger_agent_errors_total')})", "{{provider}}"),
            Query(f"sum({increase('vramledger_agent_dropped_reports_total')})", "dropped reports"),
            unit=COUNT, absent=none, width=8,
        ),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of the exporters' health."""
    return Dashboard(
        UID,
        "Exporter health",
        "Whether the exporters answer, read the driver, go on sampling, and see all that they should.",
        [
            Row("Now", [exporters(), sampling(), scraping(), blind(), failing(), dropped(), course()]),
            Row(
                "Sampling", [versions(), failures(), durations(), skew(), collectors(), collector_durations()]
            ),
            Row("What it cannot see", narrowed()),
            Row("Agents", agents(), folded=True),
            Row("Itself", [pages(), own_memory(), own_cpu(), refused(), web_config()], folded=True),
        ],
    )
