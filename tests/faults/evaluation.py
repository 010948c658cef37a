"""Let Prometheus' own rule manager live through simulated hours: ``promtool test rules``, asked what fires.

promtool evaluates every group at every step over a real database, with ``for``, ``keep_firing_for`` and
the marks of ended series exactly as a server does, a day in seconds. A test of its language that fails
prints what it got, so a test a step that expects no alert tells which ones fire.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tests.faults import rules
from tests.faults.trace import SCRAPE, Trace
from tests.faults.world import EPOCH
from vramledger.config import parse_duration

_TIME = re.compile(r"^    expr: .*, time: ([0-9a-z.]+),$")
_ALERT = re.compile(r'\{__name__="ALERTS", ((?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*"(?:, )?)+)\}')
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
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


def evaluate(traces: Sequence[Trace], scratch: Path, step: float, home: Path = rules.HOME) -> list[Firing]:
    """Return every firing of every alert over the traces, in the order of time.

    Args:
        traces: what Prometheus has scraped; all begin together.
        scratch: an empty directory.
        step: seconds between two evaluations.
        home: the directory of the rules.

    Raises:
        EvaluationError: promtool did not take the rules or the series.
    """
    path = scratch / "simulated.test.yml"
    slots = max(trace.slots for trace in traces)
    steps = [EPOCH + round(number * step) for number in range(int((slots * SCRAPE - EPOCH) / step))]
    with path.open("w", encoding="utf-8") as file:
        _write(file, traces, steps, step, home)
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode and ("error" in done.stderr or "FAILED" not in said):
        raise EvaluationError(said[-3000:])
    return _firings(_seen(said.splitlines()), step)


def _write(file: TextIO, traces: Sequence[Trace], steps: Iterable[int], step: float, home: Path) -> None:
    paths = rules.files(home)
    file.write(f"rule_files: {json.dumps([str(path) for path in paths])}\n")
    file.write(f"group_eval_order: {json.dumps(rules.groups(paths))}\n")
    file.write(f"evaluation_interval: {step:.0f}s\ntests:\n- interval: {SCRAPE:.0f}s\n  input_series:\n")
    for trace in traces:
        file.writelines(
            f"  - series: {_quoted(series)}\n    values: {_quoted(values)}\n"
            for series, values in trace.series()
        )
    file.write("  promql_expr_test:\n")
    file.writelines(f"  - expr: {_quoted(_SILENT)}\n    eval_time: {at}s\n" for at in steps)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _seen(lines: Iterable[str]) -> dict[tuple[tuple[str, str], ...], list[float]]:
    """Return at which steps an alert fired, by its labels."""
    seen: dict[tuple[tuple[str, str], ...], list[float]] = {}
    at = 0.0
    for line in lines:
        if found := _TIME.match(line):
            at = parse_duration(found[1]) - EPOCH
        elif line.lstrip().startswith("got:"):
            for labels in _ALERT.findall(line):
                seen.setdefault(tuple(_LABEL.findall(labels)), []).append(at)
    return seen


def _firings(seen: Mapping[tuple[tuple[str, str], ...], list[float]], step: float) -> list[Firing]:
    found = []
    for key, times in seen.items():
        labels = {name: value for name, value in key if name != "alertstate"}
        alert, severity = labels.pop("alertname"), labels.pop("severity", "none")
        begin = last = times[0]
        for at in [*times[1:], float("inf")]:
            if at - last > 1.5 * step:
                found.append(Firing(alert, severity, labels, begin, last + step))
                begin = at
            last = at
    return sorted(found, key=lambda firing: (firing.begin, firing.alert))
