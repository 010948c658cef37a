"""What is told of what happens to GPUs, programs, exporters and Prometheus: once, in time, and no more."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from tests.support.alerts.exporter_situations import EXPORTERS
from tests.support.alerts.growth_situations import GROWTH
from tests.support.alerts.holder_situations import HOLDERS, JOBS
from tests.support.alerts.nodes import Node
from tests.support.alerts.parts import on_gpu
from tests.support.alerts.promtool import STEP, alerts_over_time
from tests.support.alerts.situation import Situation, Told, complaints, what_is_told
from tests.support.requirements import EACH_VERSION, VERSIONS
from tests.support.selected import selected_cases

pytestmark = pytest.mark.timeout(900)  # promtool takes its time where others work too

SITUATIONS = [*EXPORTERS, *HOLDERS, *JOBS, *GROWTH]
LONG = 45
"""Minutes: an evaluation takes as long as its situations last, and the longer ones more than half of it."""
AT_AN_EDGE = {
    "2.5 GiB a minute told by nobody but the driver", "3 GiB a minute told by nobody but the driver",
    "3 GiB a minute told by its framework", "3 GiB a minute told by its agent, outside the pool",
    "an idle program beside one that fills the GPU by 4 GiB a minute",
    "a first load of 26 minutes without an agent",
}  # fmt: skip
"""Here a warning begins or ends within a sample of its threshold; ranges of Prometheus 3 are shorter."""
OF_GROWTH = ("GpuMemoryFilling-w", "GpuMemoryGrowing-w")


@pytest.fixture(scope="module", params=EACH_VERSION)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Told]:
    """Return when each alert fires in each selected situation, by its labels; in one evaluation."""
    assert len({each.wanted for each in SITUATIONS}) == len(SITUATIONS), "no name stands for two"
    asked: dict[int, list[Situation]] = {}
    for each in (cast("Situation", case["situation"]) for case in selected_cases(request)):
        # What lasts, at whatever minutes, is found in half as many evaluations.
        seldom = request.param == VERSIONS[0] and 30 <= each.minutes <= LONG and ".." not in each.told
        asked.setdefault(2 * STEP if seldom else STEP, []).append(each)
    found: dict[str, Told] = {}
    for step, some in asked.items():
        told = what_is_told(some, tmp_path_factory.mktemp("situations"), request.param, step)
        found |= {each.wanted: seen for each, seen in zip(some, told, strict=True)}
    return found


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(each, id=each.wanted, marks=[pytest.mark.thorough] if each.minutes > LONG else [])
        for each in SITUATIONS
    ],
)
def test_what_is_wanted_is_told(
    situation: Situation, told: Mapping[str, Told], request: pytest.FixtureRequest
) -> None:
    """Every alert that is wanted comes in its time, once and without a pause, and no other comes."""
    found = complaints(situation, told[situation.wanted])
    newer = request.node.callspec.params["told"] != VERSIONS[0]
    if newer and any(situation.wanted.startswith(each) for each in AT_AN_EDGE):
        found = [each for each in found if not each.startswith(OF_GROWTH)]
    assert found == []


@pytest.mark.parametrize("why", ["asleep", "reset_required"])
def test_what_explains_a_silent_gpu_counts_as_long_as_its_silence(why: str, tmp_path: Path) -> None:
    """Where Prometheus scrapes no more and no series gets its mark, no GPU is lost that only sleeps."""
    node = Node(extra={on_gpu(f"device_{why}"): 1, on_gpu("device_up"): 0})
    about = {"gpu-1": "GpuDeviceLost"}

    assert alerts_over_time({"gpu-1": (node, 20)}, range(40), tmp_path, VERSIONS[0], about=about) == {}
