"""What nvml/driver.py promises, asked of the stand-in through the real pynvml."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.standin.layout import FUNCTIONS
from tests.standin.library import (
    GIB,
    LEGACY_535_DRIVER,
    MIB,
    OLD_DRIVER,
    VERY_OLD_DRIVER,
    Code,
    StandIn,
    build,
)
from vramledger.config import SamplingConfig
from vramledger.errors import DriverError
from vramledger.nvml.driver import DeviceReader, Driver, check_access
from vramledger.nvml.hardware import QUESTIONS, SLOW_PACE
from vramledger.readings import (
    FAILURE_REASONS,
    DeviceReading,
    MemoryReading,
    ProcessEntry,
    Reading,
    decode,
    encode,
)

ALL = SamplingConfig().collectors | {"pcie"}
NOT_AVAILABLE_32 = 2**32 - 1
NOT_AVAILABLE_64 = 2**64 - 1

Open = Callable[[], list[DeviceReader]]


@pytest.fixture
def open_readers(standin_here: StandIn) -> Iterator[Open]:
    """Open the driver and return its readers, as often as asked."""
    drivers: list[Driver] = []

    def open_readers() -> list[DeviceReader]:
        drivers.append(Driver.open())
        readers = drivers[-1].readers(ALL)
        for reader in readers:
            reader.open()
        return readers

    assert standin_here.device_count
    yield open_readers
    for driver in drivers:
        driver.close()


@pytest.fixture
def reader(open_readers: Open) -> DeviceReader:
    """Return the reader of the only GPU."""
    (reader,) = open_readers()
    return reader


def read(reader: DeviceReader, monotonic: float = 0.0) -> DeviceReading:
    """Read a GPU that MIG does not divide."""
    (reading,) = reader.read(time.time(), monotonic)
    return reading


def test_what_a_device_is_comes_with_every_reading(standin_here: StandIn, reader: DeviceReader) -> None:
    """Index, UUID, name, bus address as in sysfs, and minor number identify a device."""
    reading = read(reader)
    actual = (reading.index, reading.uuid, reading.name, reading.pci_bus_id, reading.minor)
    assert actual == (0, standin_here.device(0).uuid, "NVIDIA H200", "0000:0b:00.0", 0)


def test_versions_are_those_of_the_driver(standin_here: StandIn) -> None:
    """The driver's version and the highest CUDA version are told."""
    standin_here.state.cuda_version = 12080
    driver = Driver.open()
    assert (driver.driver_version, driver.cuda_version) == ("580.159.04", "12.8")
    driver.close()


def test_memory_is_bytes_with_the_reserve_apart(standin_here: StandIn, reader: DeviceReader) -> None:
    """Version 2 of the memory question separates the driver's reserve from what is used."""
    standin_here.device(0).set_memory(total=1000 * MIB, reserved=100 * MIB, used=300 * MIB)
    assert read(reader).memory == MemoryReading(1000 * MIB, 600 * MIB, 300 * MIB, 100 * MIB)


def test_hardware_is_in_base_units(standin_here: StandIn, reader: DeviceReader) -> None:
    """Watts, joules, hertz, bytes and ratios come out of mW, mJ, MHz, KiB and percent."""
    standin_here.fail("nvmlDeviceGetFanSpeed", Code.SUCCESS)
    standin_here.device(0).set(
        temperature=61,
        memory_temperature=72,
        power=650_500,
        power_limit=700_000,
        energy=12_345,
        clocks=(1500, 1400, 3201, 1200),
        throttle_reasons=0b1000100,
        performance_state=2,
        fan_speed=40,
        ecc=(7, 1),
        remapped_rows=(3, 2, 1, 0),
        encoder_utilization=50,
        decoder_utilization=25,
        pcie_generation=4,
        pcie_width=8,
        bar1_total=2 * GIB,
        bar1_used=MIB,
        pcie_transmit=2,
        pcie_receive=3,
    )
    assert read(reader).hardware == {
        "device_temperature_celsius": 61,
        "device_memory_temperature_celsius": 72,
        "device_power_watts": 650.5,
        "device_power_limit_watts": 700,
        "device_energy_joules_total": 12.345,
        "device_clock_hertz": {"graphics": 1500e6, "sm": 1400e6, "memory": 3201e6, "video": 1200e6},
        "device_throttle_active": {
            "gpu_idle": 0,
            "applications_clocks_setting": 0,
            "sw_power_cap": 1,
            "hw_slowdown": 0,
            "sync_boost": 0,
            "sw_thermal_slowdown": 0,
            "hw_thermal_slowdown": 1,
            "hw_power_brake_slowdown": 0,
            "display_clock_setting": 0,
        },
        "device_performance_state": 2,
        "device_fan_speed_ratio": 0.4,
        "device_ecc_errors_total": {"corrected": 7, "uncorrected": 1},
        "device_remapped_rows": {"corrected": 3, "uncorrected": 2},
        "device_row_remap_pending": 1,
        "device_row_remap_failed": 0,
        "device_encoder_utilization_ratio": 0.5,
        "device_decoder_utilization_ratio": 0.25,
        "device_pcie_link_generation": {"current": 4, "max": 5},
        "device_pcie_link_width": {"current": 8, "max": 16},
        "device_bar1_memory_bytes": {"used": MIB, "total": 2 * GIB},
        "device_pcie_throughput_bytes_per_second": {"transmit": 2048, "receive": 3072},
    }


