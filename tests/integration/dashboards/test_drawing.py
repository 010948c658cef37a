"""What was learnt by looking at the dashboards in a running Grafana 12.3, as rules that need none."""

import re
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import pytest
import yaml

from dashboards.src import first_steps
from dashboards.src.queries import BLOCKS, FRAGMENTED, LACKS, LEAKS, SPINS, TOO_BIG
from dashboards.src.shared_panels import VERDICT_STEPS
from tests.integration.dashboards.test_files import links, properties
from tests.support.dashboards.files import HOME, Json, load_dashboards, panels
from vramledger.views.colours import GRAFANA, PARTS

DASHBOARDS = load_dashboards()
EACH = pytest.mark.parametrize("uid", list(DASHBOARDS))
PANELS = [panel for content in DASHBOARDS.values() for panel in panels(content)]

PIXELS = (1440 - 32) / 24
"""The width of a column of the grid on a page of 1440 pixels."""
PADDING = 36
"""Pixels of a panel beside the columns of its table, with the bar by which one scrolls."""
PHONE = 358
"""The width of a panel on a page of 390 pixels."""
HIGHEST = 4
"""Rows of a figure: on a phone it is as wide as the page, and as high as on a page of 1440 pixels."""
CHARACTER = 6.4
"""Pixels of a letter of a name, on average: 6.1 were measured in Grafana 12.3."""
LETTERS_OF_WORDS = {
    3.5: "ijl", 4.2: " .,:", 4.8: "t/", 5.4: "fr", 6.6: "-_", 7.5: "s", 7.8: "kxz", 8.0: "acvy", 8.4: "ehou",
    8.7: "bdgnpq", 12: "mw",
}  # fmt: skip
"""Letters of a cell by their pixels, measured in Grafana 12.3; capitals have 10."""
PIXELS_OF_LETTERS = {letter: width for width, letters in LETTERS_OF_WORDS.items() for letter in letters}
BESIDE = 12
"""Pixels of a cell beside its text. Text of two words, 163 wide in 164, was broken into lines."""
LONGEST = {
    "bytes": "1016 GiB", "suffix: GiB·h": "1165.4 GiB·h", "s": "23.9 hours", "binBps": "36.2 MiB/s",
    "none": "10000", "percentunit": "99.9%",
}  # fmt: skip
"""The longest figure of each unit."""
LETTERS = {
    "command": 12, "who": 14, "team": 13, "instance": 18, "name": 27, "blocker": 26, "beside": 30, "like": 30,
}  # fmt: skip
"""How many letters of a name are read whole, by the label; the last three: train.py 4711 of ada on leak."""
AXES = {"none": (1, 1), "bytes": (1e6, inf), "Bps": (1e6, inf), "s": (1e-9, 0.001), "suffix:s": (1e-9, 1)}
"""The least and the most to which the axis of a graph of zeros may go, by unit."""
LIMIT = re.compile(r"\b(?:topk|bottomk)\(\d+")
NOISY = re.compile(r"utilization_ratio|_active_ratio|_occupancy_ratio|bandwidth_used|throughput|power_watts")
ALWAYS = {"Devices", "Capacity by GPU model", "Versions and sources", "Changed, up to 4 min old"}
"""Tables that have rows wherever an exporter is known, or beside a figure that says what is not known."""
FIXED = {"Exporters", "Exporter", "Alerts", "Sample time", "Scrape time", "Blind nodes", "Failing collectors"}
"""Figures that are there wherever an exporter answers, or the rules are loaded."""
LABELS_OF_FEW = {
    *("state", "severity", "reason", "clock", "type", "kind", "direction", "category", "file", "collector"),
    *("provider", "use", "framework", "source", "xid", "name", "pipe"),
}
"""Labels with few values: a series for each of them is not too many."""
IN_ONE_PLACE = {"vramledger-process": {"gpu"}}
"""Labels that have few values on a dashboard because of its variables: a process holds memory on few GPUs."""


class Column(NamedTuple):
    """A column of a table, with what the panel's overrides set for it."""

    panel: Json
    field: str
    look: Json

    @property
    def words(self) -> list[Json]:
        """Its texts in place of values."""
        return [word for each in self.look.get("mappings", ()) for word in each["options"].values()]

    @property
    def width(self) -> float:
        """The pixels that it has at least."""
        return float(self.look.get("custom.width") or self.look["custom.minWidth"])


