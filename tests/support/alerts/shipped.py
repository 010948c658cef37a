"""The shipped rules by their names, their thresholds and waits, and a node on which each of them fires."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.alerts.boundaries import Thresholds, boundaries
from tests.support.alerts.boundary import Boundary
from tests.support.alerts.promtool import ALERTS, rules
from vramledger.commands.alert_settings import read_content, read_settings
from vramledger_agent.commands.parser import parse_duration


def name_of(rule: Mapping[str, Any]) -> str:
    """Return what distinguishes a rule from all others: its alert and the labels that it sets."""
    own = [str(value) for label, value in rule["labels"].items() if label != "many"]
    return "-".join([rule["alert"], *own])


def thresholds(home: Path) -> Thresholds:
    """Return the defaults of a folder of rules, in bytes, seconds and shares."""
    content = read_content((home / "thresholds.yml").read_text(encoding="utf-8"))
    return {name: float(value) for name, value in read_settings(content).defaults.items()}


RULES = {name_of(rule): rule for rule in rules() if "alert" in rule}
WAITS = {
    name: parse_duration(rule["for"]) / 60 if rule.get("for", "0s") != "0s" else 0.0
    for name, rule in RULES.items()
}
TABLE = boundaries(thresholds(ALERTS), WAITS)


def watched_for(boundary: Boundary) -> float:
    """Return for how many minutes a boundary is watched; at the end the rule fires."""
    return (boundary.begins or 0) + WAITS[boundary.rule] + boundary.minutes


def first_of_each_rule(within: float) -> dict[str, Boundary]:
    """Return the first boundary of each rule that fires within so many minutes."""
    return {each.rule: each for each in reversed(TABLE) if watched_for(each) <= within}
