"""A real engine's answer to every query of every dashboard, as Grafana would send it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.support.dashboards.database import ask
from tests.support.dashboards.files import PanelQuery, all_queries, substitute_variables
from tests.support.dashboards.nodes import HOURS
from tests.support.fleet.engines import Engine

EMPTY: dict[tuple[str, str, str], str] = {}
"""Queries without a result on these nodes, each with the reason: dashboard, panel, ref."""

SPAN = HOURS * 3600 - 600


class Answer(NamedTuple):
    """The result of one query: how many series, and the largest value with its labels."""

    asked: PanelQuery
    series: int
    labels: dict[str, str]
    value: float | None


def devices(engine: Engine, ahead: float) -> list[str]:
    """Return the UUID of every device."""
    found = ask(engine, "vramledger_device_info", instant=True, span=SPAN, ahead=ahead)
    return sorted(each["metric"]["uuid"] for each in found)


def answers(engine: Engine, ahead: float = 0.0) -> Iterator[Answer]:
    """Yield the answer to every query; to one about a device, that for the device of which most is known.

    Raises:
        AssertionError: a query is refused, be it for one device alone.
    """
    uuids = devices(engine, ahead)
    for asked in all_queries():
        choices = [{"uuid": uuid} for uuid in uuids] if "$uuid" in asked.expr else [{}]
        best: Sequence[Any] = []
        for chosen in choices:
            expr = substitute_variables(asked.expr, **chosen)
            found = ask(engine, expr, instant=asked.instant, span=SPAN, ahead=ahead)
            best = max(best, found, key=lambda each: (len(each), max(map(_largest, each), default=0.0)))
        if not best:
            yield Answer(asked, 0, {}, None)
            continue
        value, series = max(((_largest(each), each) for each in best), key=lambda each: each[0])
        labels = {name: text for name, text in series["metric"].items() if name != "__name__"}
        yield Answer(asked, len(best), labels, value)


def _largest(series: Mapping[str, Any]) -> float:
    points = series["values"] if "values" in series else [series["value"]]
    return max(float(value) for _, value in points)