def test_every_family_of_the_table_can_be_read(standin_here: StandIn, reader: DeviceReader) -> None:
    """No row of the table is dead: each gives a value on a card that supports everything."""
    standin_here.fail("nvmlDeviceGetFanSpeed", Code.SUCCESS)
    assert set(read(reader).hardware) == {question.key for question in QUESTIONS}


def test_utilization_is_a_ratio(standin_here: StandIn, reader: DeviceReader) -> None:
    """Device utilisation goes from 0 to 1."""
    standin_here.device(0).set(gpu_utilization=93, memory_utilization=41)
    assert read(reader).utilization == {"gpu": 0.93, "memory": 0.41}


@pytest.mark.parametrize(
    "code", [Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND, Code.ARGUMENT_VERSION_MISMATCH]
)
def test_what_a_card_does_not_support_is_absent_and_no_failure(
    standin_here: StandIn, reader: DeviceReader, code: Code
) -> None:
    """A question without an answer on this card leaves no value and no complaint."""
    for function in ("PowerUsage", "TotalEccErrors", "UtilizationRates", "ProcessUtilization", "FieldValues"):
        standin_here.fail(f"nvmlDeviceGet{function}", code)
    reading = read(reader)
    assert not {"device_power_watts", "device_ecc_errors_total", "device_memory_temperature_celsius"} & set(
        reading.hardware
    )
    assert (reading.utilization, reading.process_utilization, reading.failed) == (None, None, ())


def test_not_available_is_never_a_number(standin_here: StandIn, reader: DeviceReader) -> None:
    """NVML's 2^32-1 and 2^64-1 mean "not available", in every kind of answer."""
    standin_here.device(0).set(
        power=NOT_AVAILABLE_32,
        energy=NOT_AVAILABLE_64,
        ecc=(NOT_AVAILABLE_64, 5),
        gpu_utilization=NOT_AVAILABLE_32,
        bar1_used=NOT_AVAILABLE_64,
        throttle_reasons=NOT_AVAILABLE_64,
        memory_temperature=NOT_AVAILABLE_32,
    )
    standin_here.device(0).set_memory(used=NOT_AVAILABLE_64)
    standin_here.device(0).set_processes([(10, None)])
    reading = read(reader)
    assert reading.hardware["device_ecc_errors_total"] == {"uncorrected": 5}
    assert reading.utilization == {"memory": 0}
    assert reading.memory is None
    assert reading.processes == (ProcessEntry(10, None, "C"),)
    assert not {
        "device_power_watts",
        "device_energy_joules_total",
        "device_bar1_memory_bytes",
        "device_throttle_active",
        "device_memory_temperature_celsius",
    } & set(reading.hardware)


def test_an_unknown_performance_state_is_absent(standin_here: StandIn, reader: DeviceReader) -> None:
    """State 32 is NVML's "unknown", not a P-state."""
    standin_here.device(0).set(performance_state=32)
    assert "device_performance_state" not in read(reader).hardware


def test_throttle_reasons_of_a_newer_driver_are_left_out(standin_here: StandIn, reader: DeviceReader) -> None:
    """Bits that we have no name for do not disturb those that we know."""
    standin_here.device(0).set(throttle_reasons=1 << 40 | 1)
    active = read(reader).hardware["device_throttle_active"]
    assert isinstance(active, dict)
    assert [reason for reason, value in active.items() if value] == ["gpu_idle"]


def test_the_lists_are_merged_by_maximum(standin_here: StandIn, reader: DeviceReader) -> None:
    """A pid of several lists is one holder with its largest bytes, and the kinds of all its lists."""
    standin_here.device(0).set_processes(
        [(10, 100), (20, 500), (40, None)],
        graphics=[(30, 7), (40, 9)],
        mps=[(20, 500), (10, 120)],
    )
    assert read(reader).processes == (
        ProcessEntry(10, 120, "CM"),
        ProcessEntry(20, 500, "CM"),
        ProcessEntry(40, 9, "CG"),
        ProcessEntry(30, 7, "G"),
    )


