"""What was learnt by looking at the dashboards in a running Grafana 12.3, as rules that need none."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml

from dashboards.src import first_steps
from dashboards.src.queries import BLOCKS, FRAGMENTED, LACKS, LEAKS, SPINS, TOO_BIG
from dashboards.src.shared_panels import VERDICT_STEPS
from tests.integration.dashboards.test_files import links, properties, targets_of
from tests.support.dashboards.files import HOME, Json, load_dashboards, panels
from vramledger.views.colours import GRAFANA, PARTS

DASHBOARDS = load_dashboards()
EACH = pytest.mark.parametrize("uid", list(DASHBOARDS))

LABELS_OF_FEW = {
    *("state", "severity", "reason", "clock", "type", "kind", "direction", "category", "file", "collector"),
    *("provider", "use", "framework", "source", "xid", "name", "pipe"),
}
"""Labels with few values: a series for each of them is not too many."""

IN_ONE_PLACE = {"vramledger-process": {"gpu"}}
"""Labels that have few values on a dashboard because of its variables: a process holds memory on few GPUs."""


def of_type(uid: str, kind: str) -> Iterator[Json]:
    """Yield the panels of one kind."""
    return (panel for panel in panels(DASHBOARDS[uid]) if panel["type"] == kind)


@EACH
def test_a_bar_has_its_name_and_no_colour_of_a_state(uid: str) -> None:
    """Bars have one colour, which no state has, and names; without any bar, one says the one reason why."""
    for panel in of_type(uid, "bargauge"):
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["color"]["mode"] == "fixed", panel["title"]
        assert defaults["color"]["fixedColor"] not in GRAFANA.values(), panel["title"]
        assert defaults["displayName"] == "${__series.name}", f"{panel['title']}: Grafana names no single bar"
        assert {"not watched", "no driver"} <= {*reasons_of(panel)}, panel["title"]


def test_nothing_is_said_to_be_good_on_a_condition() -> None:
    """An empty panel says "good" only where it is: what is not watched has another text."""
    said = [
        look for content in DASHBOARDS.values() for panel in panels(content)
        for look in (panel["fieldConfig"]["defaults"].get("noValue", ""), *reasons_of(panel))
    ]  # fmt: skip
    assert [each for each in said if re.search(r"\bgood, if\b", each)] == []


@EACH
def test_a_label_is_never_drawn_as_a_number(uid: str) -> None:
    """Each column of a label has the unit string: with a number's unit, pid 3021234 is drawn as 3.02 Mil."""
    for panel in of_type(uid, "table"):
        for field, column in properties(panel).items():
            if not re.fullmatch(r"Value( #[A-Z])?", field):
                assert column.get("unit") == "string", f"{panel['title']}: {field}"


@EACH
def test_coloured_words_are_read_in_both_themes(uid: str) -> None:
    """A word with a colour stands on an area of it; a cell without a value has none."""
    for panel in of_type(uid, "table"):
        for field, column in properties(panel).items():
            looks = [look for each in column.get("mappings", ()) for look in each["options"].values()]
            colours = {look["color"] for look in looks}
            if colours - {"text"}:
                about = f"{panel['title']}: {field}"
                assert column["custom.cellOptions"]["type"] == "color-background", about
                assert "text" not in colours, f"{about}: a white area in the dark theme"
                assert [step["color"] for step in column["thresholds"]["steps"]] == ["transparent"], about


@EACH
def test_a_variable_is_one_line(uid: str) -> None:
    """Grafana takes query_result(...) for the name of a metric where there is an end of line in it."""
    for each in DASHBOARDS[uid]["templating"]["list"]:
        assert "\n" not in each.get("definition", ""), each["name"]


@EACH
def test_zero_is_drawn_on_a_short_axis(uid: str) -> None:
    """Counts go to 1 at least, bytes to 1 MB, seconds to 0.001: else what is always 0 goes up to 100."""
    for panel in of_type(uid, "timeseries"):
        defaults = panel["fieldConfig"]["defaults"]
        unit, ends = defaults["unit"], defaults["custom"].get("axisSoftMax")
        if unit == "none":
            assert (defaults["decimals"], ends) == (0, 1), panel["title"]
        elif unit in ("bytes", "Bps"):
            assert ends >= 1e6, panel["title"]
        elif unit == "s":
            assert 0 < ends <= 0.001, f"{panel['title']}: a difference of 0 s is drawn up to 1.67 mins"
        elif unit == "suffix:s":
            assert 0 < ends <= 1, panel["title"]


