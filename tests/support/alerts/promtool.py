"""The alerts that fire on given series, by the real promtool and the real rules."""

import json
import math
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.alerts.nodes import Node
from tests.support.faults.evaluation import Manager, Samples, ask, promtool_environment
from tests.support.faults.rules import evaluated, read_groups
from tests.support.requirements import require_tool, require_version

ALERTS = Path(__file__).parents[3] / "alerts"
RULE_FILES = sorted(ALERTS.glob("*.rules.yml"))

EVALUATION = 30
"""Seconds between two evaluations, the shortest interval of the rule files' groups; for boundaries."""

STEP = 60
"""The same, the interval of most groups: what asks about whole minutes alone then takes half the time."""

SELDOM = 240
"""The same, for what lasts longer and has no exact time: more, and a record is too old for the next round."""

BY_RULE_FILES = Manager(EVALUATION)

RECORDING = tuple(
    f"vramledger-{name}"
    for name in (
        "clock devices nodes allocators growth growth-driver growth-slow growth-long pieces holders ranks"
        " costs owners"
    ).split()
)
"""Groups whose results other groups read: they come first, so that a boundary is exact."""

_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_FAILED = re.compile(r"alertname: ?(\w+), time: ?(\w+),")


Series = Mapping[str, str]
"""Its name and its values, as promtool takes them."""


class Alert(NamedTuple):
    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def rules() -> list[dict[str, Any]]:
    """Return every rule of every file, with its group's name and interval."""
    return [
        {**rule, "group": group["name"], "interval": group["interval"], "file": path.name}
        for path in RULE_FILES
        for group in read_groups(path)
        for rule in group["rules"]
    ]


def alert_names() -> list[str]:
    return list(dict.fromkeys(rule["alert"] for rule in rules() if "alert" in rule))


def evaluation_order() -> list[str]:
    """Return every group, those that others read first."""
    groups = dict.fromkeys(rule["group"] for rule in rules())
    return [*RECORDING, *(name for name in groups if name not in RECORDING)]


START, FIXED = 10, 27
"""What an evaluation costs besides its nodes: its start in steps, and a step in nodes."""


def alerts_over_time(  # noqa: PLR0913, PLR0917 how rules are evaluated
    nodes: Mapping[str, tuple[Node, float]],
    times: Iterable[float],
    folder: Path,
    version: str,
    manager: Manager = BY_RULE_FILES,
    about: Mapping[str, str] | None = None,
) -> Samples:
    """Return every alert except the heartbeat on nodes that one Prometheus watches, by its labels.

    Nodes have an instance's name, and a length in minutes; those of one length are watched together. A step
    costs as much for series that have ended, so other lengths are watched apart where that is cheaper.
    ``about`` is the only alert that is asked about each node; all of the manager's if it is missing.
    """
    manager = replace(manager, order=evaluation_order(), promtool=require_version("promtool", version))
    looks, found = sorted(set(times)), Samples()
    for names in _by_length({name: minutes for name, (_, minutes) in nodes.items()}):
        some = {name: nodes[name] for name in names}
        longest = max(minutes for _, minutes in some.values())
        series = (
            (each["series"], each["values"])
            for name, (node, minutes) in some.items()
            for each in replace(node, instance=name).series(minutes)
        )
        asked = manager if about is None else replace(manager, alerts={about[name] for name in names})
        at = [round(minute * 60) for minute in looks if minute <= longest] or [0]
        for key, seen in ask('ALERTS{severity!="none"}', at, series, folder, asked).items():
            found.setdefault(key, []).extend(seen)
    return found


def _by_length(minutes: Mapping[str, float]) -> list[list[str]]:
    """Return the names in groups of similar lengths, for which the steps cost least."""
    names = sorted(minutes, key=lambda name: minutes[name])
    costs: list[tuple[float, list[list[str]]]] = [(0.0, [])]
    for end, name in enumerate(names, 1):
        last = minutes[names[end]] if end < len(names) else None
        if last == minutes[name]:
            costs.append((math.inf, []))  # nodes of one length stay together
            continue
        costs.append(
            min(
                (cost + START * FIXED + minutes[name] * (FIXED + end - begin), [*groups, names[begin:end]])
                for begin, (cost, groups) in enumerate(costs)
            )
        )
    return costs[-1][1]


def _step(*minutes: float) -> int:
    """Return the seconds between two evaluations, one of which is at each minute."""
    return STEP if all(float(minute).is_integer() for minute in minutes) else EVALUATION


def firing(
    folder: Path, series: Iterable[Series], *minutes: float, about: Collection[str] = (), step: int = 0
) -> list[Alert]:
    """Return the alerts that fire at some minutes, except the heartbeat; of some names, or all of them.

    promtool only compares, so the test file expects none, and the alerts are read from its complaint.
    """
    expectations = [
        {"eval_time": f"{round(minute * 60)}s", "alertname": name, "exp_alerts": []}
        for minute in minutes
        for name in about or alert_names()
        if name != "VramLedgerWatchdog"
    ]
    groups = evaluated(RULE_FILES, evaluation_order(), about, texts=True)
    output = _run(folder, series, groups, step or _step(*minutes), alert_rule_test=expectations)
    found = []
    for complaint in re.split(r"\n(?=\s*alertname:)", output):
        if (failed := _FAILED.search(complaint)) is not None:
            _, _, got = complaint.partition("got:")
            for labels, texts in re.findall(r"Labels: ?\{(.*?)\}\s*\n\s*Annotations: ?\{(.*)\}", got):
                found.append(Alert(failed[1], _pairs(labels), _pairs(texts)))
    if output.strip() and not found:
        raise AssertionError(f"promtool failed otherwise:\n{output}")
    return found


def expect(folder: Path, series: Sequence[Series], minute: float, samples: Mapping[str, float]) -> str:
    """Compare queries that give one sample each with the expected values; return the complaints."""
    at = f"{round(minute * 60)}s"
    tests = [
        {"expr": f"sum({query})", "eval_time": at, "exp_samples": [{"labels": "{}", "value": value}]}
        for query, value in samples.items()
    ]
    groups = evaluated(RULE_FILES, evaluation_order(), asked=[*samples])
    return _run(folder, series, groups, _step(minute), promql_expr_test=tests)


def _run(
    folder: Path, series: Iterable[Series], groups: list[dict[str, Any]], step: int, **tests: object
) -> str:
    case, kept = folder / "case.test.yml", folder / "evaluated.rules.json"
    kept.write_text(json.dumps({"groups": groups}), encoding="utf-8")
    content = {
        "rule_files": [str(kept)],
        "evaluation_interval": f"{step}s",
        "group_eval_order": [group["name"] for group in groups],
        "tests": [{"interval": "15s", "input_series": list(series), **tests}],
    }
    case.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML, and PyYAML is slow
    command = [str(require_tool("promtool")), "test", "rules", str(case)]
    done = subprocess.run(command, env=promtool_environment(), check=False, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).partition("FAILED:")[2]


def _pairs(text: str) -> dict[str, str]:
    return {name: value.replace('\\"', '"').replace("\\\\", "\\") for name, value in _PAIR.findall(text)}
