"""GiB-hours, hours of GPUs and money are what the exporters counted in each range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.src.queries import STATES, WASTED
from tests.support.dashboards import database, truth
from tests.support.dashboards.answers import SPAN
from tests.support.dashboards.database import Samples, ask
from tests.support.dashboards.figures import AT_NOW, over_minutes, query_of, total_of, value
from tests.support.dashboards.files import substitute_variables
from tests.support.dashboards.nodes import NOW
from tests.support.fleet.engines import Engine

pytestmark = pytest.mark.timeout(600)


def test_wasted_gibibyte_hours_are_those_of_the_simulation(engine: Engine) -> None:
    """The GiB-hours of a range are those that the exporters counted in it, whatever the range."""
    wasted = 'vramledger_owner_memory_wasted_byte_seconds_total{instance="hoarder"}'
    for minutes in (30, 31, 45, 60, 94, 120, 127):
        expr = query_of("vramledger-owner", "Wasted in time range")
        shown = ask(engine, over_minutes(expr, minutes, instance="hoarder"), instant=True, span=SPAN)
        counted = f"sum({wasted} - ({wasted} offset {minutes}m or 0 * {wasted})) / 2^30 / 3600"
        (true,) = ask(engine, counted, instant=True, span=SPAN)

        assert float(shown[0]["value"][1]) == pytest.approx(float(true["value"][1]), rel=0.005)


USAGE = "GiB-hours by owner and state"


@pytest.mark.parametrize("minutes", [15, 30, 120])
def test_each_owner_has_the_gibibyte_hours_that_the_exporter_counted(
    samples: Samples, engine: Engine, minutes: int
) -> None:
    """What each owner held and wasted in a short range is what its exporter counted in it, to a twentieth."""
    for ref, counter in (("A", "memory_byte_seconds_total"), ("B", "memory_wasted_byte_seconds_total")):
        rises = truth.increases(samples, f"vramledger_owner_{counter}", NOW - 60 * minutes, NOW)
        true: dict[tuple[str, str], float] = {}
        for labels, rise in rises.items():
            own = dict(labels)
            key = (own["instance"], own["owner"])
            true[key] = true.get(key, 0.0) + rise / 2**30 / 3600
        for node in {instance for instance, _ in true}:
            expr = over_minutes(query_of("vramledger-owner", USAGE, ref), minutes, instance=node)
            shown = {row["metric"]["owner"]: float(row["value"][1]) for row in ask(engine, expr, **AT_NOW)}
            for (instance, owner), hours in true.items():
                if instance == node and hours > 0.01:
                    assert shown[owner] == pytest.approx(hours, rel=0.05), (ref, node, owner)


BEGIN = NOW // 240 * 240 - 26 * 3600
"""When the world of one owner begins, before 1970: it is sent later."""


def alone(held: Callable[[float], float], restart: float | None = None, lost: float | None = None) -> Samples:
    """Return 26 hours of one owner's counter, every 15 s, and of what the rules record of it.

    Args:
        held: the GiB at a moment.
        restart: when the exporter is started again.
        lost: when the owner loses its counter, and gets a new one.
    """
    own = {"instance": "alone", "job": "vramledger", "owner": "ada", "owner_type": "user"}

    def series(name: str, **more: str) -> tuple[tuple[str, str], ...]:
        return tuple(sorted({"__name__": name, **own, **more}.items()))

    made, counted, since = Samples(), 0.0, 0.0
    held_in = {BEGIN: 0.0}
    for at in range(int(BEGIN) + 15, int(NOW), 15):
        counted += sum(held(at - 15 + second) for second in range(15))
        held_in[at] = counted
        if any(moment is not None and at - 15 < moment <= at for moment in (restart, lost)):
            since = counted
        node = {"__name__": "", "instance": "alone", "job": "vramledger"}
        made.add(
            "scrape",
            at,
            {
                series(COUNTER, gpu="0", uuid="GPU-1", state="active"): (counted - since) * 2**30,
                tuple(sorted({**node, "__name__": "process_start_time_seconds"}.items())): (
                    2e9 if restart is not None and at >= restart else 1e9
                ),
                tuple(sorted({**node, "__name__": "vramledger_up"}.items())): 1.0,
            },
        )
        if at % 240 == 0:
            mean = (counted - held_in[at - 240]) / 240
            record = series("vramledger_owner:memory_bytes:rate4m", state="active")
            made.add("rules", at, {record: mean * 2**30} if mean else {})
    return made


COUNTER = "vramledger_owner_memory_byte_seconds_total"
LATE = 172_800.0
"""Seconds by which the world of one owner is sent later."""


@pytest.mark.parametrize(
    "held",
    [
        lambda at: 40.0 if at > NOW - 180 else 4.0,
        lambda at: 4.0 if at > NOW - 180 else 40.0,
        lambda at: 10.0 if at > NOW - 600 else 0.0,
        lambda at: 10.0 if at % 600 < 150 else 1.0,
    ],
    ids=["more now", "less now", "just begun", "in turn"],
)
def test_what_changes_near_the_ends_of_a_range_is_counted(
    require_tool: Callable[[str], Path], tmp_path: Path, held: Callable[[float], float]
) -> None:
    """GiB-hours of a quarter of an hour to a day are right to a twentieth, whenever holdings change."""
    with database.prometheus(require_tool("prometheus"), tmp_path, alone(held), LATE) as engine:
        for minutes in (15, 30, 120, 1440):
            true = sum(held(NOW - second) for second in range(60 * minutes)) / 3600
            expr = over_minutes(query_of("vramledger-owner", USAGE), minutes)
            (shown,) = ask(engine, expr, instant=True, span=SPAN, ahead=LATE)
            assert float(shown["value"][1]) == pytest.approx(true, rel=0.05), minutes


@pytest.mark.parametrize("what", ["restart", "lost"])
def test_a_counter_that_begins_again_hides_nothing(
    require_tool: Callable[[str], Path], tmp_path: Path, what: str
) -> None:
    """Where an exporter or an owner's counter begins again, the recorded means count what was before."""
    made = alone(lambda _: 10.0, **{what: NOW - 1200})
    with database.prometheus(require_tool("prometheus"), tmp_path, made, LATE) as engine:
        for minutes in (30, 120, 1440):
            expr = over_minutes(query_of("vramledger-owner", USAGE), minutes)
            (shown,) = ask(engine, expr, instant=True, span=SPAN, ahead=LATE)
            assert float(shown["value"][1]) == pytest.approx(10 * minutes / 60, rel=0.05), minutes