@EACH
def test_a_timeline_draws_its_mappings(uid: str) -> None:
    """A timeline's colours are not those of thresholds, which hide mappings; no gap is drawn as a value."""
    for panel in of_type(uid, "state-timeline"):
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["color"]["mode"] != "thresholds", panel["title"]
        assert "noValue" not in defaults, panel["title"]
        assert panel["options"]["perPage"] <= 15, f"{panel['title']}: its labels overlap"


@EACH
def test_a_stack_is_in_the_order_of_the_ledger(uid: str) -> None:
    """Where states are stacked, they come in the ledger's order, active first and free last."""
    for panel in panels(DASHBOARDS[uid]):
        legends = {target["legendFormat"] for target in targets_of(panel)}
        custom = panel["fieldConfig"]["defaults"].get("custom", {})
        stacked = custom.get("stacking", {}).get("mode") == "normal" or panel["type"] == "barchart"
        by_state = "{{state}}" in legends or "(device, state)" in targets_of(panel)[0]["expr"]
        if not (stacked and by_state):
            continue
        (arranged,) = [each for each in panel["transformations"] if each["id"] == "organize"]
        places = arranged["options"]["indexByName"]
        assert sorted(PARTS, key=lambda part: places[part]) == [*PARTS], panel["title"]


@EACH
def test_a_legend_names_what_is_there(uid: str) -> None:
    """The legend of a ledger has no parts that are nothing: twelve names would fill a small graph."""
    for panel in panels(DASHBOARDS[uid]):
        if panel["type"] == "timeseries" and "transformations" in panel:
            *_, last = panel["fieldConfig"]["overrides"]
            assert last["matcher"]["id"] == "byValue", panel["title"]
            assert last["properties"][0]["value"] == {"legend": True, "tooltip": True, "viz": False}


def test_grafana_draws_the_points() -> None:
    """The newer form of a scatter names its version and its frame; without them Grafana 12.3 says "Err"."""
    drawn = [p for content in DASHBOARDS.values() for p in panels(content) if p["type"] == "xychart"]

    assert len(drawn) == 1
    for panel in drawn:
        assert float(panel["pluginVersion"].rpartition(".")[0]) >= 11.1
        assert all(series["frame"]["matcher"]["id"] == "byIndex" for series in panel["options"]["series"])


@EACH
def test_no_cell_has_a_bar(uid: str) -> None:
    """A figure in a table has no bar: Grafana gives each row another length, and draws one for no value."""
    for panel in of_type(uid, "table"):
        for field, column in properties(panel).items():
            kind = column.get("custom.cellOptions", {}).get("type", "auto")
            assert kind in ("auto", "color-background", "color-text"), f"{panel['title']}: {field}"


@EACH
def test_what_is_zero_is_no_alarm(uid: str) -> None:
    """A figure has its colour above 0 only: 0 B wasted is not yellow. Where little is the alarm, 0 is red."""
    for panel in of_type(uid, "stat"):
        looks = [panel["fieldConfig"]["defaults"], *properties(panel).values()]
        for look in looks:
            if "thresholds" in look:
                first, *others = look["thresholds"]["steps"]
                assert first["color"] == "text", panel["title"]
                alarms_below = others and others[-1]["color"] == "text"
                least = min((step["value"] for step in others), default=1)
                assert least == 0 if alarms_below else least > 0, panel["title"]
            assert look.get("color", {}).get("mode") != "fixed", panel["title"]


@EACH
def test_a_long_name_takes_two_lines(uid: str) -> None:
    """A name that is longer than its column is wide is wrapped, not cut off."""
    for panel in of_type(uid, "table"):
        for field, column in columns_of(panel):
            if column["unit"] == "string" and "mappings" not in column:
                assert column.get("custom.wrapText") is True, f"{panel['title']}: {field}"


@EACH
def test_parts_of_the_ledger_are_words(uid: str) -> None:
    """A legend says driver reserved, not driver_reserved."""
    for panel in panels(DASHBOARDS[uid]):
        for name, each in properties(panel).items():
            if name in PARTS and "_" in name:
                assert each["displayName"] == name.replace("_", " "), panel["title"]


