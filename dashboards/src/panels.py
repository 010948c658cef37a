"""Make panels in Grafana's JSON, one function for each kind.

A panel always says what its figures mean, in which unit, and what an empty one means: a missing figure is
shown as the text of ``absent``, never as 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dashboards.src.queries import (
    DOWN,
    DRIVER_LOST,
    PARTLY_BLIND,
    RELEASED,
    STALLED,
    STATES,
    WATCHING,
    WITHOUT_RULES,
)
from dashboards.src.reasons import (
    NO_DRIVER,
    NO_RULES,
    NO_SOURCE,
    NOT_WATCHED,
    SOURCES,
    STOPPED,
    WORDS,
    Needs,
    or_what_is_missing,
    or_why,
)
from vramledger.views.colours import GRAFANA, PARTS

Json = dict[str, Any]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
NO_DATA = "no data: see Exporters"
GOOD, BAD, PLAIN = GRAFANA["active"], GRAFANA["orphaned"], "text"
BYTES, SHARE, COUNT, SECONDS = "bytes", "percentunit", "none", "s"
AGE_WIDTH = 85
"""Pixels of a duration such as 1.50 hours: Grafana's "a few seconds ago" needs more than columns have."""
GIB_HOURS, HOURS = "suffix: GiB·h", "suffix: h"
PER_MINUTE, PER_SECOND, CORES = "suffix:per minute", "suffix:per second", "suffix:cores"
"""Grafana's own c/m and c/s are not known to everybody."""
ROUNDED = "short"
"""The unit of money in narrow columns: 10.5 K. Counts are never rounded."""
LEAST_WIDTHS = {None: 100, BYTES: 90, GIB_HOURS: 115, SECONDS: AGE_WIDTH}
"""Pixels that a column without a width has at least, by its unit: on a phone the table is scrolled, and no
word or digit is cut off."""
SHORTEST_AXES = {COUNT: 1, BYTES: 2**20, "Bps": 1e6, SECONDS: 0.001}
"""Where the axis of a unit ends at least: Grafana draws what is always 0 on an axis up to 100."""
NOT_ZERO = 1e-9
"""The level from which a figure has its colour, unless it has another: 0 needs no colour."""
EMPTY_CELL = "-"
"""What is not known. What is known to be nothing is 0, or blank: memory that nobody holds has no program."""
RARE = "2m"
"""The shortest step of a graph of rates. Grafana's $__rate_interval is a little longer than a step, and at
least four times the scrape interval that the data source names. Where that is named as 15 s and is a minute,
it would have one scrape, and the graph no point."""
_COLUMNS_OF_A_FIGURE = 2
"""Columns in which a figure of the usual size is broken into lines, if it stands beside others."""
COLUMNS_OF_THE_PAGE = 24
"""The width of a page, in columns of the grid."""
PIXELS_OF_A_COLUMN, PADDING = (1440 - 32) / COLUMNS_OF_THE_PAGE, 36
"""Pixels of a column of the grid on a page of 1440, and of a panel beside the columns of its table."""
POINTS_PER_COLUMN = 30
"""Points of a graph for each column of the grid: one for two pixels of a page of 1440."""
POINTS_OF_A_TABLE = 300
"""The time range in steps of ``$__interval``, where a table calculates over it."""
TEXT = "string"
"""The unit of labels."""
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
        least: pixels that a column without a width has at least, also on a phone; by its unit if None.
        empty: what a cell without a value shows.
        hidden: not shown; only links need it.
    """

    field: str
    title: str
    unit: str | None = None
    link: Json | None = None
    mappings: Sequence[Json] = ()
    width: int | None = None
    least: int | None = None
    empty: str = EMPTY_CELL
    hidden: bool = False


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
PART_NAMES = value_mapping({part: (part, GRAFANA[part]) for part in (*STATES, "unattributed")})
STATUS_NAMES = value_mapping(
    {
        DOWN: ("exporter down", GRAFANA["dead"]),
        DRIVER_LOST: ("driver does not answer", BAD),
        STALLED: ("samples have stopped", GRAFANA["unattributed"]),
        PARTLY_BLIND: ("watching in part", GRAFANA["idle"]),
        WATCHING: ("watching", GOOD),
        RELEASED: ("released on purpose", GRAFANA["stopped"]),
        WITHOUT_RULES: ("no rules", BAD),
    }
)
NAMED = "#4695b1"
"""The colour of bars and points, which have names: none of a state."""
YES_OR_NO = value_mapping({0: ("no", BAD), 1: ("yes", GOOD)})
NO_FILE = 2
WEB_CONFIG = value_mapping({0: ("no", BAD), 1: ("yes", GOOD), NO_FILE: ("no file", GRAFANA["free"])})


def stat(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    absent: str = NO_DATA,
    needs: Needs | None = None,
    colour: str = PLAIN,
    level: float = NOT_ZERO,
    below: float | None = None,
    colours: Mapping[str, str] | None = None,
    mappings: Sequence[Json] = (),
    links: Sequence[Json] = (),
    named: bool = False,
    width: int = 4,
    height: int = 3,
) -> Panel:
    """Make a panel with one current figure, or one for each query, which has its colour unless it is 0.

    A single figure has its colour from ``level`` on, or is red ``below`` one. Of several, or if it is
    ``named``, each has its legend beside it. With ``needs``, the first figure says why it is not there;
    ``absent`` is then shown only where no exporter is known, or no rules are loaded.
    """
    own = [*mappings]
    if needs is not None:
        first, *others = queries
        queries = (replace(first, expr=or_why(first.expr, needs)), *others)
        own.append(value_mapping(needs.words))
    narrow = len(queries) > 1 and width <= _COLUMNS_OF_A_FIGURE * len(queries)
    body = _panel_body("stat", title, description, queries, instant=True)
    body["fieldConfig"]["defaults"] |= {
        "unit": unit, "noValue": absent, "mappings": own, "links": [*links],
        "color": {"mode": "thresholds"},
        "thresholds": _plain_thresholds() if mappings or colour == PLAIN else _from(level, colour),
    }  # fmt: skip
    if below is not None:  # what says why there is none is negative
        steps = [
            {"value": None, "color": PLAIN},
            {"value": 0, "color": GRAFANA["dead"]},
            {"value": below, "color": PLAIN},
        ]
        body["fieldConfig"]["defaults"]["thresholds"]["steps"] = steps
    body["fieldConfig"]["overrides"] = [
        _override(name, color={"mode": "thresholds"}, thresholds=_from(NOT_ZERO, colour))
        for name, colour in (colours or {}).items()
    ]
    body["options"] = {
        "colorMode": "value", "graphMode": "none", "justifyMode": "auto", "orientation": "auto",
        "textMode": "value_and_name" if named or len(queries) > 1 else "auto",
        "wideLayout": False,  # else names stand above figures here and beside them there, by the room
        "text": {"titleSize": 13, "valueSize": 20 if narrow else 24},
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
    order: Sequence[str] = (),
    lines: Sequence[str] = (),
    maximum: float | None = None,
    named: bool = False,
    newest: bool = False,
    step: str = "",
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
        order: the names of all series from the bottom of the stack to its top, not Grafana's alphabet.
        lines: names of series that are not part of the stack, such as its total.
        maximum: top of the axis.
        named: the series are programs or devices; the legend is then a table with their figures.
        newest: the legend has the newest figure of each series.
        step: the shortest time from point to point: the rate of rare events over less time is a sawtooth.
        width: in columns.
        height: in rows.
    """
    body = _panel_body("timeseries", title, description, queries, points=POINTS_PER_COLUMN * width)
    defaults = body["fieldConfig"]["defaults"]
    defaults |= {"unit": unit, "noValue": absent, "min": 0, "color": {"mode": "palette-classic"}}
    if maximum is not None:
        defaults["max"] = maximum
    if unit == COUNT:
        defaults["decimals"] = 0
    defaults["custom"] = {
        **({"axisSoftMax": SHORTEST_AXES[unit]} if unit in SHORTEST_AXES else {}),
        "drawStyle": "line", "lineWidth": 0 if stacked else 1, "fillOpacity": 80 if stacked else 0,
        "gradientMode": "none", "showPoints": "never", "spanNulls": False, "lineInterpolation": "stepAfter",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }  # fmt: skip
    areas = {name: colour for name, colour in (colours or {}).items() if name not in lines}
    overrides = _colour_overrides(areas, areas=stacked)
    overrides += [
        _override(
            name,
            **{
                "color": {"mode": "fixed", "fixedColor": (colours or {}).get(name, PLAIN)},
                "custom.stacking": {"mode": "none", "group": "A"},
                "custom.fillOpacity": 0,
                "custom.lineWidth": 2,
            },
        )
        for name in lines
    ]
    if order:
        overrides.append(_NO_LEGEND_OF_NOTHING)
        places = {name: place for place, name in enumerate(["Time", *order, *lines])}
        arranged = {"excludeByName": {}, "indexByName": places, "renameByName": {}}
        body["transformations"] = [
            {"id": "joinByField", "options": {"byField": "Time", "mode": "outer"}},
            {"id": "organize", "options": arranged},
        ]
    body["fieldConfig"]["overrides"] = overrides
    legend = (
        {"displayMode": "table", "placement": "right", "calcs": ["lastNotNull", "max"], "sortBy": "Last *",
         "sortDesc": True, "width": 420 if width < COLUMNS_OF_THE_PAGE else 540}
        if named
        else {"displayMode": "list", "placement": "bottom", "calcs": ["lastNotNull"] if newest else []}
    )  # fmt: skip
    if step or any("$__rate_interval" in query.expr for query in queries):
        body["interval"] = step or RARE
    body["options"] = {
        "legend": {"showLegend": True, **legend},
        "tooltip": {"mode": "multi", "sort": "none" if order else "desc", "hideZeros": True},
    }
    return Panel(body, width, height)


