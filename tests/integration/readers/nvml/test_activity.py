"""What the reader says of GPM's counters, from the stand-in through the real pynvml."""

import pytest

from tests.support.nvml_readers import read
from tests.support.standin.library import MIB, Code, Device, StandIn
from tests.support.sure import sure
from vramledger.readers.nvml.device_reader import DeviceReader


def test_counters_are_means_in_base_units(standin_here: StandIn, reader: DeviceReader) -> None:
    """Shares are ratios and traffic is bytes a second, from the second reading on."""
    assert read(reader, 0.0).activity == {}
    levels = {"sm": 96.0, "tensor": 94.0, "dram": 24.0, "pcie_receive": 3.0, "nvlink_transmit": 7.5}
    standin_here.device(0).set_activity(**levels)
    activity = sure(read(reader, 1.0).activity)
    assert 0.0 < activity["seconds"] < 60.0
    idle = "occupancy integer fp64 fp32 fp16 video nvlink_receive"
    assert activity == {
        **dict.fromkeys(idle.split(), 0.0), "seconds": activity["seconds"], "sm": 0.96, "tensor": 0.94,
        "dram": 0.24, "pcie_transmit": 0.4 * MIB, "pcie_receive": 3.0 * MIB, "nvlink_transmit": 7.5 * MIB,
    }  # fmt: skip


def test_a_small_kernel_shows_and_nothing_is_exactly_0(standin_here: StandIn, reader: DeviceReader) -> None:
    """The figure of a 64x64 matmul is not rounded to 0, and a second without a kernel is exactly 0."""
    read(reader, 0.0)
    standin_here.device(0).do(sm=2e-6)
    assert (read(reader, 1.0).activity or {})["sm"] == pytest.approx(2e-8)
    assert (read(reader, 2.0).activity or {})["sm"] == 0.0


