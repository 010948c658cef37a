"""Leaks that take days are found in time, days of healthy work raise nothing, and a page lasts for days."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from tests.support.alerts.nodes import Holder, Node, uuid
from tests.support.alerts.parts import MIB, on_gpu, torch
from tests.support.alerts.promtool import ALERTS, SELDOM, evaluation_order
from tests.support.faults.evaluation import Manager, ask
from tests.support.requirements import EACH_VERSION, VERSIONS, require_version

pytestmark = pytest.mark.timeout(600)

HOURS, DAYS = 300, 600
"""Seconds between evaluations: rules about hours need all their rounds, those about days have one an hour."""

SHORT = 25
"""Hours: who lives longer is evaluated as seldom as the rules about days need."""

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


NOISE = noise("noise", 0.1)
"""More hides the slowest leak: with 0.5 GiB, 50 MiB an hour was not found within two days."""

LIVES = [
    Life("50 MiB an hour", lambda hour: 20 + 50 * MIB * hour + NOISE(hour), 48, 40),
    Life("50 MiB an hour seen by the driver", lambda hour: 20 + 50 * MIB * hour, 48, 40, agent=False),
    Life("900 MiB an hour on a large card", lambda hour: 100 + 0.88 * hour, 44, 36, agent=False, total=143),
    Life("0.8 % of the card an hour", lambda hour: 20 + 0.8 * hour + NOISE(hour), 24, 6),
    Life("0.6 % of the card an hour", lambda hour: 20 + 0.6 * hour + NOISE(hour), 24, 17),
    Life("0.12 % of the card an hour", lambda hour: 20 + 0.12 * hour, 24, 17, agent=False),
    Life("a cache of half a day", lambda hour: 20 + 3 * (1 - math.exp(-hour / 4)), 24),
    Life("0.2 % of a day", lambda hour: 20 + 0.2 * hour / 24, 24 * 8.5, 24 * 8.2),
    Life("flat", lambda hour: 40 + NOISE(hour), 24 * 8.5),
    Life(
        "days and nights", lambda hour: 20 + 30 * (8 <= hour % 24 < 20) + NOISE(hour), 24 * 8.5, agent=False
    ),
    Life("one larger job", lambda hour: 20 + 5 * (hour > 60), 24 * 8.5, agent=False),
    Life("a step each second day", lambda hour: 20 + 1.5 * (hour // 48), 24 * 8.5),
    Life("a cache that levels off", lambda hour: 20 + 10 * (1 - math.exp(-hour / 10)), 24 * 8.5),
    Life("0.05 % of a day", lambda hour: 20 + 0.05 * hour / 24, 24 * 8.5),
]


def node(life: Life) -> Node:
    """Return a node with the program, whose values change every 20 minutes."""

    def held(minute: float) -> float:
        return life.held(minute // 20 / 3)

    holder = torch(held) if life.agent else Holder(7, held)
    return Node([replace(holder, start=-60 * 24 * 30)], total=life.total, instance=life.name)


@cache  # each life asks
def first(step: int, folder: Path) -> Mapping[str, float]:
    """Return the hour at which growth was first said, of each program that is evaluated so often."""
    lives = [each for each in LIVES if (each.hours < SHORT) == (step == HOURS)]
    times = range(0, round(max(each.hours for each in lives) * 3600), 1200)
    alerts = [*LEAKS]
    manager = Manager(
        step, ALERTS, evaluation_order(), require_version("promtool", VERSIONS[0]), alerts=alerts
    )
    series = ((one["series"], one["values"]) for life in lives for one in node(life).series(life.hours * 60))
    found: dict[str, float] = {}
    for key, seen in ask('ALERTS{alertstate="firing"}', times, series, folder, manager).items():
        labels = dict(key)
        if labels["alertname"] in LEAKS:
            name = labels["instance"]
            found[name] = min(found.get(name, math.inf), min(seen) / 3600)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("days")


@pytest.mark.thorough
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_slow_growth(life: Life, folder: Path) -> None:
    """A leak of 0.2 % of the device a day is found within days; growth that ends or repeats is none."""
    hour = first(HOURS if life.hours < SHORT else DAYS, folder).get(life.name)
    if life.found is None:
        assert hour is None
    else:
        assert hour is not None
        assert hour <= life.found


@pytest.mark.parametrize("version", EACH_VERSION)
def test_a_page_about_a_missing_gpu_stays(tmp_path: Path, version: str) -> None:
    """A GPU that did not come back from a reboot pages for days, over another reboot, until it is back."""
    minutes = 60 * 30
    up = {on_gpu("device_up", gpu=1): lambda m: 1.0 if m < 20 or m >= minutes - 60 else None}
    node = Node(gpus=2, missing=lambda m: 20 <= m < 24 or 600 <= m < 620, extra=up)
    times = [each * 60 for each in (32, 92, 596, 616, 640, minutes - 64, minutes - 40)]
    promtool = require_version("promtool", version)
    manager = Manager(SELDOM, ALERTS, evaluation_order(), promtool, alerts=["GpuDeviceLost"])
    series = ((each["series"], each["values"]) for each in node.series(minutes))
    samples = ask('ALERTS{alertstate="firing"}', times, series, tmp_path, manager)
    [(labels, seen)] = samples.items()

    assert dict(labels)["uuid"] == uuid(1)
    assert seen == times[:-1]
