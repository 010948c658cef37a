"""Compare rules on draws: these, those of an earlier revision, and two simple ones that others ship."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import yaml

from tests.support.faults import intervals
from tests.support.faults.draws import DRAWS, GROWTH
from tests.support.faults.rules import PAGE
from tests.support.faults.scene import Scenario
from tests.support.faults.suite import KNOWN, Run
from tests.support.requirements import PROJECT

SIMPLE = Path(__file__).parent / "simple_rules"
SLOPE, FULL = "SlopeOf5Minutes", "MemoryAbove90Percent"

_OLD_NAMES = [
    (f"vramledger_{framework}_{old}_bytes", f'vramledger_framework_{new}_bytes{{framework="{framework}"}}')
    for framework, use in (("torch", "allocated"), ("tensorflow", "in_use"), ("jax", "in_use"))
    for old, new in ((use, "in_use"), (f"{use}_peak", "in_use_peak"))
]
"""What a framework's memory was called in version 1 of the metric contract, for rules of that time."""


def rules_of(revision: str, home: Path) -> Path:
    """Write the rules of an earlier revision, with the names of its metrics, into a new directory."""
    home.mkdir()
    listed = _git("ls-tree", "--name-only", revision, "alerts/").split()
    for path in (each for each in listed if each.endswith(".rules.yml")):
        (home / Path(path).name).write_text(_git("show", f"{revision}:{path}"), encoding="utf-8")
    names = [{"record": old, "expr": f"sum without (framework) ({selector})"} for old, selector in _OLD_NAMES]
    # Files with only recording rules come first, by their names.
    content = {"groups": [{"name": "names", "rules": names}]}
    (home / "names.rules.yml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return home


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=PROJECT, check=True, capture_output=True, text=True).stdout


@dataclass(slots=True)
class Found:
    """What one set of rules found of one scenario, or of all.

    Attributes:
        planted: the draws.
        found: those in which it was found; a leak before the card was full to nine tenths.
        times: seconds to detect.
    """

    planted: int = 0
    found: int = 0
    times: list[float] = field(default_factory=list)

    def add(self, seconds: float | None) -> None:
        """Count a draw, which was found after so many seconds or not at all."""
        self.planted += 1
        if seconds is not None:
            self.found += 1
            self.times.append(seconds)

    def cells(self) -> list[str]:
        """Return the cells of a table: found, with its interval, and the median of the times with its own."""
        low, high = intervals.share(self.found, self.planted)
        told = f"{self.found} of {self.planted} ({low:.0%} to {high:.0%})"
        if not self.times:
            return [told, "-"]
        first, last = intervals.median(self.times)
        return [told, f"{_span(median(self.times))} ({_span(first)} to {_span(last)})"]


def _span(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _time_to_detect(scenario: Scenario, run: Run, alerts: Sequence[str]) -> float | None:
    onset = run.onset or 0.0
    begins = [each.begin for each in run.firings if each.alert in alerts and each.begin >= onset]
    if not begins or (scenario.leak and run.full is not None and min(begins) >= run.full > onset):
        return None
    return min(begins) - onset


def detected(runs: Sequence[Run], alerts: Sequence[str] = ()) -> Mapping[str, Found]:
    """Return what was found by scenario: by the given alerts, or by those that the scenario expects."""
    found: dict[str, Found] = {}
    for run in runs:
        scenario = KNOWN[run.scenario]
        if not scenario.healthy:
            wanted = alerts or (GROWTH if scenario.leak else scenario.expects)
            found.setdefault(run.scenario, Found()).add(_time_to_detect(scenario, run, wanted))
    return found


def false_pages(runs: Sequence[Run], alerts: Sequence[str] = ()) -> tuple[list[str], float]:
    """Return each page about a node in a healthy draw, and the node-hours."""
    pages, hours = [], 0.0
    for run in (each for each in runs if KNOWN[each.scenario].healthy):
        hours += run.hours
        pages += [
            f"{run.scenario}/{run.seed}: {each.alert} at {each.begin / 60:.0f} min"
            for each in run.firings
            if each.severity == PAGE and each.labels.get("instance") and (not alerts or each.alert in alerts)
        ]
    return pages, hours


def false_pages_at_most(runs: Sequence[Run]) -> float:
    """Return the upper end of the interval of false pages in 1,000 node-hours."""
    pages, hours = false_pages(runs)
    return intervals.rate(len(pages), hours)[1] if hours else 0.0


def is_found(run: Run) -> bool:
    """Tell whether what is wrong in a draw was found; where nothing is wrong, it was."""
    return all(each.found == each.planted for each in detected([run]).values())


def comparison(ours: Sequence[Run], earlier: Sequence[Run], simple: Sequence[Run], revision: str) -> str:
    """Return the tables as Markdown."""
    return (
        "\n".join([*_rows(ours, earlier, simple, revision), "", *_false(ours, earlier, simple, revision)])
        + "\n"
    )


def _rows(ours: Sequence[Run], earlier: Sequence[Run], simple: Sequence[Run], revision: str) -> Iterator[str]:
    yield (
        f"| scenario | found | time to detect, median | found by the rules of {revision} | their time "
        "| slope of 5 minutes | above 90 % |"
    )
    yield "|---|---|---|---|---|---|---|"
    mine, theirs = detected(ours), detected(earlier)
    slope, full = detected(simple, [SLOPE]), detected(simple, [FULL])
    for scenario in (each for each in DRAWS if each.name in mine):
        name = scenario.name
        others = [slope[name].cells()[0], full[name].cells()[0]] if scenario.leak else ["-", "-"]
        yield f"| {' | '.join([name, *mine[name].cells(), *theirs[name].cells(), *others])} |"
    sums = [_sum(each.values())[0] for each in (mine, theirs)]
    leaks = [each.name for each in DRAWS if each.leak and each.name in mine]
    others = [_sum(each[name] for name in leaks)[0] for each in (slope, full)]
    yield f"| all | {sums[0]} | | {sums[1]} | | {others[0]} | {others[1]} |"


def _sum(found: object) -> list[str]:
    total = Found()
    for each in found:  # type: ignore[attr-defined]
        total.planted += each.planted
        total.found += each.found
    return total.cells()


def _false(
    ours: Sequence[Run], earlier: Sequence[Run], simple: Sequence[Run], revision: str
) -> Iterator[str]:
    yield "| rules | node-hours of healthy work | pages | pages in 1,000 node-hours, 95 % interval |"
    yield "|---|---|---|---|"
    for name, runs, alerts in (
        ("these", ours, ()), (f"those of {revision}", earlier, ()),
        ("slope of 5 minutes", simple, (SLOPE,)), ("above 90 %", simple, (FULL,)),
    ):  # fmt: skip
        pages, hours = false_pages(runs, alerts)
        if hours:
            low, high = intervals.rate(len(pages), hours)
            yield f"| {name} | {hours:,.0f} | {len(pages):,} | {low:.2f} to {high:.2f} |"
