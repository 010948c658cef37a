"""The shipped alerting rules: their ``for``, their severity, and the metrics that they need."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vramledger_agent.commands.parser import parse_duration

HOME = Path(__file__).resolve().parents[3] / "alerts"
PAGE, WARNING = "page", "warning"

_NAME = re.compile(r"\bvramledger_[a-z0-9_]+(?![a-z0-9_:])")
_AGE = re.compile(r'(?:state_seconds:last\{state="(?!idle)\w+"\}|reserved_unused_since\w+:min) >= (\d+)')
_RECORDED = re.compile(r"\bvramledger_[a-z]+:\w+:\w+")


@dataclass(frozen=True, slots=True)
class Alert:
    name: str  # of the alert; the same name comes twice when it has two severities
    hold: float  # seconds of ``for``
    age: float  # seconds for which the state that it is about must have lasted, besides
    severity: str  # ``page``, ``warning``, ``info`` or ``none``
    expression: str  # PromQL


def files(home: Path = HOME) -> list[Path]:
    """Return the rule files of a directory; files with only recording rules come first."""
    return sorted(home.glob("*.rules.yml"), key=lambda path: (bool(_alerting(path)), path.name))


def groups(paths: Iterable[Path]) -> list[str]:
    """Return the names of the rule groups, in the order of their evaluation: those that record come first."""
    every = [group for path in paths for group in read_groups(path)]
    return [group["name"] for group in sorted(every, key=lambda each: "record" not in each["rules"][0])]


def evaluated(  # noqa: PLR0913 what is evaluated
    paths: Iterable[Path],
    order: Sequence[str],
    named: Collection[str] = (),
    *,
    everything: bool = False,
    texts: bool = False,
    asked: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the groups with the rules that decide which alerts fire, and where wanted with their texts.

    The rest takes 40 % of the time. ``named`` are the alerts, all of them when empty; ``everything`` keeps
    what decides about no alert, too. With queries that are ``asked``, what they read stays instead.
    """
    there = {group["name"]: group for path in paths for group in read_groups(path)}
    left_out = set() if texts else {"annotations"}
    within = {
        name: [{key: rule[key] for key in rule.keys() - left_out} for rule in group["rules"]]
        for name, group in there.items()
    }
    rules = [rule for each in within.values() for rule in each]
    named = re.findall(r"\w+", " ".join(asked)) or named
    chosen_alerts = [rule for rule in rules if "alert" in rule and (not named or rule["alert"] in named)]
    read = [*chosen_alerts, *({"expr": query} for query in asked)]
    wanted = {rule["alert"] for rule in chosen_alerts} | _recorded_for(read, rules)
    found = []
    for name in order:
        chosen = [
            rule for rule in within[name] if everything or rule.get("record", rule.get("alert")) in wanted
        ]
        if chosen:
            found.append({**there[name], "rules": chosen})
    return found


def alerts(home: Path = HOME) -> list[Alert]:
    return [_alert(raw) for path in files(home) for raw in _alerting(path)]


@cache  # a regular expression over all rules
def families() -> frozenset[str]:
    """Return the exporter's families that the rules use."""
    every = [group for path in files() for group in read_groups(path)]
    expressions = [rule["expr"] for group in every for rule in group["rules"]]
    return frozenset(name for expression in expressions for name in _NAME.findall(str(expression)))


@cache  # PyYAML is slow, and each of a hundred scenarios asks
def read_groups(path: Path) -> list[dict[str, Any]]:
    """Return the rule groups of a file."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: list[dict[str, Any]] = yaml.load(path.read_text(encoding="utf-8"), loader)["groups"]  # noqa: S506
    return found


def _alerting(path: Path) -> list[Mapping[str, Any]]:
    return [rule for group in read_groups(path) for rule in group["rules"] if "alert" in rule]


def _alert(raw: Mapping[str, Any]) -> Alert:
    hold = str(raw.get("for", "0s"))
    age = _AGE.search(str(raw["expr"]))
    return Alert(
        age=float(age[1]) if age else 0.0,
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
        rule = left.pop()
        texts = " ".join(rule.get("annotations", {}).values())
        read = {*_RECORDED.findall(f"{rule['expr']} {texts}")} - names
        names |= read
        left += [rule for rule in rules if rule.get("record") in read]
    return names