def ledger_graph(
    title: str,
    description: str,
    *queries: Query,
    total: str = "",
    absent: str = NO_DATA,
    width: int = 12,
    height: int = 10,
) -> Panel:
    """Make a panel of the ledger's parts, stacked in its order and in its colours, the total as a line."""
    return time_series(
        title, description, *queries,
        unit=BYTES, absent=absent, colours=GRAFANA, stacked=True, order=[*PARTS],
        lines=[total] if total else [], width=width, height=height,
    )  # fmt: skip


def table(
    title: str,
    description: str,
    *queries: Query,
    columns: Sequence[Column],
    sort: Sequence[str] | str = (),
    ascending: bool = False,
    empty: str = NO_DATA,
    needs: str = "",
    rows_of: str = "",
    width: int = 12,
    height: int = 9,
) -> Panel:
    """Make a table of current values: a row for each set of labels, with the figures of all queries.

    Args:
        title: in a few words.
        description: what it means, and what an empty table means.
        queries: the queries; rows with the same labels are joined.
        columns: from left to right.
        sort: the fields by which the rows are sorted; an ``ascending`` sort has the smallest first. A
            field with ``-`` before it is sorted the other way.
        ascending: see ``sort``.
        empty: what the table shows without rows: what that means, and whether it is good.
        needs: what its rows need of a node, of :data:`SOURCES`; without rows and without that, one row says
            so in the column of ``rows_of``, so that an empty table is never one that nobody could fill.
        rows_of: the query that decides which rows are there; rows that only other queries have are left out.
        width: in columns.
        height: in rows.
    """
    fields = {column.field for column in columns}
    if needs:
        first = replace(queries[0], expr=or_what_is_missing(queries[0].expr, needs))
        queries = (first, *queries[1:])
    body = _panel_body(
        "table", title, description, queries, points=POINTS_OF_A_TABLE, instant=True, rows=True
    )
    needed = {
        name
        for column in columns
        for link in ([column.link] if column.link else [])
        for name in re.findall(r"__data\.fields\.(\w+)", link["url"])
    }
    columns = _with_shares(columns, width)
    columns = [*columns, *(Column(name, name, hidden=True) for name in sorted(needed - fields))]
    body["fieldConfig"]["defaults"] |= {
        "noValue": empty,
        "unit": COUNT,
        "custom": {
            "align": "auto", "cellOptions": {"type": "auto"}, "filterable": False, "wrapHeaderText": True,
            "minWidth": 60,
        },
    }  # fmt: skip
    body["fieldConfig"]["overrides"] = [
        _column_override(column, needs if column.field == rows_of else "") for column in columns
    ]
    shown = {column.field: place for place, column in enumerate(columns)}
    arranged = {"excludeByName": {}, "indexByName": shown, "renameByName": {}}
    joined = [{"id": "merge", "options": {}}] if len(queries) > 1 else []
    kept = {
        "filters": [{"fieldName": rows_of, "config": {"id": "isNotNull", "options": {}}}],
        "type": "include",
        "match": "all",
    }
    with_rows = [{"id": "filterByValue", "options": kept}] if rows_of else []
    hidden = {"id": "filterFieldsByName", "options": {"include": {"names": ["Time", *shown]}}}
    arrange = {"id": "organize", "options": arranged}
    # All rows have the time of the query, so they stay together. Without rows nothing is left, and Grafana
    # shows the text of the table: otherwise it would draw the headings of the figures alone. It comes last:
    # it gives the table a name, by which a column called Value would be found nowhere.
    by_time = {"fields": ["Time"], "keepFields": False, "naming": {"asLabels": False}}
    nothing_if_empty = {"id": "partitionByValues", "options": by_time}
    body["transformations"] = [*joined, *with_rows, hidden, arrange, nothing_if_empty]
    titles = {column.field: column.title for column in columns}
    keys = [sort] if isinstance(sort, str) else [*sort]
    order = [
        {"displayName": titles[key.removeprefix("-")], "desc": ascending is key.startswith("-")}
        for key in keys
    ]
    body["options"] = {"showHeader": True, "cellHeight": "sm", "sortBy": order}
    return Panel(body, width, height)


