"""Ask for the figures of single panels, as Grafana would."""

from typing import Any

from tests.support.dashboards.answers import SPAN
from tests.support.dashboards.database import ask
from tests.support.dashboards.files import load_dashboards, panels, substitute_variables
from tests.support.fleet.engines import Engine

Row = dict[str, Any]
"""The labels of a series, and its ``value``."""


def rows_of(engine: Engine, expr: str, ahead: float = 0.0) -> list[Row]:
    """Return labels and value of what a query gives now, or so many seconds later."""
    series = ask(engine, expr, instant=True, span=SPAN, ahead=ahead)
    return [{**each["metric"], "value": float(each["value"][1])} for each in series]


def value(engine: Engine, dashboard: str, panel: str, ref: str = "A", **chosen: str) -> list[Row]:
    """Return labels and value of the current result of one query of a panel."""
    return rows_of(engine, substitute_variables(query_of(dashboard, panel, ref), **chosen))


def figure(engine: Engine, dashboard: str, panel: str, ref: str = "A", **chosen: str) -> float:
    """Return the value of a query that has one."""
    return one(value(engine, dashboard, panel, ref, **chosen))


def one(rows: list[Row]) -> float:
    """Return the value of the only row."""
    (row,) = rows
    return float(row["value"])


def total_of(rows: list[Row]) -> float:
    return sum(float(row["value"]) for row in rows)


def query_of(dashboard: str, panel: str, ref: str = "A") -> str:
    shown = panels(load_dashboards()[f"vramledger-{dashboard}"])
    (found,) = [each for each in shown if each["title"] == panel]
    (target,) = [each for each in found["targets"] if each["refId"] == ref]
    return str(target["expr"])


def over_minutes(expr: str, minutes: int, **chosen: str) -> str:
    """Return a query as Grafana sends it for a time range of some minutes."""
    ranged = expr.replace("$__range_s", str(60 * minutes)).replace("$__range", f"{minutes}m")
    return substitute_variables(ranged, **chosen)


def pid_of(engine: Engine, node: str, **labels: str) -> str:
    """Return the pid of the one holder of a node with these labels."""
    found = value(engine, "node", "Holders", instance=node)
    (pid,) = {str(row["pid"]) for row in found if labels.items() <= row.items()}
    return pid
