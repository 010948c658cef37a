"""The cost of the dashboards' queries over a fleet: the same nodes many times, for their last minutes."""

from __future__ import annotations

import time
from typing import NamedTuple

from tests.support.dashboards.database import Samples, ask
from tests.support.dashboards.files import all_queries, substitute_variables
from tests.support.dashboards.nodes import NOW
from tests.support.fleet.engines import Engine

MINUTES = 11
"""As far back as any instant query looks, except those over the time range."""


class QueryDuration(NamedTuple):
    """What one query took, in seconds, at one moment with all nodes chosen."""

    seconds: float
    dashboard: str
    panel: str


def copy_nodes(samples: Samples, copies: int) -> Samples:
    """Return the last minutes of copies of every node, each with its own name and UUIDs."""
    many = Samples()
    for labels, values in samples.points.items():
        newest = [each for each in values if each[0] > NOW - MINUTES * 60]
        own = dict(labels)
        if newest:
            for copy in range(copies if "instance" in own else 1):
                names = {name: f"{own[name]}-{copy}" for name in ("instance", "uuid") if name in own}
                many.points[tuple(sorted((own | names).items()))] = newest
    return many


def query_durations(engine: Engine) -> list[QueryDuration]:
    """Return what each query took, the slowest first."""
    uuid = ask(engine, "vramledger_device_info", instant=True, span=0)[0]["metric"]["uuid"]
    found = []
    for asked in all_queries():
        chosen = {"uuid": uuid} if "$uuid" in asked.expr else {}
        begun = time.perf_counter()
        ask(engine, substitute_variables(asked.expr, **chosen), instant=True, span=0)
        found.append(QueryDuration(time.perf_counter() - begun, asked.dashboard, asked.panel))
    return sorted(found, reverse=True)


def report(engine: Engine) -> str:
    """Return the fleet's size and the slowest queries as text."""
    sizes = [
        ask(engine, f"count({metric})", instant=True, span=0)[0]["value"][1]
        for metric in ("vramledger_device_up", "vramledger_process_memory_bytes")
    ]
    found = query_durations(engine)
    lines = [f"{sizes[0]} GPUs, {sizes[1]} holders; each query at one moment:"]
    lines += [f"{each.seconds:7.3f} s  {each.dashboard}: {each.panel}" for each in found[:5]]
    for dashboard in sorted({each.dashboard for each in found}):
        total = sum(each.seconds for each in found if each.dashboard == dashboard)
        lines.append(f"{total:7.3f} s  {dashboard}, all together")
    return "\n".join(lines)