def test_a_week_has_the_gibibyte_hours_of_a_range_of_a_week(engine: Engine) -> None:
    """Owner says the same of 7 days in its figure and in its table, which says so a week later too."""
    week = 7 * 24 * 60
    figure = over_minutes(query_of("vramledger-owner", "Wasted in time range"), week, instance="hoarder")
    (shown,) = ask(engine, figure, instant=True, span=SPAN)
    for ref, weeks in (("A", 0), ("B", 1), ("D", 3)):
        expr = over_minutes(query_of("vramledger-owner", "Wasted, week by week", ref), 60, instance="hoarder")
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
    weeks = [over_minutes(query_of("vramledger-owner", "Wasted, week by week", ref), 60) for ref in "AB"]
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
            expr = query_of("vramledger-owner", "GiB-hours by owner and state", ref)
            shown = ask(engine, over_minutes(expr, minutes, price="2", **chosen), **AT_NOW)
            assert sum(float(each["value"][1]) for each in shown) == pytest.approx(figure, rel=near), (
                minutes, ref,
            )  # fmt: skip
        cost = ask(engine, over_minutes(query_of("vramledger-owner", COST), minutes, **chosen), **AT_NOW)
        assert float(cost[0]["value"][1]) == pytest.approx(true["D"], rel=near)


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
    assert total_of(teams) == pytest.approx(2 * total_of(owners))
    assert every["value"] == pytest.approx(total_of(owners))
    assert stat["value"] == pytest.approx(total_of(owners))
    assert total_of(owners) > 0


def test_what_an_owner_wastes_now_is_what_its_devices_say(engine: Engine) -> None:
    """Owner says of now what Node says, and no mean of the minutes before."""
    for node in ("notebook", "hoarder", "stopped", "orphan", "recorded-policies"):
        (shown,) = value(engine, "vramledger-owner", "Memory", "B", instance=node)
        (wasted,) = value(engine, "vramledger-node", "Wasted", instance=node)
        assert shown["value"] == wasted["value"], node


def test_what_is_drawn_of_waste_is_what_is_counted(engine: Engine) -> None:
    """The area of *Wasted, by owner* is the GiB-hours of the range, but for the newest minutes."""
    chosen = {"instance": "hoarder"}
    drawn = ask(
        engine,
        substitute_variables(query_of("vramledger-fleet", "Wasted, by owner, 4-minute means"), **chosen),
        instant=False,
        span=7200,
    )
    area = sum(float(point) for series in drawn for _, point in series["values"][:-4]) * database.STEP
    counted = 'vramledger_owner_memory_wasted_byte_seconds_total{instance="hoarder"}'
    (true,) = ask(engine, f"sum({counted} offset 4m - {counted} offset 2h)", **AT_NOW)

    assert area == pytest.approx(float(true["value"][1]), rel=0.02)
