"""Whether a holder may have worked beside another one, by its CPU time, however long samples are."""

from __future__ import annotations

import pytest

from vramledger.accounting.cpu_beside_work import CpuBesideWork

IDLE, LAUNCH = 0.0019, 0.0004
"""CPU seconds that an idle server took in a second on an H200, and that the smallest launch takes."""


@pytest.mark.parametrize("length", [1.0, 3.0])
def test_a_longer_sample_has_more_cpu_time_and_no_work(length: float) -> None:
    """An idle program takes three times as much in three seconds, and is not taken for one that may work."""
    known = CpuBesideWork()
    for _ in range(20):
        known.update(IDLE * (4.0 - length), 4.0 - length, busy=False, own=False)
    for _ in range(15):
        known.update(IDLE * length, length, busy=True, own=False)
    assert known.tells(length)
    assert not known.may_work


@pytest.mark.parametrize(("quiet", "busy"), [(1.0, 1.0), (3.0, 1.0), (3.0, 3.0), (1.0, 3.0)])
def test_a_launch_stands_out_of_samples_of_any_length(quiet: float, busy: float) -> None:
    """The smallest launch in each second shows, whether the samples before were as long or not."""
    known = CpuBesideWork()
    for _ in range(20):
        known.update(IDLE * quiet, quiet, busy=False, own=False)
    for _ in range(5):
        known.update((IDLE + LAUNCH) * busy, busy, busy=True, own=False)
    assert known.may_work