@EACH
def test_a_graph_of_events_tells_none_from_no_data(uid: str) -> None:
    """Where nothing happened a line is at 0: "none, or no data" would leave open which."""
    for panel in of_type(uid, "timeseries"):
        assert "none, or" not in panel["fieldConfig"]["defaults"]["noValue"], panel["title"]


@EACH
def test_an_empty_cell_has_no_sentence(uid: str) -> None:
    """Each column has a mark for no value, not the table's text, which is shown only if there is no row."""
    for panel in of_type(uid, "table"):
        for field, column in properties(panel).items():
            assert len(column["noValue"]) <= 1, f"{panel['title']}: {field}"


@EACH
def test_an_empty_table_says_what_that_means(uid: str) -> None:
    """Without rows Grafana draws no headings but the table's text: what that means."""
    for panel in of_type(uid, "table"):
        said = panel["fieldConfig"]["defaults"]["noValue"]
        assert re.fullmatch(r"[a-z][\w ,:]+", said), panel["title"]
        # Without rows Grafana draws the headings of the figures alone; divided by time, nothing is left.
        order = [each["id"] for each in panel["transformations"]]
        (divided,) = [each for each in panel["transformations"] if each["id"] == "partitionByValues"]
        assert divided["options"]["fields"] == ["Time"], panel["title"]
        # It gives the table a name, by which a column called Value would not be found and come last.
        assert order[-1] == "partitionByValues", panel["title"]
        (kept,) = [each for each in panel["transformations"] if each["id"] == "filterFieldsByName"]
        assert "Time" in kept["options"]["include"]["names"], panel["title"]


@EACH
def test_lines_have_colours_of_their_own(uid: str) -> None:
    """Colours go by place: by name, two owners or two pipes of a GPU may have the same."""
    for panel in of_type(uid, "timeseries"):
        assert panel["fieldConfig"]["defaults"]["color"]["mode"] == "palette-classic", panel["title"]


@EACH
def test_a_name_says_the_time_of_a_mean(uid: str) -> None:
    """Tables show utilisation as a mean of one length, which each heading says: no two contradict."""
    for panel in of_type(uid, "table"):
        for target in targets_of(panel):
            if re.search(r"utilization_ratio\{[^}]*\}(?!\[15m\])", target["expr"]):
                assert panel["title"].startswith("Count"), f"{panel['title']}: not the mean that others show"
        for column in properties(panel).values():
            if re.match(r"(?:Utilisation|SMs?)\b", column["displayName"]):
                assert column["displayName"].endswith(", 15 min"), panel["title"]


def test_money_has_a_currency() -> None:
    """Each figure of money has the chosen currency in its name."""
    money = [
        (panel, target["refId"])
        for panel in panels(DASHBOARDS["vramledger-owner"])
        for target in targets_of(panel)
        if "$price" in target["expr"]
    ]
    assert len(money) == 2
    for panel, ref in money:
        column = properties(panel).get(f"Value #{ref}", {})
        assert "$currency" in str(column.get("displayName", panel["title"])), panel["title"]
    names = {each["name"] for each in DASHBOARDS["vramledger-owner"]["templating"]["list"]}
    assert {"price", "currency"} <= names


@EACH
def test_nothing_lies_over_a_link(uid: str) -> None:
    """No label of a table is filtered by a click: Grafana would draw that over the link in the same cell."""
    for panel in of_type(uid, "table"):
        for field, column in properties(panel).items():
            if not field.startswith("Value"):
                assert column.get("filterable") is False, f"{panel['title']}: {field}"


@EACH
def test_an_owner_is_shown_with_its_kind(uid: str) -> None:
    """A table or a legend with an owner has its kind just before it: a name may be a job's or a user's."""
    for panel in panels(DASHBOARDS[uid]):
        shown = [] if panel["type"] != "table" else [field for field, _ in columns_of(panel)]
        assert ("owner" in shown) == ("owner_type" in shown), panel["title"]
        if "owner" in shown:
            assert shown.index("owner") == shown.index("owner_type") + 1, panel["title"]
        for target in targets_of(panel):
            assert len(re.findall(r"{{owner}}", target["legendFormat"])) == len(
                re.findall(r"{{owner_type}} {{owner}}", target["legendFormat"])
            ), panel["title"]


@EACH
def test_no_link_leads_nowhere(uid: str) -> None:
    """A column of links shows nothing where it has no value: a dash would be a link."""
    for panel in of_type(uid, "table"):
        for field, column in properties(panel).items():
            if column.get("links"):
                assert column.get("noValue") == "", f"{panel['title']}: {field}"


