"""Ask for the figures of single panels, as Grafana would."""

from typing import Any

from tests.support.dashboards.answers import SPAN
from tests.support.dashboards.database import ask
from tests.support.dashboards.files import load_dashboards, panels, substitute_variables
from tests.support.fleet.engines import Engine

AT_NOW: dict[str, Any] = {"instant": True, "span": SPAN}
"""How :func:`~tests.support.dashboards.database.ask` asks for current values."""


def value(engine: Engine, dashboard: str, panel: str, ref: str = "A", **chosen: str) -> list[dict[str, Any]]:
    """Return labels and value of the current result of one query of a panel."""
    series = ask(engine, substitute_variables(query_of(dashboard, panel, ref), **chosen), **AT_NOW)
    return [{**each["metric"], "value": float(each["value"][1])} for each in series]


def total_of(rows: list[dict[str, Any]]) -> float:
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
