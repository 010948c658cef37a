"""Real engines answer every query of every dashboard, from hours of many healthy and faulty nodes."""

from __future__ import annotations

import itertools
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.src.framework import LITTLE, SEGMENTS
from dashboards.src.process import DOES_NOT_GROW, NOT_REPORTED, SILENT
from dashboards.src.queries import (
    DOWN,
    DRIVER_LOST,
    FRAGMENTED,
    LACKS,
    LEAKS,
    NO_AGENT,
    NO_DRIVER,
    NO_LIMIT,
    NO_NEED,
    NO_SCHEDULER,
    NOT_COMPARABLE,
    NOTHING,
    PARTLY_BLIND,
    RELEASED,
    SPINS,
    STALLED,
    STATES,
    TOO_BIG,
    UNPROVEN,
    WASTED,
    WATCHING,
    WORKING,
    exporter_status,
    watch_status,
)
from tests.integration.dashboards.test_contract import TARGET
from tests.integration.dashboards.test_files import properties, selectors
from tests.support.dashboards import database, truth
from tests.support.dashboards.answers import EMPTY, SPAN, Answer, answers
from tests.support.dashboards.database import Samples, ask
from tests.support.dashboards.files import load_dashboards, panels, substitute_variables
from tests.support.dashboards.nodes import NEWEST, NODES, NOW, RECORDED, SCRAPE, scrapes
from tests.support.fleet.engines import Engine, running, until
from tests.support.ports import free_port
from tests.support.requirements import require_newer
from vramledger.config import parse_duration

pytestmark = pytest.mark.timeout(600)


LATER = 472_222 * 3600.0
"""Seconds that are added for VictoriaMetrics, which misreads times soon after 1970: whole hours, so that the
steps of subqueries fall on the same moments."""


