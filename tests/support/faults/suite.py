"""Run scenarios: each seed of each through the exporter's parts and the rules, and label what fired."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import NamedTuple

import yaml

from tests.support.faults import rules
from tests.support.faults.draws import DRAWS
from tests.support.faults.evaluation import Firing, Manager, evaluate
from tests.support.faults.exporters import EXPORTERS
from tests.support.faults.faulty import FAULTY
from tests.support.faults.healthy import HEALTHY
from tests.support.faults.jobs import JOBS
from tests.support.faults.limits import BUDGET, LIMITS, SPENDER
from tests.support.faults.scene import HOUR
from tests.support.host.scrapes import SCRAPE, Renderer, scrapes
from tests.support.host.series import Trace

SCENARIOS = {scenario.name: scenario for scenario in (*HEALTHY, *FAULTY, *LIMITS, *EXPORTERS, *JOBS)}
KNOWN = {**SCENARIOS, **{scenario.name: scenario for scenario in DRAWS}}
"""With those that are only drawn, and run by hand."""

NEARLY_FULL = 0.9
TOGETHER = 24
"""Hosts in one evaluation: enough for promtool's start, few enough to use all cores."""


@dataclass(frozen=True, slots=True)
class Pace:
    sample: float = 5.0  # seconds between the exporter's samples
    step: float = 30.0  # seconds between evaluations of the rules
    scrape: float = SCRAPE  # seconds between scrapes
    longest: float = 24.0  # hours after which a healthy scenario is left
    after: float = inf  # hours after its onset at which a faulty one is left
    together: int = TOGETHER  # hosts in one evaluation


class Tenancy(NamedTuple):
    """The owner of a pid in a span of seconds; ``owner`` is what an alert must call it."""

    pid: int
    begin: float
    end: float
    owner: str


@dataclass(frozen=True, slots=True)
class Run:
    """One variation of a scenario, how long it was watched, and what fired in it; seconds after its begin.

    ``full`` is when a card was first full to nine tenths.
    """

    scenario: str
    seed: int
    hours: float
    onset: float | None
    full: float | None
    firings: tuple[Firing, ...]
    tenancies: tuple[Tenancy, ...] = ()


Variation = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Lived:
    """A simulated variation, before it is judged."""

    trace: Trace
    run: Run  # without firings


def run(
    variations: Iterable[Variation],
    pace: Pace,
    promtools: Sequence[str] = ("promtool",),
    most_processes: int | None = None,
) -> list[list[Run]]:
    """Simulate variations of scenarios, on all cores or fewer; return the runs by version of promtool."""
    # Long ones with long ones: an evaluation lasts as long as its longest trace.
    ordered = sorted(variations, key=lambda each: (KNOWN[each[0]].healthy, each[1], each[0]))
    alone = [[each] for each in ordered if KNOWN[each[0]].alone]
    shared = [each for each in ordered if not KNOWN[each[0]].alone]
    each = pace.together
    batches = [shared[first : first + each] for first in range(0, len(shared), each)] + alone
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        home = _rules(Path(scratch))
        processes = min(len(batches), most_processes or os.cpu_count() or 1)
        with ProcessPoolExecutor(processes) as pool:
            judged = list(pool.map(partial(_batch, pace, home, promtools), batches))
    return [[each for batch in judged for each in batch[index]] for index in range(len(promtools))]


def _rules(home: Path) -> Path:
    """Write the shipped rules, with the budget of one scenario."""
    shutil.copytree(rules.HOME / "src", home / "src", ignore=shutil.ignore_patterns("__pycache__"))
    content = yaml.safe_load((rules.HOME / "thresholds.yml").read_text(encoding="utf-8"))
    content["budgets"] = [{"owner_type": SPENDER.type, "owner": SPENDER.name, "bytes": BUDGET}]
    (home / "thresholds.yml").write_text(yaml.safe_dump(content), encoding="utf-8")
    subprocess.run([sys.executable, home / "src" / "generate.py"], check=True, capture_output=True)
    return home


def _batch(
    pace: Pace, home: Path, promtools: Sequence[str], variations: Sequence[Variation]
) -> list[list[Run]]:
    """Return the runs of some variations by each promtool."""
    lived = [_live(name, seed, pace) for name, seed in variations]
    found = []
    for promtool in promtools:
        with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
            manager = Manager(pace.step, home, promtool=promtool, scrape=pace.scrape)
            firings = evaluate([each.trace for each in lived], Path(scratch), manager)
        found.append([replace(each.run, firings=_of(each, firings)) for each in lived])
    return found


def _of(lived: _Lived, firings: Iterable[Firing]) -> tuple[Firing, ...]:
    """Return what fired for a host during its time; an alert without a host counts for all."""
    instance = lived.trace.instance
    return tuple(
        firing
        for firing in firings
        if firing.labels.get("instance", instance) == instance and firing.begin < lived.run.hours * 3600
    )


def _live(name: str, seed: int, pace: Pace) -> _Lived:
    random = Random(f"{name}/{seed}")  # noqa: S311 it is chance for tests
    scene = KNOWN[name].build(random)
    most = pace.longest if KNOWN[name].healthy else (scene.onset or 0) / HOUR + pace.after
    hours = min(scene.hours, most)
    trace, full = Trace(f"{name}-{seed}", every=pace.scrape), None
    weather = replace(scene.weather, every=pace.scrape)
    host, renderer = scene.build(random, pace.sample), Renderer(rules.families(), scene.weather.most)
    for now, snapshot, lines in scrapes(host, hours, weather, random, renderer):
        trace.scraped(lines)
        ledgers = [] if snapshot is None else [each.ledger for each in snapshot.devices if each.ledger]
        if full is None and any(each.total - each.free >= NEARLY_FULL * each.total for each in ledgers):
            full = now
    tenancies = tuple(
        Tenancy(each.pid, each.begin, each.end, each.owner.name if each.owner else each.user)
        for each in scene.processes
    )
    return _Lived(trace, Run(name, seed, hours, scene.onset, full, (), tenancies))
