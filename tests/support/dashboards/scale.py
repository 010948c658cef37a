"""The cost of the dashboards' queries over a fleet: the same nodes many times, for hours or days."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.support.dashboards.database import STALE, Samples, ask
from tests.support.dashboards.files import PanelQuery, all_queries, load_dashboards, substitute_variables
from tests.support.dashboards.nodes import HOURS, NOW
from tests.support.fleet.engines import Engine

INTERVALS = (15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Seconds between two points of a graph, as Grafana rounds them."""
FULL = 3600.0
"""Seconds before now of which all series are copied, with all samples: current figures look back."""


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


class Part(NamedTuple):
    """Samples, and by how many seconds they are to be moved into the past."""

    samples: Samples
    back: float


def copy_nodes(  # noqa: PLR0913 what a fleet is
    samples: Samples, copies: int, hours: float, every: float, *, processes: int = 1, together: int = 1
) -> Iterator[Part]:
    """Yield copies of every node, with UUIDs and owners of their own, their hours repeated up to now.

    Only the series that the dashboards ask for are copied. A dashboard about one node asks for the past of
    that node alone, so only the first copies have the past of what no other dashboard draws. The parts share
    their samples: a week of them would not fit in memory.

    Args:
        samples: some hours of the nodes.
        copies: how many of each node's devices, processes and owners.
        hours: how much history there is; the hours of the samples come again and again.
        every: seconds from one sample of a series to the next, but for the last hour.
        processes: how many of each process.
        together: how many copies are on one node.
    """
    past, until_newest, newest = Samples(), Samples(), Samples()
    span = HOURS * 3600
    asked_for = _names_in(all_queries(), samples)
    drawn = [each for each in all_queries() if not each.instant or "$__range" in each.expr]
    past_of_all = _names_in((each for each in drawn if each.dashboard not in ONE_NODE), samples)
    for labels, values in samples.points.items():
        own = dict(labels)
        if own["__name__"] not in asked_for:
            continue
        thinned = _thinned(values, every)
        before = [each for each in thinned if each[0] <= NOW - FULL]
        after = [each for each in values if each[0] > NOW - FULL]
        several = own.keys() & {"uuid", "owner", "pid"} and "instance" in own
        for copy in range(copies if several else copies // together if "instance" in own else 1):
            has_past = own["__name__"] in past_of_all or copy == 0
            names: dict[str, str] = {name: f"{own[name]}-{copy}" for name in ("uuid", "owner") if name in own}
            if "instance" in own:
                names["instance"] = f"{own['instance']}-{copy % (copies // together)}"
            place = copy // (copies // together) or ""
            names |= {name: f"{own[name]}{place}" for name in ("gpu", "pid") if name in own}
            for process in range(processes if "pid" in own else 1):
                pid = {"pid": f"{names['pid']}{process or ''}"} if "pid" in own else {}
                series = tuple(sorted((own | names | pid).items()))
                for part, points in ((past, thinned), (until_newest, before)):
                    if points and has_past:
                        part.points[series] = points
                if after:
                    newest.points[series] = after
    for back in range(max(1, round(hours / HOURS)) - 1, 0, -1):
        yield Part(past, back * span)
    yield Part(until_newest, 0.0)
    yield Part(newest, 0.0)


def _names_in(queries: Iterable[PanelQuery], samples: Samples) -> set[str]:
    """Return the names of those series that the queries ask for."""
    asked = "\n".join(each.expr for each in queries)
    names = {dict(labels)["__name__"] for labels in samples.points}
    return {name for name in names if re.search(rf"(?<![\w:]){name}(?![\w:])", asked)}


def _thinned(values: list[tuple[float, bytes]], every: float) -> list[tuple[float, bytes]]:
    """Return the first sample of each span, and each end: rules have other moments than scrapes."""
    kept: list[tuple[float, bytes]] = []
    span = None
    for at, value in values:
        if at // every != span or value == STALE:
            kept.append((at, value))
            span = at // every
    return kept


def query_durations(engine: Engine, hours: float, every: float, ahead: float) -> list[QueryDuration]:
    """Return what each query took, the slowest first: over the time range, All where it can be chosen."""
    return sorted((_duration(engine, asked, hours, every, ahead) for asked in all_queries()), reverse=True)


def interval(span: float, points: int) -> int:
    """Return the seconds between two points for which Grafana asks: at least the first of the intervals."""
    wanted = span / points
    return next(
        (low for low, high in pairwise(INTERVALS) if wanted < (low + high) / 2),
        INTERVALS[-1],
    )


def _duration(engine: Engine, asked: PanelQuery, hours: float, every: float, ahead: float) -> QueryDuration:
    span = hours * 3600
    step = interval(span, asked.points)
    times = {"__range": f"{span:.0f}s", "__range_s": f"{span:.0f}", "__interval": f"{step}s"}
    rated = {"__rate_interval": f"{max(step + every, 4 * every):.0f}s"}
    devices = ask(engine, 'vramledger_device_info{instance=~".+-0"}', instant=True, span=0, ahead=ahead)
    device = devices[0]["metric"]
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
        graph = {"start": str(now - span), "end": str(now), "step": str(step)}
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


def report(engine: Engine, hours: float, every: float, ahead: float) -> Iterator[str]:
    """Yield the fleet's size, the slowest queries, and what a load of each dashboard takes, as lines."""
    gpus, holders = (
        ask(engine, f"count({metric})", instant=True, span=0, ahead=ahead)[0]["value"][1]
        for metric in ("vramledger_device_up", "vramledger_process_memory_bytes")
    )
    found, later = query_durations(engine, hours, every, ahead), _opened_later()
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