def state_timeline(
    title: str,
    description: str,
    *queries: Query,
    mappings: Sequence[Json],
    few: bool = False,
    colours: Mapping[str, str] | None = None,
    width: int = 12,
    height: int = 8,
) -> Panel:
    """Make a panel with a row for each series, which shows its states over the time range as colours.

    Only ``few`` rows have no pager: Grafana draws it even for one page. ``colours`` are by the name of a row.

    In Grafana, the colour mode ``thresholds`` ignores the mappings of numbers, and ``noValue`` is drawn as a
    state wherever a point is missing. So the timeline has neither.
    """
    body = _panel_body("state-timeline", title, description, queries, points=POINTS_PER_COLUMN * width)
    body["fieldConfig"]["defaults"] |= {
        "unit": COUNT, "mappings": [*mappings], "color": {"mode": "palette-classic"},
        "custom": {"fillOpacity": 85, "lineWidth": 0, "spanNulls": False},
    }  # fmt: skip
    body["fieldConfig"]["overrides"] = _colour_overrides(colours or {})
    body["options"] = {
        "mergeValues": True, "showValue": "never", "alignValue": "left", "rowHeight": 0.85,
        "perPage": 0 if few else 10,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }  # fmt: skip
    return Panel(body, width, height)


def bars(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    needs: Needs,
    links: Sequence[Json] = (),
    width: int = 12,
    height: int = 8,
) -> Panel:
    """Make a bar with its figure for each series of a query, as long as it is large: who holds what.

    Without any, one says why. A bar has its name beside it, and no colour that is a state's elsewhere.
    """
    query = replace(query, expr=or_why(query.expr, needs, labelled=True))
    body = _panel_body("bargauge", title, description, [query], instant=True)
    body["fieldConfig"]["defaults"] |= {
        "unit": unit, "noValue": "no exporter is known", "min": 0, "links": [*links],
        "displayName": "${__series.name}",  # else a single bar has no name
        "mappings": [value_mapping(needs.words)], "thresholds": _plain_thresholds(),
        "color": {"mode": "fixed", "fixedColor": NAMED},
    }  # fmt: skip
    body["options"] = {
        "displayMode": "basic", "orientation": "horizontal", "valueMode": "text", "namePlacement": "left",
        "showUnfilled": False, "sizing": "manual", "minVizHeight": 16, "minVizWidth": 8, "maxVizHeight": 40,
        "text": {"titleSize": 11, "valueSize": 15},  # Grafana leaves room for a name of narrow letters in 12
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }  # fmt: skip
    return Panel(body, width, height)


