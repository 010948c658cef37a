"""What nvml/driver.py does, on the stand-in through the real pynvml."""

from collections.abc import Callable

import pytest

from tests.support.nvml_readers import ALL, Open, read
from tests.support.standin.library import Code, StandIn
from vramledger.errors import DriverError
from vramledger.model.reading import FAILURE_REASONS
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver, check_access

OpenDriver = Callable[[], Driver]


def test_versions_are_those_of_the_driver(standin_here: StandIn, open_driver: OpenDriver) -> None:
    """The driver's version and the highest CUDA version are reported."""
    standin_here.state.cuda_version = 12080
    driver = open_driver()
    assert (driver.driver_version, driver.cuda_version) == ("580.159.04", "12.8")


@pytest.mark.parametrize(
    ("code", "reason", "advice"),
    [(Code.DRIVER_NOT_LOADED, "no-driver", "; run 'modprobe nvidia'"),
     (Code.LIB_RM_VERSION_MISMATCH, "version-mismatch", "; reboot, or reload the nvidia modules"),
     (Code.NO_PERMISSION, "no-permission", "; run as root"), (Code.SUCCESS, "no-devices", "'lspci -d 10de:'"),
     (Code.FUNCTION_NOT_FOUND, "version-mismatch", ""), (Code.UNKNOWN, "internal", "")],
)  # fmt: skip
def test_no_driver_says_why(standin_here: StandIn, code: Code, reason: str, advice: str) -> None:
    """Every failure of NVML's start has its reason and one line that says what to do."""
    standin_here.driver_error = code
    standin_here.device_count = 0
    with pytest.raises(DriverError) as caught:
        Driver.open().readers(ALL)
    assert caught.value.reason == reason
    assert reason in FAILURE_REASONS
    assert ";" in str(caught.value)
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpus_that_none_may_open_lack_permission(standin_here: StandIn, open_readers: Open) -> None:
    """When the handle of every GPU is refused the reason is permission."""
    standin_here.device_count = 2
    standin_here.fail("nvmlDeviceGetHandleByIndex_v2", Code.NO_PERMISSION, 1)
    check_access(open_readers())  # one may be opened
    standin_here.fail("nvmlDeviceGetHandleByIndex_v2", Code.NO_PERMISSION)
    with pytest.raises(DriverError) as caught:
        check_access(open_readers())
    assert caught.value.reason == "no-permission"


@pytest.mark.parametrize("code", [Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH])
def test_any_query_sees_a_lost_driver(standin_here: StandIn, reader: DeviceReader, code: Code) -> None:
    """An unload, reload or upgrade ends the readings with the reason driver-lost."""
    standin_here.fail("nvmlDeviceGetPowerUsage", code)
    with pytest.raises(DriverError) as caught:
        read(reader)
    assert caught.value.reason == "driver-lost"


def test_xid_errors_come_as_events(standin_here: StandIn, open_driver: OpenDriver) -> None:
    """Every XID since the last wait is returned once, with the UUID of its GPU; a clock change is none."""
    standin_here.device_count = 2
    driver = open_driver()
    assert driver.wait_events(0.001) == []
    standin_here.xid(79, device=1)
    standin_here.xid(1, event_type=0x10)
    standin_here.xid(31, device=0)
    actual = [(event.uuid, event.xid) for event in driver.wait_events(5.0)]
    assert actual == [(standin_here.device(1).uuid, 79), (standin_here.device(0).uuid, 31)]
    assert driver.wait_events(0.001) == []


def test_gpus_without_xid_events_never_have_one(standin_here: StandIn, open_driver: OpenDriver) -> None:
    """Where XID events are not supported the wait only pauses and does not call the driver."""
    standin_here.device(0).set(event_types=0x10)
    driver = open_driver()
    assert [driver.wait_events(0.001) for _ in range(2)] == [[], []]
    assert standin_here.calls("nvmlEventSetWait_v2") == 0
    assert standin_here.calls("nvmlDeviceGetSupportedEventTypes") == 1


def test_a_lost_gpu_does_not_silence_the_others(standin_here: StandIn, open_driver: OpenDriver) -> None:
    """When waiting fails because of a lost GPU, the wait continues without that GPU."""
    standin_here.device_count = 2
    driver = open_driver()
    driver.wait_events(0.001)
    standin_here.device(0).lost = True
    standin_here.fail("nvmlEventSetWait_v2", Code.GPU_IS_LOST)
    assert driver.wait_events(0.001) == []
    standin_here.fail("nvmlEventSetWait_v2", Code.SUCCESS)
    assert driver.wait_events(0.001) == []
    standin_here.xid(13, device=1)
    assert [event.xid for event in driver.wait_events(5.0)] == [13]


def test_events_end_with_the_driver(standin_here: StandIn, open_driver: OpenDriver) -> None:
    """A driver that disappears during the wait is reported as lost."""
    driver = open_driver()
    driver.wait_events(0.001)
    standin_here.reload_driver()
    with pytest.raises(DriverError) as caught:
        driver.wait_events(0.001)
    assert caught.value.reason == "driver-lost"


def test_close_releases_the_driver(standin_here: StandIn) -> None:
    """After close nothing of ours uses NVML, so that a GPU can be reset."""
    driver = Driver.open()
    driver.wait_events(0.001)
    driver.close()
    assert (standin_here.calls("nvmlEventSetFree"), standin_here.calls("nvmlShutdown")) == (1, 1)
