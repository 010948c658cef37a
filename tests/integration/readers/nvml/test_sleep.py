"""A GPU that sleeps, or could, is not asked: from documentation, on the stand-in and a made-up sysfs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nvml_readers import opened, read
from tests.support.standin.library import GIB, StandIn
from tests.support.sure import sure
from vramledger.readers.hosts.gpu_sleep import REST, GpuSleep
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver

FINE = "Runtime D3 status:          Enabled (fine-grained)\nVideo Memory:               Off\n"
COARSE = "Runtime D3 status:          Enabled (coarse-grained)\n"
DISABLED = "Runtime D3 status:          Disabled by default\n"


class Laptop:
    """One GPU, as sysfs and the driver's procfs show it, and its reader."""

    def __init__(self, root: Path, driver: Driver, standin: StandIn) -> None:
        """Begin with a GPU that is awake, can sleep, and that nobody uses."""
        self.root, self.driver, self.standin = root, driver, standin
        plain = self.reader()
        self.address, self.uuid = sure(plain.identity.pci_bus_id), plain.uuid
        model = f"Model: \t\t Stand-in\nGPU UUID: \t {self.uuid}\nDevice Minor: \t 0\n"
        self.says(information=model, power=FINE)
        self.power(runtime_status="active", control="auto")

    def says(self, **files: str) -> None:
        """Write what the driver says in its procfs."""
        self._write(self.root / "driver/nvidia/gpus" / self.address, files)

    def power(self, **files: str) -> None:
        """Write what sysfs says of the device's power."""
        self._write(self.root / "sys/bus/pci/devices" / self.address / "power", files)

    @staticmethod
    def _write(place: Path, files: dict[str, str]) -> None:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text)

    def reader(self) -> DeviceReader:
        return opened(self.driver, sleep=GpuSleep(str(self.root), self.root))

    def asked(self) -> int:
        """Return how often the driver was asked anything about the GPU."""
        names = "HandleByIndex_v2 MemoryInfo_v2 ComputeRunningProcesses_v3 UtilizationRates Temperature"
        return sum(self.standin.calls(f"nvmlDeviceGet{name}") for name in names.split())


@pytest.fixture
def laptop(tmp_path: Path, open_driver: Callable[[], Driver], standin_here: StandIn) -> Laptop:
    return Laptop(tmp_path, open_driver(), standin_here)


def test_a_gpu_that_sleeps_is_not_asked(laptop: Laptop) -> None:
    """While it is suspended nothing wakes it; who wakes it is seen with the next sample."""
    reader = laptop.reader()
    assert read(reader, 0).memory is not None
    laptop.power(runtime_status="suspended\n")
    before = laptop.asked()
    reading = read(reader, 1)
    assert (reading.error, reading.uuid, reading.memory, reading.failed) == ("asleep", laptop.uuid, None, ())
    assert laptop.asked() == before
    laptop.power(runtime_status="active\n")
    laptop.standin.device(0).set_processes([(10, GIB)])
    assert read(reader, 2).processes


@pytest.mark.parametrize("known", [True, False])
def test_a_gpu_that_sleeps_at_the_start_is_not_woken(laptop: Laptop, *, known: bool) -> None:
    """It has the identity that the driver gives without it, or none until it wakes."""
    laptop.power(runtime_status="suspended")
    if not known:
        laptop.says(information="Model: \t Unknown\nGPU UUID: \t GPU-????????-????-????-????-????????????\n")
    before, reader = laptop.asked(), laptop.reader()
    reading = read(reader, 0)
    assert (reading.error, reading.uuid) == ("asleep", laptop.uuid if known else "GPU-unknown-0")
    assert laptop.driver.wait_events(0.01) == []
    assert laptop.asked() == before
    laptop.power(runtime_status="active")
    assert (read(reader, 1).uuid, read(reader, 2).error) == (laptop.uuid, None)
    laptop.driver.wait_events(0.01)
    assert laptop.asked() > before


def test_a_gpu_that_nobody_uses_is_given_time_to_sleep(laptop: Laptop) -> None:
    """It is asked once in half a minute, not many times a second; one that a process uses is watched."""
    laptop.standin.device(0).set(gpu_utilization=0)
    reader, rest = laptop.reader(), int(REST)
    seen = [read(reader, second).error for second in range(3 * rest + 1)]
    assert seen == [None] * (rest + 1) + ["asleep"] * (rest - 1) + [None] + ["asleep"] * (rest - 1) + [None]
    laptop.standin.device(0).set_processes([(10, GIB)])
    assert [read(reader, 4 * rest + second).error for second in range(2)] == [None, None]
    laptop.standin.device(0).set_processes([])
    assert [read(reader, 5 * rest + second).error for second in range(rest)] == [None] * rest


@pytest.mark.parametrize(
    ("control", "status"), [("on", FINE), ("auto", DISABLED), ("auto", COARSE), ("auto", ""), ("", FINE)]
)
def test_a_gpu_that_cannot_sleep_is_read_as_ever(laptop: Laptop, control: str, status: str) -> None:
    """A server's GPU, and one that our open file keeps awake anyway, is read in every sample."""
    laptop.power(control=control)
    laptop.says(power=status)
    reader = laptop.reader()
    assert [read(reader, second).error for second in (0, REST, REST + 1)] == [None] * 3


def test_without_sysfs_nothing_sleeps(laptop: Laptop) -> None:
    """Where the kernel or the driver does not say it, no GPU is taken for asleep."""
    reader = opened(laptop.driver, sleep=GpuSleep(str(laptop.root / "none"), laptop.root / "none"))
    assert [read(reader, second).error for second in (0, REST, REST + 1)] == [None] * 3
