"""Whose launches are counted, and what that proves."""

from __future__ import annotations

import pytest

from vramledger.accounting.work.counted_launches import MAX_HOLDERS, Candidate, choose_holders, proves_quiet
from vramledger.model.reading import LaunchCount

IDLE_AFTER = 600.0


def holding(pid: int, quiet: float = 400.0, *, memory: int = 1, proven: bool = False) -> Candidate:
    """Return a holding of a process."""
    return Candidate((pid, 10 * pid), memory, quiet, proven)


def chosen(*candidates: Candidate, counts: tuple[LaunchCount, ...] = ()) -> list[int]:
    """Return the pids that are counted."""
    return [pid for pid, _ in choose_holders(candidates, counts, IDLE_AFTER)]


@pytest.mark.parametrize(("quiet", "counted"), [(0.0, []), (299.9, []), (300.0, [1]), (6000.0, [1])])
def test_from_half_of_the_threshold_on(quiet: float, counted: list[int]) -> None:
    """A holder is counted when it was quiet for half of the threshold, and never before."""
    assert chosen(holding(1, quiet)) == counted


def test_work_on_one_device_is_enough() -> None:
    """A holder that works on one device is not counted, however quiet it is on the others."""
    assert chosen(holding(1, 5000.0), holding(1, 10.0), holding(2)) == [2]


def test_what_is_proven_needs_no_count() -> None:
    """A holder is counted only if its quiet is not proven already, on one device at least."""
    assert chosen(holding(1, proven=True), holding(2, proven=True), holding(2)) == [2]


def test_the_largest_are_counted() -> None:
    """If there are too many quiet holders, those with the most memory on all their devices are counted."""
    many = [holding(pid, memory=100 - pid) for pid in range(1, 30)]

    assert chosen(*many, holding(50, memory=60), holding(50, memory=60)) == [*range(1, MAX_HOLDERS), 50]


def test_a_counted_holder_stays() -> None:
    """A holder that is counted keeps its place when a larger one becomes quiet."""
    many = [holding(pid, memory=100 - pid) for pid in range(1, 30)]

    assert 29 in chosen(*many, counts=(LaunchCount(29, 290, 100.0),))


def test_what_cannot_be_counted_takes_no_place() -> None:
    """A holder that cannot be counted stays known as such, and another one is counted in its place."""
    many = [holding(pid, memory=100 - pid) for pid in range(1, 30)]
    failed = tuple(LaunchCount(pid, 10 * pid, None, problem="why") for pid in range(1, 6))

    assert chosen(*many, counts=failed) == [*range(1, 6 + MAX_HOLDERS)]


@pytest.mark.parametrize(
    ("count", "proven"),
    [
        (None, False),
        (LaunchCount(1, 10, None), False),
        (LaunchCount(1, 10, None, problem="why"), False),
        (LaunchCount(1, 10, None, calls=3), False),
        (LaunchCount(1, 10, 299.9), False),
        (LaunchCount(1, 10, 300.0), True),
    ],
)
def test_proof(count: LaunchCount | None, *, proven: bool) -> None:
    """Half of the threshold without a call proves quiet; what is not known, or shorter, does not."""
    assert proves_quiet(count, IDLE_AFTER) is proven
