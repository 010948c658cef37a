"""Why an allocation failed, what grows, and what the counters show: pure functions and their tables."""

import math
from types import SimpleNamespace

import pytest

from vramledger_agent import session, settings
from vramledger_agent.oom import report_file, verdict
from vramledger_agent.oom.verdict import FRAGMENTED, HOARDED, LEAKING, TOO_BIG, UNKNOWN
from vramledger_agent.torch import allocator as torch_allocator
from vramledger_agent.torch.allocator import (
    enables_expandable_segments,
    private_pool_bytes,
    read_counters,
    reclaimable_bytes,
)

GIB = 2**30

CASES: list[tuple[str, str, dict[str, int | bool | None]]] = [
    ("more than the device has", TOO_BIG, {"requested": 81}),
    ("that, with nothing else known", TOO_BIG, {"requested": 81, "reserved": None, "active": None}),
    ("nothing known of the pool", UNKNOWN, {"reserved": None}),
    ("a full pool of live tensors", TOO_BIG, {"reserved": 75, "active": 75, "free": 4, "others": 0}),
    ("the same, nobody to ask", TOO_BIG, {"reserved": 75, "active": 75, "free": 4, "others": None}),
    ("free pieces in the pool", FRAGMENTED, {"reserved": 75, "active": 40, "free": 4, "largest_free": 2}),
    ("pieces, of sizes nobody saw", FRAGMENTED, {"reserved": 75, "active": 40, "free": 4}),
    ("pieces and the rest", FRAGMENTED, {"reserved": 70, "active": 64, "free": 6, "largest_free": 6}),
    ("pieces that would not do", TOO_BIG, {"reserved": 70, "active": 66, "free": 5, "others": 0}),
    ("another holds what is missing", HOARDED, {"reserved": 10, "active": 10, "free": 5, "others": 64}),
    ("another holds too little", TOO_BIG, {"reserved": 72, "active": 72, "free": 4, "others": 3}),
    ("somebody may, nobody says", UNKNOWN, {"reserved": 10, "active": 10, "free": 5, "others": None}),
    ("full but for some crumbs", TOO_BIG,
     {"capacity": 6980, "requested": 12, "reserved": 6980, "active": 6967, "free": 0, "largest_free": 5}),
    ("it grew", LEAKING, {"reserved": 76, "active": 76, "free": 3, "others": 0, "leaked": 60}),
    ("it grew, nobody to ask", LEAKING, {"reserved": 76, "active": 76, "free": 3, "leaked": 60}),
    ("it grew, and leaves pieces", LEAKING, {"reserved": 73, "active": 70, "free": 8, "leaked": 60}),
    ("it grew less than the pieces", FRAGMENTED, {"reserved": 75, "active": 40, "free": 4, "leaked": 20}),
    ("it grew a little", TOO_BIG, {"reserved": 76, "active": 76, "free": 3, "others": 0, "leaked": 7}),
    ("it grew, another holds more", HOARDED,
     {"reserved": 20, "active": 20, "free": 3, "others": 56, "leaked": 10}),
    ("it grew more than another holds", LEAKING,
     {"reserved": 60, "active": 60, "free": 3, "others": 15, "leaked": 50}),
    ("its own limit, others do not matter", TOO_BIG,
     {"capacity": 40, "device_total": 80, "reserved": 35, "active": 35, "free": 5, "others": 38}),
    ("pieces below its own limit", FRAGMENTED,
     {"capacity": 40, "device_total": 80, "reserved": 39, "active": 20, "free": 38, "largest_free": 2}),
    ("a limit, and the device is empty", TOO_BIG,
     {"capacity": 8, "requested": 3, "reserved": 6, "active": 6, "free": 72}),
    ("a limit, and a leak", LEAKING,
     {"capacity": 8, "requested": 1, "reserved": 8, "active": 8, "free": 72, "leaked": 6}),
    ("below the limit, another holds the rest", HOARDED,
     {"capacity": 40, "device_total": 80, "reserved": 10, "active": 10, "free": 5, "others": 64}),
    ("the other has ended since", TOO_BIG,
     {"device_total": 80, "reserved": 68, "active": 68, "held": 71, "free": 9, "others": 60}),
    ("alone, and the sample says otherwise", TOO_BIG,
     {"device_total": 80, "reserved": 69, "active": 69, "free": 10, "requested": 11, "others": 70}),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "known"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_verdict(expected: str, known: dict[str, int | bool | None]) -> None:
    """The verdict is the one that the facts prove, and unknown when they prove none."""
    facts = {"requested": 10, "capacity": 80, "free": 4, "reserved": 70, "active": 70, **known}
    scaled = {name: value * GIB if type(value) is int else value for name, value in facts.items()}
    assert verdict.classify(verdict.AllocationFailure(**scaled)) == expected  # type: ignore[arg-type]


def test_growth_of_a_leak_is_found() -> None:
    """A rise below a sawtooth is found by its minima."""
    values = [step * 12 + (step % 7) * 500 for step in range(400)]
    assert torch_allocator.leaked_bytes(values) == pytest.approx(400 * 12 * 0.9 * 0.75, rel=0.05)


def test_a_leak_that_begins_late_is_found() -> None:
    """A leak after a flat hour is found, at the latest when as many minima rise as an answer needs."""
    detector = torch_allocator.LeakDetector()
    for second in range(3600):
        detector.add(10_000 + second % 7 * 500)
    assert detector.leaked_bytes() == 0
    for second in range(300):
        detector.add(10_000 + second * 100 + second % 7 * 500)
    assert (detector.leaked_bytes() or 0) > 10_000


@pytest.mark.parametrize("begins", [100, 109, 112, 116, 120])
def test_of_a_leak_that_begins_late_nearly_all_is_counted(begins: int) -> None:
    """Also where it began within the minima that are looked at: the pieces that it leaves would be more."""
    passing = [0, 3, 3, 0, 3, 3, 3]
    minima = [passing[place % 7] for place in range(begins)]
    minima += [4 * (place + 1) + passing[place % 7] for place in range(23)]
    assert 60 <= (torch_allocator.latest_rise(minima) or 0) <= 92


@pytest.mark.parametrize("place", range(20, 112, 3))
def test_a_jump_or_a_dip_before_a_leak_is_no_part_of_it(place: int) -> None:
    """A program that loads another model, or sleeps for a moment, has leaked only what came after."""
    jump = [10] * place + [60 + 0.1 * after for after in range(120 - place)]
    dip = [60] * place + [0] + [60 + 0.1 * after for after in range(120 - place)]
    for minima in (jump, dip):
        scaled = [int(each * 1000) for each in minima]
        assert (torch_allocator.latest_rise(scaled) or 0) <= 100 * (120 - place)


def test_what_rises_and_falls_for_hours_is_no_leak() -> None:
    """A slow cycle of an hour is never taken for a leak after its first turn."""
    detector = torch_allocator.LeakDetector()
    for second in range(3600):
        detector.add(10_000 + second * 10)
    for second in range(1, 4 * 3600):
        detector.add(10_000 + second % 3600 * 10)
        if second % 300 == 0:
            assert detector.leaked_bytes() == 0, second


@pytest.mark.parametrize(("set_already", "named"), [(True, False), (False, True), (None, True)])
def test_advice_names_what_is_not_set(set_already: bool | None, named: bool) -> None:
    """The report recommends expandable segments only to a program that does not have them."""
    text = report_file.format_report({"verdict": "fragmented", "expandable_segments": set_already})
    assert ("expandable_segments:True" in text) is named


@pytest.mark.parametrize(
    "values",
    [
        [100 + (step % 5) * 50 for step in range(100)],
        [step * 10 for step in range(20)] + [200] * 80,
        [100] * 50 + [900] * 50,
        [900 - step for step in range(100)],
    ],
    ids=["breathing", "loading", "one jump", "falling"],
)
def test_no_leak(values: list[int]) -> None:
    """Memory that rises and falls, rises only at the start, jumps once or shrinks is not a leak."""
    assert torch_allocator.latest_rise(values) == 0


def test_too_early_for_a_leak() -> None:
    """A few readings give no answer, which differs from "no leak"."""
    assert torch_allocator.leaked_bytes([1, 2, 3]) is None


def test_growth_keeps_the_whole_time_in_little_space() -> None:
    """A month of readings takes as much space as a few, and still shows the leak."""
    grown = torch_allocator.LeakDetector()
    for step in range(100_000):
        grown.add(step)
    assert len(grown.minima) <= torch_allocator.MAX_MINIMA + 1
    assert grown.leaked_bytes() == pytest.approx(90_000, rel=0.05)


FULL: dict[str, int | None] = {"reserved": 100, "active": 60, "inactive_split": 15}


@pytest.mark.parametrize(
    ("expandable", "private", "figure", "expected"),
    [(False, 0, FULL, 25), (True, 0, FULL, None), (None, 0, FULL, None), (False, 7, FULL, None),
     (False, None, FULL, None), (False, 0, {**FULL, "inactive_split": None}, None)],
)  # fmt: skip
def test_reclaimable(
    expandable: bool | None, private: int | None, figure: dict[str, int | None], expected: int | None
) -> None:
    """The reclaimable bytes come from the counters, or are not reported."""
    assert reclaimable_bytes(figure, expandable=expandable, private=private) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", False), ("expandable_segments:True", True),
     ("max_split_size_mb:128, expandable_segments:True", True), ("expandable_segments:False", False),
     ("roundup_power2_divisions:[256:1,512:2],expandable_segments:True", True)],
)  # fmt: skip
def test_enables_expandable_segments(text: str, expected: bool) -> None:
    """The allocator's configuration says whether segments expand."""
    assert enables_expandable_segments(text) is expected


