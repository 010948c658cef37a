"""Run scenarios: each seed of each through the exporter's parts and the rules, and label what fired."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.faults import rules
from tests.faults.evaluation import Firing, evaluate
from tests.faults.faulty import FAULTY
from tests.faults.healthy import HEALTHY
from tests.faults.trace import Trace

SCENARIOS = {scenario.name: scenario for scenario in (*HEALTHY, *FAULTY)}
TOGETHER = 12
"""Hosts in one evaluation: as many as make promtool's start worth it, few enough to spread over cores."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How finely time is cut.

    Attributes:
        sample: seconds between the exporter's samples.
        step: seconds between evaluations of the rules.
        longest: hours after which a scenario is left.
    """

    sample: float = 5.0
    step: float = 30.0
    longest: float = 24.0


@dataclass(frozen=True, slots=True)
class Run:
    """One variation of a scenario and what fired in it; seconds after its beginning.

    ``full`` is when a card was first full to nine tenths, ``hours`` how long it was watched.
    """

    scenario: str
    seed: int
    hours: float
    onset: float | None
    full: float | None
    firings: tuple[Firing, ...]


Variation = tuple[str, int]


def run(variations: Iterable[Variation], pace: Pace) -> list[Run]:
    """Live through variations of scenarios, on all cores."""
    # Long ones with long ones: an evaluation lasts as long as its longest trace.
    ordered = sorted(variations, key=lambda each: (SCENARIOS[each[0]].healthy, each[1], each[0]))
    batches = [ordered[first : first + TOGETHER] for first in range(0, len(ordered), TOGETHER)]
    with ProcessPoolExecutor(min(len(batches), os.cpu_count() or 1)) as pool:
        return [each for batch in pool.map(_batch, batches, [pace] * len(batches)) for each in batch]


def _batch(variations: Sequence[Variation], pace: Pace) -> list[Run]:
    lived = [_live(name, seed, pace) for name, seed in variations]
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        firings = evaluate([trace for trace, _, _ in lived], Path(scratch), pace.step)
    return [
        Run(name, seed, hours, onset, trace.full, _of(trace, hours, firings))
        for (name, seed), (trace, hours, onset) in zip(variations, lived, strict=True)
    ]


def _of(trace: Trace, hours: float, firings: Iterable[Firing]) -> tuple[Firing, ...]:
    """Return what fired for a host while it was watched; what names no host counts for all."""
    return tuple(
        firing
        for firing in firings
        if firing.labels.get("instance", trace.instance) == trace.instance and firing.begin < hours * 3600
    )


def _live(name: str, seed: int, pace: Pace) -> tuple[Trace, float, float | None]:
    random = Random(f"{name}/{seed}")  # noqa: S311 it is chance for tests
    scene = SCENARIOS[name].build(random)
    hours = min(scene.hours, pace.longest) if SCENARIOS[name].healthy else scene.hours
    trace = Trace(f"{name}-{seed}", rules.families())
    trace.live(scene.build(random, pace.sample), hours, scene.weather, random)
    return trace, hours, scene.onset