def test_used_and_holders_are_of_one_book(standin_here: StandIn, reader: DeviceReader) -> None:
    """Used is what the merged holders hold and what nobody holds, a pid of two lists counted once."""
    device = standin_here.device(0)
    device.set_processes([(10, 100 * MIB), (20, GIB)], mps=[(20, GIB)])
    device.set_memory(unattributed=14 * MIB)
    reading = read(reader)
    assert reading.memory is not None
    assert reading.processes is not None
    assert reading.memory.used == sum(entry.memory or 0 for entry in reading.processes) + 14 * MIB


def test_nobody_and_not_known_differ(standin_here: StandIn, reader: DeviceReader) -> None:
    """An empty list is an answer; a list that fails is none, and says so."""
    assert read(reader).processes == ()
    standin_here.fail("nvmlDeviceGetMPSComputeRunningProcesses_v3", Code.UNKNOWN)
    reading = read(reader)
    assert (reading.processes, reading.failed) == (None, ("processes",))


def test_graphics_and_mps_lists_may_be_unsupported(standin_here: StandIn, reader: DeviceReader) -> None:
    """The compute list stands without the other two."""
    standin_here.device(0).set_processes([(10, 100)])
    for kind in ("Graphics", "MPSCompute"):
        standin_here.fail(f"nvmlDeviceGet{kind}RunningProcesses_v3", Code.NOT_SUPPORTED)
    reading = read(reader)
    assert (reading.processes, reading.failed) == ((ProcessEntry(10, 100, "C"),), ())


def test_without_a_compute_list_nothing_is_known(standin_here: StandIn, reader: DeviceReader) -> None:
    """An unsupported compute list is no empty list."""
    standin_here.fail("nvmlDeviceGetComputeRunningProcesses_v3", Code.NOT_SUPPORTED)
    reading = read(reader)
    assert (reading.processes, reading.failed) == (None, ())


def test_a_list_that_grows_while_it_is_asked_is_read_whole(
    standin_here: StandIn, reader: DeviceReader
) -> None:
    """More processes than the first answer promised are still all there."""
    device = standin_here.device(0)
    device.set_processes([(pid, MIB) for pid in range(1, 101)])
    device.grow_processes("compute", [(pid, MIB) for pid in range(101, 501)])
    processes = read(reader).processes
    assert processes is not None
    assert [entry.pid for entry in processes] == list(range(1, 501))


def test_a_list_that_never_fits_is_given_up(standin_here: StandIn, reader: DeviceReader) -> None:
    """A driver that always wants more room costs the list, not the reading."""
    standin_here.fail("nvmlDeviceGetComputeRunningProcesses_v3", Code.INSUFFICIENT_SIZE)
    reading = read(reader)
    assert (reading.processes, reading.failed) == (None, ("processes",))
    assert reading.memory is not None


@pytest.mark.parametrize("without", [OLD_DRIVER, VERY_OLD_DRIVER, LEGACY_535_DRIVER])
def test_older_drivers_are_read_by_the_functions_they_have(
    standin_directory: Path, tmp_path: Path, without: Iterable[str]
) -> None:
    """Missing v2 and v3 functions, and the longer rows of the 535.43 drivers, give the same holders."""
    library = build(standin_directory, without=without)
    with StandIn(tmp_path, library) as standin, standin.in_this_process():
        standin.device(0).set_processes([(10, GIB), (20, None)], mps=[(10, GIB)])
        driver = Driver.open()
        (reader,) = driver.readers(ALL)
        reading = read(reader)
        driver.close()
    assert reading.processes == (ProcessEntry(10, GIB, "CM"), ProcessEntry(20, None, "C"))
    assert reading.failed == ()
    assert "device_throttle_active" in reading.hardware


def test_version_1_of_the_memory_question_knows_no_reserve(standin_directory: Path, tmp_path: Path) -> None:
    """Where only version 1 exists the reserve is unknown, and is a part of used."""
    library = build(standin_directory, without=OLD_DRIVER)
    with StandIn(tmp_path, library) as standin, standin.in_this_process():
        standin.device(0).set_memory(total=1000, reserved=100, used=300)
        driver = Driver.open()
        (reader,) = driver.readers(ALL)
        memory = read(reader).memory
        driver.close()
    assert memory == MemoryReading(1000, 600, 400, None)


def test_a_kernel_module_older_than_the_library_is_noticed(
    standin_here: StandIn, reader: DeviceReader
) -> None:
    """A function that exists and answers "function not found" is replaced by its older version."""
    standin_here.device(0).set_processes([(10, 100)])
    standin_here.device(0).set_memory(total=1000, reserved=100, used=300)
    standin_here.fail("nvmlDeviceGetComputeRunningProcesses_v3", Code.FUNCTION_NOT_FOUND)
    standin_here.fail("nvmlDeviceGetMemoryInfo_v2", Code.FUNCTION_NOT_FOUND)
    reading = read(reader)
    assert reading.processes == (ProcessEntry(10, 100, "C"),)
    assert reading.memory == MemoryReading(1000, 600, 400, None)


