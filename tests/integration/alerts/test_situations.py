"""What is told of what happens to GPUs, programs, exporters and Prometheus: once, in time, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.alerts.exporter_situations import EXPORTERS
from tests.support.alerts.growth_situations import GROWTH
from tests.support.alerts.holder_situations import HOLDERS, JOBS
from tests.support.alerts.situation import Told, complaints, what_is_told
from tests.support.requirements import EACH_VERSION

pytestmark = pytest.mark.timeout(900)  # promtool takes its time where others work too

SITUATIONS = [*EXPORTERS, *HOLDERS, *JOBS, *GROWTH]


@pytest.fixture(scope="module", params=EACH_VERSION)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Told]:
    """Return when each alert fires in each situation, by its labels; in one evaluation."""
    assert len({each.wanted for each in SITUATIONS}) == len(SITUATIONS), "no name stands for two"
    return what_is_told(SITUATIONS, tmp_path_factory.mktemp("situations"), request.param)


@pytest.mark.parametrize("number", range(len(SITUATIONS)), ids=[each.wanted for each in SITUATIONS])
def test_what_is_wanted_is_told(number: int, told: Sequence[Told]) -> None:
    """Every alert that is wanted comes in its time, once and without a pause, and no other comes."""
    assert complaints(SITUATIONS[number], told[number]) == []