def columns_of(panel: Json) -> list[Column]:
    return [Column(panel, field, look) for field, look in properties(panel).items()]


def shown_columns(panel: Json) -> list[Column]:
    return [each for each in columns_of(panel) if "custom.hideFrom.viz" not in each.look]


def defaults(panel: Json) -> Json:
    found: Json = panel["fieldConfig"]["defaults"]
    return found


def reasons_of(panel: Json) -> list[str]:
    """Return the words that a figure shows instead of a value."""
    looks = [each for mapping in defaults(panel).get("mappings", ()) for each in mapping["options"].items()]
    return [look["text"] for value, look in looks if float(value) < 0]


def pixels(text: str) -> float:
    """Return how wide a text in a cell is."""
    return sum(PIXELS_OF_LETTERS.get(letter, 10) for letter in text)


def coloured_words_are_read(column: Column) -> bool:
    colours = {word["color"] for word in column.words}
    return colours <= {"text"} or (
        column.look["custom.cellOptions"]["type"] == "color-background"
        and "text" not in colours
        and [step["color"] for step in column.look["thresholds"]["steps"]] == ["transparent"]
    )


def heading_fits(column: Column) -> bool:
    longest = max(map(len, column.look["displayName"].split()))
    by = [each["displayName"] for each in column.panel["options"]["sortBy"]][:1]
    needed = 7.5 * longest + 48 if [column.look["displayName"]] == by else 8 * longest + 20
    return float(column.look.get("custom.width", inf)) >= needed


def words_fit(column: Column) -> bool:
    if not column.words or not column.look.get("custom.width"):
        return True
    needed = max(pixels(word["text"]) for word in column.words) + BESIDE
    return bool(column.look["custom.width"] >= needed + (6 if column.look.get("custom.wrapText") else 0))