def scatter(
    title: str,
    description: str,
    across: Query,
    up: Query,
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
) -> Panel:
    """Make a point for each row of two queries: ``across`` from left to right, ``up`` from bottom to top."""
    body = _panel_body("xychart", title, description, [across, up], instant=True, rows=True)
    body["fieldConfig"]["defaults"] |= {
        "unit": unit, "noValue": NO_DATA, "min": 0, "max": 1, "color": {"mode": "fixed", "fixedColor": NAMED},
        "custom": {
            "show": "points", "pointSize": {"fixed": 7}, "pointShape": "circle", "axisPlacement": "auto",
        },
    }  # fmt: skip
    # Without it Grafana takes the options for those of before 11.1, and says "Err".
    body["pluginVersion"] = "11.1.0"
    names = {"Value #A": across.legend, "Value #B": up.legend}
    body["fieldConfig"]["overrides"] = [_override(name, displayName=text) for name, text in names.items()]
    body["transformations"] = [{"id": "merge", "options": {}}]

    def field(name: str) -> Json:
        return {"matcher": {"id": "byName", "options": name}}

    body["options"] = {
        "mapping": "manual",
        "series": [
            {
                "frame": {"matcher": {"id": "byIndex", "options": 0}},
                "x": field("Value #A"),
                "y": field("Value #B"),
                "name": {"fixed": up.legend},
            }
        ],
        "tooltip": {"mode": "single", "sort": "none"},
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
    }
    return Panel(body, width, height)