@pytest.fixture(scope="module")
def samples(require_tool: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Return hours of scrapes of all nodes, and what the rules recorded from them."""
    require_tool("promtool")
    return database.collect(scrapes(), tmp_path_factory.mktemp("collected"))


@pytest.fixture(scope="module")
def engine(
    samples: Samples, require_tool: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Run the real Prometheus with these samples."""
    home = tmp_path_factory.mktemp("prometheus")
    with database.prometheus(require_tool("prometheus"), home, samples) as running_engine:
        yield running_engine


@pytest.fixture(scope="module")
def answered(engine: Engine) -> list[Answer]:
    """Return its answer to every query."""
    return list(answers(engine))


def value(
    engine: Engine, dashboard: str, panel: str, ref: str = "A", **chosen: str
) -> list[dict[str, object]]:
    """Return labels and value of the current result of one query of a panel."""
    series = ask(
        engine, substitute_variables(_expr(dashboard, panel, ref), **chosen), instant=True, span=SPAN
    )
    return [{**each["metric"], "value": float(each["value"][1])} for each in series]


def test_every_query_is_answered(answered: list[Answer]) -> None:
    """Each query has a result, or is in a list with the reason; the queries in the list have none."""
    without = {
        (each.asked.dashboard, each.asked.panel, each.asked.ref) for each in answered if not each.series
    }

    assert without == EMPTY.keys()


def test_columns_exist_in_the_answers(engine: Engine) -> None:
    """Every column of a table is a figure of one of its queries or a label of the answers."""
    for content in load_dashboards().values():
        for panel in panels(content):
            if panel["type"] != "table":
                continue
            # A process has neighbours only where its own pid is chosen.
            uuids = {"uuid": ".+"}
            if panel["title"] in ("Neighbours", "Newest failed allocation"):
                uuids |= {"instance": "hoarder", "pid": _pid(engine, "hoarder", owner="18")}
            labels = {"Value", *(f"Value #{target['refId']}" for target in panel["targets"])}
            for target in panel["targets"]:
                for each in ask(
                    engine, substitute_variables(target["expr"], **uuids), instant=True, span=SPAN
                ):
                    labels |= each["metric"].keys()
            assert set(properties(panel)) <= labels, panel["title"]


KIND = re.compile(r"(?:job|user|pod|container|unit) \S+|unknown|other|")
"""An owner as a table shows it; nothing for what nobody owns."""


def test_every_owner_is_shown_with_its_kind(engine: Engine) -> None:
    """Each owner that a table names has its kind before it: a user, a job, a pod, a container or a unit."""
    shown = set()
    for content in load_dashboards().values():
        for panel in panels(content):
            if "who" not in properties(panel):
                continue
            rows = [
                row["metric"]
                for target in panel["targets"]
                for row in ask(engine, substitute_variables(target["expr"]), **_NOW)
            ]
            owned = {row["owner"]: row["who"] for row in rows if row.get("owner") and "who" in row}
            assert all(KIND.fullmatch(row.get("who", "")) for row in rows), panel["title"]
            assert all(who.endswith(owner) for owner, who in owned.items()), panel["title"]
            assert owned or panel["title"] in ("Reserved for", "Neighbours"), panel["title"]
            shown |= {who.partition(" ")[0] for who in owned.values()}

    assert {"job", "user", "pod"} <= shown


TOO_SLOW = {f"vramledger_process:demand_growth_bytes:delta{span}" for span in ("3h", "1d", "6d")}
"""What is recorded of no node within three hours."""


def test_labels_exist_on_the_series(samples: Samples) -> None:
    """Every label that a query matches on is one that the metric has on some node."""
    had: dict[str, set[str]] = {}
    for labels in samples.points:
        names = {name for name, _ in labels}
        had.setdefault(dict(labels)["__name__"], set()).update(names)
    wrong = {
        (panel["title"], metric, label)
        for content in load_dashboards().values()
        for panel in panels(content)
        for target in panel["targets"]
        for metric, matchers in selectors(target["expr"])
        if metric not in TOO_SLOW
        for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", matchers)
        if label not in TARGET | had[metric]
    }

    assert wrong == set()


def test_the_variable_of_devices_shows_names_and_gives_uuids(engine: Engine) -> None:
    """Grafana's text is node, index and product, of an instance its id too; its value is the UUID."""
    (variable,) = [
        each
        for each in load_dashboards()["vramledger-device"]["templating"]["list"]
        if each["name"] == "uuid"
    ]
    query = re.fullmatch(r"query_result\((.*)\)", variable["query"]["query"])
    assert query
    found = ask(engine, substitute_variables(query[1]), instant=True, span=SPAN)
    pattern = re.compile(variable["regex"].strip("/").replace("(?<", "(?P<"))
    lines = ["{" + ", ".join(f'{k}="{v}"' for k, v in sorted(each["metric"].items())) + "}" for each in found]
    matched = [pattern.search(line) for line in lines]

    assert all(matched)
    texts = {match["text"] for match in matched if match}
    instances = {f"mig / 0 instance {number} / NVIDIA H200 MIG 1g.18gb" for number in (7, 8, 9)}
    assert instances | {"mig / 0 / NVIDIA H200", "hoarder / 0 / NVIDIA A100-SXM4-40GB"} <= texts
    assert len(texts) == len(found)
    assert {match["value"] for match in matched if match} == {each["metric"]["uuid"] for each in found}


def test_a_node_that_is_not_watched_says_how_old_its_data_is(engine: Engine) -> None:
    """A node that is down, or whose samples have stopped, has the age of its newest data."""
    rows = value(engine, "vramledger-fleet", "Nodes that are not fully watched", "C")
    ages = {str(row["instance"]): float(str(row["value"])) for row in rows}

    assert {"down", "stalled", "driver-lost"} <= ages.keys()
    assert not ages.keys() & {"agent-silent", "blind", "device-lost"}
    assert ages["down"] == pytest.approx(1200, abs=90)
    assert ages["stalled"] == pytest.approx(1200, abs=90)


def test_the_age_of_a_nodes_data_does_not_depend_on_the_time_range(engine: Engine) -> None:
    """Fleet over a day and Exporter health over six hours say the same of a node that is not watched."""
    expr = _expr("vramledger-fleet", "Nodes that are not fully watched", "C")
    assert expr == _expr("vramledger-exporter", "Nodes that are not fully watched", "C")
    ages = [
        {
            row["metric"]["instance"]: row["value"][1]
            for row in ask(engine, _over(expr, minutes).replace("$__interval", f"{minutes}s"), **_NOW)
        }
        for minutes in (30, 360, 1440)
    ]

    assert ages[0] == ages[1] == ages[2]
    assert {"down", "stalled", "driver-lost"} <= ages[0].keys()


def test_a_process_is_charged_no_more_than_it_holds(engine: Engine) -> None:
    """What a growing process holds and what NVML charges to it are of the same moment, at each point."""
    chosen = {"instance": "leak"}
    held, charged = (
        dict(ask(engine, substitute_variables(expr, **chosen), instant=False, span=SPAN)[0]["values"])
        for expr in (_expr("vramledger-process", "Where its memory goes", ref) for ref in "EF")
    )

    assert held.keys() == charged.keys()
    assert all(float(charged[at]) <= float(held[at]) for at in held)


def test_figures_of_a_node_are_those_of_its_newest_scrape(samples: Samples, engine: Engine) -> None:
    """Memory used and In active use now are of the same moment as the end of its ledger."""
    for node in ("leak", "large-moment", "recorded-faults"):
        ledger = truth.values(samples, "vramledger_device_memory_bytes", NOW, instance=node)
        states = truth.by_label(ledger, "state")
        (used,) = value(engine, "vramledger-node", "Memory used", instance=node)
        (active,) = value(engine, "vramledger-node", "In active use now", instance=node)
        held = sum(states.get(state, 0.0) for state in STATES)

        assert used["value"] == pytest.approx(1 - states["free"] / sum(states.values()))
        assert active["value"] == pytest.approx(states["active"] / held)


def test_no_panel_counts_an_instance_as_a_gpu(engine: Engine) -> None:
    """A GPU with three MIG instances is one GPU wherever GPUs are counted, and has three ledgers."""
    fleet, node = "vramledger-fleet", "vramledger-node"
    for dashboard, panel, ref in ((fleet, "GPUs", "A"), (fleet, "GPUs", "B"), (node, "GPUs reachable", "A")):
        assert _total(value(engine, dashboard, panel, ref, instance="mig")) == 1, (panel, ref)
    for ref, model, count in (("B", "NVIDIA H200", 1), ("F", "NVIDIA H200 MIG 1g.18gb", 3)):
        (row,) = value(engine, fleet, "Capacity by GPU model", ref, instance="mig")
        assert (row["name"], row["value"]) == (model, count)

    parts = value(engine, node, "Devices as ledgers", instance="mig")
    bars = {str(each["device"]) for each in parts}
    assert bars == {"GPU 0 instance 7", "GPU 0 instance 8", "GPU 0 instance 9"}
    for bar in bars:
        shares = [each for each in parts if each["device"] == bar]
        assert _total(shares) == pytest.approx(1), bar


def test_the_hoarder_is_found_in_three_clicks(engine: Engine) -> None:
    """Fleet to owner to device: the first row names the owner, the next ones the process and the GPU."""
    rows = value(engine, "vramledger-fleet", "Waste by owner", instance="hoarder|nobody|ranks|leak")
    worst = max(rows, key=lambda row: float(str(row["value"])))
    assert (worst["owner_type"], worst["owner"]) == ("slurm", "17")

    (process,) = value(engine, "vramledger-owner", "Processes", owner=str(worst["owner"]))
    assert (process["state"], process["instance"], process["gpu"]) == ("idle", "hoarder", "0")
    (since,) = value(engine, "vramledger-owner", "Processes", "B", owner=str(worst["owner"]))
    assert float(str(since["value"])) > 3600

    holders = value(engine, "vramledger-device", "Holders", uuid=str(process["uuid"]))
    assert {str(each["owner"]) for each in holders} == {"17", "18"}


def test_what_is_wasted_of_a_recorded_incident(engine: Engine) -> None:
    """Fleet names what real H200s certainly waste; who is idle by inference only is not among it."""
    rows = value(engine, "vramledger-fleet", "Largest wasted holdings", instance="recorded-lively")
    worst = max(rows, key=lambda row: float(str(row["value"])))
    (wasted,) = value(engine, "vramledger-node", "Wasted", instance="recorded-lively")

    assert (worst["command"], worst["state"]) == ("holder.py", "stopped")
    assert _total(rows) == wasted["value"]


def test_the_parts_add_up_to_the_total(engine: Engine) -> None:
    """On every device the ledger's parts add up to the line that is drawn as their total."""
    devices = ask(engine, "vramledger_device_memory_total_bytes", instant=True, span=SPAN)
    for device in devices:
        uuid = device["metric"]["uuid"]
        parts = value(engine, "vramledger-device", "Ledger", "A", uuid=uuid)
        (total,) = value(engine, "vramledger-device", "Ledger", "B", uuid=uuid)
        assert sum(float(str(part["value"])) for part in parts) == total["value"]
    assert len(devices) > len(NODES)


def test_the_peak_is_of_the_same_memory_as_now(engine: Engine) -> None:
    """Where nothing changes, the peak is the share that is in use now: both have the driver's reserve."""
    (device,) = ask(
        engine, 'vramledger_device_memory_total_bytes{instance="notebook"}', instant=True, span=SPAN
    )
    chosen = {"instance": "notebook", "uuid": device["metric"]["uuid"]}
    (now,) = value(engine, "vramledger-device", "Memory used", "A", **chosen)
    (peak,) = value(engine, "vramledger-device", "Memory used", "B", **chosen)
    assert peak["value"] == pytest.approx(now["value"], abs=1e-6)


@pytest.mark.parametrize(
    ("node", "status"),
    [("down", 0), ("driver-lost", 1), ("stalled", 2), ("hoarder", 3), ("released", 4)],
)
def test_a_dead_collection_is_told_apart(engine: Engine, node: str, status: int) -> None:
    """The indicator distinguishes the ways in which an exporter has no data, and a release on purpose."""
    (found,) = value(engine, "vramledger-node", "Exporters", instance=node)
    assert found["value"] == status


@pytest.mark.parametrize("node", ["down", "driver-lost", "released"])
def test_nothing_is_shown_of_what_is_not_known(engine: Engine, node: str) -> None:
    """Where nothing is collected there is no figure: a 0 would look like an idle GPU."""
    for panel in ("Wasted", "Unowned", "Devices as ledgers", "Holders"):
        assert value(engine, "vramledger-node", panel, instance=node) == []


def test_a_program_without_an_agent_has_no_framework_figures(engine: Engine) -> None:
    """Figures that only an agent has are absent without one, never 0."""
    assert value(engine, "vramledger-node", "Holders", "F", instance="notebook") == []
    assert len(value(engine, "vramledger-owner", "Processes", "A", instance="notebook")) == 1
    for panel, ref in (("Peak need", "A"), ("Reclaimable now", "A"), ("Where its memory goes", "B")):
        assert value(engine, "vramledger-process", panel, ref, instance="notebook") == []


def test_wasted_gibibyte_hours_are_those_of_the_simulation(engine: Engine) -> None:
    """The GiB-hours of a range are those that the exporters counted in it, whatever the range."""
    wasted = 'vramledger_owner_memory_wasted_byte_seconds_total{instance="hoarder"}'
    for minutes in (30, 31, 45, 60, 94, 120, 127):
        expr = _expr("vramledger-owner", "Wasted in time range")
        shown = ask(engine, _over(expr, minutes, instance="hoarder"), instant=True, span=SPAN)
        counted = f"sum({wasted} - ({wasted} offset {minutes}m or 0 * {wasted})) / 2^30 / 3600"
        (true,) = ask(engine, counted, instant=True, span=SPAN)

        assert float(shown[0]["value"][1]) == pytest.approx(float(true["value"][1]), rel=0.005)


def test_a_week_has_the_gibibyte_hours_of_a_range_of_a_week(engine: Engine) -> None:
    """Owner says the same of 7 days in its figure and in its table, which says so a week later too."""
    week = 7 * 24 * 60
    figure = _over(_expr("vramledger-owner", "Wasted in time range"), week, instance="hoarder")
    (shown,) = ask(engine, figure, instant=True, span=SPAN)
    for ref, weeks in (("A", 0), ("B", 1), ("D", 3)):
        expr = _over(_expr("vramledger-owner", "Wasted, week by week", ref), 60, instance="hoarder")
        rows = ask(engine, expr, instant=True, span=SPAN, ahead=60.0 * weeks * week)

        said = sum(float(row["value"][1]) for row in rows)
        assert said == pytest.approx(float(shown["value"][1]), rel=1e-6), ref
        assert said > 0


def test_no_week_has_less_than_nothing(require_tool: Callable[[str], Path], tmp_path: Path) -> None:
    """An owner that ended about a week's edge has no GiB-hours after it, and all that it held before it.

    Its newest mean may go on for up to 4 minutes.
    """
    week, last = 7 * 86_400.0, NOW // 240 * 240 - 240
    series = tuple(
        sorted(
            {
                "__name__": "vramledger_owner:memory_wasted_bytes:rate4m",
                "instance": "alone",
                "job": "vramledger",
                "owner": "ada",
                "owner_type": "user",
            }.items()
        )
    )
    steady = Samples()
    for at in range(int(last) - 3600, int(last) + 1, 240):
        steady.add("rules", at, {series: 2.0**30})
    steady.add("rules", last + 240, {})  # the owner has ended
    weeks = [_over(_expr("vramledger-owner", "Wasted, week by week", ref), 60) for ref in "AB"]
    with database.prometheus(require_tool("prometheus"), tmp_path, steady) as alone:
        for after in (*range(-900, 300, 60), *range(-7, 0)):
            edge = last + after - NOW + week
            this, before = (
                sum(float(row["value"][1]) for row in ask(alone, expr, instant=True, span=SPAN, ahead=edge))
                for expr in weeks
            )
            assert this >= 0 <= before, after
            # Before 3.0 a range has both its ends: a mean that was recorded exactly at the edge is in both.
            twice = 240 if after % 240 == 0 else 0
            assert 3840 <= round(3600 * (this + before), 6) <= (3840 + twice if after <= 0 else 4080), after


COST = "Cost of the waste, $currency"


def test_hours_and_cost_are_those_of_the_simulation(samples: Samples, engine: Engine) -> None:
    """GiB-hours by state, hours of whole GPUs and their cost are what the exporters counted in each range."""
    chosen = {"instance": "hoarder|stopped|zombie|orphan"}
    memory = truth.by_label(truth.values(samples, "vramledger_device_memory_total_bytes", NOW), "uuid")
    # States change within the longest range, and a mean of 4 minutes may have two of them.
    for minutes, near in ((60, 0.001), (120, 0.001), (168, 0.1)):
        begin = NOW - 60 * minutes
        held = truth.increases(samples, "vramledger_owner_memory_byte_seconds_total", begin, NOW, **chosen)
        wasted = truth.increases(
            samples, "vramledger_owner_memory_wasted_byte_seconds_total", begin, NOW, **chosen
        )
        gpus = {labels: value / memory[dict(labels)["uuid"]] for labels, value in wasted.items()}
        states = truth.by_label(held, "state")
        hours = {state: states.get(state, 0.0) / 2**30 / 3600 for state in STATES}
        quiet = sum(hours[state] for state in WASTED.split("|"))
        true = {
            "A": sum(held.values()) / 2**30 / 3600,
            "B": sum(wasted.values()) / 2**30 / 3600,
            "K": quiet - sum(wasted.values()) / 2**30 / 3600,
            "C": sum(gpus.values()) / 3600,
            "D": 2 * sum(gpus.values()) / 3600,
            "E": states["active"] / 2**30 / 3600,
            "F": states["idle"] / 2**30 / 3600,
            "G": states["stopped"] / 2**30 / 3600,
            "H": states["orphaned"] / 2**30 / 3600,
            "I": states["zombie"] / 2**30 / 3600,
        }
        for ref, figure in true.items():
            expr = _expr("vramledger-owner", "GiB-hours by owner and state", ref)
            shown = ask(engine, _over(expr, minutes, price="2", **chosen), **_NOW)
            assert sum(float(each["value"][1]) for each in shown) == pytest.approx(figure, rel=near), (
                minutes, ref,
            )  # fmt: skip
        cost = ask(engine, _over(_expr("vramledger-owner", COST), minutes, **chosen), **_NOW)
        assert float(cost[0]["value"][1]) == pytest.approx(true["D"], rel=near)


def test_capacity_is_that_of_the_simulation(samples: Samples, engine: Engine) -> None:
    """Memory, devices, the 95th percentile of what was used, and room for a job are those of the ledgers."""
    node = {"instance": "hoarder|leak|ranks|large-moment"}
    ends = NOW - NOW % 300  # a subquery looks at whole multiples of its step
    for minutes in (60, 120):
        sums = []
        for number in range(minutes // 5):
            ledger = truth.values(
                samples, "vramledger_device_memory_bytes", ends - 300 * number - SCRAPE, **node
            )
            states = truth.by_label(ledger, "state")
            sums.append(sum(states.values()) - states["free"] - states["driver_reserved"])
        ledger = truth.values(samples, "vramledger_device_memory_bytes", NOW, **node)
        free = [value for labels, value in ledger.items() if dict(labels)["state"] == "free"]
        used = sorted(sums)
        place = 0.95 * (len(used) - 1)
        low = used[int(place)]
        true = {
            "A": sum(ledger.values()),
            "B": len(free),
            "C": low + (used[min(int(place) + 1, len(used) - 1)] - low) * (place - int(place)),
            "E": sum(value >= 40 * 2**30 for value in free),
        }
        for ref, figure in true.items():
            expr = _expr("vramledger-fleet", "Capacity by GPU model", ref)
            shown = ask(engine, _over(expr, minutes, size="40", **node), **_NOW)
            # The rules may have looked a minute earlier.
            assert sum(float(each["value"][1]) for each in shown) == pytest.approx(figure, rel=0.01), (
                minutes, ref,
            )  # fmt: skip


def test_wasted_means_the_same_everywhere(engine: Engine) -> None:
    """The fleet, its teams, its owners and its nodes waste the same number of bytes, and of GiB-hours."""
    chosen = {"instance": "hoarder|pod|notebook|stopped|zombie|orphan|dead"}
    (fleet,) = value(engine, "vramledger-fleet", "Wasted memory", **chosen)
    (node,) = value(engine, "vramledger-node", "Wasted", **chosen)
    teams = value(engine, "vramledger-fleet", "GiB-hours by team and state", "B", **chosen)
    (every,) = [team for team in teams if team["team"] == "All"]
    owners = value(engine, "vramledger-fleet", "Waste by owner", **chosen)
    (stat,) = value(engine, "vramledger-owner", "Wasted in time range", **chosen)

    assert fleet["value"] == node["value"]
    assert _total(teams) == pytest.approx(2 * _total(owners))
    assert every["value"] == pytest.approx(_total(owners))
    assert stat["value"] == pytest.approx(_total(owners))
    assert _total(owners) > 0


def test_what_an_owner_wastes_now_is_what_its_devices_say(engine: Engine) -> None:
    """Owner says of now what Node says, and no mean of the minutes before."""
    for node in ("notebook", "hoarder", "stopped", "orphan", "recorded-policies"):
        (shown,) = value(engine, "vramledger-owner", "Memory", "B", instance=node)
        (wasted,) = value(engine, "vramledger-node", "Wasted", instance=node)
        assert shown["value"] == wasted["value"], node


def test_the_parts_of_a_total_add_up(engine: Engine) -> None:
    """GPUs up and down are all whole GPUs, on every panel; each node is counted once, by its status."""
    every, *gpus, empty = [value(engine, "vramledger-fleet", "GPUs", ref)[0] for ref in "ABCD"]
    by_model = value(engine, "vramledger-fleet", "Capacity by GPU model", "B")
    instances = value(engine, "vramledger-fleet", "Capacity by GPU model", "F")
    known = 'count(count by (instance, gpu) (vramledger_device_up{uuid!~"MIG-.*"}))'
    (whole,) = ask(engine, known, instant=True, span=SPAN)
    assert _total(gpus) == every["value"] == _total(by_model) == float(whole["value"][1])
    assert _total(instances) == 3
    assert float(str(empty["value"])) <= float(str(every["value"]))
    for dashboard in ("fleet", "exporter", "owner", "framework"):
        nodes = [value(engine, f"vramledger-{dashboard}", "Exporters", ref)[0] for ref in "ABCD"]
        assert _total(nodes) == len(NODES) + len(RECORDED)
        rows = value(engine, "vramledger-fleet", "Nodes that are not fully watched")
        assert _total(nodes[1:]) == len(rows)


def test_each_node_that_is_not_fully_watched_is_named(engine: Engine) -> None:
    """A node that is down, stalled, released or blind, or has a silent agent or a lost GPU, is there."""
    panel = "Nodes that are not fully watched"
    rows = [str(row["instance"]) for row in value(engine, "vramledger-fleet", panel)]
    codes = {row["instance"]: row["value"] for row in value(engine, "vramledger-fleet", panel, "B")}
    unseen = [[row["instance"] for row in value(engine, "vramledger-fleet", panel, ref)] for ref in "DEF"]

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


def test_a_node_that_is_seen_in_part_is_not_painted_as_watched(engine: Engine) -> None:
    """The timeline of exporters and the indicator of a node tell watching in part from watching."""
    timeline = {
        row["instance"]: row["value"] for row in value(engine, "vramledger-exporter", "Exporter status")
    }
    for node in ("blind", "device-lost", "agent-silent"):
        (indicator,) = value(engine, "vramledger-node", "Exporters", instance=node)
        assert timeline[node] == indicator["value"] == PARTLY_BLIND
    assert timeline["hoarder"] == WATCHING


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
    """The figure beside a table says how many rows there are, or why there are none."""
    rows = value(engine, f"vramledger-{dashboard}", panel, instance=node)

    assert [row["value"] for row in rows] == [meaning]


def test_the_share_of_a_limit_is_what_its_cgroup_has_taken(engine: Engine) -> None:
    """An owner whose use is known has a share; one whose use is not known has a limit alone."""
    limits = value(engine, "vramledger-node", "Limits", "A", instance="jax")
    shares = value(engine, "vramledger-owner", "Limits", "C", instance="jax")

    assert len(limits) == 2
    taken = _total(value(engine, "vramledger-node", "Limits", "B", instance="jax"))
    held = {row["owner"]: row["value"] for row in value(engine, "vramledger-node", "Holders", instance="jax")}
    assert [row["value"] for row in shares] == [taken / (80 * 2**30)]
    (named,) = (row["owner"] for row in shares)
    assert taken == held[named]
    assert [
        row["value"]
        for row in value(engine, "vramledger-owner", "Limits: count", instance="jax", owner="nobody-else")
    ] == [NOTHING]
    assert value(engine, "vramledger-owner", "Limits", "C", instance="jax", owner=str(named))


def test_an_empty_table_says_that_no_exporter_is_known(engine: Engine) -> None:
    """For a node that Prometheus does not know, the figure beside a table has no value."""
    assert value(engine, "vramledger-fleet", "Growing: count", instance="nowhere") == []


def test_an_empty_comparison_says_that_nobody_watched_then(engine: Engine) -> None:
    """Where nothing is known of the beginning of the range, the figure beside Changed says so."""
    expr = _expr("vramledger-fleet", "Changed: count")
    shown = ask(engine, _over(expr, 200, instance="leak"), **_NOW)

    assert [float(each["value"][1]) for each in shown] == [NOT_COMPARABLE]


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


POOLS = "Pools and use, by framework"


@pytest.mark.parametrize(
    ("dashboard", "panel", "ref", "live"),
    [
        *(
            ("framework", POOLS, ref, f"sum by (framework) (vramledger_framework_{name}_bytes{{}})")
            for ref, name in zip("AB", ("pool", "in_use"), strict=True)
        ),
        *(
            ("framework", "torch: pools and tensors", ref, f"sum(vramledger_torch_{name}_bytes{{}})")
            for ref, name in zip("ABCD", ("reserved", "allocated", "active", "requested"), strict=True)
        ),
        ("framework", "Private pools of torch", "A", "sum(vramledger_torch_private_pools_bytes{})"),
        ("exporter", "Collector success", "A", "min by (collector) (vramledger_collector_success{})"),
    ],
)
def test_what_is_recorded_for_graphs_is_what_the_exporters_said(
    engine: Engine, dashboard: str, panel: str, ref: str, live: str
) -> None:
    """The newest point of a graph of recorded sums is what the exporters said, at most 5 minutes before."""

    def figures(expr: str, ago: float) -> dict[str, float]:
        found = ask(engine, expr, instant=True, span=0, ahead=-ago)
        return {str(sorted(row["metric"].items())): float(row["value"][1]) for row in found}

    drawn = figures(
        substitute_variables(_expr(f"vramledger-{dashboard}", panel, ref), instance="leak|jax"), 0
    )
    before = [
        figures(live.replace("{}", '{instance=~"leak|jax"}'), SCRAPE * scrapes) for scrapes in range(12)
    ]
    assert drawn
    assert drawn in before


def test_what_has_changed_is_only_said_of_nodes_watched_at_both_moments(engine: Engine) -> None:
    """Owners of a node that is not watched at one of the moments have not changed: nobody knows."""
    reasons: set[float] = set()
    for node, minutes in (
        ("down", 60),
        ("stalled", 60),
        ("driver-lost", 60),
        ("released", 60),
        ("leak", 200),
    ):
        shown = ask(engine, _over(_expr("vramledger-fleet", "Changed"), minutes, instance=node), **_NOW)
        expr = _over(_expr("vramledger-fleet", "Changed: count"), minutes, instance=node)
        counted = {float(each["value"][1]) for each in ask(engine, expr, **_NOW)}
        assert shown == [], node
        assert counted <= {NO_DRIVER, NOT_COMPARABLE}, f"{node}: nothing was compared"
        reasons |= counted
    assert NOT_COMPARABLE in reasons


def test_what_has_changed_is_what_the_simulation_changed(samples: Samples, engine: Engine) -> None:
    """The change of each owner is the difference of what the exporters said at the two moments."""
    for minutes in (30, 60, 120):
        chosen = {"instance": "leak|hoarder|pod|large-moment|notebook|tensorflow"}
        shown = ask(engine, _over(_expr("vramledger-fleet", "Changed"), minutes, **chosen), **_NOW)
        now, then = (_held(samples, at, **chosen) for at in (NOW, NOW - 60 * minutes))
        found = {each["metric"]["owner"]: float(each["value"][1]) for each in shown}

        assert found, minutes
        for owner in now.keys() | then.keys():
            (low, high), (least, most) = now.get(owner, (0, 0)), then.get(owner, (0, 0))
            assert low - most <= found.get(owner, 0.0) <= high - least, (minutes, owner)


def test_a_week_ago_is_what_the_simulation_held_then(
    samples: Samples, require_tool: Callable[[str], Path], tmp_path: Path
) -> None:
    """Changed says what each owner holds, what it held before, and what it held at this hour a week ago.

    The same hours are there twice, the second time half an hour less than a week later.
    """
    chosen = {"instance": "leak|hoarder|pod|large-moment|notebook|tensorflow"}
    week, earlier, minutes = 7 * 86_400.0, 1800.0, 60
    asked = ("vramledger_owner:memory_held_bytes:sum", "vramledger_device_up", "exporter_status:code")
    needed = Samples()
    needed.points = {
        labels: points
        for labels, points in samples.points.items()
        if dict(labels)["__name__"].endswith(asked)
    }
    with database.prometheus(require_tool("prometheus"), tmp_path, needed) as engine:
        database.send(needed, engine, week - earlier)
        columns = {
            ref: {
                row["metric"]["owner"]: float(row["value"][1])
                for row in ask(
                    engine,
                    _over(_expr("vramledger-fleet", "Changed", ref), minutes, **chosen),
                    instant=True,
                    span=SPAN,
                    ahead=week - earlier,
                )
            }
            for ref in "ABCD"
        }

    for ref, moment in (("B", NOW - 60 * minutes), ("C", NOW), ("D", NOW - earlier)):
        held = _held(samples, moment, **chosen)
        assert {owner for owner, (low, _) in held.items() if low} <= columns[ref].keys(), ref
        for owner, value in columns[ref].items():
            low, high = held[owner]
            assert low <= value <= high, (ref, owner)
    assert columns["D"] != columns["C"]
    for owner, change in columns["A"].items():
        assert change == columns["C"].get(owner, 0.0) - columns["B"].get(owner, 0.0), owner
    assert columns["A"]


def _held(samples: Samples, moment: float, **chosen: str) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest holdings of each owner when the rules may have looked last."""
    moments = [moment - SCRAPE * back for back in range(5)]
    held = [
        truth.by_label(truth.values(samples, "vramledger_owner_memory_bytes", at, **chosen), "owner")
        for at in moments
    ]
    owners = {owner for each in held for owner in each}
    return {
        owner: (min(each.get(owner, 0.0) for each in held), max(each.get(owner, 0.0) for each in held))
        for owner in owners
    }


def test_managed_memory_is_in_its_holders_figures(engine: Engine) -> None:
    """Uncharged bytes are part of what a process and its owner hold, and are shown apart beside it."""
    held = _total(value(engine, "vramledger-node", "Holders", instance="managed"))
    apart = _total(value(engine, "vramledger-device", "Uncharged memory, by holder", "B", instance="managed"))
    charged = ask(engine, 'sum(vramledger_process_memory_bytes{instance="managed"})', instant=True, span=0)

    assert apart > 0
    assert held == float(charged[0]["value"][1]) + apart


def test_a_fast_leak_grows_and_has_a_time_until_full(engine: Engine) -> None:
    """The holder that leaks is in Growing with its rate and the time until its GPU is full."""
    rates = {
        row["pid"]: row["value"] for row in value(engine, "vramledger-fleet", "Growing", instance="leak")
    }
    times = {
        row["pid"]: row["value"] for row in value(engine, "vramledger-fleet", "Growing", "B", instance="leak")
    }

    assert len(rates) == 1
    assert times.keys() == rates.keys()


def test_alerts_come_with_their_severity_and_their_beginning(engine: Engine) -> None:
    """Each firing alert has a rank, pages first, and how long its condition holds."""
    ranks = value(engine, "vramledger-fleet", "Firing alerts", "A")
    ages = value(engine, "vramledger-fleet", "Firing alerts", "B")

    assert {row["value"] for row in ranks} >= {1.0, 2.0}
    assert len(ages) >= len(ranks)
    assert all(0 <= float(str(row["value"])) <= SPAN + 600 for row in ages)


@pytest.mark.parametrize("node", ["managed", "jax", "fragmented"])
def test_what_a_process_has_adds_up_to_what_it_holds(engine: Engine, node: str) -> None:
    """The parts of its memory are no more than all of it, also if its pool is larger than what it holds."""
    agents = ask(engine, f'vramledger_framework_pool_bytes{{instance="{node}"}}', **_NOW)
    for pid in {each["metric"]["pid"] for each in agents}:
        chosen = {"instance": node, "pid": pid}
        panel = "Where its memory goes"
        held = _total(value(engine, "vramledger-process", panel, "E", **chosen))
        parts = [value(engine, "vramledger-process", panel, ref, **chosen) for ref in "ABCD"]
        assert parts[3], chosen
        assert sum(_total(part) for part in parts) <= 1.02 * held + 64 * 2**20, chosen


@pytest.mark.parametrize("node", ["leak", "managed", "jax"])
def test_the_figures_of_a_process_are_of_the_same_moment(engine: Engine, node: str) -> None:
    """What it holds is the same in its table and above it, also while it grows."""
    pids = {
        each["metric"]["pid"]
        for each in ask(engine, f'vramledger_process_memory_bytes{{instance="{node}"}}', **_NOW)
    }
    for pid in pids - {"other"}:
        chosen = {"instance": node, "pid": pid}
        above = value(engine, "vramledger-process", "Holds", **chosen)
        assert _total(value(engine, "vramledger-process", "The process", **chosen)) == _total(above), chosen


def test_a_failed_scrape_ends_no_holder_and_makes_no_xid_new(engine: Engine) -> None:
    """Marks of ended holders need a device that still has a ledger; an old XID is not new after a gap."""
    marks = {each["name"]: each for each in load_dashboards()["vramledger-device"]["annotations"]["list"]}

    def moments(name: str, node: str) -> int:
        expr = substitute_variables(marks[name]["expr"], instance=node)
        return sum(len(each["values"]) for each in ask(engine, expr, instant=False, span=SPAN))

    assert moments("Holders that ended", "down") == 0
    assert 1 <= moments("XID errors", "leak") <= 2


_NOW: dict[str, Any] = {"instant": True, "span": SPAN}


def _pid(engine: Engine, node: str, **labels: str) -> str:
    """Return the pid of the one holder of a node with these labels."""
    found = value(engine, "vramledger-node", "Holders", instance=node)
    (pid,) = {str(row["pid"]) for row in found if labels.items() <= row.items()}
    return pid


def test_who_made_a_job_fail_is_named(engine: Engine) -> None:
    """Beside a failed allocation stands who else held most then: program, pid, owner and node."""
    hoarder, failed = _pid(engine, "hoarder", owner="17"), _pid(engine, "hoarder", owner="18")
    chosen = {"instance": "hoarder", "pid": failed}
    blocker = f"train.py {hoarder} of job 17 on hoarder"
    panel = "Newest failed allocation"
    (failure,) = value(engine, "vramledger-process", panel, **chosen)
    (named,) = value(engine, "vramledger-process", panel, "C", **chosen)
    neighbours = value(engine, "vramledger-process", "Neighbours", "C", **chosen)
    on_device = value(
        engine, "vramledger-device", "Why allocations failed", "G", instance="hoarder", uuid=".+"
    )
    panel = "Programs that ran out of memory"
    (on_node,) = value(engine, "vramledger-node", panel, instance="hoarder")
    (beside,) = value(engine, "vramledger-node", panel, "C", instance="hoarder")
    assert (on_node["pid"], on_node["owner"], on_node["step"]) == (failed, "18", "hoarded")
    assert (beside["pid"], beside["blocker"]) == (failed, blocker)

    assert (failure["verdict"], failure["step"]) == ("hoarded", "hoarded")
    assert named["blocker"] == blocker
    assert [row["pid"] for row in neighbours] == [hoarder]
    assert [row["blocker"] for row in on_device] == [blocker]


def test_a_job_that_fails_alone_has_no_blocker(engine: Engine) -> None:
    """Where nobody else holds memory, the verdict is another one, and nobody is named."""
    panel, chosen = "Newest failed allocation", {"instance": "out-of-memory"}
    (failure,) = value(engine, "vramledger-process", panel, **chosen)

    assert failure["verdict"] == "too_big"
    assert value(engine, "vramledger-process", panel, "C", **chosen) == []


def test_the_first_step_is_that_of_the_worst_that_is_known(engine: Engine) -> None:
    """What is known of a holder beyond its state decides: no program in trouble has the step none."""
    steps = {
        node: {str(row["step"]) for row in value(engine, "vramledger-node", "Holders", instance=node)}
        for node in (
            "leak",
            "hoarder",
            "stopped",
            "apart",
            "waits",
            "fragmented",
            "recorded-faults",
            "out-of-memory",
        )
    }

    assert steps["leak"] == {LEAKS}
    assert steps["hoarder"] == {"idle", LACKS}
    assert steps["out-of-memory"] == {TOO_BIG}  # nobody else is there
    assert steps["waits"] == {SPINS}
    assert FRAGMENTED in steps["fragmented"]
    inferred = 'vramledger_process_state_since_timestamp_seconds{state="idle", grade="inferred"}'
    unproven = {each["metric"]["pid"] for each in ask(engine, inferred, **_NOW)}
    rows = value(engine, "vramledger-node", "Holders", instance="recorded-faults")
    assert {row["pid"] for row in rows if row["step"] == UNPROVEN} <= unproven
    assert UNPROVEN in steps["recorded-faults"]
    assert not unproven & {row["pid"] for row in rows if row["step"] == "idle"}
    assert steps["stopped"] == {"stopped"}
    assert steps["apart"] == {"active"}
    working = ask(engine, "vramledger_process_orphan_working == 1", **_NOW)
    assert working
    for each in working:
        place = {name: each["metric"][name] for name in ("instance", "pid", "uuid")}
        rows = value(engine, "vramledger-device", "Holders", instance=place["instance"], uuid=place["uuid"])
        assert [row["step"] for row in rows if row["pid"] == place["pid"]] == [WORKING]


def test_a_figure_that_is_not_there_says_why(engine: Engine) -> None:
    """An agent that reports no need is not no agent; growth that is not known is not no growth."""
    (need,) = value(
        engine, "vramledger-process", "Peak need", instance="hoarder", pid=_pid(engine, "hoarder", owner="17")
    )
    assert need["value"] == NOT_REPORTED
    assert value(engine, "vramledger-process", "Peak need", instance="notebook") == []
    (silent,) = value(engine, "vramledger-process", "Peak need", instance="agent-silent")
    assert silent["value"] == SILENT
    for panel in ("Grows", "Its GPU is full in"):
        (calm,) = value(engine, "vramledger-process", panel, instance="notebook")
        assert calm["value"] == DOES_NOT_GROW
        assert value(engine, "vramledger-process", panel, instance="driver-lost") == []


def test_steady_growth_is_shown_wherever_a_leak_is_alerted(engine: Engine) -> None:
    """A process with a leak alert has a line in Steady growth, whatever the alert's span."""
    leaks = ask(
        engine, 'ALERTS{alertname=~"GpuMemoryLeak.*|GpuMemoryGrowing", alertstate="firing", pid!=""}', **_NOW
    )
    assert leaks
    for each in leaks:
        chosen = {name: each["metric"][name] for name in ("instance", "pid")}
        drawn = [value(engine, "vramledger-process", "Steady growth", ref, **chosen) for ref in "ABCDE"]
        assert any(drawn), chosen


def test_unowned_and_unknown_memory_is_listed(engine: Engine) -> None:
    """The rows of Unowned and unknown memory are the figures above, which are a minute older."""
    expr = _expr("vramledger-fleet", "Unowned and unknown memory").replace("topk(50, ", "(")
    rows = ask(engine, substitute_variables(expr), **_NOW)
    sums = truth.by_label({tuple(row["metric"].items()): float(row["value"][1]) for row in rows}, "state")
    for ref, unknown in (("B", False), ("C", True)):
        (figure,) = value(engine, "vramledger-fleet", "Wasted memory", ref)
        listed = sum(size for state, size in sums.items() if (state == "unknown") is unknown)
        assert listed == pytest.approx(figure["value"], rel=0.01)


def test_what_healthy_devices_have_needs_no_step(engine: Engine) -> None:
    """Some unattributed memory is usual; much of it is looked into."""
    expr = _expr("vramledger-fleet", "Unowned and unknown memory").replace("topk(50, ", "(")
    rows = [row for row in ask(engine, substitute_variables(expr), **_NOW) if "pid" not in row["metric"]]
    assert all(float(row["value"][1]) > 0 for row in rows)
    steps: dict[str, list[float]] = {}
    for row in rows:
        steps.setdefault(row["metric"]["step"], []).append(float(row["value"][1]))

    assert max(steps["usual"]) < 128 * 2**20 <= min(steps["unattributed"])


def test_more_jobs_add_up_and_have_a_known_need(engine: Engine) -> None:
    """The GPUs with room add up to the figure of more jobs, and name the job that is meant and its need."""
    (total,) = value(engine, "vramledger-framework", "More jobs would fit")
    rooms, jobs = (value(engine, "vramledger-framework", "GPUs with room for more jobs", ref) for ref in "AB")

    assert _total(rooms) == total["value"]
    assert {row["instance"] for row in jobs} == {row["instance"] for row in rooms} >= {"apart"}
    assert all(float(str(row["value"])) > 0 for row in jobs)


def test_jobs_that_could_share_are_named_with_the_gpu(engine: Engine) -> None:
    """Of two small jobs on a GPU each, one is named with the other's GPU and the other itself."""
    chosen = {"instance": "apart"}
    panel = "Jobs that could share a GPU"
    (job,) = value(engine, "vramledger-framework", panel, **chosen)
    (room,) = value(engine, "vramledger-framework", panel, "B", **chosen)
    (beside,) = value(engine, "vramledger-framework", panel, "C", **chosen)

    assert {job["gpu"], room["to"]} == {"0", "1"}
    assert float(str(room["value"])) >= float(str(job["value"])) > 0
    assert str(job["pid"]) not in str(beside["beside"])
    assert value(engine, "vramledger-framework", panel, instance="waits") == []


def test_retries_are_counted_in_whole_numbers(engine: Engine) -> None:
    """A count of retries is not extrapolated to a part of one."""
    rows = value(engine, "vramledger-framework", "torch: fragmentation", "C")

    assert rows
    assert all(float(str(row["value"])).is_integer() for row in rows)


def test_what_helps_against_fragmentation_stands_beside_it(engine: Engine) -> None:
    """Much in pieces has a setting that helps; little has none."""
    (much,) = value(engine, "vramledger-framework", "torch: fragmentation", instance="fragmented")
    (little,) = value(engine, "vramledger-framework", "torch: fragmentation", instance="leak")

    assert (much["step"], little["step"]) == (SEGMENTS, LITTLE)


def test_fragmentation_is_the_share_of_the_pool_in_free_pieces(engine: Engine) -> None:
    """It is what is split and free over what is reserved: few pieces of a large pool are a small share."""
    shares: dict[str, float] = {}
    for node in ("fragmented", "leak"):
        (row,) = value(engine, "vramledger-framework", "torch: fragmentation", "B", instance=node)
        split, pool = (
            float(each["value"][1])
            for metric in ("inactive_split", "reserved")
            for each in ask(engine, f'vramledger_torch_{metric}_bytes{{instance="{node}"}}', **_NOW)
        )
        shares[node] = split / pool
        assert row["value"] == pytest.approx(shares[node])

    assert shares["fragmented"] > 0.1 > shares["leak"]


def test_no_age_is_in_the_future(engine: Engine) -> None:
    """A host's clock that is ahead of Prometheus' gives ages of 0, never less."""
    for content in load_dashboards().values():
        for panel in panels(content):
            for target in panel["targets"]:
                if not target["expr"].startswith("clamp_min(time()"):
                    continue
                past = substitute_variables(target["expr"].replace("time()", "(time() - 7200)"))
                assert all(float(each["value"][1]) >= 0 for each in ask(engine, past, **_NOW)), panel["title"]


def test_what_is_drawn_of_waste_is_what_is_counted(engine: Engine) -> None:
    """The area of Wasted, by owner over a range is the GiB-hours of the range, but for the newest minutes."""
    chosen = {"instance": "hoarder"}
    drawn = ask(
        engine,
        substitute_variables(_expr("vramledger-fleet", "Wasted, by owner"), **chosen),
        instant=False,
        span=7200,
    )
    area = sum(float(point) for series in drawn for _, point in series["values"][:-4]) * database.STEP
    counted = 'vramledger_owner_memory_wasted_byte_seconds_total{instance="hoarder"}'
    (true,) = ask(engine, f"sum({counted} offset 4m - {counted} offset 2h)", **_NOW)

    assert area == pytest.approx(float(true["value"][1]), rel=0.02)


def test_the_count_of_alerts_is_the_sum_by_severity(engine: Engine) -> None:
    """The figures by severity and the table beside them have the same alerts."""
    count = value(engine, "vramledger-fleet", "Firing alerts: count")
    severities = [value(engine, "vramledger-fleet", "Alerts", ref)[0] for ref in "ABC"]
    expr = _expr("vramledger-fleet", "Firing alerts").replace("bottomk(50, ", "(")
    rows = ask(engine, substitute_variables(expr), **_NOW)
    labels = [tuple(sorted(row["metric"].items())) for row in rows]

    assert _total(count) == _total(severities) == len(rows) == len(set(labels))


@pytest.mark.parametrize("late", [0.0, 15.0, 30.0, 45.0])
@pytest.mark.parametrize("name", ["Out of memory", "Holders that ended", "XID errors"])
def test_a_mark_of_a_failure_is_there_and_short(engine: Engine, name: str, late: float) -> None:
    """It stands where a failure begins, wherever the scrapes lie; unbroken marks would shade the graph."""
    marks = {each["name"]: each for each in load_dashboards()["vramledger-device"]["annotations"]["list"]}
    expr, step = substitute_variables(marks[name]["expr"]), parse_duration(marks[name]["step"])
    found = ask(engine, expr, instant=False, span=SPAN, ahead=late, step=step)

    assert found
    for series in found:
        moments = [at for at, _ in series["values"]]
        unbroken = sum(later - at == step for at, later in itertools.pairwise(moments))
        assert unbroken <= 2, series["metric"]


def _total(rows: list[dict[str, object]]) -> float:
    return sum(float(str(row["value"])) for row in rows)


def _expr(dashboard: str, panel: str, ref: str = "A") -> str:
    """Return a query of a panel; for ``X: count`` that of the figure beside the table X."""
    title, beside, _ = panel.partition(": count")
    listed = [*panels(load_dashboards()[dashboard])]
    (place,) = [place for place, each in enumerate(listed) if each["title"] == title]
    found = listed[place + bool(beside)]
    (target,) = [each for each in found["targets"] if each["refId"] == ref]
    return str(target["expr"])


def _over(expr: str, minutes: int, **chosen: str) -> str:
    ranged = expr.replace("$__range_s", str(60 * minutes)).replace("$__range", f"{minutes}m")
    return substitute_variables(ranged, **chosen)


@pytest.mark.thorough
def test_victoriametrics_answers_the_same(samples: Samples, answered: list[Answer], tmp_path: Path) -> None:
    """VictoriaMetrics also answers every query, with the same current series and figures."""
    program = require_newer("victoria-metrics")
    newest = sum(1 for values in samples.points.values() if values[-1][0] == NEWEST)
    port = free_port()
    command: list[str | Path] = [
        program,
        f"-storageDataPath={tmp_path / 'data'}",
        f"-httpListenAddr=127.0.0.1:{port}",
        "-retentionPeriod=100y",
        "-search.latencyOffset=0s",
        "-loggerLevel=ERROR",
    ]
    with running(command, tmp_path, f"http://127.0.0.1:{port}", "/health") as other:
        database.send(samples, other, LATER)
        urllib.request.urlopen(f"{other.url}/internal/force_flush", timeout=60).close()  # noqa: S310 loopback
        until(lambda: _series(other) >= newest, "VictoriaMetrics finds all that it was given")
        theirs = {each.asked: each for each in answers(other, LATER)}

    for mine in answered:
        if "< 120" in mine.asked.expr:
            continue  # what happened within two minutes is long ago there
        given = theirs[mine.asked]
        # A graph has other points in time, and other processes may live then. Current values are the same; a
        # sum over subqueries is almost the same.
        assert bool(given.series) == bool(mine.series), mine.asked
        if mine.asked.instant and mine.value is not None:
            assert given.series == mine.series, mine.asked
            # Times in figures are not later, but `time()` is; what `timestamp()` gives is later too.
            told = not mine.asked.expr.startswith("count(") and "timestamp(" not in mine.asked.expr
            told |= mine.asked.panel == "Nodes that are not fully watched"  # the largest is a figure there
            later = LATER if "time()" in mine.asked.expr and told else 0.0
            # Prometheus 2 also counts the sample where a span begins: a step is a sixth less steep there.
            near = 0.2 if "deriv(" in mine.asked.expr else 0.05
            assert given.value == pytest.approx(mine.value + later, rel=near), mine.asked


def _series(engine: Engine) -> int:
    found = ask(engine, 'count({__name__!=""})', instant=True, span=SPAN, ahead=LATER)
    return int(found[0]["value"][1]) if found else 0


@pytest.mark.thorough
def test_a_newer_prometheus_answers_too(samples: Samples, answered: list[Answer], tmp_path: Path) -> None:
    """Prometheus 3 gives as many series for every query as Prometheus 2."""
    with database.prometheus(require_newer("prometheus"), tmp_path, samples) as newer:
        theirs = {each.asked: each.series for each in answers(newer)}

    assert {each.asked: each.series for each in answered} == theirs
