"""GiB-hours, hours of GPUs and money are what the exporters counted in each range."""

import pytest

from tests.support.dashboards import database, truth
from tests.support.dashboards.database import Samples, ask
from tests.support.dashboards.figures import figure, one, over_minutes, query_of, rows_of, total_of, value
from tests.support.dashboards.files import substitute_variables
from tests.support.dashboards.nodes import NOW
from tests.support.fleet.engines import Engine

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder

USAGE = "GiB-hours by owner and state"


@pytest.mark.parametrize("minutes", [30, 120])
def test_each_owner_has_what_the_exporter_counted(samples: Samples, engine: Engine, minutes: int) -> None:
    """What each owner held and wasted is what its exporter counted, right to 4 minutes at each end."""
    for ref, counter in (("A", "memory_byte_seconds_total"), ("B", "memory_wasted_byte_seconds_total")):
        name = f"vramledger_owner_{counter}"
        least, most = (
            _by_owner(truth.increases(samples, name, NOW - 60 * minutes + ends, NOW - ends))
            for ends in (300, -300)
        )
        for node, owner in least:
            rows = rows_of(engine, over_minutes(query_of("owner", USAGE, ref), minutes, instance=node))
            shown = {row["owner"]: row["value"] for row in rows}
            if least[node, owner] > 0.01:
                longest = max(most.get((node, owner), 0.0), least[node, owner]) * (1 + 10 / minutes)
                assert 0.95 * least[node, owner] <= shown[owner] <= 1.05 * longest, (ref, node, owner)


def _by_owner(rises: dict[tuple[tuple[str, str], ...], float]) -> dict[tuple[str, str], float]:
    hours: dict[tuple[str, str], float] = {}
    for labels, rise in rises.items():
        own = dict(labels)
        key = (own["instance"], own["owner"])
        hours[key] = hours.get(key, 0.0) + rise / 2**30 / 3600
    return hours


def test_a_week_has_the_gibibyte_hours_of_a_range_of_a_week(engine: Engine) -> None:
    """Owner says the same of 7 days in its figure and in its table, which says so a week later too."""
    week = 7 * 24 * 60
    expr = over_minutes(query_of("owner", "GiB-hours in time range", "C"), week, instance="hoarder")
    shown = one(rows_of(engine, expr))
    assert shown > 0
    for ref, weeks in (("A", 0), ("B", 1), ("D", 3)):
        expr = over_minutes(query_of("owner", "Wasted, week by week", ref), 60, instance="hoarder")
        said = total_of(rows_of(engine, expr, ahead=60.0 * weeks * week))
        assert said == pytest.approx(shown, rel=1e-6), ref


COST = "Waste in time range, $currency"


def test_hours_and_cost_are_those_of_the_simulation(samples: Samples, engine: Engine) -> None:
    """GiB-hours by state, hours of whole GPUs and their cost are what the exporters counted in each range."""
    chosen = {"instance": "hoarder|stopped|zombie|orphan"}
    memory = truth.by_label(truth.values(samples, "vramledger_device_memory_total_bytes", NOW), "uuid")
    # States change within the longest range, and a mean of 4 minutes may have two of them.
    for minutes, near in ((60, 0.1), (120, 0.05), (168, 0.1)):
        begin = NOW - 60 * minutes
        held = truth.increases(samples, "vramledger_owner_memory_byte_seconds_total", begin, NOW, **chosen)
        name = "vramledger_owner_memory_wasted_byte_seconds_total"
        wasted = truth.increases(samples, name, begin, NOW, **chosen)
        states = truth.by_label(held, "state")
        byte_seconds = {"A": sum(held.values()), "B": sum(wasted.values())}
        for ref, state in zip("EFGHI", ("active", "idle", "stopped", "orphaned", "zombie"), strict=True):
            byte_seconds[ref] = states[state]
        true = {ref: each / 2**30 / 3600 for ref, each in byte_seconds.items()}
        true["C"] = sum(each / memory[dict(labels)["uuid"]] for labels, each in wasted.items()) / 3600
        true["D"] = 2 * true["C"]
        for ref, hours in true.items():
            expr = over_minutes(query_of("owner", USAGE, ref), minutes, price="2", **chosen)
            assert total_of(rows_of(engine, expr)) == pytest.approx(hours, rel=near), (minutes, ref)
        cost = one(rows_of(engine, over_minutes(query_of("owner", COST), minutes, **chosen)))
        assert cost == pytest.approx(true["D"], rel=near)


def test_wasted_means_the_same_everywhere(engine: Engine) -> None:
    """The fleet, its teams, its owners and its nodes waste the same number of bytes, and of GiB-hours."""
    chosen = {"instance": "hoarder|pod|notebook|stopped|zombie|orphan|dead"}
    teams = total_of(value(engine, "fleet", "GiB-hours by team and state", "B", **chosen))
    owners = total_of(value(engine, "fleet", "Waste by owner", **chosen))

    assert figure(engine, "fleet", "Wasted memory", **chosen) == figure(engine, "node", "Wasted", **chosen)
    assert teams == pytest.approx(owners)
    assert figure(engine, "owner", "GiB-hours in time range", "C", **chosen) == pytest.approx(owners)
    assert owners > 0


def test_what_an_owner_wastes_now_is_what_its_devices_say(engine: Engine) -> None:
    """Owner says of now what Node says, and no mean of the minutes before."""
    for node in ("notebook", "hoarder", "stopped", "orphan", "recorded-policies"):
        shown = figure(engine, "owner", "Memory", "B", instance=node)
        assert shown == figure(engine, "node", "Wasted", instance=node), node


def test_what_is_drawn_of_waste_is_what_is_counted(engine: Engine) -> None:
    """The area of *Wasted, by owner* is the GiB-hours of the range, but for the newest minutes."""
    expr = substitute_variables(query_of("fleet", "Wasted, by owner, 4-minute means"), instance="hoarder")
    drawn = ask(engine, expr, instant=False, span=7200)
    area = sum(float(point) for series in drawn for _, point in series["values"][:-4]) * database.STEP
    counted = 'vramledger_owner_memory_wasted_byte_seconds_total{instance="hoarder"}'
    true = one(rows_of(engine, f"sum({counted} offset 4m - {counted} offset 2h)"))

    assert area == pytest.approx(true, rel=0.02)
