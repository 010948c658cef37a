"""Alerts and marks of failures are there when they should be, and each once."""

import itertools

import pytest

from tests.support.dashboards.answers import SPAN
from tests.support.dashboards.database import ask
from tests.support.dashboards.figures import query_of, total_of, value
from tests.support.dashboards.files import load_dashboards, substitute_variables
from tests.support.fleet.engines import Engine
from vramledger_agent.commands.parser import parse_duration

MARKS = {each["name"]: each for each in load_dashboards()["vramledger-device"]["annotations"]["list"]}

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder


def test_alerts_come_with_their_severity_and_their_beginning(engine: Engine) -> None:
    """Each firing alert has a rank, pages first, and how long its condition holds."""
    ranks = value(engine, "fleet", "Needs attention", "A")
    ages = value(engine, "fleet", "Needs attention", "B")

    assert {row["value"] for row in ranks} >= {1.0, 2.0}
    assert len(ages) >= len(ranks)
    assert all(0 <= row["value"] <= SPAN + 600 for row in ages)


def test_the_count_of_alerts_is_the_sum_by_severity(engine: Engine) -> None:
    """The figures by severity and the table beside them have the same alerts."""
    severities = [value(engine, "fleet", "Alerts", ref)[0] for ref in "ABC"]
    expr = query_of("fleet", "Needs attention").replace("bottomk(50, ", "(")
    rows = ask(engine, substitute_variables(expr), instant=True, span=SPAN)
    labels = [tuple(sorted(row["metric"].items())) for row in rows]

    assert total_of(severities) == len(rows) == len(set(labels))


def test_a_failed_scrape_ends_no_holder_and_makes_no_xid_new(engine: Engine) -> None:
    """Marks of ended holders need a device that still has a ledger; an old XID is not new after a gap."""

    def moments(name: str, node: str) -> int:
        expr = substitute_variables(MARKS[name]["expr"], instance=node)
        return sum(len(each["values"]) for each in ask(engine, expr, instant=False, span=SPAN))

    assert moments("Holders that ended", "down") == 0
    assert 1 <= moments("XID errors", "leak") <= 2


@pytest.mark.parametrize("late", [0.0, 15.0, 30.0, 45.0])
@pytest.mark.parametrize("name", ["Out of memory", "Holders that ended", "XID errors"])
def test_a_mark_of_a_failure_is_there_and_short(engine: Engine, name: str, late: float) -> None:
    """It stands where a failure begins, wherever the scrapes lie; unbroken marks would shade the graph."""
    expr, step = substitute_variables(MARKS[name]["expr"]), parse_duration(MARKS[name]["step"])
    found = ask(engine, expr, instant=False, span=SPAN, ahead=late, step=step)

    assert found
    for series in found:
        moments = [at for at, _ in series["values"]]
        unbroken = sum(later - at == step for at, later in itertools.pairwise(moments))
        assert unbroken <= 2, series["metric"]
