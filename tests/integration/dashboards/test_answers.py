"""Real engines answer every query of every dashboard, from hours of many healthy and faulty nodes."""

from __future__ import annotations

import itertools
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.src.queries import (
    DOWN,
    DRIVER_LOST,
    NO_AGENT,
    NO_DRIVER,
    NO_LIMIT,
    NO_NEED,
    NO_SCHEDULER,
    NOT_COMPARABLE,
    NOTHING,
    RELEASED,
    STALLED,
    WATCHING,
    exporter_status,
)
from tests.integration.dashboards.test_contract import TARGET
from tests.integration.dashboards.test_files import properties, selectors
from tests.support.dashboards import database, truth
from tests.support.dashboards.answers import EMPTY, SPAN, Answer, answers, processes
from tests.support.dashboards.database import Samples, ask
from tests.support.dashboards.files import load_dashboards, panels, substitute_variables
from tests.support.dashboards.nodes import NODES, NOW, RECORDED, SCRAPE, scrapes
from tests.support.fleet.engines import Engine, running, until
from tests.support.ports import free_port
from tests.support.requirements import require_newer

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
            if panel["title"] == "Neighbours":
                uuids |= next(each for each in processes(engine, 0) if each["instance"] == "hoarder")
            labels = {"Value", *(f"Value #{target['refId']}" for target in panel["targets"])}
            for target in panel["targets"]:
                for each in ask(
                    engine, substitute_variables(target["expr"], **uuids), instant=True, span=SPAN
                ):
                    labels |= each["metric"].keys()
            assert set(properties(panel)) <= labels, panel["title"]


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
        for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", matchers)
        if label not in TARGET | had[metric]
    }

    assert wrong == set()


def test_the_variable_of_devices_shows_names_and_gives_uuids(engine: Engine) -> None:
    """Grafana's text is node, index and product, its value the UUID."""
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
    assert "hoarder / 0 / NVIDIA H200" in texts
    assert {match["value"] for match in matched if match} == {each["metric"]["uuid"] for each in found}


def test_the_hoarder_is_found_in_three_clicks(engine: Engine) -> None:
    """Fleet to owner to device: the first row names the owner, the next ones the process and the GPU."""
    rows = value(engine, "vramledger-fleet", "Waste by owner", instance="hoarder|nobody|ranks|leak")
    worst = max(rows, key=lambda row: float(str(row["value"])))
    assert (worst["owner_type"], worst["owner"]) == ("slurm", "17")

    (process,) = value(engine, "vramledger-owner", "Processes", owner=str(worst["owner"]))
    assert (process["state"], process["instance"], process["gpu"]) == ("idle", "hoarder", "0")
    (since,) = value(engine, "vramledger-owner", "Processes", "B", owner=str(worst["owner"]))
    assert NOW - float(str(since["value"])) / 1000 > 3600

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
    assert value(engine, "vramledger-owner", "Processes", "F", instance="notebook") == []
    assert len(value(engine, "vramledger-owner", "Processes", "A", instance="notebook")) == 1
    for panel, ref in (("Needs", "A"), ("Could be freed", "A"), ("Where its memory goes", "B")):
        assert value(engine, "vramledger-process", panel, ref, instance="notebook") == []


