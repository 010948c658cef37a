"""Whose memory a device has, as the stand-in tells it through the real pynvml."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nvml_readers import opened, read
from tests.support.standin.layout import NOT_SUPPORTED_32
from tests.support.standin.library import GIB, MIB, Code, Device, StandIn
from tests.support.sure import sure
from tests.support.system_memory import write_host_memory, write_node
from vramledger.model.reading import MemoryReading, NodeMemory
from vramledger.readers.hosts.system_memory import SystemMemory
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver
from vramledger.readers.nvml.hardware import SLOW_INTERVAL

KIB = 1024
HOST = 119 * GIB
AVAILABLE = 100 * GIB
NODE = 95 * GIB

Open = Callable[[], DeviceReader]


def fail_memory(standin: StandIn, code: int) -> None:
    """Let each version of the question for the used bytes fail on all GPUs, or answer again."""
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        standin.fail(name, code)


@pytest.fixture
def open_reader(open_driver: Callable[[], Driver], tmp_path: Path) -> Open:
    """Open the GPU on a host whose kernel tells of 119 GiB, and of a node 1 without CPUs."""
    write_host_memory(tmp_path, total=HOST // KIB, available=AVAILABLE // KIB)
    write_node(tmp_path, 0, total=HOST // KIB, free=10, processors="0-71")
    gib = GIB // KIB
    write_node(tmp_path, 1, total=NODE // KIB, free=60 * gib, file=gib, anonymous=2 * gib)

    return lambda: opened(open_driver(), SystemMemory(str(tmp_path), tmp_path))


@pytest.mark.parametrize(
    ("gpu", "told"),
    [(("NVIDIA H200", NOT_SUPPORTED_32, 0), "none"), (("NVIDIA H200", 0, 0), "none"),
     (("NVIDIA GH200 480GB", NOT_SUPPORTED_32, 2), "ats")],
    ids=["an H200", "the node beside it, which has CPUs", "a GH200 whose driver manages its memory (CDMM)"],
)  # fmt: skip
def test_a_discrete_gpu(device: Device, open_reader: Open, gpu: tuple[str, int, int], told: str) -> None:
    """Its memory is its own: neither coherent nor unified."""
    device.name, device.numa_node, mode = gpu
    device.set(addressing_mode=mode)
    reading = read(open_reader())
    assert (reading.memory_kind, reading.node, reading.addressing_mode) == (None, None, told)
    assert reading.failed == ()


def test_a_node_without_processors_is_coherent_memory(device: Device, open_reader: Open) -> None:
    """On a GH200 in NUMA mode the kernel's figures of the node come with NVML's."""
    device.be_coherent(1)
    reading = read(open_reader())
    assert (reading.memory_kind, reading.addressing_mode, reading.failed) == ("coherent", "ats", ())
    assert reading.node == NodeMemory(1, NODE, 60 * GIB, GIB, 2 * GIB, 0)
    assert sure(reading.memory).total == 143_771 * MIB


@pytest.mark.parametrize("code", [Code.FUNCTION_NOT_FOUND, Code.NO_PERMISSION, Code.UNKNOWN])
def test_a_silent_driver_is_no_harsher_verdict(standin_here: StandIn, open_reader: Open, code: Code) -> None:
    """A product that may be a node counts as one while the driver does not say; a failure is reported."""
    standin_here.device(0).be_coherent(1)
    standin_here.fail("nvmlDeviceGetNumaNodeId", code)
    reading = read(open_reader())
    assert (reading.memory_kind, reading.node) == ("coherent", None)
    assert reading.failed == (() if code == Code.FUNCTION_NOT_FOUND else ("node",))


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND])
def test_what_was_known_of_a_node_is_kept(standin_here: StandIn, open_reader: Open, code: Code) -> None:
    """A query that fails, also as unsupported, does not make the system's memory unattributed bytes."""
    device = standin_here.device(0)
    device.be_coherent(1)
    device.name = "a new product"
    reader = open_reader()
    read(reader)
    standin_here.fail("nvmlDeviceGetNumaNodeId", code)
    later = read(reader, SLOW_INTERVAL)
    assert (later.memory_kind, later.node is not None, later.failed) == ("coherent", True, ("node",))
    standin_here.fail("nvmlDeviceGetNumaNodeId", 0)
    assert read(reader, SLOW_INTERVAL + 1).failed == ()


