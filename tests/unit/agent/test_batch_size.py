"""Which batch fits, by the peaks of the steps before a failure: a pure function."""

import pytest

from vramledger_agent.oom.diagnosis import PartPeak, Step, fitting_batch

LIMIT = 6 * 2**30


def step(batch: int, forward: tuple[int, int], backward: tuple[int, int], optimizer: tuple[int, int]) -> Step:
    """Return a step with the peaks of its parts: bytes, and the activations among them."""
    parts = {
        name: PartPeak(*peak)
        for name, peak in (("forward", forward), ("backward", backward), ("optimizer", optimizer))
    }
    return Step(batch, max(peak.bytes for peak in parts.values()), parts)


# A training on an H200, torch 2.11: the small batch has its peak in the optimizer, the large one in the
# backward pass. A line through these two peaks said 70,143, and one through the peaks of the backward passes,
# of which that of the small batch is at its end, 54,875. It failed with both.
SMALL = step(2048, (638_781_448, 235_931_656), (689_168_456, 168_820_808), (739_573_764, 202_440_708))
LARGE = step(4096, (806_553_672, 403_703_880), (907_214_856, 504_365_064), (739_573_764, 202_440_708))


def test_only_peaks_at_the_same_moment_of_a_step_are_on_one_line() -> None:
    """Beside other gradients a peak is of another moment, and its slope is not that of a larger batch."""
    fits = fitting_batch([SMALL, LARGE, LARGE], 90_000, LIMIT)
    others, activations = 907_214_856 - 504_365_064, 504_365_064 / 4096  # of the large batch's backward pass
    assert fits == pytest.approx((0.98 * LIMIT - others) / activations, abs=2)


def test_each_part_of_a_step_has_its_own_slope() -> None:
    """The batch that fits is the smallest that a part of the step allows."""
    one = step(100, (3000, 2000), (4000, 3000), (9000, 100))
    other = step(200, (5000, 4000), (6500, 5500), (9000, 100))
    assert fitting_batch([one, other], 1000, 20_000) == int((0.98 * 20_000 - 1500) / 25)


def test_the_optimizers_peak_does_not_follow_a_single_batch_size() -> None:
    """Where all steps had one size, what the optimizer takes is not spread over the batch."""
    fits = fitting_batch([SMALL, SMALL], 90_000, LIMIT)
    forward = (0.98 * LIMIT - (638_781_448 - 235_931_656)) / (235_931_656 / 2048)
    assert fits == pytest.approx(forward, abs=2)


def test_peaks_without_parts_show_a_slope_only_with_several_sizes() -> None:
    """PyTorch's own peaks alone say which batch fits if the batches had several sizes."""
    small, large = Step(10, 2000, {}), Step(20, 3000, {})
    assert fitting_batch([small, large], 100, 10_000) == 88
    assert fitting_batch([small, small], 100, 10_000) is None
    assert fitting_batch([], 100, 10_000) is None


def test_a_part_that_rises_faster_than_the_batch_still_counts() -> None:
    """Where a line through a part's peaks begins below 0, the largest batch says what fits."""
    one = step(4, (2100, 2000), (3900, 3800), (100, 10))
    other = step(8, (4100, 4000), (8100, 8000), (100, 10))
    assert fitting_batch([one, other], 32, 16_000) == int((0.98 * 16_000 - 100) / 1000)
    assert fitting_batch([Step(4, 3900, {}), Step(8, 8100, {})], 32, 16_000) is None