COLUMNS: dict[str, Callable[[Column], object]] = {
    "a label has the unit string: with a number's pid 3021234 is drawn as 3.02 Mil": lambda column: (
        re.fullmatch(r"Value( #[A-Z])?", column.field) or column.look.get("unit") == "string"
    ),
    "words with a colour stand on an area of it, read in both themes": coloured_words_are_read,
    "no cell has a bar: Grafana gives each row another length, and no value one": lambda column: (
        column.look.get("custom.cellOptions", {}).get("type", "auto")
        in ("auto", "color-background", "color-text")
    ),
    "an empty cell has a mark, not the sentence of a table without rows": lambda column: (
        len(column.look["noValue"]) <= 1
    ),
    "utilisation is a mean of one length, which each heading says": lambda column: (
        not re.match(r"(?:Utilisation|SMs?)\b", column.look["displayName"])
        or column.look["displayName"].endswith(", 15 min")
    ),
    "a label is not filtered by a click, which is drawn over its link": lambda column: (
        column.field.startswith("Value") or column.look.get("filterable") is False
    ),
    "no link leads nowhere: a dash for no value would be one": lambda column: (
        not column.look.get("links") or column.look.get("noValue") == ""
    ),
    "no state or step is cut off: Grafana takes some rows of two lines for one": words_fit,
    "GiB-hours have their unit in each column, money its currency": lambda column: (
        "GiB-hours" not in column.panel["title"]
        or column.look.get("unit") != "short"
        or "$currency" in column.look["displayName"]
    ),
}  # fmt: skip
SHOWN: dict[str, Callable[[Column], object]] = {
    "a name longer than its column is wrapped, not cut off": lambda column: (
        column.look["unit"] != "string" or column.words or column.look.get("custom.wrapText") is True
    ),
    "no heading is cut off, with the arrow of the one that sorts": heading_fits,
    "on a phone a column has the width of its longest figure": lambda column: (
        column.words or column.width >= CHARACTER * len(LONGEST.get(column.look["unit"], "")) + BESIDE
    ),
    "the program of a notebook is read whole: Grafana breaks lines at spaces alone": lambda column: (
        column.field != "command" or column.width >= pixels("ipykernel_launcher") + BESIDE
    ),
    "a name has room for as many letters as most have": lambda column: (
        column.width >= CHARACTER * LETTERS.get(column.field, 0) + BESIDE
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", [*COLUMNS, *SHOWN])
def test_each_column_of_a_table(rule: str) -> None:
    """Each column of each table keeps the rule."""
    found = columns_of if rule in COLUMNS else shown_columns
    columns = [each for panel in PANELS if panel["type"] == "table" for each in found(panel)]
    broken = [each for each in columns if not {**COLUMNS, **SHOWN}[rule](each)]

    assert [(each.panel["title"], each.field) for each in broken] == []


def axis_of_zeros(panel: Json) -> bool:
    unit, ends = defaults(panel)["unit"], defaults(panel)["custom"].get("axisSoftMax")
    if unit not in AXES:
        return True
    least, most = AXES[unit]
    return bool(least <= ends <= most and (unit != "none" or defaults(panel)["decimals"] == 0))


def stack_in_order(panel: Json) -> bool:
    targets = panel["targets"]
    stacked = defaults(panel).get("custom", {}).get("stacking", {}).get("mode") == "normal"
    by_state = "{{state}}" in {each["legendFormat"] for each in targets} or (
        "(device, state)" in targets[0]["expr"]
    )
    if not by_state or not (stacked or panel["type"] == "barchart"):
        return True
    (arranged,) = [each for each in panel["transformations"] if each["id"] == "organize"]
    places = arranged["options"]["indexByName"]
    return sorted(PARTS, key=lambda part: places[part]) == [*PARTS]


def legend_of_what_is_there(panel: Json) -> bool:
    last = panel["fieldConfig"]["overrides"][-1] if "transformations" in panel else None
    return last is None or (
        last["matcher"]["id"] == "byValue"
        and last["properties"][0]["value"] == {"legend": True, "tooltip": True, "viz": False}
    )


def colours_above_zero(panel: Json) -> bool:
    for look in (defaults(panel), *properties(panel).values()):
        if look.get("color", {}).get("mode") == "fixed":
            return False
        if "thresholds" in look:
            first, *others = look["thresholds"]["steps"]
            alarms_below = others and others[-1]["color"] == "text"
            least = min((step["value"] for step in others), default=1)
            if first["color"] != "text" or (least != 0 if alarms_below else least <= 0):
                return False
    return True


def empty_table_says_why(panel: Json) -> bool:
    order = [each["id"] for each in panel["transformations"]]
    by = {each["id"]: each["options"] for each in panel["transformations"]}
    # Without rows Grafana draws the headings of the figures alone; divided by time, nothing is left. That
    # gives the table a name, by which a column called Value would not be found and come last.
    return bool(
        re.fullmatch(r"[a-z][\w ,:]+", defaults(panel)["noValue"])
        and order.count("partitionByValues") == order.count("filterFieldsByName") == 1
        and order[-1] == "partitionByValues"
        and by["partitionByValues"]["fields"] == ["Time"]
        and "Time" in by["filterFieldsByName"]["include"]["names"]
    )


def rows_say_what_is_missing(panel: Json) -> bool:
    words = {word["text"] for each in columns_of(panel) for word in each.words}
    if "vramledger_node:missing:code" in panel["targets"][0]["expr"]:
        return {"not watched", "no driver", "no rules"} <= words
    return panel["title"] in ALWAYS


def owner_beside_its_kind(panel: Json) -> bool:
    shown = [each.field for each in shown_columns(panel)] if panel["type"] == "table" else []
    kinds = [place + 1 for place, field in enumerate(shown) if field == "owner_type"]
    return kinds == [place for place, field in enumerate(shown) if field == "owner"] and all(
        each["legendFormat"].count("{{owner}}") == each["legendFormat"].count("{{owner_type}} {{owner}}")
        for each in panel["targets"]
    )


def work_as_means(panel: Json) -> bool:
    noisy = [target["expr"] for target in panel["targets"] if NOISY.search(target["expr"])]
    joined = (defaults(panel)["custom"]["lineInterpolation"], panel.get("interval")) == ("linear", "2m")
    return not noisy or (joined and all("avg_over_time(" in expr for expr in noisy))


def one_reason(panel: Json) -> bool:
    words = reasons_of(panel)
    return not [each for each in words if re.search(r"\bor\b|[,?]|see ", each)] and (
        panel["title"] in FIXED
        or (
            defaults(panel)["noValue"].startswith("no data: see Exporter")
            and {"no driver", "not watched"} <= set(words)
        )
    )


def sorted_by_what_is_shown(panel: Json) -> bool:
    by = {each["displayName"] for each in panel["options"]["sortBy"]}
    return set() < by <= {each.look["displayName"] for each in shown_columns(panel)}


def fits_on_the_page(panel: Json) -> bool:
    room = panel["gridPos"]["w"] * PIXELS - PADDING
    fixed = sum(each.look.get("custom.width", 0) for each in shown_columns(panel))
    sharing = [each for each in shown_columns(panel) if "custom.width" not in each.look]
    share = (room - fixed) / max(1, len(sharing))
    return bool(fixed + sum(max(share, each.width) for each in sharing) <= room + 1)


RULES: dict[tuple[str, str], Callable[[Json], object]] = {
    ("bargauge", "bars have one colour, which no state has"): lambda panel: (
        defaults(panel)["color"]["mode"] == "fixed"
        and defaults(panel)["color"]["fixedColor"] not in GRAFANA.values()
    ),
    ("bargauge", "a bar has its name: Grafana names no single one"): lambda panel: (
        defaults(panel)["displayName"] == "${__series.name}"
    ),
    ("bargauge", "without any bar one says the one reason why"): lambda panel: (
        {"not watched", "no driver"} <= {*reasons_of(panel)}
    ),
    ("", "nothing is said to be good on a condition"): lambda panel: (
        not re.search(r"\bgood, if\b", " / ".join([defaults(panel).get("noValue", ""), *reasons_of(panel)]))
    ),
    ("timeseries", "what is always 0 is drawn on a short axis, not one up to 100"): axis_of_zeros,
    ("state-timeline", "its colours are not those of thresholds, which hide mappings"): lambda panel: (
        defaults(panel)["color"]["mode"] != "thresholds"
    ),
    ("state-timeline", "no gap is drawn as a value"): lambda panel: "noValue" not in defaults(panel),
    ("state-timeline", "its labels do not overlap"): lambda panel: panel["options"]["perPage"] <= 15,
    ("", "states are stacked in the ledger's order, active first and free last"): stack_in_order,
    ("timeseries", "the legend of a ledger has no parts that are nothing"): legend_of_what_is_there,
    ("stat", "a figure has its colour above 0 alone, or at 0 where little is the alarm"): colours_above_zero,
    ("", "a legend says driver reserved, not driver_reserved"): lambda panel: all(
        each["displayName"] == name.replace("_", " ")
        for name, each in properties(panel).items()
        if name in PARTS and "_" in name
    ),
    ("timeseries", "a graph of events is at 0, and leaves not open whether there is data"): lambda panel: (
        "none, or" not in defaults(panel)["noValue"]
    ),
    ("timeseries", "colours go by place: by name two owners may have the same"): lambda panel: (
        defaults(panel)["color"]["mode"] == "palette-classic"
    ),
    ("timeseries", "lines that are not stacked have no fill: twenty of them become mud"): lambda panel: (
        defaults(panel)["custom"]["fillOpacity"] == 0
        or defaults(panel)["custom"]["stacking"]["mode"] != "none"
    ),
    ("timeseries", "an empty part of a stack is not drawn as a line"): lambda panel: (
        defaults(panel)["custom"]["lineWidth"] == 0
        or defaults(panel)["custom"]["stacking"]["mode"] == "none"
    ),
    ("timeseries", "what changes each second is a joined mean of the step"): work_as_means,
    ("timeseries", "an area outside the ledger has none of its colours"): lambda panel: not [
        name
        for name, each in properties(panel).items()
        if name not in GRAFANA and each.get("color", {}).get("fixedColor") in GRAFANA.values()
    ],
    ("table", "without rows a table says what that means"): empty_table_says_why,
    ("table", "where data is missing one row says what"): rows_say_what_is_missing,
    ("table", "utilisation is the mean that others show, or a count"): lambda panel: (
        panel["title"].startswith("Count")
        or not re.search(
            r"utilization_ratio\{[^}]*\}(?!\[15m\])", " ".join(each["expr"] for each in panel["targets"])
        )
    ),
    ("table", "a table is sorted by a column that it shows"): sorted_by_what_is_shown,
    ("table", "at 1440 pixels a table shows all its columns"): fits_on_the_page,
    ("", "an owner has its kind just before it: a name may be a job's or a user's"): owner_beside_its_kind,
    ("stat", "a figure that is not there has one reason, or leads to what is not watched"): one_reason,
    ("stat", "no figure fills a phone"): lambda panel: panel["gridPos"]["h"] <= HIGHEST,
    ("", "a query of more than 600 characters is recorded, named and documented"): lambda panel: (
        max(len(target["expr"]) for target in panel["targets"]) <= 600
    ),
    ("", "a rate has two scrapes, whatever scrape interval the data source names"): lambda panel: (
        panel.get("interval") == "2m"
        or not any("$__rate_interval" in target["expr"] for target in panel["targets"])
    ),
    ("", "units are words, and ages durations that Prometheus counts"): lambda panel: (
        {each.look.get("unit") for each in columns_of(panel)} | {defaults(panel).get("unit")}
    ).isdisjoint({"cpm", "cps", "opm", "ops", "dateTimeFromNow"}
    ),
    ("", "a title has room beside the mark of its description, on a phone too"): lambda panel: (
        7.2 * len(panel["title"]) <= min(panel["gridPos"]["w"] * PIXELS, PHONE) - 88
    ),
    ("", "no panel counts another one's rows"): lambda panel: not panel["title"].startswith("Count of"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "rule"), RULES, ids=[f"{kind or 'any'}: {rule}" for kind, rule in RULES])
def test_each_panel(kind: str, rule: str) -> None:
    """Each panel, or each of a kind, keeps the rule."""
    bound = [panel for panel in PANELS if not kind or panel["type"] == kind]

    assert bound
    assert [panel["title"] for panel in bound if not RULES[kind, rule](panel)] == []


def test_a_variable_is_one_line() -> None:
    """Grafana takes query_result(...) for the name of a metric where there is an end of line in it."""
    for content in DASHBOARDS.values():
        for each in content["templating"]["list"]:
            assert "\n" not in each.get("definition", ""), each["name"]


def test_grafana_draws_the_points() -> None:
    """The newer form of a scatter names its version and its frame; without them Grafana 12.3 says "Err"."""
    (panel,) = [each for each in PANELS if each["type"] == "xychart"]

    assert float(panel["pluginVersion"].rpartition(".")[0]) >= 11.1
    assert all(series["frame"]["matcher"]["id"] == "byIndex" for series in panel["options"]["series"])


def test_money_has_a_currency() -> None:
    """Each figure of money has the chosen currency in its name."""
    owner = DASHBOARDS["vramledger-owner"]
    asked = [(panel, target) for panel in panels(owner) for target in panel["targets"]]
    money = [(panel, target["refId"]) for panel, target in asked if "$price" in target["expr"]]

    assert len(money) == 2
    for panel, ref in money:
        column = properties(panel).get(f"Value #{ref}", {})
        assert "$currency" in str(column.get("displayName", panel["title"])), panel["title"]
    assert {"price", "currency"} <= {each["name"] for each in owner["templating"]["list"]}


def test_one_cause_has_one_first_step() -> None:
    """A process in two tables has one first step, where both are about the same cause."""
    holders, alerts = first_steps.OF_HOLDERS, first_steps.OF_ALERTS
    verdicts = {verdict: look["text"] for verdict, look in VERDICT_STEPS["options"].items()}

    assert holders[LEAKS] == alerts["GpuMemoryLeakSuspected"] == verdicts["leaking"]
    assert holders[FRAGMENTED] == alerts["GpuMemoryFragmented"] == verdicts["fragmented"]
    assert holders[LACKS] == verdicts["hoarded"]
    assert holders[TOO_BIG] == verdicts["too_big"]
    assert holders[BLOCKS] == alerts["GpuMemoryPreallocatedShared"]
    assert holders[SPINS] == alerts["GpuBusyWithoutWork"]
    for state in ("orphaned", "zombie", "stuck", "dead", "stopped", "unattributed"):
        assert holders[state] == alerts[f"GpuMemory{state.capitalize()}"], state
    assert holders["idle"] == alerts["GpuMemoryHoarded"]


@EACH
def test_no_panel_draws_an_unlimited_number_of_series(uid: str) -> None:
    """Series or rows of programs, owners or nodes are the largest few; others are by labels of few values."""
    few = LABELS_OF_FEW | IN_ONE_PLACE.get(uid, set())
    for panel in panels(DASHBOARDS[uid]):
        first, *others = panel["targets"]
        if panel["type"] == "table" and uid != "vramledger-node":
            outer = re.match(r"[\s\d*()\w]*?\bby \(([^)]*)\)", first["expr"])
            named = set(re.findall(r"\w+", outer[1])) if outer else set()
            if named - few or not re.search(r"\bby\b", first["expr"]):
                assert LIMIT.search(first["expr"]), f"{panel['title']}: {first['expr']}"
                kept = [each for each in panel["transformations"] if each["id"] == "filterByValue"]
                assert kept or not others, f"{panel['title']}: rows of other queries"
        for target in panel["targets"] if panel["type"] not in ("table", "stat") else ():
            if set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - few:
                assert LIMIT.search(target["expr"]), f"{panel['title']}: {target['expr']}"


def test_no_annotation_covers_the_graphs() -> None:
    """Alerts fire for hours, and their marks cover the graph; so they are shown only if chosen."""
    for content in DASHBOARDS.values():
        for each in content["annotations"]["list"]:
            assert each["enable"] is ("vramledger_alert:" not in each["expr"]), each["name"]


@EACH
def test_variables_filter_every_panel(uid: str) -> None:
    """Each variable that filters is in every query of its dashboard, or in the choices of one that is."""
    listed = [each for each in DASHBOARDS[uid]["templating"]["list"] if each["type"] == "query"]
    for place, each in enumerate(listed):
        name, later = f"${each['name']}", listed[place + 1 :]
        if any(name in other["definition"] and "allValue" not in other for other in later):
            continue  # All of the other one means all of its choices
        if name in ("$gpu", "$uuid") and uid == "vramledger-node":
            continue  # it draws one panel for each GPU
        for panel in panels(DASHBOARDS[uid]):
            if panel["title"] not in ("Exporters", "Exporter"):  # an exporter has no owner
                found = any(name in target["expr"] for target in panel["targets"])
                assert found, f"{panel['title']}: {name}"


def test_few_panels_are_open() -> None:
    """At most 12 panels are open on a dashboard, and there are 110 in all."""
    assert len(PANELS) <= 110
    for content in DASHBOARDS.values():
        assert len([panel for panel in content["panels"] if panel["type"] != "row"]) <= 12, content["uid"]


@EACH
def test_a_line_of_panels_is_as_wide_as_the_page(uid: str) -> None:
    """Panels side by side fill the page and are equally high, so that there is no hole."""
    lines: dict[tuple[int, int], list[Json]] = {}
    row = 0
    for panel in DASHBOARDS[uid]["panels"]:
        if panel["type"] == "row":
            row += 1
        for each in panel["panels"] if panel["type"] == "row" else [panel]:
            lines.setdefault((row, each["gridPos"]["y"]), []).append(each["gridPos"])
    for line in lines.values():
        assert sum(place["w"] for place in line) == 24, line
        assert len({place["h"] for place in line}) == 1, line


def test_a_dashboard_of_one_node_has_one_exporter() -> None:
    """Node, Device and Process say Exporter, the others Exporters, in titles and in every text."""
    for uid, content in DASHBOARDS.items():
        one_node = uid.removeprefix("vramledger-") in ("node", "device", "process")
        other = "Exporters" if one_node else "Exporter"
        for panel in panels(content):
            said = f"{panel['title']}. {defaults(panel).get('noValue', '')}"
            assert panel["title"] != other, uid
            assert not re.search(rf"see {other}\b", said), f"{uid}: {panel['title']}"


def test_steady_growth_has_every_span_of_the_leak_alerts() -> None:
    """Each record of steady growth that a leak alert uses is drawn, so none fires beside "no growth"."""
    rules = (HOME.parent / "alerts/src/growth.yml").read_text("utf-8")
    (panel,) = [each for each in panels(DASHBOARDS["vramledger-process"]) if each["title"] == "Steady growth"]
    drawn = " ".join(target["expr"] for target in panel["targets"])
    record = re.compile(r"vramledger_process:demand_growth_bytes:delta\w+")

    assert set(record.findall(rules)) == set(record.findall(drawn)) != set()


def test_a_runbook_is_where_the_rules_say() -> None:
    """The link of an alert leads to the address that its rule has for the runbook."""
    place = yaml.safe_load((HOME.parent / "alerts/thresholds.yml").read_text("utf-8"))["runbooks"]
    found = {url for content in DASHBOARDS.values() for _, url in links(content) if "runbook" in url}
    names = {"{instance}": "${__data.fields.instance}", "{alert}": "${__data.fields.alertname}"}

    assert found == {re.sub(r"\{\w+\}", lambda each: names[each[0]], place)}
