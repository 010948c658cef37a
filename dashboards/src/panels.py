"""Make panels in Grafana's JSON, one function for each kind.

A panel always says what its figures mean, in which unit, and what an empty one means: a missing figure is
shown as the text of ``absent``, never as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.src.queries import DOWN, DRIVER_LOST, RELEASED, STALLED, STATES, WATCHING
from vramledger.views.colours import GRAFANA, PARTS

Json = dict[str, Any]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
NO_DATA = "no data: see Exporters"
NO_RULES = "no data: are the recording rules loaded?"
NO_HOLDER = "no process holds memory, or no data"
GOOD, BAD, PLAIN = GRAFANA["active"], GRAFANA["orphaned"], "text"
BYTES, SHARE, COUNT, SECONDS, TIME_AGO = "bytes", "percentunit", "short", "s", "dateTimeFromNow"
GIB_HOURS = "suffix: GiB·h"
NODE_LEGEND = "{{instance}}"
DEVICE_LEGEND = f"{NODE_LEGEND} GPU {{{{gpu}}}}"
PROCESS_LEGEND = f"{DEVICE_LEGEND}: {{{{pid}}}}"
"""The names of series in legends."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel: PromQL, and the name of its series in the legend."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        field: the label, or ``Value #A`` for the figures of the first query and so on.
        title: its heading.
        unit: of figures; a text has none.
        link: where a click leads, see ``dashboard.py``.
        mappings: words and colours for its values.
        width: pixels; None lets Grafana choose.
        bar: drawn as a bar behind the figure.
    """

    field: str
    title: str
    unit: str | None = None
    link: Json | None = None
    mappings: Sequence[Json] = ()
    width: int | None = None
    bar: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel and its size: ``width`` of 24 columns, ``height`` of 30 pixels each."""

    body: Json
    width: int
    height: int


def value_mapping(texts: Mapping[object, tuple[str, str]]) -> Json:
    """Map values to (text, colour)."""
    options = {
        str(value): {"text": text, "color": colour, "index": index}
        for index, (value, (text, colour)) in enumerate(texts.items())
    }
    return {"type": "value", "options": options}


STATE_NAMES = value_mapping({state: (state, GRAFANA[state]) for state in STATES})
STATE_CODES = value_mapping({code: (state, GRAFANA[state]) for code, state in enumerate(STATES, 1)})
STATUS_NAMES = value_mapping(
    {
        DOWN: ("exporter down", BAD),
        DRIVER_LOST: ("driver does not answer", BAD),
        STALLED: ("samples have stopped", BAD),
        WATCHING: ("watching", GOOD),
        RELEASED: ("released on purpose", GRAFANA["stopped"]),
    }
)
YES_OR_NO = value_mapping({0: ("no", BAD), 1: ("yes", GOOD)})


def stat(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    absent: str = NO_DATA,
    colour: str = PLAIN,
    mappings: Sequence[Json] = (),
    links: Sequence[Json] = (),
    width: int = 4,
    height: int = 4,
) -> Panel:
    """Make a panel with one current figure, or one for each query."""
    body = _panel_body("stat", title, description, queries, instant=True)
    body["fieldConfig"]["defaults"] |= {
        "unit": unit, "noValue": absent, "mappings": [*mappings], "links": [*links],
        "color": {"mode": "thresholds"} if mappings else {"mode": "fixed", "fixedColor": colour},
        "thresholds": _plain_thresholds(),
    }  # fmt: skip
    body["options"] = {
        "colorMode": "value", "graphMode": "none", "justifyMode": "auto", "orientation": "auto",
        "textMode": "auto" if len(queries) == 1 else "value_and_name", "wideLayout": True,
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }  # fmt: skip
    return Panel(body, width, height)


