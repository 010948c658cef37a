"""What nvml/device_reader.py reads of a GPU, from the stand-in through the real pynvml."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.nvml_readers import ALL, Open, read
from tests.support.standin.layout import FUNCTIONS
from tests.support.standin.library import (
    GIB,
    LEGACY_535_DRIVER,
    MIB,
    OLD_DRIVER,
    VERY_OLD_DRIVER,
    Code,
    Device,
    StandIn,
    build,
)
from tests.support.sure import sure
from vramledger.model.reading import DeviceReading, MemoryReading, ProcessEntry
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver
from vramledger.readers.nvml.hardware import SLOW_INTERVAL

NOT_AVAILABLE_32 = 2**32 - 1
NOT_AVAILABLE_64 = 2**64 - 1


def test_what_a_device_is_comes_with_every_reading(device: Device, reader: DeviceReader) -> None:
    """Index, UUID, name, bus address as in sysfs, and minor number identify a device."""
    reading = read(reader)
    actual = (reading.index, reading.uuid, reading.name, reading.pci_bus_id, reading.minor)
    assert actual == (0, device.uuid, "NVIDIA H200", "0000:0b:00.0", 0)


def test_utilization_is_a_ratio(standin_here: StandIn, reader: DeviceReader) -> None:
    """Device utilisation is a ratio from 0 to 1."""
    standin_here.device(0).set(gpu_utilization=93, memory_utilization=41)
    assert read(reader).utilization == {"gpu": 0.93, "memory": 0.41}


@pytest.mark.parametrize(
    "code", [Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND, Code.ARGUMENT_VERSION_MISMATCH]
)
def test_what_a_card_lacks_is_no_failure(standin_here: StandIn, reader: DeviceReader, code: Code) -> None:
    """A query that this card does not answer gives no value and no error."""
    for function in ("PowerUsage", "TotalEccErrors", "UtilizationRates", "ProcessUtilization", "FieldValues"):
        standin_here.fail(f"nvmlDeviceGet{function}", code)
    reading = read(reader)
    absent = {"device_power_watts", "device_ecc_errors_total", "device_memory_temperature_celsius"}
    assert not absent & set(reading.hardware)
    assert (reading.utilization, reading.process_utilization, reading.failed) == (None, None, ())


def test_not_available_is_never_a_number(standin_here: StandIn, reader: DeviceReader) -> None:
    """NVML's 2^32-1 and 2^64-1 mean "not available", in every kind of answer."""
    standin_here.device(0).set(
        power=NOT_AVAILABLE_32, gpu_utilization=NOT_AVAILABLE_32, memory_temperature=NOT_AVAILABLE_32,
        energy=NOT_AVAILABLE_64, ecc=(NOT_AVAILABLE_64, 5), bar1_used=NOT_AVAILABLE_64,
        throttle_reasons=NOT_AVAILABLE_64,
    )  # fmt: skip
    standin_here.device(0).set_memory(used=NOT_AVAILABLE_64)
    standin_here.device(0).set_processes([(10, None)])
    reading = read(reader)
    assert reading.hardware["device_ecc_errors_total"] == {"uncorrected": 5}
    assert (reading.utilization, reading.memory) == ({"memory": 0}, None)
    assert reading.processes == (ProcessEntry(10, None, "C"),)
    absent = "power_watts energy_joules_total bar1_memory_bytes throttle_active memory_temperature_celsius"
    assert not {f"device_{name}" for name in absent.split()} & set(reading.hardware)


@pytest.mark.parametrize("without", [OLD_DRIVER, VERY_OLD_DRIVER, LEGACY_535_DRIVER])
def test_older_drivers_are_read(standin_directory: Path, tmp_path: Path, without: Iterable[str]) -> None:
    """Without v2 and v3 functions, and with longer rows, the holders are the same; v1 knows no reserve."""
    with StandIn(tmp_path, build(standin_directory, without=without)) as standin, standin.in_this_process():
        standin.device(0).set_processes([(10, 100), (20, None)], mps=[(10, 100)])
        standin.device(0).set_memory(total=1000, reserved=100, used=300)
        driver = Driver.open()
        (reader,) = driver.readers(ALL)
        first, reading = read(reader), read(reader, 1.0)
        driver.close()
    assert reading.processes == (ProcessEntry(10, 100, "CM"), ProcessEntry(20, None, "C"))
    newer = MemoryReading(1000, 600, 300, 100)
    assert reading.memory == (newer if without is LEGACY_535_DRIVER else MemoryReading(1000, 600, 400, None))
    assert (first.failed, reading.failed) == ((), ())
    assert (reading.activity is None) is (without is not LEGACY_535_DRIVER)
    assert "device_throttle_active" in reading.hardware


