"""Let Prometheus' own rule manager evaluate simulated hours: ``promtool test rules`` reports what fires.

A test of its language that fails prints what it got, so tests that expect no alert tell which ones fire.
"""

import json
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults import rules
from tests.support.host.model import EPOCH
from tests.support.host.scrapes import SCRAPE
from tests.support.host.series import Trace
from vramledger_agent.commands.parser import parse_duration

_TIME = re.compile(r"^    expr: .*, time: ([0-9a-z.]+),$")
_ALERT = re.compile(r'\{__name__="ALERTS", ((?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*"(?:, )?)+)\}')
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_RULE_ERROR = re.compile(r"^\s+rule: .*, err: ", re.MULTILINE)
_SILENT = 'ALERTS{alertstate="firing",severity!="none"}'


class EvaluationError(Exception):
    """Say that promtool could not evaluate the rules."""


@dataclass(frozen=True, slots=True)
class Firing:
    """A span in which an alert fires for one set of labels; seconds after the beginning of the simulation."""

    alert: str
    severity: str
    labels: Mapping[str, str]
    begin: float
    end: float


Samples = dict[tuple[tuple[str, str], ...], list[float]]
"""At which times, seconds, there was an alert, by its labels."""


@dataclass(frozen=True, slots=True)
class Manager:
    step: float  # seconds between two evaluations
    home: Path = rules.HOME  # the directory of the rules
    order: Sequence[str] = ()  # of the groups, all of them; as the files have them when empty
    promtool: str | Path = "promtool"  # the program, whose version is that of the rule manager
    scrape: float = SCRAPE  # seconds between two scrapes of the series
    alerts: Collection[str] = ()  # the names of those that anybody asks about; all of them when empty
    everything: bool = False  # also what decides about no alert: its errors are looked for


def promtool_environment() -> dict[str, str]:
    """Return the environment in which promtool takes the least time.

    It collects its garbage only where there is more than this: 18 % less time than as usual, in 440 MB.
    """
    return {**os.environ, "GOGC": "off", "GOMEMLIMIT": "400MiB"}


def evaluate(traces: Sequence[Trace], scratch: Path, manager: Manager, looks: int = 1) -> list[Firing]:
    """Return every firing of every alert over traces that begin together, in the order of time.

    ``looks``: after how many steps is looked at what fires: the answers take a large part of the time.
    """
    slots = max(trace.slots for trace in traces)
    step = manager.step
    steps = [EPOCH + round(number * step) for number in range(int((slots * manager.scrape - EPOCH) / step))]
    series = (each for trace in traces for each in trace.series())
    return _firings(ask(_SILENT, steps[::looks], series, scratch, manager), step * looks)


def ask(
    query: str, times: Iterable[int], series: Iterable[tuple[str, str]], scratch: Path, manager: Manager
) -> Samples:
    """Return at which of some times a query for ``ALERTS`` finds any, by their labels.

    Times are Unix seconds, multiples of the manager's step.
    """
    seen: Samples = {}
    for at, answer in answers(((query, at) for at in times), series, scratch, manager):
        for labels in _ALERT.findall(answer):
            seen.setdefault(tuple(_LABEL.findall(labels)), []).append(at)
    return seen


def answers(
    queries: Iterable[tuple[str, int]], series: Iterable[tuple[str, str]], scratch: Path, manager: Manager
) -> Iterator[tuple[float, str]]:
    """Yield what promtool finds for queries, each with its time, as the time and the line of its complaint.

    A series has a value a scrape, in promtool's notation. Raises :class:`EvaluationError`.
    """
    path, paths = scratch / "simulated.test.yml", rules.files(manager.home)
    order = [*manager.order] or rules.groups(paths)
    groups = rules.evaluated(paths, order, manager.alerts, everything=manager.everything)
    loaded = scratch / "evaluated.rules.json"
    loaded.write_text(json.dumps({"groups": groups}), encoding="utf-8")  # JSON is YAML
    with path.open("w", encoding="utf-8") as file:
        file.write(f"rule_files: {json.dumps([str(loaded)])}\n")
        file.write(f"group_eval_order: {json.dumps([group['name'] for group in groups])}\n")
        file.write(f"evaluation_interval: {manager.step:.0f}s\n")
        file.write(f"tests:\n- interval: {manager.scrape:.0f}s\n  input_series:\n")
        file.writelines(
            f"  - series: {_quoted(name)}\n    values: {_quoted(values)}\n" for name, values in series
        )
        file.write("  promql_expr_test:\n")
        file.writelines(f"  - expr: {_quoted(query)}\n    eval_time: {at}s\n" for query, at in queries)
    command = [manager.promtool, "test", "rules", path]
    done = subprocess.run(command, env=promtool_environment(), capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode and ("error" in done.stderr or "FAILED" not in said or _RULE_ERROR.search(said)):
        raise EvaluationError(said[-3000:])
    at = 0.0
    for line in said.splitlines():
        if found := _TIME.match(line):
            weeks, _, rest = found[1].rpartition("w")
            at = int(weeks or 0) * 604800 + (parse_duration(rest) if rest not in {"", "0s"} else 0.0)
        elif line.lstrip().startswith("got:"):
            yield at, line


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _firings(seen: Samples, step: float) -> list[Firing]:
    found = []
    for key, stamps in seen.items():
        labels = {name: value for name, value in key if name != "alertstate"}
        alert, severity = labels.pop("alertname"), labels.pop("severity", "none")
        times = [stamp - EPOCH for stamp in stamps]
        begin = last = times[0]
        for at in [*times[1:], float("inf")]:
            if at - last > 1.5 * step:
                found.append(Firing(alert, severity, labels, begin, last + step))
                begin = at
            last = at
    return sorted(found, key=lambda firing: (firing.begin, firing.alert))
