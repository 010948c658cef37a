"""A short, seeded run of every part of the soak: the long ones are ``make soak``."""

from pathlib import Path

import pytest

from tests.lab.soak import attacks, faults
from tests.support.requirements import require_root


@pytest.mark.repeats
@pytest.mark.parametrize(("seed", "wanted"), [(1, 3_000), (2, 30_000)])
def test_a_page_is_true_whatever_the_driver_answers(tmp_path: Path, seed: int, wanted: int) -> None:
    """Thousands of errors, garbage answers and losses: every page matches the host's true state."""
    tally = faults.inject(tmp_path, faults=wanted, seed=seed)
    assert tally.injected >= wanted
    assert len(tally.faults) > 5
    assert tally.steps > wanted / 100


@pytest.mark.thorough
def test_no_user_of_the_host_stops_it(tmp_path: Path) -> None:
    """While strangers attack it, a kind at a time, scrapes are answered and what is sampled is stored."""
    require_root()
    rows = list(attacks.run(tmp_path, seconds=1.0))
    assert [row for row in rows if not row.good] == []
    assert len(rows) > 10
