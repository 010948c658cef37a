"""The last 15 minutes: limited, balanced, with gaps where nothing is known."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.builders import MIB, RESERVED, TOTAL, coherent_device, device, failed, holding, snapshot
from tests.support.sure import sure
from vramledger.model.snapshot import Snapshot
from vramledger.views.timeline import SPAN, STEP, HoldingGrowth, Timeline

BEGIN = 1_790_000_000.0


def at(seconds: float, memory: int = MIB, *, pid: int = 7) -> Snapshot:
    """Make a sample with one holder, this many seconds after the beginning."""
    return replace(snapshot(device(0, [holding(pid, memory)])), time=BEGIN + seconds)


def told(timeline: Timeline) -> tuple[list[float], dict[str, list[Any]]]:
    """Return the times and the first device's columns."""
    found = timeline.history()
    return found.times, msgspec.to_builtins(found.devices[0].memory) if found.devices else {}


def test_every_step_balances() -> None:
    """In each step the parts add up to the device's total."""
    timeline = Timeline()
    for second in range(20):
        timeline.record(at(second, second * MIB))
    times, memory = told(timeline)
    assert times == [BEGIN, BEGIN + 5, BEGIN + 10, BEGIN + 15]
    for place in range(len(times)):
        parts = [
            column[place] for name, column in memory.items() if name not in ("total", "operating_system")
        ]
        assert sum(parts) == memory["total"][place] == TOTAL
    assert memory["operating_system"] == [None] * len(times)


@pytest.mark.parametrize("reserved", [None, 0, 5 * MIB])
def test_parts_that_not_every_device_has(reserved: int | None) -> None:
    """The operating system's part is kept with and without a driver's reserve; a missing one is null."""
    timeline = Timeline()
    coherent = coherent_device()
    ledger = replace(sure(coherent.ledger), driver_reserved=reserved)
    timeline.record(replace(snapshot(replace(coherent, ledger=ledger)), time=BEGIN))
    _, memory = told(timeline)
    assert memory["driver_reserved"] == [reserved]
    assert memory["operating_system"] == [ledger.operating_system]
    assert memory["total"] == [TOTAL - (RESERVED - (reserved or 0))]


def test_a_peak_within_a_step_is_kept() -> None:
    """Of the samples in one step the one with the most memory in use is shown."""
    timeline = Timeline()
    for second, size in enumerate((1, 9, 2, 3)):
        timeline.record(at(second, size * MIB))
    assert told(timeline)[1]["active"] == [9 * MIB]


def test_a_failed_sample_is_a_gap() -> None:
    """A step without a successful sample has no values: neither the value before nor 0."""
    timeline = Timeline()
    timeline.record(at(0))
    timeline.record(replace(failed(), time=BEGIN + 5))
    timeline.record(at(10))
    assert told(timeline)[1]["active"] == [MIB, None, MIB]
    assert told(timeline)[1]["total"] == [TOTAL, None, TOTAL]


def test_memory_is_bounded() -> None:
    """After hours there are 15 minutes, and devices and holders that are gone are forgotten."""
    timeline = Timeline()
    timeline.record(replace(snapshot(device(1, [holding(9)])), time=BEGIN))
    for second in range(0, 7200, 2):
        timeline.record(at(second, pid=100 + second // 100))
    times, _ = told(timeline)
    assert len(times) == SPAN / STEP + 1
    assert [each.gpu for each in timeline.history().devices] == [0]
    assert len(timeline.state.holdings) <= 2


def test_growth_is_over_the_last_quarter_of_an_hour() -> None:
    """A holding's growth counts from its size 15 minutes ago, or from its first sample, which has none."""
    timeline = Timeline()
    timeline.record(at(0))
    assert timeline.growth(at(0)) == {}
    for second in range(1, 3601):
        timeline.record(at(second, MIB + second * 1024))
    ((_, growth),) = timeline.growth(at(3600, MIB + 3600 * 1024)).items()
    assert 840 <= growth.seconds <= 900
    assert growth == HoldingGrowth(int(growth.seconds) * 1024, growth.seconds)


def test_a_clock_that_goes_back_begins_anew() -> None:
    """When the time goes back, as between two passes of a fast recording, the history is dropped."""
    timeline = Timeline()
    timeline.record(at(500))
    timeline.record(at(0))
    assert told(timeline)[0] == [BEGIN]


def test_without_a_reserve_there_is_none() -> None:
    """If the driver does not report its reserve separately the column is null, and the rest balances."""
    timeline = Timeline()
    timeline.record(replace(snapshot(device(0, reserved=None)), time=BEGIN))
    memory = told(timeline)[1]
    assert memory["driver_reserved"] == [None]
    assert memory["total"] == [TOTAL]


def test_nothing_noted_is_an_empty_history() -> None:
    """Before the first sample the document has neither times nor devices."""
    assert told(Timeline()) == ([], {})
