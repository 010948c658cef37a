"""What a program needs, judged from what was seen of it."""

import re

import pytest

from vramledger.accounting.holders.policies import CONTEXT_BYTES
from vramledger.commands.fit_input import DeviceUse, FrameworkUse
from vramledger.commands.memory_need import Busy, assess_need, copies_by_compute, limit_advice
from vramledger.model.snapshot import Grade

MIB = 2**20
GIB = 2**30
CARD = 24_265 * MIB


def use(
    *frameworks: FrameworkUse,
    held: int | None = 22_885 * MIB,
    overhead: int | None = None,
    framework: str = "tensorflow",
    policy: str = "preallocate",
    **more: object,
) -> DeviceUse:
    """Return what was seen in one sample on a card of 24 GiB."""
    known = {
        "uuid": "GPU-0", "gpu": 0, "name": "NVIDIA A10", "capacity": CARD, "held": held, "peak": held,
        "overhead": overhead, "framework": framework, "policy": policy, "frameworks": frameworks,
        "whole_life": False,
    }  # fmt: skip
    return DeviceUse(**{**known, **more})  # type: ignore[arg-type]


def counted(name: str, peak: int | None, *, ordinal: int | None = 0) -> FrameworkUse:
    """Return what a framework reported."""
    return FrameworkUse(name, ordinal, peak, None)


def test_a_preallocation_is_not_a_need() -> None:
    """A program that holds 22,885 MiB and used 181 of them needs these and its context."""
    need = assess_need([use(counted("tensorflow", 181 * MIB))])
    assert need.bytes == 181 * MIB + CONTEXT_BYTES == 1205 * MIB
    assert need.grade is Grade.INFERRED
    assert "assumed" in need.why
    assert need.most == 22_885 * MIB


def test_what_is_outside_the_pool_is_measured_where_it_can_be() -> None:
    """With a known pool the rest is NVML's charge minus the pool, and the need is proven."""
    need = assess_need([use(counted("jax", GIB), overhead=518 * MIB, framework="jax", policy="fraction")])
    assert (need.bytes, need.grade) == (GIB + 518 * MIB, Grade.PROVEN)


def test_a_small_holding_needs_no_assumed_context() -> None:
    """The need is never more than the holding because of a context that is only assumed."""
    need = assess_need([use(counted("tensorflow", 300 * MIB), held=534 * MIB, policy="growth")])
    assert need.bytes == 534 * MIB


def test_a_peak_that_the_program_resets_is_not_forgotten() -> None:
    """The highest peak of all samples counts, and the largest context."""
    seen = [
        use(counted("torch", 9 * GIB), overhead=500 * MIB),
        use(counted("torch", GIB), overhead=600 * MIB),
        use(counted("torch", 2 * GIB), overhead=None),
    ]
    assert assess_need(seen).bytes == 9 * GIB + 600 * MIB


def test_two_frameworks_share_one_context() -> None:
    """The peaks of all frameworks add up, and what is outside the pools counts once for the device."""
    need = assess_need([use(counted("torch", GIB), counted("jax", 2 * GIB), overhead=700 * MIB)])
    assert need.bytes == 3 * GIB + 700 * MIB


@pytest.mark.parametrize("policy", ["preallocate", "fraction", "limit"])
def test_without_counters_a_set_size_says_nothing_of_the_need(policy: str) -> None:
    """Of a program that took a set size nothing but an upper bound is known, and no limit is advised."""
    need = assess_need([use(policy=policy)])
    assert (need.bytes, need.planned, need.most) == (None, None, 22_885 * MIB)
    assert "vramledger run" in need.why
    assert list(limit_advice(need, CARD)) == []


def test_a_framework_without_a_peak_hides_the_need() -> None:
    """One framework whose peak is not known is enough to make the sum not known: never a partial sum."""
    need = assess_need(
        [use(counted("torch", GIB), counted("cupy", None), overhead=500 * MIB, policy="caching")]
    )
    assert (need.bytes, need.most) == (None, 22_885 * MIB)


def test_the_highest_charge_of_a_whole_life_is_an_upper_bound() -> None:
    """What a program with a cache held is enough for it, if it was watched since its start."""
    need = assess_need([use(framework="torch", policy="caching", whole_life=True)])
    assert (need.bytes, need.enough, need.grade) == (None, 22_885 * MIB, Grade.SEEN)


