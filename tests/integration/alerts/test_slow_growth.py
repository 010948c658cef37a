"""Leaks that take days to fill a device are found in time, and days of healthy work raise nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from tests.integration.alerts.test_false_pages import torch
from tests.support.alerts.nodes import Holder, Node
from tests.support.alerts.promtool import ALERTS, evaluation_order
from tests.support.faults.evaluation import Manager, ask
from tests.support.requirements import VERSIONS, require_version

pytestmark = pytest.mark.timeout(600)

STEP = 600
"""Seconds between evaluations here; the rules about days are evaluated once an hour."""

MIB = 1 / 1024
DAY = 24.0
LEAKS = {"GpuMemoryLeakSuspected", "GpuMemoryGrowing"}


class Life(NamedTuple):
    """What a program holds by the hour, GiB, and by which hour it must be found, if ever."""

    name: str
    held: Callable[[float], float]
    hours: float
    found: float | None = None
    agent: bool = True
    total: float = 100


def noise(seed: str, size: float) -> Callable[[float], float]:
    """Return GiB between 0 and ``size`` that differ from step to step, always the same."""
    return lambda hour: Random(f"{seed}/{hour:.2f}").random() * size  # noqa: S311 chance for a test


def working_day(hour: float) -> float:
    """Return 1 by day and 0 by night."""
    return float(8 <= hour % 24 < 20)


NOISE = noise("noise", 0.1)
"""More hides the slowest leak: with 0.5 GiB, 50 MiB an hour was not found within two days."""

LIVES = [
    Life("50 MiB an hour", lambda hour: 20 + 50 * MIB * hour + NOISE(hour), 48, 40),
    Life("50 MiB an hour seen by the driver", lambda hour: 20 + 50 * MIB * hour, 48, 40, agent=False),
    Life("900 MiB an hour on a large card", lambda hour: 100 + 0.88 * hour, 44, 36, agent=False, total=143),
    Life("0.2 % of a day", lambda hour: 20 + 0.2 * hour / 24, 24 * 8.5, 24 * 8.2),
    Life("flat", lambda hour: 40 + NOISE(hour), 24 * 8.5),
    Life("days and nights", lambda hour: 20 + 30 * working_day(hour) + NOISE(hour), 24 * 8.5, agent=False),
    Life("one larger job", lambda hour: 20 + 5 * (hour > 60), 24 * 8.5, agent=False),
    Life("a step each second day", lambda hour: 20 + 1.5 * (hour // 48), 24 * 8.5),
    Life("a cache that levels off", lambda hour: 20 + 10 * (1 - math.exp(-hour / 10)), 24 * 8.5),
    Life("0.05 % of a day", lambda hour: 20 + 0.05 * hour / 24, 24 * 8.5),
]


def node(life: Life) -> Node:
    """Return a node with the program, whose values change every 20 minutes."""

    def held(minute: float) -> float:
        return life.held(minute // 20 / 3)

    holder = torch(7, held) if life.agent else Holder(7, held)
    return Node([replace(holder, start=-60 * 24 * 30)], total=life.total, instance=life.name)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, float]:
    """Return the hour at which growth of each program was first said."""
    folder = tmp_path_factory.mktemp("days")
    times = range(0, round(max(each.hours for each in LIVES) * 3600), 2 * STEP)
    manager = Manager(STEP, ALERTS, evaluation_order(), require_version("promtool", VERSIONS[0]))
    series = ((one["series"], one["values"]) for life in LIVES for one in node(life).series(life.hours * 60))
    found: dict[str, float] = {}
    for key, seen in ask('ALERTS{alertstate="firing"}', times, series, folder, manager).items():
        labels = dict(key)
        if labels["alertname"] in LEAKS:
            name = labels["instance"]
            found[name] = min(found.get(name, math.inf), min(seen) / 3600)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_slow_growth(life: Life, first: Mapping[str, float]) -> None:
    """A leak of 0.2 % of the device a day is found within days; growth that ends or repeats is none."""
    hour = first.get(life.name)
    if life.found is None:
        assert hour is None
    else:
        assert hour is not None
        assert hour <= life.found