def test_counters_of_another_version() -> None:
    """Counters that a version lacks are not known, and never zero."""
    assert set(read_counters({}).values()) == {None}
    assert read_counters({"reserved_bytes": {"all": {"current": 7}}})["reserved"] == 7
    pools: dict[object, object] = {(0, 1): {"all": {"current": 5}}}
    assert private_pool_bytes({"reserved_bytes_by_private_pools": pools}) == 5
    assert private_pool_bytes({"reserved_bytes_by_private_pools": pools | {(0, 2): 3}}) is None


def test_sums_of_a_snapshot() -> None:
    """The largest free block is one that a tensor can use, not one of a CUDA graph's pool."""
    block = [{"state": "inactive", "size": 30}, {"state": "active_allocated", "size": 10}]
    graph = [{"state": "inactive", "size": 90}]
    segments: list[dict[str, object]] = [
        {"device": 1, "total_size": 40, "blocks": block},
        {"device": 1, "total_size": 20, "blocks": [{"state": "inactive", "size": 20}]},
        {"device": 1, "total_size": 90, "segment_pool_id": (0, 1), "blocks": graph},
        {"device": 0, "total_size": 8, "is_expandable": True, "blocks": []},
    ]
    found = torch_allocator.sum_segments(segments)
    assert (found[1].largest_free, found[1].private) == (30, 90)
    assert (found[0].has_expandable, found[1].has_expandable) == (True, False)


