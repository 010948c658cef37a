"""The alerting rules as Prometheus would evaluate them, over hours at once.

Recording rules are evaluated by promtool, in the order in which they need each other. An alert's
expression is one range query; ``for`` and ``keep_firing_for`` are then applied here as Prometheus' own
rule manager does, and a test holds the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.faults.database import Series, server
from vramledger.config import parse_duration

HOME = Path(__file__).resolve().parents[2] / "alerts"
STEP = 30.0
"""Seconds between evaluations, of every group: no result of one group is older than another needs it."""

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*(?::[a-zA-Z0-9_:]+)?")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as its file says it.

    Attributes:
        name: of the alert, or of the series that it records.
        expression: PromQL.
        alert: whether it is one.
        hold: seconds of ``for``.
        keep: seconds of ``keep_firing_for``.
        labels: that it adds.
    """

    name: str
    expression: str
    alert: bool
    hold: float
    keep: float
    labels: Mapping[str, str]

    @property
    def severity(self) -> str:
        """How loud it is; a page is ``critical``."""
        return self.labels.get("severity", "")


class Firing(NamedTuple):
    """A span in which one alert fires for one label set; ``pending`` is since when its expression held."""

    rule: Rule
    labels: Mapping[str, str]
    pending: float
    begin: float
    end: float


def load(home: Path = HOME) -> list[Rule]:
    """Read every rule of the rule files of a directory, in their order."""
    return [_rule(raw) for path in files(home) for group in _groups(path) for raw in group["rules"]]


def files(home: Path = HOME) -> list[Path]:
    """Return the rule files of a directory: those with groups at their top."""
    return [path for path in sorted(home.glob("*.y*ml")) if _groups(path)]


def _groups(path: Path) -> list[dict[str, Any]]:
    content = yaml.safe_load(path.read_text())
    groups: list[dict[str, Any]] = content.get("groups", []) if isinstance(content, dict) else []
    return groups


def _rule(raw: Mapping[str, Any]) -> Rule:
    return Rule(
        name=raw.get("alert") or raw["record"],
        expression=str(raw["expr"]),
        alert="alert" in raw,
        hold=_seconds(raw.get("for")),
        keep=_seconds(raw.get("keep_firing_for")),
        labels=raw.get("labels") or {},
    )


def _seconds(text: object) -> float:
    return parse_duration(str(text)) if text not in (None, 0, "0", "0s", "0m") else 0.0


def families(rules: Sequence[Rule]) -> frozenset[str]:
    """Return the exporter's families that rules ask for."""
    found = {name for rule in rules for name in _NAME.findall(rule.expression)}
    return frozenset(name for name in found if name.startswith("vramledger_") and ":" not in name)


def stages(rules: Sequence[Rule]) -> list[list[Rule]]:
    """Sort recording rules into stages, each of which needs only what the stages before it record."""
    left = [rule for rule in rules if not rule.alert]
    done: list[list[Rule]] = []
    while left:
        names = {rule.name for rule in left}
        ready = [rule for rule in left if names.isdisjoint(_NAME.findall(rule.expression))]
        if not ready:
            message = f"recording rules need each other in a circle: {sorted(names)}"
            raise ValueError(message)
        done.append(ready)
        left = [rule for rule in left if rule not in ready]
    return done


def evaluate(
    rules: Sequence[Rule], database: Path, scratch: Path, begin: float, end: float, step: float = STEP
) -> list[Firing]:
    """Record what the recording rules record, then let every alert fire when it must."""
    for number, stage in enumerate(stages(rules)):
        path = scratch / f"stage-{number}.yml"
        group = {
            "name": f"stage-{number}",
            "interval": f"{step:.0f}s",
            "rules": [
                {"record": rule.name, "expr": rule.expression, "labels": dict(rule.labels)} for rule in stage
            ],
        }
        path.write_text(yaml.safe_dump({"groups": [group]}))
        with server(database, scratch) as prometheus:
            prometheus.record(path, begin, end)
    found: list[Firing] = []
    with server(database, scratch) as prometheus:
        for rule in rules:
            if rule.alert:
                series = prometheus.query_range(rule.expression, begin, end, step)
                found += firings(rule, series, step)
    return found


def firings(rule: Rule, series: Sequence[Series], step: float) -> list[Firing]:
    """Apply ``for`` and ``keep_firing_for`` to what an expression gave at every step."""
    return [
        firing
        for one in series
        for firing in _spans(rule, one.labels, [at for at, _ in one.points], step)
    ]


def _spans(rule: Rule, labels: Mapping[str, str], times: Sequence[float], step: float) -> Iterator[Firing]:
    """Yield the spans in which an alert with these labels fires.

    It is pending from the first evaluation that gives the series, and fires at the first at which it has
    been for ``for``. An evaluation without it ends that, but a firing one lasts for ``keep_firing_for``.
    """
    labels = {name: value for name, value in labels.items() if name != "__name__"} | dict(rule.labels)
    pending = begin = last = None
    for at in times:
        if last is not None and pending is not None:
            absent = at - last > 1.5 * step
            kept = begin is not None and at - last - 2 * step < rule.keep  # since its first absence
            if absent and not kept:
                if begin is not None:
                    yield Firing(rule, labels, pending, begin, last + step + rule.keep)
                pending = begin = None
        if pending is None:
            pending = at
        if begin is None and at - pending >= rule.hold:
            begin = at
        last = at
    if begin is not None and last is not None and pending is not None:
        yield Firing(rule, labels, pending, begin, last + step + rule.keep)