def repeated(panel: Panel, name: str, per_row: int = 4) -> Panel:
    """Draw a panel once for each chosen value of a variable, side by side: small multiples."""
    panel.body.update(repeat=name, repeatDirection="h", maxPerRow=per_row)
    return panel


def _panel_body(
    kind: str,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    points: int | None = None,
    instant: bool = False,
    rows: bool = False,
) -> Json:
    """Return the keys that every panel has; ``rows`` for queries whose answer is a table.

    Without ``points``, Grafana asks for one for each pixel.
    """
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
        **({"maxDataPoints": points} if points else {}),
        "fieldConfig": {"defaults": {}, "overrides": []},
    }


def _plain_thresholds(colour: str = PLAIN) -> Json:
    """Return thresholds without colours: where a colour means something, a mapping gives it."""
    return {"mode": "absolute", "steps": [{"value": None, "color": colour}]}


def _from(level: float, colour: str) -> Json:
    """Return thresholds that colour a figure from a level on."""
    return {
        "mode": "absolute",
        "steps": [{"value": None, "color": PLAIN}, {"value": level, "color": colour}],
    }


def _override(name: str, **properties: object) -> Json:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }


_NO_LEGEND_OF_NOTHING: Json = {
    "matcher": {"id": "byValue", "options": {"reducer": "max", "op": "lte", "value": 0}},
    "properties": [{"id": "custom.hideFrom", "value": {"legend": True, "tooltip": True, "viz": False}}],
}
"""Of twelve parts of a ledger five are something: with all of them, a small legend had three lines."""


