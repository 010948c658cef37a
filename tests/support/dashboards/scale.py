"""The cost of the dashboards' queries over a fleet: the same nodes many times, for hours or days."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.support.dashboards.database import STALE, Samples, ask
from tests.support.dashboards.files import PanelQuery, all_queries, load_dashboards, substitute_variables
from tests.support.dashboards.nodes import HOURS, NOW
from tests.support.fleet.engines import Engine

POINTS = 1440
"""Points of a graph that is as wide as the page."""


class QueryDuration(NamedTuple):
    """What one query took, in seconds of the processor and of time, and how many points it returned.

    It is asked as its panel asks it. On a loaded machine only the processor's time says anything.
    """

    cpu: float
    seconds: float
    points: int
    dashboard: str
    panel: str
    ref: str


def copy_nodes(samples: Samples, copies: int, hours: float, every: float, processes: int = 1) -> Samples:
    """Return copies of every node, each with its own name, UUIDs and owners, their hours repeated up to now.

    Only the series that the dashboards ask for are copied.

    Args:
        samples: some hours of the nodes.
        copies: how many of each node.
        hours: how much history there is; the hours of the samples come again and again.
        every: seconds from one sample of a series to the next.
        processes: how many of each process.
    """
    many = Samples()
    span = HOURS * 3600
    asked = "\n".join(each.expr for each in all_queries())
    asked_for = {name for name in _names(samples) if re.search(rf"(?<![\w:]){name}(?![\w:])", asked)}
    for labels, values in samples.points.items():
        if dict(labels)["__name__"] not in asked_for:
            continue
        thinned = _thinned(values, every)
        times = range(max(1, round(hours / HOURS)) - 1, -1, -1)
        repeated = [(at - back * span, value) for back in times for at, value in thinned]
        own = dict(labels)
        for copy in range(copies if "instance" in own else 1):
            names = {name: f"{own[name]}-{copy}" for name in ("instance", "uuid", "owner") if name in own}
            for process in range(processes if "pid" in own else 1):
                pid = {"pid": f"{own['pid']}{process or ''}"} if "pid" in own else {}
                many.points[tuple(sorted((own | names | pid).items()))] = repeated
    return many


def _names(samples: Samples) -> set[str]:
    return {dict(labels)["__name__"] for labels in samples.points}


def _thinned(values: list[tuple[float, bytes]], every: float) -> list[tuple[float, bytes]]:
    """Return the first sample of each span, and each end: rules have other moments than scrapes."""
    kept: list[tuple[float, bytes]] = []
    span = None
    for at, value in values:
        if at // every != span or value == STALE:
            kept.append((at, value))
            span = at // every
    return kept


def query_durations(engine: Engine, hours: float, ahead: float) -> list[QueryDuration]:
    """Return what each query took, the slowest first: over the time range, All where it can be chosen."""
    return sorted((_duration(engine, asked, hours, ahead) for asked in all_queries()), reverse=True)


def _duration(engine: Engine, asked: PanelQuery, hours: float, ahead: float) -> QueryDuration:
    span = hours * 3600
    times = {"__range": f"{span:.0f}s", "__range_s": f"{span:.0f}", "__interval": f"{span / POINTS:.0f}s"}
    rated = {"__rate_interval": f"{max(240, 4 * span / POINTS):.0f}s"}
    device = ask(engine, "vramledger_device_info", instant=True, span=0, ahead=ahead)[0]["metric"]
    place = f'vramledger_process_memory_bytes{{pid!="other", instance="{device["instance"]}"}}'
    holders = ask(engine, place, instant=True, span=0, ahead=ahead)
    chosen = {**times, **rated}
    if asked.dashboard in ONE_NODE:
        chosen |= {"instance": device["instance"], "uuid": device["uuid"]}
        chosen |= {"pid": holders[0]["metric"]["pid"] if holders else "1"}
    expr = substitute_variables(asked.expr, **chosen)
    now = NOW + ahead
    begun, used = time.perf_counter(), _cpu_seconds(engine)
    if asked.instant:
        answer = engine.get("/api/v1/query", query=expr, time=str(now))
    else:
        graph = {"start": str(now - span), "end": str(now), "step": str(max(15, span / POINTS))}
        answer = engine.get("/api/v1/query_range", query=expr, **graph)
    assert answer is not None, f"refused: {expr}"
    found = answer["data"]["result"]
    seconds = time.perf_counter() - begun
    points = sum(len(each.get("values", (0,))) for each in found)
    return QueryDuration(
        _cpu_seconds(engine) - used, seconds, points, asked.dashboard, asked.panel, asked.ref
    )


def _cpu_seconds(engine: Engine) -> float:
    """Return the processor's time that Prometheus has used, as it tells itself."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as page:  # noqa: S310 loopback
        found = re.search(rb"^process_cpu_seconds_total (\S+)$", page.read(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def _opened_later() -> set[tuple[str, str]]:
    """Return the panels of rows that are closed at first: they ask nothing until somebody opens the row."""
    return {
        (uid, panel["title"])
        for uid, content in load_dashboards().items()
        for row in content["panels"]
        if row["type"] == "row"
        for panel in row["panels"]
    }


ONE_NODE = ("vramledger-node", "vramledger-device", "vramledger-process")
"""Dashboards that are about one node."""


def report(engine: Engine, hours: float, ahead: float) -> Iterator[str]:
    """Yield the fleet's size, the slowest queries, and what a load of each dashboard takes, as lines."""
    gpus, holders = (
        ask(engine, f"count({metric})", instant=True, span=0, ahead=ahead)[0]["value"][1]
        for metric in ("vramledger_device_up", "vramledger_process_memory_bytes")
    )
    found, later = query_durations(engine, hours, ahead), _opened_later()
    yield f"{gpus} GPUs, {holders} holders, {hours:.0f} h; each query as its panel asks it:"
    for each in found[:8]:
        yield f"{_figures([each])}  {each.dashboard}: {each.panel} {each.ref}"
    for dashboard in sorted({each.dashboard for each in found}):
        own = [each for each in found if each.dashboard == dashboard]
        first = [each for each in own if (each.dashboard, each.panel) not in later]
        yield f"{_figures(first)}  {dashboard}, the {len(first)} queries of its first load"


def _figures(durations: Sequence[QueryDuration]) -> str:
    cpu, seconds = sum(each.cpu for each in durations), sum(each.seconds for each in durations)
    return f"{cpu:7.3f} s CPU {seconds:7.3f} s {sum(each.points for each in durations):8} points"