def time_series(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    absent: str = NO_DATA,
    colours: Mapping[str, str] | None = None,
    stacked: bool = False,
    lines: Sequence[str] = (),
    maximum: float | None = None,
    width: int = 12,
    height: int = 8,
) -> Panel:
    """Make a panel of figures over the time range.

    Args:
        title: in a few words.
        description: what it means, and when to worry.
        queries: the queries.
        unit: Grafana's name of it.
        absent: the text that is shown without data.
        colours: by the name of a series; others get one of Grafana's.
        stacked: the series add up.
        lines: names of series that are not part of the stack, such as its total.
        maximum: top of the axis.
        width: in columns.
        height: in rows.
    """
    body = _panel_body("timeseries", title, description, queries)
    defaults = body["fieldConfig"]["defaults"]
    defaults |= {"unit": unit, "noValue": absent, "min": 0, "color": {"mode": "palette-classic-by-name"}}
    if maximum is not None:
        defaults["max"] = maximum
    defaults["custom"] = {
        "drawStyle": "line", "lineWidth": 1, "fillOpacity": 70 if stacked else 8, "gradientMode": "none",
        "showPoints": "never", "spanNulls": False, "lineInterpolation": "stepAfter",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }  # fmt: skip
    overrides = [
        _override(name, color={"mode": "fixed", "fixedColor": colour})
        for name, colour in (colours or {}).items()
    ]
    overrides += [
        _override(
            name,
            **{
                "color": {"mode": "fixed", "fixedColor": PLAIN},
                "custom.stacking": {"mode": "none", "group": "A"},
                "custom.fillOpacity": 0,
                "custom.lineWidth": 2,
            },
        )
        for name in lines
    ]
    body["fieldConfig"]["overrides"] = overrides
    body["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return Panel(body, width, height)


def ledger_graph(
    title: str,
    description: str,
    *queries: Query,
    total: str = "",
    absent: str = NO_DATA,
    width: int = 12,
    height: int = 8,
) -> Panel:
    """Make a panel of the ledger's parts, stacked and in their colours, the total as a line."""
    return time_series(
        title, description, *queries,
        unit=BYTES, absent=absent, colours=GRAFANA, stacked=True, lines=[total] if total else [],
        width=width, height=height,
    )  # fmt: skip


def table(
    title: str,
    description: str,
    *queries: Query,
    columns: Sequence[Column],
    sort: str = "",
    absent: str = NO_DATA,
    width: int = 12,
    height: int = 9,
) -> Panel:
    """Make a table of current values: a row for each set of labels, with the figures of all queries."""
    body = _panel_body("table", title, description, queries, instant=True, rows=True)
    fields = {column.field for column in columns}
    if "uuid" not in fields and any(
        "fields.uuid" in (column.link or {}).get("url", "") for column in columns
    ):
        columns = [*columns, Column("uuid", "UUID")]  # a link can only use what the table shows
    body["fieldConfig"]["defaults"] |= {
        "noValue": absent,
        "unit": COUNT,
        "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True},
    }
    body["fieldConfig"]["overrides"] = [_column_override(column) for column in columns]
    shown = {column.field: place for place, column in enumerate(columns)}
    arranged = {"excludeByName": {"Time": True}, "indexByName": shown, "renameByName": {}}
    joined = [{"id": "merge", "options": {}}] if len(queries) > 1 else []
    hidden = {"id": "filterFieldsByName", "options": {"include": {"names": [*shown]}}}
    body["transformations"] = [*joined, hidden, {"id": "organize", "options": arranged}]
    titles = {column.field: column.title for column in columns}
    order = [{"displayName": titles[sort], "desc": True}] if sort else []
    body["options"] = {"showHeader": True, "cellHeight": "sm", "sortBy": order}
    return Panel(body, width, height)


def state_timeline(
    title: str,
    description: str,
    *queries: Query,
    mappings: Sequence[Json],
    absent: str = NO_DATA,
    width: int = 12,
    height: int = 8,
) -> Panel:
    """Make a panel with a row for each series, which shows its states over the time range as colors."""
    body = _panel_body("state-timeline", title, description, queries)
    body["fieldConfig"]["defaults"] |= {
        "unit": COUNT, "noValue": absent, "mappings": [*mappings],
        "color": {"mode": "thresholds"}, "thresholds": _plain_thresholds(),
        "custom": {"fillOpacity": 85, "lineWidth": 0, "spanNulls": False},
    }  # fmt: skip
    body["options"] = {
        "mergeValues": True, "showValue": "auto", "alignValue": "left", "rowHeight": 0.85,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }  # fmt: skip
    return Panel(body, width, height)


def bar_chart(
    title: str, description: str, query: Query, *, row: str, width: int = 24, height: int = 9
) -> Panel:
    """Make one bar for each device, of stacked parts: the label ``row`` names the bar, ``state`` the part."""
    body = _panel_body("barchart", title, description, [query], instant=True, rows=True)
    body["fieldConfig"]["defaults"] |= {
        "unit": BYTES, "noValue": NO_DATA, "min": 0, "color": {"mode": "palette-classic-by-name"},
        "custom": {"fillOpacity": 85, "lineWidth": 0},
    }  # fmt: skip
    body["fieldConfig"]["overrides"] = [
        _override(part, color={"mode": "fixed", "fixedColor": colour}) for part, colour in GRAFANA.items()
    ]
    matrix = {"columnField": "state", "rowField": row, "valueField": "Value"}
    corner = f"{row}\\state"
    order = {name: place for place, name in enumerate([corner, *PARTS])}
    arranged = {"excludeByName": {}, "indexByName": order, "renameByName": {}}
    body["transformations"] = [
        {"id": "groupingToMatrix", "options": matrix},
        {"id": "organize", "options": arranged},
    ]
    body["options"] = {
        "orientation": "horizontal", "stacking": "normal", "xField": corner, "showValue": "never",
        "barWidth": 0.9, "groupWidth": 0.9, "xTickLabelRotation": 0, "xTickLabelSpacing": 0,
        "fullHighlight": False,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "none"},
    }  # fmt: skip
    return Panel(body, width, height)


def _panel_body(
    kind: str,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    instant: bool = False,
    rows: bool = False,
) -> Json:
    """Return the keys that every panel has; ``rows`` for queries whose answer is a table."""
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "format": "table" if rows else "time_series",
            "instant": instant,
            "range": not instant,
            "legendFormat": query.legend or "__auto",
        }
        for place, query in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {}, "overrides": []},
    }


def _plain_thresholds() -> Json:
    """Return thresholds without colours: where a colour means something, a mapping gives it."""
    return {"mode": "absolute", "steps": [{"value": None, "color": PLAIN}]}


def _override(name: str, **properties: object) -> Json:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }


def _column_override(column: Column) -> Json:
    properties: Json = {"displayName": column.title}
    if column.unit:
        properties["unit"] = column.unit
    if column.link:
        properties["links"] = [column.link]
    if column.mappings:
        properties["mappings"] = [*column.mappings]
        properties["custom.cellOptions"] = {"type": "color-text"}
    if column.width:
        properties["custom.width"] = column.width
    if column.bar:
        properties["custom.cellOptions"] = {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}
        properties["color"] = {"mode": "fixed", "fixedColor": GRAFANA["idle"]}
        properties["min"] = 0
    return _override(column.field, **properties)