def test_an_offline_node_stays_coherent(standin_here: StandIn, open_reader: Open, tmp_path: Path) -> None:
    """Without the kernel's figures the memory is still the operating system's, and the lack is reported."""
    standin_here.device(0).be_coherent(1)
    reader = open_reader()
    read(reader)
    (tmp_path / "sys/devices/system/node/node1/meminfo").unlink()
    reading = read(reader, 1.0)
    assert (reading.memory_kind, reading.node, reading.failed) == ("coherent", None, ("node",))


def test_an_instance_of_a_coherent_gpu_is_coherent(device: Device, open_reader: Open) -> None:
    """An instance without a node of its own has memory of the operating system all the same."""
    device.be_coherent(1)
    own, shared = device.divide("1g.12gb", "1g.12gb")
    own.numa_node = 1
    assert shared.numa_node != 1
    _, first, second = open_reader().read(time.time(), 0.0)
    assert [each.memory_kind for each in (first, second)] == ["coherent", "coherent"]
    assert (first.node is not None, second.node) == (True, None)


@pytest.mark.parametrize("total", [None, 0, HOST], ids=["a GB10", "no bytes", "the host's"])
def test_a_hosts_memory(standin_here: StandIn, open_reader: Open, tmp_path: Path, total: int | None) -> None:
    """Where the driver has no total, 0 or the host's, what can be taken of the host's memory is free.

    While the figures of the kernel are missing there is no ledger, which is a failure.
    """
    device = standin_here.device(0)
    device.set_processes([(7, 30 * GIB)])
    if total is None:
        device.be_unified(standin_here)
    else:
        device.set_memory(total=total, reserved=0, used=0)
        standin_here.fail("nvmlDeviceGetBAR1MemoryInfo", Code.NOT_SUPPORTED)
    reader = open_reader()
    text = (tmp_path / "meminfo").read_text()
    reading = read(reader)
    assert (reading.memory_kind, reading.failed, reading.processes is not None) == ("unified", (), True)
    assert reading.memory == MemoryReading(HOST, AVAILABLE, HOST - AVAILABLE, None)
    (tmp_path / "meminfo").unlink()
    gone = read(reader, 1.0)
    assert (gone.memory, gone.memory_kind, gone.failed) == (None, None, ("memory",))
    (tmp_path / "meminfo").write_text(text)
    again = read(reader, SLOW_INTERVAL)
    assert (again.memory_kind, again.failed) == ("unified", ())


def test_a_discrete_gpu_never_gets_the_hosts_memory(standin_here: StandIn, open_reader: Open) -> None:
    """A GPU with a window to its own memory has no ledger while the driver does not report it."""
    fail_memory(standin_here, Code.NOT_SUPPORTED)
    reader = open_reader()
    assert (read(reader).memory, read(reader).memory_kind) == (None, None)
    fail_memory(standin_here, Code.SUCCESS)
    assert read(reader, 1.0).memory is not None


@pytest.mark.parametrize("code", [Code.NOT_SUPPORTED, Code.UNKNOWN])
def test_reported_memory_is_never_the_hosts(standin_here: StandIn, open_reader: Open, code: Code) -> None:
    """A virtual GPU without a window fails when its memory is not reported any more."""
    standin_here.fail("nvmlDeviceGetBAR1MemoryInfo", Code.NOT_SUPPORTED)
    reader = open_reader()
    assert read(reader).memory_kind is None
    fail_memory(standin_here, code)
    reading = read(reader, 1.0)
    assert (reading.memory, reading.memory_kind, reading.failed) == (None, None, ("memory",))


MODES = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host_vgpu", 4: "host_vsga", 9: None, 2**32 - 1: None}


@pytest.mark.parametrize(("mode", "expected"), MODES.items())
def test_virtual_gpus_say(standin_here: StandIn, open_reader: Open, mode: int, expected: str | None) -> None:
    """The driver's mode of virtualization is reported; a newer one, or none, is not known."""
    standin_here.device(0).set(virtualization_mode=mode)
    reading = read(open_reader())
    assert (reading.virtualization, reading.failed) == (expected, ())