def test_process_utilization_is_a_ratio_at_its_time(standin_here: StandIn, reader: DeviceReader) -> None:
    """A busy pid has its newest sample; who is not in the driver's log is not in the reading."""
    read(reader)
    before = time.time()
    standin_here.device(0).set_processes([(10, 100), (20, 100)])
    standin_here.device(0).busy(10, sm=0.4, memory=0.15)
    samples = read(reader).process_utilization
    assert samples is not None
    ((pid, stamp, *ratios),) = samples
    assert (pid, ratios) == (10, [0.4, 0.15, 0, 0])
    assert before <= stamp <= time.time()


def test_nobody_busy_is_an_answer(standin_here: StandIn, reader: DeviceReader) -> None:
    """NVML's "not found" for the utilisation of nobody is an empty result, not a failure."""
    reading = read(reader)
    assert (reading.process_utilization, reading.failed) == ((), ())
    assert standin_here.calls("nvmlDeviceGetProcessUtilization") == 1


def test_a_failed_utilization_query_is_no_evidence(standin_here: StandIn, reader: DeviceReader) -> None:
    """A failed query is unknown, which nobody may take for idleness."""
    standin_here.fail("nvmlDeviceGetProcessUtilization", Code.UNKNOWN)
    reading = read(reader)
    assert (reading.process_utilization, reading.failed) == (None, ("process_utilization",))


def test_the_utilization_log_is_read_from_now_on(standin_here: StandIn, reader: DeviceReader) -> None:
    """The first query starts at the present, the next one where the newest sample was."""
    device = standin_here.device(0)
    reader.read(1000.0, 0.0)
    assert device.last_seen == 1_000_000_000
    device.raw_sample(10, timestamp=1_000_700_000, sm=5)
    device.raw_sample(20, timestamp=1_000_300_000, sm=5)
    reader.read(1001.0, 1.0)
    reader.read(1002.0, 2.0)
    assert device.last_seen == 1_000_700_000


def test_a_sample_is_reported_once(standin_here: StandIn, reader: DeviceReader) -> None:
    """What the log still holds from before is not taken for new work."""
    reader.read(1000.0, 0.0)
    standin_here.device(0).raw_sample(10, timestamp=1_000_500_000, sm=5)
    ((first,), (again,)) = (reader.read(1001.0, 1.0), reader.read(1002.0, 2.0))
    assert first.process_utilization is not None
    assert [sample.pid for sample in first.process_utilization] == [10]
    assert again.process_utilization == ()


def test_only_the_newest_sample_of_a_pid_counts(standin_here: StandIn, reader: DeviceReader) -> None:
    """Several samples of one pid since the last reading are one: the newest, in whatever order they come."""
    reader.read(1000.0, 0.0)
    for stamp, sm in ((1_000_200_000, 20), (1_000_800_000, 80), (1_000_500_000, 50)):
        standin_here.device(0).raw_sample(10, timestamp=stamp, sm=sm)
    ((reading),) = reader.read(1001.0, 1.0)
    assert reading.process_utilization is not None
    assert [(sample.time, sample.sm) for sample in reading.process_utilization] == [(1000.8, 0.8)]


def test_garbage_samples_are_dropped(standin_here: StandIn, reader: DeviceReader) -> None:
    """Percentages above 100, times in the future and pid 0 are what drivers are known to write."""
    device = standin_here.device(0)
    reader.read(1000.0, 0.0)
    device.raw_sample(10, timestamp=1_000_500_000, sm=4_000_000)
    device.raw_sample(20, timestamp=9_000_000_000_000_000, sm=5)
    device.raw_sample(0, timestamp=1_000_500_000, sm=5)
    device.raw_sample(30, timestamp=0x10, sm=5)
    device.raw_sample(40, timestamp=1_000_500_000, sm=5)
    ((reading),) = reader.read(1001.0, 1.0)
    assert reading.process_utilization is not None
    assert [sample.pid for sample in reading.process_utilization] == [40]


def test_garbage_for_one_holder_is_no_evidence_that_it_was_quiet(
    standin_here: StandIn, reader: DeviceReader
) -> None:
    """A holder with nothing but garbage is not idle because another has a good sample; it is met once."""
    device = standin_here.device(0)
    device.set_processes([(10, 100), (40, 100)])
    reader.read(1000.0, 0.0)
    device.raw_sample(10, timestamp=1_000_500_000, sm=4_000_000)
    device.raw_sample(40, timestamp=1_000_400_000, sm=5)
    ((reading),) = reader.read(1001.0, 1.0)
    assert (reading.process_utilization, reading.failed) == (None, ("process_utilization",))
    ((again),) = reader.read(1002.0, 2.0)
    assert (again.process_utilization, again.failed) == ((), ())


