"""Results of the fault injection: an impossible answer does not count, and takes no memory."""

import pynvml
import pytest

from tests.support.nvml_readers import ALL, Open, read
from tests.support.standin.library import GIB, MIB, Code, StandIn
from tests.support.sure import sure
from vramledger.errors import DriverError
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver
from vramledger.readers.nvml.hardware import SLOW_INTERVAL

PIDS = [(7, GIB), (8, 2 * GIB)]


@pytest.fixture
def reader(standin_here: StandIn, open_readers: Open) -> DeviceReader:
    """Return a reader of a GPU with two holders, which has been read once."""
    standin_here.device(0).set_processes(PIDS)
    (reader,) = open_readers()
    assert read(reader).error is None
    return reader


@pytest.mark.parametrize("seed", range(12))
def test_garbage_is_no_answer(standin_here: StandIn, reader: DeviceReader, seed: int) -> None:
    """Of a GPU whose every answer is garbage only the failure is reported."""
    standin_here.chaos(spoil=1.0, seed=seed)
    reading = read(reader, SLOW_INTERVAL)
    assert (reading.memory, reading.processes) == (None, None)
    assert not reading.process_utilization
    assert {"memory_figures", "processes"} <= set(reading.failed)
    assert reading.hardware.keys() <= {"device_performance_state"}
    standin_here.chaos()
    assert read(reader, SLOW_INTERVAL + 1).failed == ()


def test_a_garbage_uuid_is_no_new_gpu(standin_here: StandIn) -> None:
    """A GPU whose UUID is garbage has none, until it reports its own."""
    standin_here.chaos(spoil=1.0, seed=3)
    reader = DeviceReader(pynvml, 0, ALL)
    with pytest.raises(DriverError):
        Driver.open()  # its count is garbage, too
    standin_here.chaos()
    Driver.open()
    standin_here.chaos(spoil=1.0, seed=3)
    reader.open()
    assert reader.uuid == "GPU-unknown-0"
    standin_here.chaos()
    assert read(reader).uuid == standin_here.device(0).uuid


def test_a_garbage_count_of_gpus_is_no_work_for_ever(standin_here: StandIn) -> None:
    """Four thousand million GPUs count as a failure of the driver."""
    driver = Driver.open()
    standin_here.device_count = 2**32 - 1
    with pytest.raises(DriverError):
        driver.readers(ALL)
    standin_here.device_count = 1
    driver.close()


def test_a_list_that_claims_to_be_endless_gets_no_room(standin_here: StandIn, reader: DeviceReader) -> None:
    """Lists that grow at every read are given up; the buffer does not double for ever."""
    standin_here.chaos(grow=1.0, seed=1)
    for _ in range(200):
        assert "processes" in read(reader).failed
    standin_here.chaos()
    assert len(sure(read(reader).processes)) == 2


@pytest.mark.parametrize(
    "code", [Code.FUNCTION_NOT_FOUND, Code.ARGUMENT_VERSION_MISMATCH, Code.NOT_SUPPORTED]
)
@pytest.mark.parametrize("query", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMemoryInfo_v2"])
def test_what_worked_failed(standin_here: StandIn, reader: DeviceReader, query: str, code: Code) -> None:
    """A query that was answered once is not unsupported later, and no older version replaces it."""
    standin_here.fail(query, code)
    failed = read(reader)
    assert failed.failed
    assert failed.memory is None or failed.processes is None
    standin_here.fail(query, Code.SUCCESS)
    again = read(reader)
    assert sure(again.memory).reserved is not None
    assert (again.failed, {entry.pid for entry in again.processes or ()}) == ((), {7, 8})


def test_what_failed_is_asked_again_at_once(standin_here: StandIn, reader: DeviceReader) -> None:
    """A slow query that failed has no old value, and is repeated in the next sample; the others are not."""
    standin_here.fail("nvmlDeviceGetTotalEnergyConsumption", Code.UNKNOWN)
    for second in (SLOW_INTERVAL, SLOW_INTERVAL + 0.5):
        failed = read(reader, second)
        assert failed.failed == ("device_energy_joules_total",)
        assert "device_energy_joules_total" not in failed.hardware
    standin_here.fail("nvmlDeviceGetTotalEnergyConsumption", Code.SUCCESS)
    others = standin_here.calls("nvmlDeviceGetEnforcedPowerLimit")
    reading = read(reader, SLOW_INTERVAL + 1)
    assert ("device_energy_joules_total" in reading.hardware, reading.failed) == (True, ())
    assert standin_here.calls("nvmlDeviceGetEnforcedPowerLimit") == others


def test_a_gpu_without_a_handle_is_asked_again_at_once(standin_here: StandIn) -> None:
    """A GPU without a handle at the start is complete in the first sample that gets a handle."""
    Driver.open()
    standin_here.fail("nvmlDeviceGetHandleByIndex_v2", Code.UNKNOWN)
    reader = DeviceReader(pynvml, 0, ALL)
    assert read(reader, 0.0).error == "failed"
    standin_here.fail("nvmlDeviceGetHandleByIndex_v2", Code.SUCCESS)
    reading = read(reader, 1.0)
    assert (reading.error, "device_energy_joules_total" in reading.hardware) == (None, True)


def test_a_name_that_failed_at_the_start_is_told_later(standin_here: StandIn) -> None:
    """A missing part of the identity is read again until it is there."""
    Driver.open()
    standin_here.fail("nvmlDeviceGetMinorNumber", Code.UNKNOWN)
    reader = DeviceReader(pynvml, 0, ALL)
    reader.open()
    assert read(reader).minor is None
    standin_here.fail("nvmlDeviceGetMinorNumber", Code.SUCCESS)
    assert read(reader, 1.0).minor == 0


def test_a_lost_gpu_in_answer_to_a_question_of_the_system(standin_here: StandIn) -> None:
    """If the driver's version query says "GPU lost", there is no version, and the driver works."""
    standin_here.fail("nvmlSystemGetDriverVersion", Code.GPU_IS_LOST)
    driver = Driver.open()
    assert (driver.driver_version, driver.device_count()) == (None, 1)


def test_more_rows_than_room_are_none(standin_here: StandIn, reader: DeviceReader) -> None:
    """Memory above a GPU's possible size, or a pid above the kernel's limit, is not a holder."""
    for pid, size in ((2**31, GIB), (7, 2**60)):
        standin_here.device(0).set_processes([(pid, size)])
        reading = read(reader)
        assert (reading.processes, "processes" in reading.failed) == (None, True)
    standin_here.device(0).set_processes([(7, 60 * MIB)])
    assert read(reader).failed == ()