@EACH
def test_only_stacks_are_filled(uid: str) -> None:
    """Lines that are not stacked have no fill: twenty of them become mud."""
    for panel in of_type(uid, "timeseries"):
        custom = panel["fieldConfig"]["defaults"]["custom"]
        if custom["stacking"]["mode"] == "none":
            assert custom["fillOpacity"] == 0, panel["title"]
        else:
            assert custom["lineWidth"] == 0, f"{panel['title']}: an empty part is drawn as a line"


NOISY = re.compile(r"utilization_ratio|_active_ratio|_occupancy_ratio|bandwidth_used|throughput|power_watts")


@EACH
def test_work_is_drawn_as_means_and_without_steps(uid: str) -> None:
    """What changes each second is a mean of the step, its points joined: steps of four GPUs are a fence."""
    for panel in of_type(uid, "timeseries"):
        noisy = [target["expr"] for target in targets_of(panel) if NOISY.search(target["expr"])]
        if noisy:
            joined = panel["fieldConfig"]["defaults"]["custom"]["lineInterpolation"]
            assert (joined, panel["interval"]) == ("linear", "2m"), panel["title"]
            assert all("avg_over_time(" in expr for expr in noisy), panel["title"]


@EACH
def test_the_colour_of_a_state_means_that_state(uid: str) -> None:
    """An area outside the ledger has none of its colours: pink is unattributed everywhere."""
    for panel in of_type(uid, "timeseries"):
        for name, each in properties(panel).items():
            if name not in GRAFANA and "color" in each:
                assert each["color"]["fixedColor"] not in GRAFANA.values(), f"{panel['title']}: {name}"


@EACH
def test_a_table_is_sorted_by_a_column_that_it_shows(uid: str) -> None:
    """The reader sees by what the rows are sorted: by a column with an arrow."""
    for panel in of_type(uid, "table"):
        titles = {column["displayName"] for _, column in columns_of(panel)}
        by = [each["displayName"] for each in panel["options"]["sortBy"]]
        assert by, panel["title"]
        assert set(by) <= titles, panel["title"]


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
def test_links_carry_raw_values_to_variables_that_exist(uid: str) -> None:
    """A link sets variables that its target has, from columns that are drawn raw or hidden."""
    for panel, url in links(DASHBOARDS[uid]):
        fields = re.findall(r"\$\{__data\.fields\.(\w+)", url)
        for field in fields:
            column = properties(panel)[field]
            assert column.get("unit") == "string", f"{panel['title']}: {field}"
        found = re.match(r"/d/([\w-]+)\?", url)
        if found:
            there = {each["name"] for each in DASHBOARDS[found[1]]["templating"]["list"]}
            assert set(re.findall(r"[?&]var-(\w+)=", url)) <= there, url


@EACH
def test_no_panel_draws_an_unlimited_number_of_series(uid: str) -> None:
    """Series or rows of programs, owners or nodes are the largest few; others are by labels of few values."""
    few = LABELS_OF_FEW | IN_ONE_PLACE.get(uid, set())
    for panel in panels(DASHBOARDS[uid]):
        if panel["type"] == "stat":
            continue
        first, *others = targets_of(panel)
        if panel["type"] == "table":
            if _labels_of(first["expr"]) - few or not re.search(r"\bby\b", first["expr"]):
                limited = _is_limited(first["expr"]) or uid == "vramledger-node"
                assert limited, f"{panel['title']}: {first['expr']}"
                kept = [each for each in panel["transformations"] if each["id"] == "filterByValue"]
                assert not others or kept or uid == "vramledger-node", (
                    f"{panel['title']}: rows of other queries"
                )
            continue
        for target in (first, *others):
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            if named - few:
                assert _is_limited(target["expr"]), f"{panel['title']}: {target['expr']}"


def _is_limited(expr: str) -> bool:
    return re.search(r"\b(?:topk|bottomk)\(\d+", expr) is not None


def _labels_of(expr: str) -> set[str]:
    outer = re.match(r"[\s\d*()\w]*?\bby \(([^)]*)\)", expr)
    return set(re.findall(r"\w+", outer[1])) if outer else set()


@EACH
def test_no_annotation_covers_the_graphs(uid: str) -> None:
    """Alerts fire for hours, and their marks cover the graph; so they are shown only if chosen."""
    for each in DASHBOARDS[uid]["annotations"]["list"]:
        assert each["enable"] is ("vramledger_alert:" not in each["expr"]), each["name"]