def test_garbage_beside_a_good_sample_of_the_pid_does_no_harm(
    standin_here: StandIn, reader: DeviceReader
) -> None:
    """A holder with a good sample worked, whatever else is in the log about it."""
    device = standin_here.device(0)
    device.set_processes([(10, 100)])
    reader.read(1000.0, 0.0)
    device.raw_sample(10, timestamp=1_000_300_000, sm=5)
    device.raw_sample(10, timestamp=1_000_500_000, sm=4_000_000)
    ((reading),) = reader.read(1001.0, 1.0)
    assert [sample.time for sample in reading.process_utilization or ()] == [1000.3]


def test_nothing_but_garbage_is_no_evidence(standin_here: StandIn, reader: DeviceReader) -> None:
    """When all that is new is garbage nobody is known to be idle."""
    reader.read(1000.0, 0.0)
    standin_here.device(0).raw_sample(10, timestamp=1_000_500_000, sm=4_000_000)
    ((reading),) = reader.read(1001.0, 1.0)
    assert (reading.process_utilization, reading.failed) == (None, ("process_utilization",))


def test_a_clock_that_was_set_back_does_not_silence_the_log(
    standin_here: StandIn, reader: DeviceReader
) -> None:
    """After the wall clock went back an hour new samples are still new."""
    reader.read(10_000.0, 0.0)
    reader.read(6_400.0, 1.0)
    standin_here.device(0).raw_sample(10, timestamp=6_400_500_000, sm=5)
    ((reading),) = reader.read(6_401.0, 2.0)
    assert reading.process_utilization is not None
    assert [sample.pid for sample in reading.process_utilization] == [10]


def test_mig_instances_are_devices_and_their_gpu_holds_nothing(
    standin_here: StandIn, open_readers: Open
) -> None:
    """A divided GPU has hardware readings; its instances have the memory and the holders."""
    device = standin_here.device(0)
    device.set_processes([(10, GIB), (20, 2 * GIB)])
    small, large = device.divide("1g.18gb", "2g.35gb")
    small.set_processes([(10, GIB)])
    large.set_processes([(20, 2 * GIB)])
    (reader,) = open_readers()
    gpu, first, second = reader.read(time.time(), 0.0)
    assert (gpu.divided, gpu.memory, gpu.processes, gpu.process_utilization) == (True, None, None, None)
    assert "device_power_watts" in gpu.hardware
    assert (gpu.error, gpu.failed) == (None, ())
    for instance, unit, profile, number, pid in (
        (first, small, "1g.18gb", 1, 10),
        (second, large, "2g.35gb", 2, 20),
    ):
        assert (instance.uuid, instance.parent, instance.index) == (unit.uuid, gpu.uuid, 0)
        assert (instance.mig_profile, instance.gpu_instance, instance.compute_instance) == (
            profile,
            number,
            0,
        )
        assert instance.memory is not None
        assert instance.processes is not None
        assert [entry.pid for entry in instance.processes] == [pid]
        assert (instance.divided, instance.process_utilization, instance.hardware) == (False, None, {})


def test_a_profile_that_no_name_tells_is_made_from_the_attributes(
    standin_here: StandIn, open_readers: Open
) -> None:
    """A MIG name without a profile does not leave the instance without one."""
    (unit,) = standin_here.device(0).divide("2g.35gb")
    unit.name = "NVIDIA H200"
    (reader,) = open_readers()
    _, instance = reader.read(time.time(), 0.0)
    assert instance.mig_profile == "2g.35gb"


def test_the_mig_layout_is_asked_for_at_the_slow_pace(standin_here: StandIn, open_readers: Open) -> None:
    """A new layout is seen after ten seconds, since asking costs 114 µs a time."""
    (reader,) = open_readers()
    assert len(reader.read(time.time(), 0.0)) == 1
    standin_here.device(0).divide("1g.18gb")
    assert len(reader.read(time.time(), SLOW_PACE - 1)) == 1
    assert len(reader.read(time.time(), SLOW_PACE)) == 2
    assert standin_here.calls("nvmlDeviceGetMigMode") == 2


def test_a_destroyed_instance_is_forgotten_at_the_next_sample(
    standin_here: StandIn, open_readers: Open
) -> None:
    """An instance that answers no more makes the layout be read again, and costs the others nothing."""
    device = standin_here.device(0)
    device.divide("1g.18gb", "1g.18gb")
    (reader,) = open_readers()
    reader.read(time.time(), 0.0)
    device.raw.instances[0].present = 0
    _, gone, alive = reader.read(time.time(), 1.0)
    assert (gone.error, gone.memory, gone.processes) == ("failed", None, None)
    assert (alive.error, alive.failed) == (None, ())
    assert [reading.uuid for reading in reader.read(time.time(), 2.0)] == [device.uuid, alive.uuid]


