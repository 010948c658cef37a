"""The dashboards say which nodes are watched, and nothing of what is not known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards.src.queries import (
    DOWN,
    DRIVER_LOST,
    PARTLY_BLIND,
    RELEASED,
    STALLED,
    WATCHING,
    exporter_status,
    watch_status,
)
from dashboards.src.reasons import (
    NO_AGENT,
    NO_DEVICE,
    NO_DRIVER,
    NO_LIMIT,
    NO_NEED,
    NO_RULES,
    NO_SCHEDULER,
    NOTHING,
)
from tests.support.dashboards import database
from tests.support.dashboards.database import Samples, ask
from tests.support.dashboards.figures import AT_NOW, over_minutes, query_of, value
from tests.support.dashboards.files import load_dashboards, panels, substitute_variables
from tests.support.fleet.engines import Engine

pytestmark = pytest.mark.timeout(600)


def test_a_node_that_is_not_watched_says_how_old_its_data_is(engine: Engine) -> None:
    """A node that is down, or whose samples have stopped, has the age of its newest data."""
    rows = value(engine, "vramledger-fleet", "Nodes that are not fully watched", "C")
    ages = {str(row["instance"]): float(str(row["value"])) for row in rows}

    assert {"down", "stalled", "driver-lost"} <= ages.keys()
    assert all(ages[node] == 0 for node in ("agent-silent", "blind", "device-lost"))
    assert ages["down"] == pytest.approx(1200, abs=90)
    assert ages["stalled"] == pytest.approx(1200, abs=90)


def test_the_age_of_a_nodes_data_does_not_depend_on_the_time_range(engine: Engine) -> None:
    """Fleet over a day and Exporter health over six hours say the same of a node that is not watched."""
    expr = query_of("vramledger-fleet", "Nodes that are not fully watched", "C")
    assert expr == query_of("vramledger-exporter", "Nodes that are not fully watched", "C")
    ages = [
        {
            row["metric"]["instance"]: row["value"][1]
            for row in ask(
                engine, over_minutes(expr, minutes).replace("$__interval", f"{minutes}s"), **AT_NOW
            )
        }
        for minutes in (30, 360, 1440)
    ]

    assert ages[0] == ages[1] == ages[2]
    assert {"down", "stalled", "driver-lost"} <= ages[0].keys()


@pytest.mark.parametrize(
    ("node", "status"), [("down", 0), ("driver-lost", 1), ("stalled", 2), ("hoarder", 3), ("released", 4)]
)
def test_a_dead_collection_is_told_apart(engine: Engine, node: str, status: int) -> None:
    """The indicator distinguishes the ways in which an exporter has no data, and a release on purpose."""
    (found,) = value(engine, "vramledger-node", "Exporter", instance=node)
    assert found["value"] == status


@pytest.mark.parametrize("node", ["down", "driver-lost", "released"])
def test_nothing_is_shown_of_what_is_not_known(engine: Engine, node: str) -> None:
    """Where nothing is collected there is no figure: a 0 would look like an idle GPU."""
    for panel in ("Devices as ledgers", "Holders"):
        assert value(engine, "vramledger-node", panel, instance=node) == []
    for panel in ("Wasted", "Unowned", "Memory used"):
        said = [row["value"] for row in value(engine, "vramledger-node", panel, instance=node)]
        assert said == {"down": [], "driver-lost": [NO_DRIVER], "released": [NO_DRIVER]}[node], panel


def test_each_node_that_is_not_fully_watched_is_named(engine: Engine) -> None:
    """A node that is down, stalled, released or blind, or has a silent agent or a lost GPU, is there."""
    panel = "Nodes that are not fully watched"
    rows = [str(row["instance"]) for row in value(engine, "vramledger-fleet", panel)]
    codes = {row["instance"]: row["value"] for row in value(engine, "vramledger-fleet", panel, "B")}
    unseen, seen = [], []
    for ref in "DEF":
        found = value(engine, "vramledger-fleet", panel, ref)
        unseen.append([row["instance"] for row in found if row["value"]])
        seen.append({row["instance"] for row in found if not row["value"]})

    assert {name: codes[name] for name in rows} == {
        "down": DOWN,
        "driver-lost": DRIVER_LOST,
        "stalled": STALLED,
        "released": RELEASED,
        "blind": PARTLY_BLIND,
        "device-lost": PARTLY_BLIND,
        "agent-silent": PARTLY_BLIND,
    }
    assert len(rows) == len(set(rows))
    assert unseen == [["device-lost"], ["blind"], ["agent-silent"]]
    in_part = {"device-lost", "blind", "agent-silent"}
    assert seen == [in_part - {*there} for there in unseen], "of what is not watched nothing is known"


def test_a_node_that_is_seen_in_part_is_not_painted_as_watched(engine: Engine) -> None:
    """The timeline of exporters and the indicator of a node tell watching in part from watching."""
    timeline = {
        row["instance"]: (row["value"], ref)
        for ref in "ABC"
        for row in value(engine, "vramledger-exporter", "Exporter status", ref)
    }
    for node in ("blind", "device-lost", "agent-silent"):
        (indicator,) = value(engine, "vramledger-node", "Exporter", instance=node)
        assert timeline[node] == (PARTLY_BLIND, "A")
        assert indicator["value"] == PARTLY_BLIND
    assert timeline["hoarder"] == (WATCHING, "C"), "those that are watched come last"


@pytest.mark.parametrize(
    ("status", "record"),
    [
        (exporter_status(), "vramledger_node:exporter_status:code"),
        (watch_status(exporter_status()), "vramledger_node:watch_status:code"),
    ],
)
def test_the_recorded_status_is_the_live_one(engine: Engine, status: str, record: str) -> None:
    """What the rules record of each exporter for graphs is what the indicator of every dashboard says now."""
    live = ask(engine, substitute_variables(status), instant=True, span=0)
    recorded = ask(engine, record, instant=True, span=0)

    def codes(found: list[dict[str, Any]]) -> dict[str, float]:
        return {each["metric"]["instance"]: float(each["value"][1]) for each in found}

    assert codes(recorded) == codes(live)
    known = set(codes(live).values()) - {PARTLY_BLIND}
    assert known == {DOWN, DRIVER_LOST, STALLED, WATCHING, RELEASED}


@pytest.mark.parametrize(
    ("dashboard", "panel", "node", "meaning"),
    [
        ("fleet", "Growing: count", "hoarder", NOTHING),
        ("fleet", "Firing alerts: count", "small-jobs", NOTHING),
        ("fleet", "Firing alerts: count", "hoarder", 5),
        ("fleet", "Growing: count", "driver-lost", NO_DRIVER),
        ("framework", "torch: fragmentation: count", "notebook", NO_AGENT),
        ("framework", "Held beyond peak need, by program: count", "jax", 1),
        ("framework", "Held beyond peak need, by program: count", "hoarder", NO_NEED),
        ("framework", "Held beyond peak need, by program: count", "notebook", NO_NEED),
        ("fleet", "Busy without work: count", "hoarder", NOTHING),
        ("node", "Reservations and holdings: count", "pod", 2),
        ("node", "Reservations and holdings: count", "hoarder", NO_SCHEDULER),
        ("node", "Limits: count", "jax", 2),
        ("node", "Limits: count", "hoarder", NO_LIMIT),
        ("node", "Limits: count", "driver-lost", NO_DRIVER),
    ],
)
def test_a_figure_counts_rows_or_says_why_there_are_none(
    engine: Engine, dashboard: str, panel: str, node: str, meaning: int
) -> None:
    """The figure above a table says how many rows there are, or why there are none."""
    rows = value(engine, f"vramledger-{dashboard}", panel, instance=node)

    assert [row["value"] for row in rows] == [meaning]


@pytest.mark.parametrize(
    ("dashboard", "panel", "chosen", "meaning"),
    [
        ("owner", "Memory", {"instance": "leak", "owner": "nobody"}, NOTHING),
        ("owner", "Memory", {"instance": "driver-lost"}, NO_DRIVER),
        ("owner", "In active use in time range", {"instance": "leak", "owner": "nobody"}, NOTHING),
        ("owner", "Wasted in time range", {"instance": "leak", "owner": "nobody"}, NOTHING),
        ("owner", "Reclaimable now", {"instance": "notebook"}, NO_AGENT),
        ("owner", "Reclaimable now", {"instance": "leak", "owner": "nobody"}, NOTHING),
        ("framework", "Need is known for", {"instance": "released"}, NO_DRIVER),
        ("framework", "Need is known for", {"instance": "mig|released", "job": "nothing"}, None),
        ("framework", "Agents", {"instance": "down"}, None),
        ("framework", "Held beyond peak need", {"instance": "notebook"}, NO_AGENT),
        ("framework", "Held beyond peak need", {"instance": "hoarder"}, NO_NEED),
        ("framework", "More jobs would fit", {"instance": "notebook"}, NO_AGENT),
        ("fleet", "Memory", {"instance": "driver-lost"}, NO_DRIVER),
        ("fleet", "GPUs", {"instance": "down"}, None),
        ("device", "Time until full", {"instance": "notebook", "uuid": ".+"}, NOTHING),
        ("device", "Memory used", {"instance": "hoarder", "uuid": "GPU-none"}, NO_DEVICE),
        ("device", "Unattributed", {"instance": "driver-lost", "uuid": ".+"}, NO_DRIVER),
    ],
)
def test_a_figure_says_the_one_reason_why_it_is_not_there(
    engine: Engine, dashboard: str, panel: str, chosen: dict[str, str], meaning: int | None
) -> None:
    """Without a value there is the true reason; where no exporter answers there is none, which says that."""
    rows = value(engine, f"vramledger-{dashboard}", panel, **chosen)

    assert [row["value"] for row in rows] == [] if meaning is None else [meaning]


def test_a_figure_says_that_no_rules_are_loaded(
    samples: Samples, require_tool: Callable[[str], Path], tmp_path: Path
) -> None:
    """With a Prometheus that has no rules, each figure that needs them has no other reason."""
    scraped = Samples()
    scraped.points = {
        labels: points
        for labels, points in samples.points.items()
        if ("instance", "leak") in labels and ":" not in dict(labels)["__name__"]
        if not dict(labels)["__name__"].startswith("ALERTS")
    }
    silent = set()
    with database.prometheus(require_tool("prometheus"), tmp_path, scraped) as engine:
        for uid, content in load_dashboards().items():
            for panel in panels(content):
                mappings = panel["fieldConfig"]["defaults"].get("mappings", ())
                words = {look["text"] for mapping in mappings for look in mapping["options"].values()}
                if panel["type"] != "stat" or "no rules" not in words:
                    continue
                (said,) = value(engine, uid, panel["title"], instance="leak", uuid=".+")
                assert said["value"] == NO_RULES or float(str(said["value"])) >= 0, panel["title"]
                silent |= {panel["title"]} if said["value"] == NO_RULES else set()

    assert {"Wasted memory", "Time until full", "Count of firing alerts"} <= silent


def test_an_empty_table_says_that_no_exporter_is_known(engine: Engine) -> None:
    """For a node that Prometheus does not know, the figure above a table has no value."""
    assert value(engine, "vramledger-fleet", "Growing: count", instance="nowhere") == []