@pytest.mark.parametrize("function", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_a_failed_query_loses_no_work(standin_here: StandIn, reader: DeviceReader, function: str) -> None:
    """The reading after a failed one covers its time as well."""
    read(reader, 0.0)
    standin_here.device(0).do(sm=5.0)
    standin_here.fail(function, Code.UNKNOWN)
    failed = read(reader, 1.0)
    assert (failed.activity, failed.failed) == (None, ("activity",))
    standin_here.fail(function, Code.SUCCESS)
    assert (read(reader, 2.0).activity or {})["sm"] == 0.05


def test_a_gpu_before_hopper_has_none(standin_here: StandIn, reader: DeviceReader) -> None:
    """Where the device does not support it, nothing has failed, and it is asked only once."""
    standin_here.device(0).set(gpm_supported=0)
    for now in (0.0, 1.0, 2.0):
        reading = read(reader, now)
        assert (reading.activity, reading.failed) == (None, ())
    assert standin_here.calls("nvmlGpmQueryDeviceSupport") == 1


def test_without_counters_a_burst_in_between_shows(standin_here: StandIn, reader: DeviceReader) -> None:
    """Before Hopper the driver's samples of the whole GPU say what its last rate does not."""
    standin_here.device(0).set(gpm_supported=0)
    read(reader, 0.0)
    read(reader, 1.0)
    standin_here.device(0).set(gpu_utilization_peak=60)
    assert read(reader, 2.0).utilization == {"gpu": 0.0, "memory": 0.0, "gpu_peak": 0.6}
    standin_here.fail("nvmlDeviceGetSamples", Code.UNKNOWN)
    reading = read(reader, 3.0)
    assert (reading.utilization, reading.failed) == ({"gpu": 0.0, "memory": 0.0}, ())


def test_metrics_that_the_driver_lacks_are_left_out(standin_here: StandIn, reader: DeviceReader) -> None:
    """A driver that refuses a question with newer metrics answers the one without them."""
    standin_here.device(0).set(gpm_last_metric=97)
    read(reader, 0.0)
    assert "sm" in sure(read(reader, 1.0).activity)


def test_a_metric_that_the_card_does_not_have_is_absent(standin_here: StandIn, reader: DeviceReader) -> None:
    """A card without NVLink has no NVLink traffic, rather than 0."""
    standin_here.device(0).set_activity(nvlink_receive=None, nvlink_transmit=None)
    read(reader, 0.0)
    assert not {"nvlink_receive", "nvlink_transmit"} & sure(read(reader, 1.0).activity).keys()


@pytest.mark.parametrize("value", [float("nan"), 1e300, 4_000.0])
def test_garbage_is_no_figure(standin_here: StandIn, reader: DeviceReader, value: float) -> None:
    """An impossible share makes the query one that has failed."""
    read(reader, 0.0)
    standin_here.device(0).set_activity(sm=value)
    reading = read(reader, 1.0)
    assert (reading.activity, reading.failed) == (None, ("activity",))


def test_what_answered_before_has_failed_afterwards(standin_here: StandIn, reader: DeviceReader) -> None:
    """A driver that says "not supported" later has failed, and is asked again."""
    read(reader, 0.0)
    assert read(reader, 1.0).activity
    standin_here.fail("nvmlGpmSampleGet", Code.NOT_SUPPORTED)
    assert read(reader, 2.0).failed == ("activity",)
    standin_here.fail("nvmlGpmSampleGet", Code.SUCCESS)
    assert read(reader, 3.0).activity


def test_a_lost_gpu_is_read_as_for_the_first_time(standin_here: StandIn, reader: DeviceReader) -> None:
    """A reset GPU counts from 0 again: samples of before and after it are never compared."""
    read(reader, 0.0)
    standin_here.device(0).lost = True
    read(reader, 1.0)
    standin_here.device(0).lost = False
    assert read(reader, 20.0).activity == {}
    assert read(reader, 21.0).activity


def test_the_counters_replace_the_slow_query_for_pcie(standin_here: StandIn, reader: DeviceReader) -> None:
    """With counters, PCIe traffic comes in each sample; the call that takes 20 ms is made where they fail."""
    throughput = "device_pcie_throughput_bytes_per_second"
    assert throughput in read(reader, 0.0).hardware  # counters need two samples
    calls = standin_here.calls("nvmlDeviceGetPcieThroughput")
    standin_here.device(0).set_activity(pcie_transmit=1.0, pcie_receive=2.0)
    assert read(reader, 1.0).hardware[throughput] == {"transmit": MIB, "receive": 2 * MIB}
    assert standin_here.calls("nvmlDeviceGetPcieThroughput") == calls
    standin_here.fail("nvmlGpmSampleGet", Code.UNKNOWN, 0)
    assert throughput in read(reader, 2.0).hardware
    assert standin_here.calls("nvmlDeviceGetPcieThroughput") > calls


@pytest.mark.parametrize(("profile", "other"), [("3g.71gb", 0.0), ("1c.3g.71gb", 0.5)])
def test_each_instance_has_counters(device: Device, reader: DeviceReader, profile: str, other: float) -> None:
    """One of two instances works; compute instances share those of theirs; the divided GPU has none."""
    one, _ = device.divide(profile, profile)
    reader.read(1000.0, 0.0)
    one.set_activity(sm=50.0)
    gpu, first, second = reader.read(1001.0, 1.0)
    assert gpu.activity is None
    assert [(each.activity or {}).get("sm") for each in (first, second)] == [0.5, other]
    assert (first.activity == second.activity) is (other > 0)


def test_a_destroyed_instance_frees_its_samples(standin_here: StandIn, reader: DeviceReader) -> None:
    """The driver's memory for the samples of an instance goes with the instance."""
    standin_here.device(0).divide("3g.71gb", "3g.71gb")
    reader.read(1000.0, 0.0)
    standin_here.device(0).undivide()
    reader.read(1020.0, 20.0)
    assert standin_here.calls("nvmlGpmSampleFree") == 4


def test_hidden_counters_prove_nothing(standin_here: StandIn, reader: DeviceReader) -> None:
    """Where confidential computing hides the counters, a counter of 0 is not shown."""
    standin_here.state.confidential = 1
    readings = [read(reader, moment) for moment in (0.0, 1.0)]
    assert [(each.confidential, each.activity, each.failed) for each in readings] == [("on", None, ())] * 2
    assert readings[1].utilization is not None
    standin_here.state.developer_tools = 1
    assert read(reader, 20.0).confidential == "devtools"
    assert (read(reader, 21.0).activity or {})["sm"] == 0.0


def test_a_machine_of_unknown_mode_proves_nothing(standin_here: StandIn, reader: DeviceReader) -> None:
    """Counters are not read until the driver says that they are not hidden; later failures change nothing."""
    standin_here.fail("nvmlSystemGetConfComputeState", Code.UNKNOWN)
    assert [read(reader, moment).activity for moment in (0.0, 1.0)] == [None, None]
    standin_here.fail("nvmlSystemGetConfComputeState", 0)
    assert read(reader, 20.0).confidential == "off"
    standin_here.fail("nvmlSystemGetConfComputeState", Code.UNKNOWN)
    assert read(reader, 40.0).confidential == "off"
    assert (read(reader, 41.0).activity or {})["sm"] == 0.0


@pytest.mark.parametrize("code", [Code.FUNCTION_NOT_FOUND, Code.NOT_SUPPORTED])
def test_an_older_driver_hides_no_counters(standin_here: StandIn, reader: DeviceReader, code: Code) -> None:
    """An older driver has no such mode: its counters are read."""
    standin_here.fail("nvmlSystemGetConfComputeState", code)
    assert (read(reader, 0.0).confidential, read(reader, 0.0).activity) == (None, {})
