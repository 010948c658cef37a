"""When a look at a GPU may stand for a reading, on the stand-in: only while a reading would say the same."""

import time
from collections.abc import Callable

import pytest

from tests.support.standin.library import GIB, MIB, Code, Device, StandIn
from vramledger.errors import DriverError
from vramledger.readers.nvml.calls import DeviceLostError
from vramledger.readers.nvml.device_reader import DeviceReader

USED, COUNTERS = "nvmlDeviceGetMemoryInfo_v2", "nvmlGpmSampleGet"
LIST, ROWS = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetProcessUtilization"
Change = Callable[[StandIn], object]
OTHERS = (LIST, ROWS, "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates")

BEGIN = 1_000_000.0
"""Unix time of the first reading."""

NOW = 22.0
"""Seconds after it at which a look is due: the GPU was calm for more than ten seconds before."""


@pytest.fixture
def calm(standin_here: StandIn, reader: DeviceReader) -> DeviceReader:
    """Return the reader of a GPU with two holders that was read each second, of which nothing has changed."""
    standin_here.device(0).set_processes([(10, GIB), (20, MIB)])
    for second in range(int(NOW)):
        reader.read(BEGIN + second, float(second))
    return reader


def test_a_look_asks_for_bytes_and_counters_alone(standin_here: StandIn, calm: DeviceReader) -> None:
    """A look at a calm GPU makes two queries, and none of those that cost."""
    before = {name: standin_here.calls(name) for name in (USED, COUNTERS, *OTHERS)}
    assert calm.is_calm(NOW)
    assert calm.is_unchanged(NOW)
    made = {name: standin_here.calls(name) - count for name, count in before.items()}
    assert made == {USED: 1, COUNTERS: 1, **dict.fromkeys(OTHERS, 0)}


CHANGES: dict[str, Change] = {
    "one comes": lambda it: it.device(0).set_processes([(10, GIB), (20, MIB), (30, MIB)]),
    "one ends": lambda it: it.device(0).set_processes([(10, GIB)]),
    "one grows": lambda it: it.device(0).set_processes([(10, GIB + MIB), (20, MIB)]),
    "all end": lambda it: it.device(0).set_processes([]),
    "a kernel": lambda it: it.device(0).do(sm=0.001),
    "a copy": lambda it: it.device(0).do(pcie_receive=100.0),
    "work goes on from now on": lambda it: it.device(0).set_activity(sm=90.0),
    "no counters": lambda it: it.fail(COUNTERS, Code.UNKNOWN),
    "no used bytes": lambda it: it.fail(USED, Code.UNKNOWN),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_end_it(standin_here: StandIn, calm: DeviceReader, change: Change) -> None:
    """A look that finds a change, or that fails, says so, also after looks that found none."""
    assert calm.is_unchanged(NOW)
    change(standin_here)
    assert not calm.is_unchanged(NOW + 1)


def test_a_busy_gpu_is_calm_too_until_it_rests(device: Device, reader: DeviceReader) -> None:
    """Kernels in each second are as steady as none; the first second without one is a change."""
    device.set_processes([(10, GIB)])
    device.set_activity(sm=90.0, dram=20.0)
    for second in range(int(NOW)):
        device.raw_sample(10, timestamp=int((BEGIN + second) * 1e6), sm=90)
        reader.read(BEGIN + second, float(second))
    device.set_activity(sm=40.0, dram=0.0)
    assert reader.is_calm(NOW)
    assert reader.is_unchanged(NOW)
    device.be_idle()
    assert not reader.is_unchanged(NOW + 1)


def test_what_looks_counted_is_in_the_next_reading(standin_here: StandIn, calm: DeviceReader) -> None:
    """A kernel in any of the seconds between two readings is work in the second of them, and only there."""
    calm.is_unchanged(NOW)
    standin_here.device(0).do(sm=0.5)
    began = time.monotonic()
    calm.is_unchanged(NOW + 1)
    calm.is_unchanged(NOW + 2)
    looked = time.monotonic() - began
    (reading,) = calm.read(BEGIN + NOW + 3, NOW + 3)
    (after,) = calm.read(BEGIN + NOW + 4, NOW + 4)
    assert (reading.activity or {})["sm"] > 0.0
    assert (after.activity or {})["sm"] == 0.0
    assert (reading.activity or {})["seconds"] > looked


def test_a_reading_beside_a_look_counts_nothing_twice(standin_here: StandIn, calm: DeviceReader) -> None:
    """The look that found work is followed by a reading of the same moment, and maybe by a second one."""
    standin_here.device(0).do(sm=0.5)
    calm.is_unchanged(NOW)
    first, again = (calm.read(BEGIN + NOW, NOW)[0].activity for _ in range(2))
    assert first == again
    (after,) = calm.read(BEGIN + NOW + 1, NOW + 1)
    assert (after.activity or {})["sm"] == 0.0


def test_counters_that_failed_are_in_the_next_reading(standin_here: StandIn, calm: DeviceReader) -> None:
    """What a look counted is not lost when the reading that should have it fails."""
    standin_here.device(0).do(sm=0.5)
    calm.is_unchanged(NOW)
    standin_here.fail(COUNTERS, Code.UNKNOWN)
    (failed,) = calm.read(BEGIN + NOW + 1, NOW + 1)
    standin_here.fail(COUNTERS, Code.SUCCESS)
    (reading,) = calm.read(BEGIN + NOW + 2, NOW + 2)
    assert failed.activity is None
    assert (reading.activity or {})["sm"] > 0.0


def test_a_gpu_that_worked_ten_seconds_ago_is_not_calm(standin_here: StandIn, calm: DeviceReader) -> None:
    """After a burst each second has a reading of its own."""
    standin_here.device(0).do(sm=0.5)
    for second in range(10):
        calm.read(BEGIN + NOW + second, NOW + second)
        assert not calm.is_calm(NOW + second + 0.5)


NEVER_CALM: dict[str, Change] = {
    "before Hopper": lambda it: it.fail("nvmlGpmQueryDeviceSupport", Code.NOT_SUPPORTED),
    "divided by MIG": lambda it: it.device(0).divide("1g.18gb"),
    "a query fails": lambda it: it.fail("nvmlDeviceGetTemperature", Code.UNKNOWN),
    "work of nobody": lambda it: it.device(0).set_activity(sm=90.0),
    "no list": lambda it: it.fail(LIST, Code.UNKNOWN),
}


@pytest.mark.parametrize("case", NEVER_CALM.values(), ids=NEVER_CALM.keys())
def test_what_is_not_known_makes_no_calm(standin_here: StandIn, reader: DeviceReader, case: Change) -> None:
    """A look needs counters, a whole last reading, and a name for all work."""
    standin_here.device(0).set_processes([(10, GIB)])
    case(standin_here)
    for second in range(int(NOW)):
        reader.read(BEGIN + second, float(second))
    assert not reader.is_calm(NOW)


def test_a_look_at_a_gpu_that_is_lost_raises(standin_here: StandIn, calm: DeviceReader) -> None:
    """A look never hides that a GPU has fallen off the bus, or that the driver is gone."""
    standin_here.device(0).lost = True
    with pytest.raises(DeviceLostError):
        calm.is_unchanged(NOW)
    standin_here.device(0).lost = False
    standin_here.driver_error = Code.DRIVER_NOT_LOADED
    with pytest.raises(DriverError):
        calm.is_unchanged(NOW)