def test_an_older_kernel_module_is_noticed(standin_here: StandIn, reader: DeviceReader) -> None:
    """A function that exists and answers "function not found" is replaced by its older version."""
    standin_here.device(0).set_processes([(10, 100)])
    standin_here.device(0).set_memory(total=1000, reserved=100, used=300)
    standin_here.fail("nvmlDeviceGetComputeRunningProcesses_v3", Code.FUNCTION_NOT_FOUND)
    standin_here.fail("nvmlDeviceGetMemoryInfo_v2", Code.FUNCTION_NOT_FOUND)
    reading = read(reader)
    assert reading.processes == (ProcessEntry(10, 100, "C"),)
    assert reading.memory == MemoryReading(1000, 600, 400, None)


def test_a_lost_gpu_costs_only_itself(standin_here: StandIn, open_readers: Open) -> None:
    """A GPU that falls off the bus keeps its identity; the other GPU is read as usual."""
    standin_here.device_count = 2
    first, second = open_readers()
    healthy = read(first)
    standin_here.device(0).lost = True
    lost, other = read(first, 1.0), read(second, 1.0)
    identity = (0, healthy.uuid, healthy.name, healthy.pci_bus_id, healthy.minor)
    assert lost == DeviceReading(*identity, error="lost", duration=lost.duration)
    assert (other.error, other.memory is not None) == (None, True)


def test_a_gpu_lost_from_the_start_is_a_reader_too(standin_here: StandIn, open_readers: Open) -> None:
    """A GPU without a handle does not hide the others, and keeps its identity when it returns."""
    standin_here.device_count = 2
    standin_here.device(0).lost = True
    first, second = open_readers()
    reading = read(first)
    assert (reading.index, reading.uuid, reading.error) == (0, "GPU-unknown-0", "lost")
    assert read(second).error is None
    standin_here.device(0).lost = False
    back = read(first, SLOW_INTERVAL)
    assert (back.uuid, back.error) == (standin_here.device(0).uuid, None)


def test_a_gpu_that_answers_nothing_has_failed(standin_here: StandIn, reader: DeviceReader) -> None:
    """When every query fails the device is reported as failed, with the queries."""
    for function in FUNCTIONS:
        if function.startswith("nvmlDeviceGet"):
            standin_here.fail(function, Code.RESET_REQUIRED)
    reading = read(reader)
    assert reading.error == "failed"
    assert {"memory", "processes", "utilization", "process_utilization"} <= set(reading.failed)


@pytest.mark.parametrize("code", [Code.UNKNOWN, 4711])
def test_a_failed_question_costs_its_value(standin_here: StandIn, reader: DeviceReader, code: int) -> None:
    """One hardware query that fails, with any number, is named; the rest of the reading is valid."""
    standin_here.fail("nvmlDeviceGetTemperature", code)
    reading = read(reader)
    assert (reading.error, reading.failed) == (None, ("device_temperature_celsius",))
    assert "device_temperature_celsius" not in reading.hardware
    assert "device_power_watts" in reading.hardware


def test_a_fast_sample_asks_nothing_twice(standin_here: StandIn, reader: DeviceReader) -> None:
    """In a steady state a sample makes one call each for memory, compute processes and utilisation."""
    standin_here.device(0).set_processes([(pid, MIB) for pid in range(1, 65)])
    standin_here.device(0).busy(1)
    read(reader, 0.0)
    lists = [f"{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute")]
    asked = [f"nvmlDeviceGet{each}" for each in ("MemoryInfo_v2", "ProcessUtilization", *lists)]
    before = [standin_here.calls(function) for function in asked]
    read(reader, 1.0)
    made = [standin_here.calls(function) - count for function, count in zip(asked, before, strict=True)]
    assert made == [1, 1, 1, 0, 0]


