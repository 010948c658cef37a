"""The dashboards' committed files: their panels, queries and variables."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).resolve().parents[3] / "dashboards"
FILES = sorted(HOME.glob("*.json"))

Json = dict[str, Any]


class PanelQuery(NamedTuple):
    """One query: its dashboard, its panel and its text."""

    dashboard: str
    panel: str
    ref: str
    expr: str
    instant: bool


def load_dashboards() -> dict[str, Json]:
    return {content["uid"]: content for content in (json.loads(path.read_text("utf-8")) for path in FILES)}


def panels(dashboard: Json) -> Iterator[Json]:
    """Yield a dashboard's panels in order, those of collapsed rows included, without the rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries(dashboard: Json) -> Iterator[PanelQuery]:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            asked = (target["refId"], target["expr"], target["instant"])
            yield PanelQuery(dashboard["uid"], panel["title"], *asked)
    for each in dashboard["annotations"]["list"]:
        yield PanelQuery(dashboard["uid"], f"annotation: {each['name']}", "A", each["expr"], False)


def all_queries() -> list[PanelQuery]:
    return [each for dashboard in load_dashboards().values() for each in queries(dashboard)]


INTERVALS = {"__range": "170m", "__range_s": "10200", "__rate_interval": "4m", "__interval": "1m"}
CHOICES = {
    **dict.fromkeys(("cluster", "team", "owner"), ".*"),
    **dict.fromkeys(("model", "instance", "pid", "uuid", "gpu"), ".+"),
    "job": "vramledger",
    "size": "40",
    "price": "2",
    "currency": "USD",
}
"""The value of a variable when All is chosen, or what a panel calculates with."""


def substitute_variables(expr: str, **chosen: str) -> str:
    values: Mapping[str, str] = {**INTERVALS, **CHOICES, **chosen}
    return re.sub(r"\$(__\w+|[a-z]\w*)", lambda found: values[found[1]], expr)