def test_a_lost_gpu_costs_only_itself(standin_here: StandIn, open_readers: Open) -> None:
    """A GPU that falls off the bus keeps its identity; its neighbour is read as ever."""
    standin_here.device_count = 2
    first, second = open_readers()
    healthy = read(first)
    standin_here.device(0).lost = True
    lost, other = read(first, 1.0), read(second, 1.0)
    assert lost == DeviceReading(
        index=0,
        uuid=healthy.uuid,
        name=healthy.name,
        pci_bus_id=healthy.pci_bus_id,
        minor=healthy.minor,
        error="lost",
        duration=lost.duration,
    )
    assert other.error is None
    assert other.memory is not None


def test_a_gpu_lost_from_the_start_is_a_reader_too(standin_here: StandIn, open_readers: Open) -> None:
    """A GPU without a handle does not hide the others, and is itself when it comes back."""
    standin_here.device_count = 2
    standin_here.device(0).lost = True
    first, second = open_readers()
    reading = read(first)
    assert (reading.index, reading.uuid, reading.error) == (0, "GPU-unknown-0", "lost")
    assert read(second).error is None
    standin_here.device(0).lost = False
    back = read(first, SLOW_PACE)
    assert (back.uuid, back.error) == (standin_here.device(0).uuid, None)


def test_the_instances_of_a_lost_gpu_are_lost(standin_here: StandIn, open_readers: Open) -> None:
    """The MIG instances of a lost GPU are reported as lost, they do not just vanish."""
    device = standin_here.device(0)
    (unit,) = device.divide("1g.18gb")
    (reader,) = open_readers()
    reader.read(time.time(), 0.0)
    device.lost = True
    readings = reader.read(time.time(), 1.0)
    assert [(each.uuid, each.error) for each in readings] == [(device.uuid, "lost"), (unit.uuid, "lost")]


def test_a_gpu_that_answers_nothing_has_failed(standin_here: StandIn, reader: DeviceReader) -> None:
    """When every question fails the device is reported as failed, with what was asked."""
    for function in FUNCTIONS:
        if function.startswith("nvmlDeviceGet"):
            standin_here.fail(function, Code.RESET_REQUIRED)
    reading = read(reader)
    assert reading.error == "failed"
    assert {"memory", "processes", "utilization", "process_utilization"} <= set(reading.failed)


def test_a_failed_question_costs_only_its_value(standin_here: StandIn, reader: DeviceReader) -> None:
    """One failing hardware question is named, the rest of the reading stands."""
    standin_here.fail("nvmlDeviceGetTemperature", Code.UNKNOWN)
    reading = read(reader)
    assert (reading.error, reading.failed) == (None, ("device_temperature_celsius",))
    assert "device_temperature_celsius" not in reading.hardware
    assert "device_power_watts" in reading.hardware


def test_an_error_number_of_a_future_driver_is_only_a_failure(
    standin_here: StandIn, reader: DeviceReader
) -> None:
    """A return code that nobody knows is a failed question, not a crash."""
    standin_here.fail("nvmlDeviceGetMemoryInfo_v2", 4711)
    reading = read(reader)
    assert (reading.memory, reading.failed) == (None, ("memory",))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (Code.DRIVER_NOT_LOADED, "no-driver"),
        (Code.LIB_RM_VERSION_MISMATCH, "version-mismatch"),
        (Code.NO_PERMISSION, "no-permission"),
        (Code.FUNCTION_NOT_FOUND, "version-mismatch"),
        (Code.UNKNOWN, "internal"),
    ],
)
def test_a_driver_that_cannot_be_opened_says_why(standin_here: StandIn, code: Code, reason: str) -> None:
    """Every way in which NVML does not start has its reason and a line that says what to do."""
    standin_here.driver_error = code
    with pytest.raises(DriverError) as caught:
        Driver.open()
    assert caught.value.reason == reason
    assert reason in FAILURE_REASONS
    assert ";" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_driver_without_a_gpu_says_so(standin_here: StandIn) -> None:
    """No devices is a reason of its own, and NVML is let go of."""
    standin_here.device_count = 0
    with pytest.raises(DriverError) as caught:
        Driver.open()
    assert caught.value.reason == "no-devices"
    assert standin_here.calls("nvmlShutdown") == 1


def test_gpus_that_none_may_open_are_a_matter_of_permission(
    standin_here: StandIn, open_readers: Open
) -> None:
    """When the handle of every GPU is refused the reason is permission."""
    standin_here.device_count = 2
    standin_here.fail("nvmlDeviceGetHandleByIndex_v2", Code.NO_PERMISSION, 1)
    check_access(open_readers())  # one may be opened
    standin_here.fail("nvmlDeviceGetHandleByIndex_v2", Code.NO_PERMISSION)
    with pytest.raises(DriverError) as caught:
        check_access(open_readers())
    assert caught.value.reason == "no-permission"


