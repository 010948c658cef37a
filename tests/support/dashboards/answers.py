"""A real engine's answer to every query of every dashboard, as Grafana would send it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.support.dashboards.database import ask
from tests.support.dashboards.files import PanelQuery, all_queries, substitute_variables
from tests.support.dashboards.nodes import HOURS
from tests.support.fleet.engines import Engine

_NONE = "only what is above 0 is drawn"
_UNSEEN = "of holders that cannot be seen, no owner is known"
_YOUNG = "nothing is older than three hours"
EMPTY: dict[tuple[str, str, str], str] = {
    ("vramledger-exporter", "Unaccounted time", "A"): _NONE,
    **{(f"vramledger-{uid}", "Exporters", "E"): "the rules are loaded"
       for uid in ("exporter", "fleet", "framework", "owner")},
    ("vramledger-exporter", "Collector success", "A"): "no collector fails",
    ("vramledger-exporter", "Failed samples", "B"): "some samples fail",
    ("vramledger-exporter", "Web configuration in use", "B"): "an exporter has a file",
    **{("vramledger-exporter", "Series dropped, by device", ref): _NONE for ref in "AB"},
    ("vramledger-fleet", "GiB-hours by team and state", "H"): _UNSEEN,
    ("vramledger-fleet", "Largest wasted holdings", "E"): "no program that wastes tells its peak need",
    ("vramledger-owner", "GiB-hours by owner and state", "J"): _UNSEEN,
    **{("vramledger-process", "Steady growth", ref): _YOUNG for ref in "CDEF"},
    **{("vramledger-owner", "Wasted, week by week", ref): _YOUNG for ref in "BCD"},
    ("vramledger-fleet", "Wasted, by owner, 4-minute means", "B"): "no more than ten owners have wasted",
}  # fmt: skip
"""Queries without a result on these nodes, each with the reason: dashboard, panel, ref."""

SPAN = HOURS * 3600 - 600


class Answer(NamedTuple):
    """The result of one query: how many series, and the largest value with its labels."""

    asked: PanelQuery
    series: int
    labels: dict[str, str]
    value: float | None


def devices(engine: Engine, ahead: float) -> list[str]:
    found = ask(engine, "vramledger_device_info", instant=True, span=SPAN, ahead=ahead)
    return sorted(each["metric"]["uuid"] for each in found)


def processes(engine: Engine, ahead: float) -> list[dict[str, str]]:
    found = ask(engine, 'vramledger_process_memory_bytes{pid!="other"}', instant=True, span=SPAN, ahead=ahead)
    pairs = {(each["metric"]["instance"], each["metric"]["pid"]) for each in found}
    return [{"instance": instance, "pid": pid} for instance, pid in sorted(pairs)]


def answers(engine: Engine, ahead: float = 0.0) -> Iterator[Answer]:
    """Yield the answer to every query; about a device or process, that for the one of which most is known."""
    uuids = [{"uuid": uuid} for uuid in devices(engine, ahead)]
    pids = processes(engine, ahead)
    for asked in all_queries():
        choices = uuids if "$uuid" in asked.expr else pids if "$pid" in asked.expr else [{}]
        best: Sequence[Any] = []
        for chosen in choices:
            expr = substitute_variables(asked.expr, **chosen)
            found = ask(engine, expr, instant=asked.instant, span=SPAN, ahead=ahead)
            best = max(best, found, key=lambda each: (len(each), max(map(_largest, each), default=0.0)))
        if not best:
            yield Answer(asked, 0, {}, None)
            continue
        value, series = max(((_largest(each), each) for each in best), key=lambda each: each[0])
        labels = {name: text for name, text in series["metric"].items() if name != "__name__"}
        yield Answer(asked, len(best), labels, value)


def _largest(series: Mapping[str, Any]) -> float:
    points = series["values"] if "values" in series else [series["value"]]
    return max(float(value) for _, value in points)
