"""A Tegra's GPU with the nvgpu driver (Jetson Orin): from reports and sources, not seen."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nvml_readers import opened, read
from tests.support.standin.library import GIB, Code, Device, StandIn
from tests.support.system_memory import write_host_memory
from vramledger.model.reading import MemoryReading, ProcessEntry
from vramledger.readers.hosts.system_memory import SystemMemory
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver

KIB = 1024
HEADING = "CLIENT                        PROCESS      PID        SIZE\n"
TOTAL = "total                                            3000000K\n"

Open = Callable[[], DeviceReader]


@pytest.fixture
def open_reader(standin_here: StandIn, open_driver: Callable[[], Driver], tmp_path: Path) -> Open:
    """Open an Orin, of which NVML knows the name alone, on a host with 64 GiB."""
    standin_here.device(0).name = "Orin (nvgpu)"
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetBAR1MemoryInfo"):
        standin_here.fail(name, Code.NOT_SUPPORTED)
    write_host_memory(tmp_path, total=64 * GIB // KIB, available=40 * GIB // KIB)

    return lambda: opened(open_driver(), SystemMemory(str(tmp_path), tmp_path))


def write_clients(rootfs: Path, text: str) -> None:
    place = rootfs / "sys/kernel/debug/nvmap/iovmm/clients"
    place.parent.mkdir(parents=True)
    place.write_text(text, newline="")


def name_process(proc: Path, pid: int, name: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "comm").write_text(f"{name}\n", newline="")


def test_its_memory_is_the_hosts(open_reader: Open) -> None:
    """Total and free are the kernel's, marked as unified; nothing has failed."""
    reading = read(open_reader())
    assert reading.memory == MemoryReading(64 * GIB, 40 * GIB, 24 * GIB, None)
    assert (reading.memory_kind, reading.failed, reading.error) == ("unified", (), None)


def test_what_nvml_makes_up_is_not_evidence(standin_here: StandIn, device: Device, open_reader: Open) -> None:
    """Zeros and processes that do not exist are neither idleness nor holders: they are not known."""
    device.set_processes([(77, GIB)])
    device.idle(77)
    device.set(temperature=0, power=0)
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        standin_here.fail(name, 0)
    reading = read(open_reader())
    assert (reading.processes, reading.utilization, reading.process_utilization) == (None, None, None)
    assert (reading.activity, reading.hardware, reading.memory_kind) == (None, {}, "unified")


def test_nvmap_names_the_holders(open_reader: Open, tmp_path: Path) -> None:
    """Each process has the sum of its clients; names may have blanks, and the kernel's own is left out."""
    name_process(tmp_path, 1570, "gnome shell")
    name_process(tmp_path, 2001, "python3")
    write_clients(
        tmp_path,
        f"{HEADING}user                      gnome shell     1570      20480K\n"
        "user                          python3     2001    2097152K\n"
        "user                          python3     2001       1024K\n"
        f"vi                             kernel        0       4096K\n{TOTAL}",
    )
    shell, python = ProcessEntry(1570, 20480 * KIB, "C"), ProcessEntry(2001, 2098176 * KIB, "C")
    assert read(open_reader()).processes == (shell, python)


@pytest.mark.parametrize(
    "text",
    ["", "no list\n", f"{HEADING}user python3 2001 12M\n", f"{HEADING}user python3 {2**31} 12K\n",
     f"{HEADING}user python3 -1 12K\n", f"{HEADING}user python3 2001\n"],
)  # fmt: skip
def test_a_list_of_another_form_is_not_read(open_reader: Open, tmp_path: Path, text: str) -> None:
    """Holders are not known then, which is not the same as none."""
    write_clients(tmp_path, text)
    assert read(open_reader()).processes is None


@pytest.mark.parametrize(
    "name", ["x 1 9999999K\nx", "9 9K\nuser sh", "a\nb", "a\rb", "a\x0bb", "\nuser b 7 9K\n"]
)
def test_a_name_makes_no_line_of_the_list(open_reader: Open, tmp_path: Path, name: str) -> None:
    """A program with line breaks in its name gives no memory to another process, or to one that has ended."""
    name_process(tmp_path, 1, "systemd")
    name_process(tmp_path, 9, "sh")
    name_process(tmp_path, 2001, name)
    write_clients(tmp_path, f"{HEADING}user {name} 2001 1024K\n{TOTAL}")
    assert read(open_reader()).processes in (None, (ProcessEntry(2001, 1024 * KIB, "C"),))


def test_an_empty_list_is_no_holder(open_reader: Open, tmp_path: Path) -> None:
    """Where nvmap has no client, nobody holds memory."""
    write_clients(tmp_path, HEADING + TOTAL)
    assert read(open_reader()).processes == ()


def test_a_host_that_does_not_tell_has_no_ledger(open_reader: Open, tmp_path: Path) -> None:
    """Without the kernel's figures nothing is known, and that is a failure."""
    (tmp_path / "meminfo").unlink()
    reading = read(open_reader())
    assert (reading.memory, reading.failed) == (None, ("memory",))