def test_instances_are_devices_and_their_gpu_has_none(device: Device, reader: DeviceReader) -> None:
    """A divided GPU has hardware readings; its instances have the memory and the holders."""
    device.set_processes([(10, GIB), (20, 2 * GIB)])
    small, large = device.divide("1g.18gb", "2g.35gb")
    small.set_processes([(10, GIB)])
    large.set_processes([(20, 2 * GIB)])
    gpu, first, second = reader.read(time.time(), 0.0)
    assert (gpu.divided, gpu.memory, gpu.processes, gpu.process_utilization) == (True, None, None, None)
    assert ("device_power_watts" in gpu.hardware, gpu.error, gpu.failed) == (True, None, ())
    expected = ((first, small, "1g.18gb", 1, 10), (second, large, "2g.35gb", 2, 20))
    for instance, unit, profile, number, pid in expected:
        assert (instance.uuid, instance.parent, instance.index) == (unit.uuid, gpu.uuid, 0)
        known = (instance.mig_profile, instance.gpu_instance, instance.compute_instance)
        assert known == (profile, number, 0)
        assert instance.memory is not None
        assert [entry.pid for entry in sure(instance.processes)] == [pid]
        assert (instance.divided, instance.process_utilization, instance.hardware) == (False, None, {})


def test_a_profile_without_a_name_is_from_attributes(device: Device, reader: DeviceReader) -> None:
    """An instance has a profile even if its MIG name has none."""
    (unit,) = device.divide("2g.35gb")
    unit.name = "NVIDIA H200"
    _, instance = reader.read(time.time(), 0.0)
    assert instance.mig_profile == "2g.35gb"


def test_the_mig_layout_is_asked_for_at_the_slow_pace(standin_here: StandIn, reader: DeviceReader) -> None:
    """A new layout is seen after ten seconds, because the query takes 114 µs."""
    assert len(reader.read(time.time(), 0.0)) == 1
    standin_here.device(0).divide("1g.18gb")
    assert len(reader.read(time.time(), SLOW_INTERVAL - 1)) == 1
    assert len(reader.read(time.time(), SLOW_INTERVAL)) == 2
    assert standin_here.calls("nvmlDeviceGetMigMode") == 2


def test_a_destroyed_instance_is_gone_the_next_sample(device: Device, reader: DeviceReader) -> None:
    """An instance that does not answer any more causes a new read of the layout; others keep their data."""
    device.divide("1g.18gb", "1g.18gb")
    reader.read(time.time(), 0.0)
    device.raw.instances[0].present = 0
    _, gone, alive = reader.read(time.time(), 1.0)
    assert (gone.error, gone.memory, gone.processes) == ("failed", None, None)
    assert (alive.error, alive.failed) == (None, ())
    assert [reading.uuid for reading in reader.read(time.time(), 2.0)] == [device.uuid, alive.uuid]


def test_the_instances_of_a_lost_gpu_are_lost(device: Device, reader: DeviceReader) -> None:
    """The MIG instances of a lost GPU are reported as lost; they do not just disappear."""
    (unit,) = device.divide("1g.18gb")
    reader.read(time.time(), 0.0)
    device.lost = True
    readings = reader.read(time.time(), 1.0)
    assert [(each.uuid, each.error) for each in readings] == [(device.uuid, "lost"), (unit.uuid, "lost")]


def test_an_instance_has_a_place(device: Device, reader: DeviceReader) -> None:
    """Its first memory slice and their number distinguish instances of one profile."""
    first, second = device.divide("3g.71gb", "3g.71gb")
    first.place(0, 4)
    second.place(4, 4)
    assert [each.mig_placement for each in reader.read(time.time(), 0.0)] == [None, "0:4", "4:4"]


def test_a_place_that_is_not_told_is_not_a_failure(standin_here: StandIn, reader: DeviceReader) -> None:
    """NVML tells the place only to root; the instance has its data all the same."""
    standin_here.device(0).divide("3g.71gb")
    standin_here.fail("nvmlDeviceGetGpuInstanceById", Code.NO_PERMISSION)
    _, instance = reader.read(time.time(), 0.0)
    assert (instance.mig_placement, instance.error, instance.failed) == (None, None, ())
    assert instance.memory is not None