@EACH
def test_variables_filter_every_panel(uid: str) -> None:
    """Each variable that filters is in every query of its dashboard, or in the choices of one that is."""
    listed = [each for each in DASHBOARDS[uid]["templating"]["list"] if each["type"] == "query"]
    for place, each in enumerate(listed):
        name = f"${each['name']}"
        later = listed[place + 1 :]
        if any(name in other["definition"] and "allValue" not in other for other in later):
            continue  # All of the other one means all of its choices
        for panel in panels(DASHBOARDS[uid]):
            if panel["title"] in ("Exporters", "Exporter"):
                continue  # an exporter has no owner
            if name in ("$gpu", "$uuid") and uid == "vramledger-node":
                continue  # it draws one panel for each GPU
            assert any(name in target["expr"] for target in targets_of(panel)), f"{panel['title']}: {name}"


ALWAYS = {*("Devices", "Capacity by GPU model", "Versions and sources", "Changed")}
"""Tables that have rows wherever an exporter is known, or beside a figure that says what is not known."""


@EACH
def test_a_table_says_what_no_rows_mean(uid: str) -> None:
    """Without rows a table says in words whether that is good; where data is missing, one row says what."""
    for panel in of_type(uid, "table"):
        asked = "vramledger_node:missing:code" in targets_of(panel)[0]["expr"]
        words = {
            look["text"]
            for column in properties(panel).values()
            for mapping in column.get("mappings", ())
            for look in mapping["options"].values()
        }
        assert asked or panel["title"] in ALWAYS, panel["title"]
        assert not asked or {"not watched", "no driver", "no rules"} <= words, panel["title"]


def test_few_panels_are_open_and_none_counts_rows() -> None:
    """At most 12 panels are open on a dashboard, and there are 110 in all; none counts another one's rows."""
    every = [panel for content in DASHBOARDS.values() for panel in panels(content)]

    assert [panel["title"] for panel in every if panel["title"].startswith("Count of")] == []
    assert len(every) <= 110
    for content in DASHBOARDS.values():
        assert len([panel for panel in content["panels"] if panel["type"] != "row"]) <= 12, content["uid"]


@EACH
def test_a_query_can_be_read(uid: str) -> None:
    """No query of a panel is longer than 600 characters: what is longer is recorded, named and documented."""
    for panel in panels(DASHBOARDS[uid]):
        for target in targets_of(panel):
            assert len(target["expr"]) <= 600, f"{panel['title']}: {target['refId']}"


def reasons_of(figure: Json) -> list[str]:
    """Return the words that a figure shows instead of a value."""
    looks = [
        look
        for mapping in figure["fieldConfig"]["defaults"].get("mappings", ())
        for value, look in mapping["options"].items()
        if float(value) < 0
    ]
    return [look["text"] for look in looks]


FIXED = {"Exporters", "Exporter", "Alerts", "Sample time", "Scrape time", "Blind nodes", "Failing collectors"}
"""Figures that are there wherever an exporter answers, or the rules are loaded."""


@EACH
def test_a_figure_that_is_not_there_has_one_reason(uid: str) -> None:
    """Without a value a figure says the one reason; without an answer it leads to what is not watched."""
    for panel in of_type(uid, "stat"):
        words = reasons_of(panel)
        assert [each for each in words if re.search(r"\bor\b|[,?]|see ", each)] == [], panel["title"]
        absent = panel["fieldConfig"]["defaults"]["noValue"]
        assert panel["title"] in FIXED or absent.startswith("no data: see Exporter"), panel["title"]
        if panel["title"] not in FIXED:
            assert {"no driver", "not watched"} <= set(words), panel["title"]


HIGHEST = 4
"""Rows of a figure: on a phone it is as wide as the page, and as high as on a page of 1440 pixels."""


@EACH
def test_no_figure_fills_a_phone(uid: str) -> None:
    """A panel of figures is at most 4 rows high: beside a table it would be as high as the table."""
    for panel in of_type(uid, "stat"):
        assert panel["gridPos"]["h"] <= HIGHEST, panel["title"]


def grids(uid: str) -> Iterator[list[Json]]:
    """Yield the panels of each row of a dashboard."""
    together: list[Json] = []
    for panel in DASHBOARDS[uid]["panels"]:
        if panel["type"] == "row":
            yield together
            together = [*panel["panels"]]
        else:
            together.append(panel)
    yield together