def test_wasted_gibibyte_hours_are_those_of_the_simulation(engine: Engine) -> None:
    """The GiB-hours of a range are those that the exporters counted in it, whatever the range."""
    wasted = 'vramledger_owner_memory_wasted_byte_seconds_total{instance="hoarder"}'
    for minutes in (30, 60, 120, 176):
        expr = _expr("vramledger-owner", "Wasted in time range")
        shown = ask(engine, _over(expr, minutes, instance="hoarder"), instant=True, span=SPAN)
        counted = f"sum({wasted} - ({wasted} offset {minutes}m or 0 * {wasted})) / 2^30 / 3600"
        (true,) = ask(engine, counted, instant=True, span=SPAN)

        # A mean of 4 minutes at each end may be inside or outside.
        rest = 8 / minutes
        assert float(shown[0]["value"][1]) == pytest.approx(float(true["value"][1]), rel=0.02 + rest)


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
        true = {
            "A": sum(held.values()) / 2**30 / 3600,
            "B": sum(wasted.values()) / 2**30 / 3600,
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
        cost = ask(engine, _over(_expr("vramledger-owner", "Cost of the waste"), minutes, **chosen), **_NOW)
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
    teams = value(engine, "vramledger-fleet", "Waste by team", **chosen)
    owners = value(engine, "vramledger-fleet", "Waste by owner", **chosen)

    assert fleet["value"] == node["value"]
    assert _total(teams) == pytest.approx(_total(owners))
    assert _total(owners) > 0


def test_the_parts_of_a_total_add_up(engine: Engine) -> None:
    """GPUs up and down are all whole GPUs; nodes watched, not watched and released are all nodes."""
    gpus = [value(engine, "vramledger-fleet", "GPUs", ref)[0] for ref in "AB"]
    known = 'count(count by (instance, gpu) (vramledger_device_up{uuid!~"MIG-.*"}))'
    (whole,) = ask(engine, known, instant=True, span=SPAN)
    nodes = [value(engine, "vramledger-fleet", "Exporters", ref)[0] for ref in "ABC"]

    assert _total(gpus) == float(whole["value"][1])
    assert _total(nodes) == len(NODES) + len(RECORDED)


def test_each_node_that_is_not_fully_watched_is_named(engine: Engine) -> None:
    """A node that is down, stalled, released or blind, or has a silent agent or a lost GPU, is there."""
    rows = value(engine, "vramledger-fleet", "Nodes that are not fully watched")
    found = {(str(row["instance"]), str(row["reason"])) for row in rows}

    assert {
        ("down", "exporter down"),
        ("driver-lost", "driver lost"),
        ("stalled", "samples stopped"),
        ("released", "released"),
        ("blind", "host PID namespace missing"),
        ("device-lost", "GPU not reachable"),
        ("agent-silent", "agent silent"),
    } <= found
    assert not {instance for instance, _ in found} & {"hoarder", "ranks", "small-jobs"}


@pytest.mark.parametrize(
    ("dashboard", "panel", "node", "meaning"),
    [
        ("fleet", "Growing: count", "hoarder", NOTHING),
        ("fleet", "Firing alerts: count", "small-jobs", NOTHING),
        ("fleet", "Firing alerts: count", "hoarder", 5),
        ("fleet", "Growing: count", "driver-lost", NO_DRIVER),
        ("framework", "torch: fragmentation: count", "notebook", NO_AGENT),
        ("framework", "Held beyond need, by program: count", "jax", 1),
        ("framework", "Held beyond need, by program: count", "hoarder", NO_NEED),
        ("framework", "Held beyond need, by program: count", "notebook", NO_NEED),
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
    assert [row["value"] for row in shares] == [0.5]
    (named,) = (row["owner"] for row in shares)
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


def test_the_recorded_status_is_the_live_one(engine: Engine) -> None:
    """What the rules record of each exporter for graphs is what the indicator of every dashboard says now."""
    live = ask(engine, substitute_variables(exporter_status()), instant=True, span=0)
    recorded = ask(engine, "vramledger_node:exporter_status:code", instant=True, span=0)

    def codes(found: list[dict[str, Any]]) -> dict[str, float]:
        return {each["metric"]["instance"]: float(each["value"][1]) for each in found}

    assert codes(recorded) == codes(live)
    assert set(codes(live).values()) == {DOWN, DRIVER_LOST, STALLED, WATCHING, RELEASED}


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
    apart = _total(value(engine, "vramledger-node", "Holders", "H", instance="managed"))
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
    """Each firing alert has a rank, pages first, and the time at which its condition began."""
    ranks = value(engine, "vramledger-fleet", "Firing alerts", "A")
    begun = value(engine, "vramledger-fleet", "Firing alerts", "B")

    assert {row["value"] for row in ranks} >= {1.0, 2.0}
    assert len(begun) >= len(ranks)
    assert all(0 < float(str(row["value"])) / 1000 <= NOW for row in begun)


def test_a_failed_scrape_ends_no_holder_and_makes_no_xid_new(engine: Engine) -> None:
    """Marks of ended holders need a device that still has a ledger; an old XID is not new after a gap."""
    marks = {each["name"]: each for each in load_dashboards()["vramledger-device"]["annotations"]["list"]}

    def moments(name: str, node: str) -> int:
        expr = substitute_variables(marks[name]["expr"], instance=node)
        return sum(len(each["values"]) for each in ask(engine, expr, instant=False, span=SPAN))

    assert moments("Holders that ended", "down") == 0
    assert 1 <= moments("XID errors", "leak") <= 2


_NOW: dict[str, Any] = {"instant": True, "span": SPAN}


def test_the_count_of_alerts_is_the_sum_by_severity(engine: Engine) -> None:
    """The figures by severity and the table beside them have the same alerts."""
    rows = value(engine, "vramledger-fleet", "Firing alerts: count")
    severities = [value(engine, "vramledger-fleet", "Alerts", ref)[0] for ref in "ABC"]

    assert _total(rows) == _total(severities)


def test_marks_of_failures_do_not_cover_the_graph(engine: Engine) -> None:
    """A program that fails again and again is marked where it begins to: Grafana shades unbroken marks."""
    marks = {each["name"]: each for each in load_dashboards()["vramledger-device"]["annotations"]["list"]}
    for name in ("Out of memory", "Holders that ended", "XID errors"):
        found = ask(engine, substitute_variables(marks[name]["expr"]), instant=False, span=SPAN)

        assert found, name
        for series in found:
            moments = [at for at, _ in series["values"]]
            unbroken = sum(later - at == database.STEP for at, later in itertools.pairwise(moments))
            assert unbroken <= 2, (name, series["metric"])


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
    newest = sum(1 for values in samples.points.values() if values[-1][0] == NOW)
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
        given = theirs[mine.asked]
        # A graph has other points in time, and other processes may live then. Current values are the same; a
        # sum over subqueries is almost the same.
        assert bool(given.series) == bool(mine.series), mine.asked
        if mine.asked.instant and mine.value is not None:
            assert given.series == mine.series, mine.asked
            # What `timestamp()` gives is later too.
            later = 1000 * LATER if re.search(r"\btimestamp\(", mine.asked.expr) else 0.0
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