def test_first_survey_comes_soon() -> None:
    """The first snapshot is at the third reading with live blocks, the next one half a minute later."""
    taken: list[object] = []

    def snapshot(pool: object) -> dict[str, object]:
        taken.append(pool)
        return {"segments": []}

    native = SimpleNamespace(_cuda_memorySnapshot=snapshot, _cuda_isHistoryEnabled=lambda: False)
    survey = torch_allocator.BlockSurvey(SimpleNamespace(_C=native, cuda=SimpleNamespace(memory=None)))  # type: ignore[arg-type]
    counts = []
    for second in range(40):
        live = 0 if second < 2 else 7
        survey.survey_if_due(1000.0 + second, [{"active": {"all": {"current": live}}}])
        counts.append(len(taken))
    assert [second for second in range(1, 40) if counts[second] > counts[second - 1]] == [4, 34]


def test_below_zero_is_not_known() -> None:
    """A figure below zero is left out like one that is not reported, at every depth."""
    device = {
        "ordinal": 0, "reserved": -1, "allocated": None, "categories": {"gradients": -5, "optimizer": 0},
    }  # fmt: skip
    entry: dict[str, object] = {"supported": False, "devices": [device], "policy": None}
    assert session.drop_unknown(entry) == {
        "supported": False,
        "devices": [{"ordinal": 0, "categories": {"optimizer": 0}}],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, 1.0), ("5", 5.0), ("0", 1.0), ("0.01", 0.25), ("soon", 1.0), ("inf", 3600.0)],
)
def test_interval(text: str | None, expected: float) -> None:
    """An invalid interval becomes the default or the nearest valid one, without an error in the program."""
    given = settings.parse_interval(text if text != "0" else None)
    assert math.isclose(given, expected)
    assert settings.parse_interval("nan") == settings.DEFAULT_INTERVAL_SECONDS