def test_a_host_without_the_library_says_so(tmp_path: Path) -> None:
    """Where libnvidia-ml.so.1 cannot be loaded the reason is no-library, on hosts with a GPU as well."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")  # found before the real one, and no library
    program = (
        "from vramledger.errors import DriverError\n"
        "from vramledger.nvml.driver import Driver\n"
        "try: Driver.open()\n"
        "except DriverError as error: print(error.reason)\n"
    )
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "no-library\n"


@pytest.mark.parametrize("code", [Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH])
def test_a_driver_that_goes_away_is_noticed_by_any_question(
    standin_here: StandIn, reader: DeviceReader, code: Code
) -> None:
    """Unload, reload and upgrade under us end the readings with the reason driver-lost."""
    standin_here.fail("nvmlDeviceGetPowerUsage", code)
    with pytest.raises(DriverError) as caught:
        read(reader)
    assert caught.value.reason == "driver-lost"


def test_a_reloaded_driver_can_be_opened_again(standin_here: StandIn, open_readers: Open) -> None:
    """After a reload the old readers are void and a new Driver works."""
    (old,) = open_readers()
    standin_here.reload_driver()
    with pytest.raises(DriverError) as caught:
        read(old)
    (new,) = open_readers()
    assert (caught.value.reason, read(new).error) == ("driver-lost", None)


def test_a_plugged_gpu_is_counted(standin_here: StandIn) -> None:
    """The number of GPUs is asked anew each time."""
    driver = Driver.open()
    assert driver.device_count() == 1
    standin_here.device_count = 3
    assert driver.device_count() == 3
    driver.close()


SLOW_FUNCTIONS = ("TotalEnergyConsumption", "FieldValues", "PcieThroughput", "BAR1MemoryInfo", "MigMode")


def test_expensive_readings_have_their_own_pace(standin_here: StandIn, reader: DeviceReader) -> None:
    """What takes more than 100 µs is asked every ten seconds, and its value is kept in between."""
    for second in range(10):
        energy = read(reader, float(second)).hardware["device_energy_joules_total"]
        assert energy == 5000
        standin_here.device(0).set(energy=6_000_000)
    counts = {name: standin_here.calls(f"nvmlDeviceGet{name}") for name in SLOW_FUNCTIONS}
    assert counts == {**dict.fromkeys(SLOW_FUNCTIONS, 1), "PcieThroughput": 2}
    assert standin_here.calls("nvmlDeviceGetPowerUsage") == 10
    assert read(reader, 10.0).hardware["device_energy_joules_total"] == 6000


def test_a_slow_reading_that_fails_is_not_kept(standin_here: StandIn, reader: DeviceReader) -> None:
    """An old energy is not served as new: a failure removes it until it is read again."""
    read(reader, 0.0)
    standin_here.fail("nvmlDeviceGetTotalEnergyConsumption", Code.UNKNOWN)
    for second in (10.0, 11.0):
        reading = read(reader, second)
        assert "device_energy_joules_total" not in reading.hardware
        assert reading.failed == ("device_energy_joules_total",)
    standin_here.fail("nvmlDeviceGetTotalEnergyConsumption", Code.SUCCESS)
    assert "device_energy_joules_total" in read(reader, 20.0).hardware


def test_a_collector_that_is_off_calls_nothing(standin_here: StandIn) -> None:
    """Without its collector no function of a family is called; the book needs none of them."""
    driver = Driver.open()
    (reader,) = driver.readers(frozenset({"ledger", "process"}))
    reading = read(reader)
    driver.close()
    assert reading.hardware == {}
    assert reading.memory is not None
    for name in ("PowerUsage", "Temperature", "ClockInfo", "FieldValues", "PcieThroughput", "BAR1MemoryInfo"):
        assert standin_here.calls(f"nvmlDeviceGet{name}") == 0


@pytest.mark.parametrize("collector", ["hardware", "energy", "pcie"])
def test_a_collector_reads_its_own_families(standin_here: StandIn, collector: str) -> None:
    """Each collector alone gives its rows of the table and no others."""
    standin_here.fail("nvmlDeviceGetFanSpeed", Code.SUCCESS)
    driver = Driver.open()
    (reader,) = driver.readers(frozenset({collector}))
    keys = set(read(reader).hardware)
    driver.close()
    assert keys == {question.key for question in QUESTIONS if question.collector == collector}


def test_a_fast_sample_asks_nothing_twice(standin_here: StandIn, reader: DeviceReader) -> None:
    """In a steady state a sample is one call for memory, one a process list and one for utilisation."""
    standin_here.device(0).set_processes([(pid, MIB) for pid in range(1, 65)])
    standin_here.device(0).busy(1)
    read(reader, 0.0)
    lists = [f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute")]
    functions = ["nvmlDeviceGetMemoryInfo_v2", *lists, "nvmlDeviceGetProcessUtilization"]
    before = [standin_here.calls(function) for function in functions]
    read(reader, 1.0)
    assert [standin_here.calls(function) for function in functions] == [count + 1 for count in before]


def test_xid_errors_come_as_events(standin_here: StandIn) -> None:
    """Every XID since the last wait is told once, with the UUID of its GPU."""
    standin_here.device_count = 2
    driver = Driver.open()
    assert driver.wait_events(0.001) == []
    standin_here.xid(79, device=1)
    standin_here.xid(31, device=0)
    events = driver.wait_events(5.0)
    actual = [(event.uuid, event.xid) for event in events]
    assert actual == [(standin_here.device(1).uuid, 79), (standin_here.device(0).uuid, 31)]
    assert driver.wait_events(0.001) == []
    driver.close()


def test_other_events_are_no_xid_errors(standin_here: StandIn) -> None:
    """A clock change event is not taken for an error."""
    driver = Driver.open()
    driver.wait_events(0.001)
    standin_here.xid(1, event_type=0x10)
    assert driver.wait_events(0.01) == []
    driver.close()


def test_gpus_without_xid_events_never_have_one(standin_here: StandIn) -> None:
    """Where XID events are not supported the wait is a pause that asks the driver nothing."""
    standin_here.device(0).set(event_types=0x10)
    driver = Driver.open()
    assert driver.wait_events(0.001) == []
    assert driver.wait_events(0.001) == []
    assert standin_here.calls("nvmlEventSetWait_v2") == 0
    assert standin_here.calls("nvmlDeviceGetSupportedEventTypes") == 1
    driver.close()


def test_a_lost_gpu_does_not_silence_the_events_of_the_others(standin_here: StandIn) -> None:
    """When waiting fails because of a lost GPU the events are asked for without it."""
    standin_here.device_count = 2
    driver = Driver.open()
    driver.wait_events(0.001)
    standin_here.device(0).lost = True
    standin_here.fail("nvmlEventSetWait_v2", Code.GPU_IS_LOST)
    assert driver.wait_events(0.001) == []
    standin_here.fail("nvmlEventSetWait_v2", Code.SUCCESS)
    assert driver.wait_events(0.001) == []
    standin_here.xid(13, device=1)
    assert [event.xid for event in driver.wait_events(5.0)] == [13]
    driver.close()


def test_events_end_with_the_driver(standin_here: StandIn) -> None:
    """A driver that goes away during the wait is reported as such."""
    driver = Driver.open()
    driver.wait_events(0.001)
    standin_here.reload_driver()
    with pytest.raises(DriverError) as caught:
        driver.wait_events(0.001)
    assert caught.value.reason == "driver-lost"
    driver.close()


def test_close_releases_the_driver(standin_here: StandIn) -> None:
    """After close nothing of ours holds NVML, so that a GPU can be reset."""
    driver = Driver.open()
    driver.wait_events(0.001)
    driver.close()
    assert (standin_here.calls("nvmlEventSetFree"), standin_here.calls("nvmlShutdown")) == (1, 1)


def test_a_hanging_gpu_does_not_hold_up_another(standin_here: StandIn, open_readers: Open) -> None:
    """While a call on one GPU hangs another GPU is read to its end in its own thread."""
    standin_here.device_count = 2
    first, second = open_readers()
    standin_here.hang("nvmlDeviceGetMemoryInfo_v2", device=0)
    hanging = threading.Thread(target=read, args=(first,))
    hanging.start()
    standin_here.wait_for_call("nvmlDeviceGetMemoryInfo_v2")
    assert read(second).error is None
    assert hanging.is_alive()
    standin_here.release()
    hanging.join(10)
    assert not hanging.is_alive()


def test_a_child_process_gets_the_stand_in_from_its_environment(standin: StandIn) -> None:
    """With LD_LIBRARY_PATH and the state file's name any program reads the stand-in, live."""
    standin.device(0).set_processes([(4321, GIB)])
    program = (
        "from vramledger.nvml.driver import Driver\n"
        "(reader,) = Driver.open().readers(frozenset())\n"
        "print(reader.read(0.0, 0.0)[0].processes[0].pid)\n"
    )
    environment = {**os.environ, **standin.env(), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "4321\n"


def test_a_state_file_of_another_layout_is_refused(
    standin_here: StandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stand-in does not answer from a file that it does not understand."""
    standin_here.state.version += 1
    with pytest.raises(DriverError):
        Driver.open()
    assert "is no state file of this build" in capfd.readouterr().err


def test_readings_survive_their_way_through_json(standin_here: StandIn, reader: DeviceReader) -> None:
    """What the driver reads holds nothing that JSON would change."""
    standin_here.device(0).set_processes([(10, None), (20, GIB)])
    standin_here.device(0).busy(20)
    read(reader)
    reading = Reading(time=1.0, monotonic=1.0, devices=(read(reader, 1.0),))
    assert dataclasses.asdict(decode(encode(reading))) == dataclasses.asdict(reading)