@pytest.mark.parametrize("policy", ["caching", "preallocate", "fraction", "limit", ""])
def test_the_highest_charge_of_a_part_of_a_life_is_no_bound(policy: str) -> None:
    """A program that was not watched since its start may need more than it was seen to hold, or less."""
    need = assess_need([use(framework="torch", policy=policy, whole_life=False)])
    assert (need.bytes, need.most, need.enough) == (None, 22_885 * MIB, None)
    assert need.grade is Grade.INFERRED


def test_a_peak_that_a_framework_counted_may_have_been_reset() -> None:
    """The evidence says since when a framework counts: its program may set the peak back to zero."""
    need = assess_need([use(counted("torch", GIB), overhead=518 * MIB, framework="torch", policy="caching")])
    assert "since its start or its last reset" in need.why


def test_nothing_known_is_not_zero() -> None:
    """Where NVML does not say what a process holds, its need is not known."""
    need = assess_need([use(held=None, peak=None)])
    assert (need.bytes, need.most, need.enough) == (None, None, None)


def test_a_failed_allocation_is_part_of_what_is_wanted() -> None:
    """After an out-of-memory error there is no amount that is certainly enough, and no limit to advise."""
    need = assess_need(
        [
            use(
                counted("torch", 8 * GIB),
                overhead=GIB,
                failed=True,
                failed_request=3 * GIB,
                used_at_failure=7 * GIB,
            )
        ]
    )
    assert (need.bytes, need.wanted, need.enough) == (9 * GIB, 11 * GIB, None)
    assert list(limit_advice(need, CARD)) == []


def test_a_device_that_is_only_listed_is_not_used() -> None:
    """A program whose framework used nothing on a device does not need it, whatever it took there."""
    assert assess_need([use(counted("tensorflow", 1280))]).unused
    assert not assess_need([use()]).unused


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "rmm"])
@pytest.mark.parametrize("peak", [MIB, 181 * MIB, 7 * GIB + 1, 20 * GIB])
def test_a_limit_is_never_below_the_need(framework: str, peak: int) -> None:
    """Each limit, in whatever unit the framework takes it, leaves at least the peak with its headroom."""
    need = assess_need([use(counted(framework, peak, ordinal=3), overhead=GIB, framework=framework)])
    wanted = peak + max(int(peak * 0.1), 64 * MIB)
    limits = {
        "torch": (r"fraction\(([\d.]+), 3\)", CARD),
        "jax": (r"MEM_FRACTION=([\d.]+)$", CARD),
        "tensorflow": (r"\[3\].*memory_limit=(\d+)\)", MIB),
        "rmm": (r"maximum_pool_size=(\d+)\)", 1),
    }
    pattern, unit = limits[framework]
    found = [re.search(pattern, each.text) for each in limit_advice(need, CARD)]
    (limit,) = (float(each[1]) * unit for each in found if each is not None)
    assert wanted <= limit <= wanted + CARD / 1000


def test_no_limit_for_a_device_that_is_too_small() -> None:
    """A share of more than the whole device is not written down."""
    need = assess_need([use(counted("torch", 20 * GIB), overhead=GIB)])
    assert list(limit_advice(need, 8 * GIB)) == []


@pytest.mark.parametrize(
    ("mean", "copies"), [(1.0, 1), (0.5, 2), (0.34, 2), (0.1, 10), (1e-320, 1_000_000), (0.0, None)]
)
def test_a_program_that_is_busy_leaves_time_for_few(mean: float, copies: int | None) -> None:
    """A busy share gives the copies that have time; one that did nothing gives no number."""
    assert copies_by_compute(Busy(mean, mean, 1)) == copies


def test_busy_samples_that_are_missing_are_not_zero() -> None:
    """A sample without a figure changes neither the mean nor the number of samples."""
    need = assess_need([use(time_busy=0.4), use(time_busy=None), use(time_busy=0.8)])
    assert need.time_busy is not None
    assert need.time_busy.mean == pytest.approx(0.6)
    assert (need.time_busy.highest, need.time_busy.samples) == (0.8, 2)
    assert assess_need([use()]).time_busy is None