@EACH
def test_a_line_of_panels_is_as_wide_as_the_page(uid: str) -> None:
    """Panels side by side fill the page and are equally high, so that there is no hole."""
    for group in grids(uid):
        for y in {panel["gridPos"]["y"] for panel in group}:
            line = [panel for panel in group if panel["gridPos"]["y"] == y]
            titles = [panel["title"] for panel in line]
            assert sum(panel["gridPos"]["w"] for panel in line) == 24, titles
            assert len({panel["gridPos"]["h"] for panel in line}) == 1, titles


@EACH
def test_a_rate_has_two_scrapes(uid: str) -> None:
    """A panel of rates has no shorter step than 2 minutes, whatever scrape interval the data source names."""
    for panel in panels(DASHBOARDS[uid]):
        if any("$__rate_interval" in target["expr"] for target in targets_of(panel)):
            assert panel.get("interval") == "2m", panel["title"]


@EACH
def test_no_unit_is_an_abbreviation_of_grafana(uid: str) -> None:
    """Units are words, such as per minute for c/m; GiB-hours have their unit in each column."""
    for panel in panels(DASHBOARDS[uid]):
        columns = properties(panel).values()
        units = {column.get("unit") for column in columns} | {panel["fieldConfig"]["defaults"].get("unit")}
        assert not units & {"cpm", "cps", "opm", "ops"}, panel["title"]
        for column in columns if "GiB-hours" in panel["title"] else ():
            if column.get("unit") == "short":
                assert "$currency" in column["displayName"], f"{panel['title']}: {column['displayName']}"


def test_a_dashboard_of_one_node_has_one_exporter() -> None:
    """Node, Device and Process say Exporter, the others Exporters, in titles and in every text."""
    for uid, content in DASHBOARDS.items():
        one_node = uid.removeprefix("vramledger-") in ("node", "device", "process")
        other = "Exporters" if one_node else "Exporter"
        for panel in panels(content):
            said = f"{panel['title']}. {panel['fieldConfig']['defaults'].get('noValue', '')}"
            assert panel["title"] != other, uid
            assert not re.search(rf"see {other}\b", said), f"{uid}: {panel['title']}"


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


def pixels(text: str) -> float:
    """Return how wide a text in a cell is."""
    return sum(PIXELS_OF_LETTERS.get(letter, 10) for letter in text)


@EACH
def test_no_word_is_cut_off_in_its_column(uid: str) -> None:
    """A column is as wide as its longest state or step: Grafana takes some rows of two lines for one."""
    for panel in of_type(uid, "table"):
        for field, column in properties(panel).items():
            words = [
                look["text"] for mapping in column.get("mappings", ()) for look in mapping["options"].values()
            ]
            if words and column.get("custom.width"):
                needed = max(map(pixels, words)) + BESIDE + (6 if column.get("custom.wrapText") else 0)
                assert column["custom.width"] >= needed, f"{panel['title']}: {field} needs {needed:.0f}"


@EACH
def test_no_heading_is_cut_off(uid: str) -> None:
    """A column is as wide as the longest word of its heading, with the arrow of the one that sorts."""
    for panel in of_type(uid, "table"):
        for column in properties(panel).values():
            longest = max(map(len, column["displayName"].split()))
            width = column.get("custom.width")
            if width and "custom.hideFrom.viz" not in column:
                by = [each["displayName"] for each in panel["options"]["sortBy"]][:1]
                needed = 7.5 * longest + 48 if [column["displayName"]] == by else 8 * longest + 20
                assert width >= needed, f"{panel['title']}: {column['displayName']}"


@EACH
def test_no_time_is_told_from_the_clock_of_the_browser(uid: str) -> None:
    """Ages are durations that Prometheus counts: a browser's clock that is late says "in a few seconds"."""
    for panel in panels(DASHBOARDS[uid]):
        units = {column.get("unit") for column in properties(panel).values()}
        assert "dateTimeFromNow" not in units | {panel["fieldConfig"]["defaults"].get("unit")}, panel["title"]


