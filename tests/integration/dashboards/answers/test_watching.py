"""The dashboards say which nodes are watched, and nothing of what is not known."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.src.queries import DOWN, DRIVER_LOST, PARTLY_BLIND, RELEASED, STALLED, WATCHING, WITHOUT_RULES
from dashboards.src.reasons import NO_DEVICE, NO_DRIVER, NO_RULES, NO_SOURCE, NOT_WATCHED, NOTHING, STOPPED
from tests.support.dashboards import database
from tests.support.dashboards.database import Samples
from tests.support.dashboards.figures import figure, value
from tests.support.dashboards.files import load_dashboards, panels
from tests.support.fleet.engines import Engine

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder


def test_a_node_that_is_not_watched_says_how_old_its_data_is(engine: Engine) -> None:
    """A node that is down, or whose samples have stopped, has the age of its newest data."""
    rows = value(engine, "exporter", "Nodes that are not fully watched", "B")
    ages = {str(row["instance"]): row["value"] for row in rows}

    assert {"down", "stalled", "driver-lost"} <= ages.keys()
    assert all(ages[node] <= 60 for node in ("agent-silent", "blind", "device-lost"))
    assert ages["down"] == pytest.approx(1200, abs=90)
    assert ages["stalled"] == pytest.approx(1200, abs=90)


@pytest.mark.parametrize(
    ("node", "status"), [("down", 0), ("driver-lost", 1), ("stalled", 2), ("hoarder", 3), ("released", 4)]
)
def test_a_dead_collection_is_told_apart(engine: Engine, node: str, status: int) -> None:
    """The indicator distinguishes the ways in which an exporter has no data, and a release on purpose."""
    assert figure(engine, "node", "Exporter", instance=node) == status


@pytest.mark.parametrize(
    ("node", "missing"), [("down", NOT_WATCHED), ("driver-lost", NO_DRIVER), ("released", NOT_WATCHED)]
)
def test_nothing_is_shown_of_what_is_not_known(engine: Engine, node: str, missing: int) -> None:
    """Where nothing is collected there is no figure: a 0 would look like an idle GPU."""
    assert value(engine, "node", "GPU $gpu", instance=node) == []
    for panel in ("Wasted", "Unattributed", "Memory used", "Holders"):
        rows = value(engine, "node", panel, instance=node)
        assert rows == [{"value": missing}], panel


def test_each_node_that_is_not_fully_watched_is_named(engine: Engine) -> None:
    """A node that is down, stalled, released or blind, or has a silent agent or a lost GPU, is there."""
    panel = "Nodes that are not fully watched"
    rows = [str(row["instance"]) for row in value(engine, "exporter", panel)]
    codes = {row["instance"]: row["value"] for row in value(engine, "exporter", panel, "A")}
    unseen, seen = [], []
    for ref in "CDE":
        found = value(engine, "exporter", panel, ref)
        unseen.append([row["instance"] for row in found if row["value"]])
        seen.append({row["instance"] for row in found if not row["value"]})

    in_part = {"device-lost", "blind", "agent-silent"}
    whole = {"down": DOWN, "driver-lost": DRIVER_LOST, "stalled": STALLED, "released": RELEASED}
    assert {name: codes[name] for name in rows} == {**whole, **dict.fromkeys(in_part, PARTLY_BLIND)}
    assert len(rows) == len(set(rows))
    assert unseen == [["device-lost"], ["blind"], ["agent-silent"]]
    assert seen == [in_part - {*there} for there in unseen], "of what is not watched nothing is known"


def test_a_node_that_is_seen_in_part_is_not_painted_as_watched(engine: Engine) -> None:
    """The timeline of exporters and the indicator of a node tell watching in part from watching."""
    timeline = {
        row["instance"]: (row["value"], ref)
        for ref in "AB"
        for row in value(engine, "exporter", "Exporter status", ref)
    }
    for node in ("blind", "device-lost", "agent-silent"):
        assert timeline[node] == (PARTLY_BLIND, "A")
        assert figure(engine, "node", "Exporter", instance=node) == PARTLY_BLIND
    assert timeline["hoarder"] == (WATCHING, "B"), "those that are watched come last"


@pytest.mark.parametrize(
    ("dashboard", "panel", "chosen", "meaning"),
    [
        ("fleet", "Largest wasted holdings", {"instance": "driver-lost"}, NO_DRIVER),
        ("fleet", "Largest wasted holdings", {"instance": "small-jobs"}, None),
        ("framework", "Fragmentation: free, but not usable", {"instance": "notebook"}, NO_SOURCE),
        ("fleet", "Needs attention", {"instance": "small-jobs"}, None),
        ("fleet", "Needs attention", {"instance": "nowhere"}, NO_RULES),
        ("exporter", "Nodes that are not fully watched", {"instance": "nowhere"}, NO_RULES),
        ("framework", "Held beyond peak need, by program", {"instance": "hoarder"}, NO_SOURCE),
        ("node", "Reservations and holdings", {"instance": "hoarder"}, NO_SOURCE),
        ("node", "Limits", {"instance": "hoarder"}, NO_SOURCE),
        ("node", "Limits", {"instance": "driver-lost"}, NO_DRIVER),
        ("node", "Limits", {"instance": "down"}, NOT_WATCHED),
        ("node", "Limits", {"instance": "stalled"}, STOPPED),
        ("node", "Limits", {"instance": "nowhere"}, NO_RULES),
        ("owner", "Memory", {"instance": "driver-lost"}, NO_DRIVER),
        ("owner", "GiB-hours in time range", {"instance": "leak", "owner": "nobody"}, NOTHING),
        ("owner", "Memory", {"instance": "leak", "owner": "nobody"}, NOTHING),
        ("framework", "Need known", {"instance": "released"}, NOT_WATCHED),
        ("framework", "Need known", {"instance": "mig|released", "job": "nothing"}, None),
        ("framework", "Agents", {"instance": "down"}, NOT_WATCHED),
        ("framework", "Held, but not used", {"instance": "notebook"}, NO_SOURCE),
        ("framework", "Held, but not used", {"instance": "hoarder"}, NO_SOURCE),
        ("framework", "More copies fit", {"instance": "notebook"}, NO_SOURCE),
        ("fleet", "Memory", {"instance": "driver-lost"}, NO_DRIVER),
        ("fleet", "GPUs", {"instance": "down"}, NOT_WATCHED),
        ("fleet", "Waste by owner", {"instance": "small-jobs"}, NOTHING),
        ("fleet", "Waste by owner", {"instance": "driver-lost"}, NO_DRIVER),
        ("fleet", "Waste by owner", {"instance": "nowhere"}, None),
        ("fleet", "Who holds what", {"instance": "nowhere"}, None),
        ("fleet", "Who grows steadily", {"instance": "small-jobs"}, None),
        ("device", "Time until full", {"instance": "notebook", "uuid": ".+"}, NOTHING),
        ("device", "Memory used", {"instance": "hoarder", "uuid": "GPU-none"}, NO_DEVICE),
        ("device", "Unattributed", {"instance": "driver-lost", "uuid": ".+"}, NO_DEVICE),
    ],
)
def test_what_is_not_there_says_the_one_reason(
    engine: Engine, dashboard: str, panel: str, chosen: dict[str, str], meaning: int | None
) -> None:
    """A figure or table that nobody could fill says the true reason, and nothing where there is none."""
    rows = value(engine, dashboard, panel, **chosen)

    assert [row["value"] for row in rows] == ([] if meaning is None else [meaning])


def test_without_any_rules(samples: Samples, require_tool: Callable[[str], Path], tmp_path: Path) -> None:
    """With a Prometheus that has no rules, the first figure says that, and no figure says another reason."""
    scraped = Samples()
    for labels, points in samples.points.items():
        name = dict(labels)["__name__"]
        if ("instance", "leak") in labels and ":" not in name and not name.startswith("ALERTS"):
            scraped.points[labels] = points
    with database.prometheus(require_tool("prometheus"), tmp_path, scraped) as engine:
        for uid, content in load_dashboards().items():
            first, *others = panels(content)
            ref, meaning = ("A", WITHOUT_RULES) if first["title"] == "Exporter" else ("E", 1)
            dashboard = uid.removeprefix("vramledger-")
            assert figure(engine, dashboard, first["title"], ref, instance="leak") == meaning, uid
            for panel in others:
                if panel["type"] == "stat":
                    for said in value(engine, dashboard, panel["title"], instance="leak", uuid=".+"):
                        assert said["value"] >= 0, panel["title"]
        assert figure(engine, "fleet", "Largest wasted holdings", instance="leak") == NO_RULES
