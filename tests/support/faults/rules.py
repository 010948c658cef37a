"""The shipped alerting rules: their ``for``, their severity, and the metrics that they need."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vramledger.config import parse_duration

HOME = Path(__file__).resolve().parents[3] / "alerts"
PAGE, WARNING = "page", "warning"

_NAME = re.compile(r"\bvramledger_[a-z0-9_]+(?![a-z0-9_:])")
_RECORDED = re.compile(r"\bvramledger_[a-z]+:\w+:\w+")


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule.

    Attributes:
        name: of the alert; the same name comes twice when it has two severities.
        hold: seconds of ``for``.
        severity: ``page``, ``warning``, ``info`` or ``none``.
        expression: PromQL.
    """

    name: str
    hold: float
    severity: str
    expression: str


def files(home: Path = HOME) -> list[Path]:
    """Return the rule files of a directory; files with only recording rules come first."""
    return sorted(home.glob("*.rules.yml"), key=lambda path: (bool(_alerting(path)), path.name))


def groups(paths: Iterable[Path]) -> list[str]:
    """Return the names of the rule groups, in the order of their evaluation: those that record come first."""
    every = [group for path in paths for group in read_groups(path)]
    return [group["name"] for group in sorted(every, key=lambda each: "record" not in each["rules"][0])]


def evaluated(
    paths: Iterable[Path], order: Sequence[str], named: Collection[str] = (), *, everything: bool = False
) -> list[dict[str, Any]]:
    """Return the groups with the rules that decide which alerts fire, and without the alerts' texts.

    Each evaluation of an alert that fires writes its texts, with a query for each figure. With the recording
    rules that only dashboards read, they take 40 % of the time.

    Args:
        paths: of the rule files.
        order: of the groups.
        named: the alerts; all of them when empty.
        everything: keep the rules that decide about no alert, too.
    """
    there = {group["name"]: group for path in paths for group in read_groups(path)}
    rules = [rule for group in there.values() for rule in group["rules"]]
    chosen_alerts = [rule for rule in rules if "alert" in rule and (not named or rule["alert"] in named)]
    wanted = {rule["alert"] for rule in chosen_alerts} | _recorded_for(chosen_alerts, rules)
    found = []
    for name in order:
        chosen = [
            {key: value for key, value in rule.items() if key != "annotations"}
            for rule in there[name]["rules"]
            if everything or rule.get("record", rule.get("alert")) in wanted
        ]
        if chosen:
            found.append({**there[name], "rules": chosen})
    return found


def alerts(home: Path = HOME) -> list[Alert]:
    """Read every alerting rule of a directory."""
    return [_alert(raw) for path in files(home) for raw in _alerting(path)]


def families(home: Path = HOME) -> frozenset[str]:
    """Return the exporter's families that the rules use."""
    every = [group for path in files(home) for group in read_groups(path)]
    expressions = [rule["expr"] for group in every for rule in group["rules"]]
    return frozenset(name for expression in expressions for name in _NAME.findall(str(expression)))


def reduce(home: Path, into: Path, wanted: Callable[[Mapping[str, Any]], bool]) -> Path:
    """Write the wanted alerts of a directory of rules, with the recording rules that they need, into another.

    What these alerts do is the same without the other rules, and takes less than half of the time.
    """
    content = {path.name: [{**group} for group in read_groups(path)] for path in files(home)}
    every = [rule for groups_of in content.values() for group in groups_of for rule in group["rules"]]
    names = _recorded_for([rule for rule in every if "alert" in rule and wanted(rule)], every)
    into.mkdir(exist_ok=True)
    for name, groups_of in content.items():
        for group in groups_of:
            group["rules"] = [
                rule
                for rule in group["rules"]
                if rule.get("record") in names or ("alert" in rule and wanted(rule))
            ]
        kept = [group for group in groups_of if group["rules"]]
        if kept:
            (into / name).write_text(yaml.safe_dump({"groups": kept}), encoding="utf-8")
    return into


@cache  # PyYAML is slow, and each of a hundred scenarios asks
def read_groups(path: Path) -> list[dict[str, Any]]:
    """Return the rule groups of a file."""
    found: list[dict[str, Any]] = yaml.safe_load(path.read_text())["groups"]
    return found


def _alerting(path: Path) -> list[Mapping[str, Any]]:
    return [rule for group in read_groups(path) for rule in group["rules"] if "alert" in rule]


def _alert(raw: Mapping[str, Any]) -> Alert:
    hold = str(raw.get("for", "0s"))
    return Alert(
        name=str(raw["alert"]),
        hold=0.0 if re.fullmatch(r"0[a-z]*", hold) else parse_duration(hold),
        severity=str(raw.get("labels", {}).get("severity", "none")),
        expression=str(raw["expr"]),
    )


def _recorded_for(wanted: Iterable[Mapping[str, Any]], rules: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the recording rules that these rules read, themselves or by other recordings."""
    names: set[str] = set()
    left = list(wanted)
    while left:
        read = {*_RECORDED.findall(str(left.pop()["expr"]))} - names
        names |= read
        left += [rule for rule in rules if rule.get("record") in read]
    return names