def test_steady_growth_has_every_span_of_the_leak_alerts() -> None:
    """Each record of steady growth that a leak alert uses is drawn, so none fires beside "no growth"."""
    rules = (HOME.parent / "alerts/src/growth.yml").read_text("utf-8")
    (panel,) = [each for each in panels(DASHBOARDS["vramledger-process"]) if each["title"] == "Steady growth"]
    drawn = " ".join(target["expr"] for target in targets_of(panel))
    record = re.compile(r"vramledger_process:demand_growth_bytes:delta\w+")

    assert set(record.findall(rules)) == set(record.findall(drawn)) != set()


PIXELS = (1440 - 32) / 24
"""The width of a column of the grid on a page of 1440 pixels."""
PADDING = 36
"""Pixels of a panel beside the columns of its table, with the bar by which one scrolls."""
LONGEST = {
    "bytes": "1016 GiB",
    "suffix: GiB·h": "1165.4 GiB·h",
    "s": "23.9 hours",
    "binBps": "36.2 MiB/s",
    "none": "10000",
    "percentunit": "99.9%",
}
"""The longest figure of each unit."""


@EACH
def test_a_table_fits_on_the_page(uid: str) -> None:
    """At 1440 pixels each table shows all its columns; those without a width share what is left."""
    for panel in of_type(uid, "table"):
        room = panel["gridPos"]["w"] * PIXELS - PADDING
        shown = [column for _, column in columns_of(panel)]
        fixed = sum(column.get("custom.width", 0) for column in shown)
        sharing = [column for column in shown if "custom.width" not in column]
        share = (room - fixed) / max(1, len(sharing))
        needed = fixed + sum(max(share, width_of(column)) for column in sharing)
        assert needed <= room + 1, f"{panel['title']}: {needed}"


def columns_of(panel: Json) -> Iterator[tuple[str, Json]]:
    """Yield the fields and properties of the columns that a table shows."""
    for field, column in properties(panel).items():
        if "custom.hideFrom.viz" not in column:
            yield field, column


def width_of(column: Json) -> float:
    """Return the pixels that a column has at least."""
    return float(column.get("custom.width") or column["custom.minWidth"])


@EACH
def test_nothing_is_cut_off_on_a_phone(uid: str) -> None:
    """A column has at least the width of its longest figure, also on a phone, where the table is scrolled."""
    for panel in of_type(uid, "table"):
        for field, column in columns_of(panel):
            if "mappings" not in column:
                needed = CHARACTER * len(LONGEST.get(column["unit"], "")) + 12
                assert width_of(column) >= needed, f"{panel['title']}: {field} needs {needed:.0f}"


@EACH
def test_the_program_of_a_notebook_is_read_whole(uid: str) -> None:
    """The column of programs has room for ipykernel_launcher: Grafana breaks lines at spaces alone."""
    for panel in of_type(uid, "table"):
        for field, column in columns_of(panel):
            if field == "command":
                assert width_of(column) >= pixels("ipykernel_launcher") + BESIDE, panel["title"]


LETTERS = {
    "command": 12, "who": 14, "team": 13, "instance": 18, "name": 27,
    "blocker": 26, "beside": 30, "like": 30,
}  # fmt: skip
"""How many letters of a name are read whole, by the label; the last three are such as train.py 4711 of ada on
leak."""


@EACH
def test_names_are_read_on_a_phone(uid: str) -> None:
    """A name has room for as many letters as most have, however narrow the page is."""
    for panel in of_type(uid, "table"):
        for field, column in columns_of(panel):
            letters = LETTERS.get(field, 0)
            assert width_of(column) >= CHARACTER * letters + 12, f"{panel['title']}: {field}"


PHONE = 358
"""The width of a panel on a page of 390 pixels."""


@EACH
def test_a_title_is_not_cut_off(uid: str) -> None:
    """The title of each panel has room beside the mark of its description, also on a phone."""
    for panel in panels(DASHBOARDS[uid]):
        room = min(panel["gridPos"]["w"] * PIXELS, PHONE) - 88
        assert 7.2 * len(panel["title"]) <= room, panel["title"]


def test_a_runbook_is_where_the_rules_say() -> None:
    """The link of an alert leads to the address that its rule has for the runbook."""
    place = yaml.safe_load((HOME.parent / "alerts/thresholds.yml").read_text("utf-8"))["runbooks"]
    found = {url for content in DASHBOARDS.values() for _, url in links(content) if "runbook" in url}
    wanted = place.replace("{instance}", "${__data.fields.instance}").replace(
        "{alert}", "${__data.fields.alertname}"
    )

    assert found == {wanted}