def _colour_overrides(colours: Mapping[str, str], *, areas: bool = False) -> list[Json]:
    """Return the colours of series by name, and names in words; as ``areas``, what is free is only shaded."""
    return [
        _override(
            name,
            color={"mode": "fixed", "fixedColor": colour},
            **({"displayName": name.replace("_", " ")} if "_" in name else {}),
            **({"custom.fillOpacity": 15} if areas and name == "free" else {}),
        )
        for name, colour in colours.items()
    ]


def _least_width(column: Column) -> int:
    """Return the pixels that a column without a width has at least."""
    return column.least or LEAST_WIDTHS[column.unit]


def _with_shares(columns: Sequence[Column], width: int) -> list[Column]:
    """Return columns of which none without a width needs more than its share of the room.

    Grafana gives each of them the same share. One that needs more would push the last ones out of the page.
    """
    room = width * PIXELS_OF_A_COLUMN - PADDING
    while True:
        shared = [column for column in columns if not column.width and not column.hidden]
        left = room - sum(column.width or 0 for column in columns)
        wide = [column for column in shared if _least_width(column) * len(shared) > left]
        if not wide:
            return [*columns]
        columns = [
            replace(column, width=_least_width(column)) if column in wide else column for column in columns
        ]


def _looks(column: Column) -> Iterator[Json]:
    for mapping in column.mappings:
        yield from mapping["options"].values()


def _missing_words(source: str, colour: str) -> Json:
    """Return the words of the row that says what is missing, where a table has no other."""
    words: dict[object, tuple[str, str]] = {NO_SOURCE: (SOURCES[source], colour)}
    codes = (STOPPED, NO_DRIVER, NOT_WATCHED, NO_RULES)
    return value_mapping({**words, **{code: (WORDS[code][0], colour) for code in codes}})


def _column_override(column: Column, needs: str) -> Json:
    # Without a unit of its own, a label of digits such as a pid is drawn as a number: 1.41 K.
    # The table's own text for no value is what it shows without rows, so each column has another.
    properties: Json = {"displayName": column.title, "unit": column.unit or TEXT, "noValue": column.empty}
    if not column.field.startswith("Value"):
        # Else Grafana draws filters over a label: a click on one, instead of the link, filters every query of
        # the page by a label that few have, and the page is empty.
        properties["filterable"] = False
    if column.link:
        properties["links"] = [column.link]
        properties["noValue"] = ""  # a dash would be a link that leads nowhere
    coloured = any(look["color"] != PLAIN for look in _looks(column))
    if not column.unit and not coloured:
        properties["custom.wrapText"] = True  # a long name takes two lines instead of being cut off
    if column.mappings:
        properties["mappings"] = [*column.mappings]
        # Coloured words are too dim: the colours stand out as areas, 3:1, in both themes.
        properties["custom.cellOptions"] = (
            {"type": "color-background", "mode": "basic"} if coloured else {"type": "color-text"}
        )
        properties["thresholds"] = _plain_thresholds("transparent" if coloured else PLAIN)
        properties["custom.align"] = "left"
    if needs:
        missing = _missing_words(needs, GRAFANA["unknown"] if coloured else PLAIN)
        properties["mappings"] = [*column.mappings, missing]
    if column.width:
        properties["custom.width"] = column.width
    elif not column.hidden:
        properties["custom.minWidth"] = _least_width(column)
    if column.hidden:
        properties["custom.hideFrom.viz"] = True
    return _override(column.field, **properties)
