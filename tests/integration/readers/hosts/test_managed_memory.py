"""Memory that is managed: by CUDA for programs, and by the operating system."""

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.sure import sure
from tests.support.system_memory import write_host_memory, write_node
from vramledger.model import reading
from vramledger.readers.hosts.managed_memory import (
    CHANGED_INTERVAL,
    READ_INTERVAL,
    ManagedMemoryReader,
    managed_bound,
    read_managed_bound,
)
from vramledger.readers.hosts.stat import read_row
from vramledger.readers.hosts.system_memory import HostMemory, SystemMemory

KIB, MIB, GIB = 2**10, 2**20, 2**30
BASE = 2 * MIB


@contextmanager
def program(place: Path, *sizes: int) -> Iterator[reading.ProcessRow]:
    """Run a process that maps files of these sizes under the name of the driver's."""
    ready, begin = os.pipe()
    pid = os.fork()
    if not pid:
        maps = []
        for size in sizes:
            with place.open("wb+") as file:
                file.truncate(size)
                maps.append(mmap.mmap(file.fileno(), 0))
            place.unlink()
        os.write(begin, b".")
        signal.pause()
        os._exit(len(maps))
    try:
        os.read(ready, 1)
        yield sure(read_row("/proc", pid))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(begin)


@pytest.fixture
def uvm(tmp_path: Path) -> Path:
    """Return a path that ends as the driver's device file does, as in a container's own root."""
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev" / "nvidia-uvm"


def device(pid: int, uncharged: int, charged: int = 518 * MIB) -> reading.DeviceReading:
    """Make a device with one holder and bytes that NVML charges to nobody."""
    used = charged + uncharged
    memory = reading.MemoryReading(80 * GIB, 79 * GIB - used, used, GIB)
    return reading.DeviceReading(
        0, "GPU-0", memory=memory, processes=(reading.ProcessEntry(pid, charged, "C"),)
    )


@pytest.mark.parametrize(("sizes", "bound"), [((5 * GIB, 3 * GIB), 8 * GIB), ((), 0)])
def test_a_real_process(uvm: Path, sizes: tuple[int, ...], bound: int) -> None:
    """All mappings of the driver's file count, also of a file that is deleted, less what everybody maps."""
    with program(uvm, BASE, *sizes) as row:
        assert read_managed_bound("/proc", row) == bound


def test_a_process_that_has_ended(uvm: Path) -> None:
    """Nothing is known of a process that is gone, or whose pid is another process by now."""
    with program(uvm, GIB) as row:
        assert read_managed_bound("/proc", row._replace(start=row.start + 1)) is None
    assert read_managed_bound("/proc", row) is None


@pytest.mark.parametrize(
    "line",
    [
        b"7f0000000000-7f0040000000 rw-s 00000000 00:06 400 /dev/nvidia-uvm-tools",
        b"7f0000000000-7f0040000000 rw-s 00000000 00:06 400 /dev/nvidia-uvm\\012 /dev/nvidia0",
        b"7f0000000000-7f0040000000 rw-s 00000000 00:06 400 /tmp/not-nvidia-uvm",
        b"7f0040000000-7f0000000000 rw-s 00000000 00:06 400 /dev/nvidia-uvm",
        b"xyz-7f0000000000 rw-s 00000000 00:06 400 /dev/nvidia-uvm",
        b"7f0000000000-7f0040000000 rw-s 00000000 00:00 0 [/dev/nvidia-uvm]",
    ],
)
def test_other_mappings_do_not_count(line: bytes) -> None:
    """Only a mapping of a file of exactly this name counts, and no size is negative."""
    assert managed_bound(b"7e0000000000-7e0040000000 r--p 0 0:0 1 /bin/x\n" + line + b"\n") == 0


def test_nothing_is_read_without_uncharged_bytes(tmp_path: Path) -> None:
    """While contexts explain the uncharged bytes, no process is looked at: a wrong path is not noticed."""
    reader = ManagedMemoryReader(str(tmp_path / "nowhere"))
    row = sure(read_row("/proc", os.getpid()))
    assert reader.update([device(row.pid, 20 * MIB)], [row], 5.0) == ()
    unknown = reading.ManagedMappings(row.pid, row.start, None)
    assert reader.update([device(row.pid, 60 * MIB)], [row], 5.0) == (unknown,)


def test_the_pace(uvm: Path, tmp_path: Path) -> None:
    """A process is read again after a while, sooner if the bytes have changed."""
    now, proc = 0.0, tmp_path / "proc"
    proc.symlink_to("/proc")
    reader = ManagedMemoryReader(str(proc), clock=lambda: now)
    with program(uvm, BASE + GIB) as row:

        def bound(uncharged: int) -> list[int | None]:
            return [each.bound for each in reader.update([device(row.pid, uncharged)], [row], 5.0)]

        assert bound(GIB) == [GIB]
        proc.unlink()  # from here on a read finds nothing, so that it shows
        now = CHANGED_INTERVAL + 0.1
        assert bound(GIB) == [GIB]
        assert bound(2 * GIB) == [None]
        proc.symlink_to("/proc")
        assert bound(2 * GIB) == [None]
        now += READ_INTERVAL + 0.1
        assert bound(2 * GIB) == [GIB]
        assert bound(0) == []


def test_a_driver_that_hides_its_reserve(uvm: Path) -> None:
    """Where the driver's reserve counts as used, nothing is read: the bytes may be the driver's own."""
    with program(uvm, BASE + GIB) as row:
        plain = device(row.pid, GIB)
        hidden = replace(plain, memory=sure(plain.memory)._replace(reserved=None))
        assert ManagedMemoryReader("/proc").update([hidden], [row], 5.0) == ()


def test_this_host_has_memory() -> None:
    """The kernel of this host says how much memory there is, and how much a program could take."""
    found = sure(SystemMemory().host())
    assert 0 < found.available <= found.total


@pytest.mark.parametrize(("available", "free"), [(400, 400), (2000, 1000)])
def test_the_figures_of_a_host_and_a_node(tmp_path: Path, available: int, free: int) -> None:
    """Sizes become bytes, no estimate is above the total, and what the kernel cannot drop is read apart."""
    write_host_memory(tmp_path, total=1000, available=available)
    write_node(tmp_path, 1, total=500, free=100, file=70, anonymous=30, kernel=9)
    memory = SystemMemory(str(tmp_path), tmp_path)
    assert memory.host() == HostMemory(1000 * KIB, free * KIB)
    figures = (1, 500 * KIB, 100 * KIB, 70 * KIB, 30 * KIB, 9 * KIB)
    assert memory.node(1) == reading.NodeMemory(*figures)
    assert memory.has_processors(1) is False
    with (tmp_path / "sys/devices/system/node/node1/meminfo").open("a") as meminfo:
        meminfo.write("Node 1 Shmem:  50 kB\n")
    assert memory.node(1) == reading.NodeMemory(*figures, shared=50 * KIB)


@pytest.mark.parametrize("text", ["", "MemTotal: 10 kB\n", "MemTotal: 0 kB\nMemAvailable: 0 kB\n", "\xff\n"])
def test_what_the_kernel_does_not_tell_is_not_known(tmp_path: Path, text: str) -> None:
    """Without a total and an estimate there is no figure, and a missing file is the same."""
    (tmp_path / "meminfo").write_text(text, encoding="latin-1")
    for place in (tmp_path, tmp_path / "none"):
        assert SystemMemory(str(place), tmp_path).host() is None


def test_a_node_that_is_offline_is_not_empty(tmp_path: Path) -> None:
    """A node without files, without memory, or with more free than it has, has no figures."""
    write_node(tmp_path, 1, total=0, free=0)
    write_node(tmp_path, 2, total=10, free=11)
    memory = SystemMemory(str(tmp_path), tmp_path)
    assert [memory.node(number) for number in (1, 2, 3)] == [None, None, None]
    assert memory.has_processors(3) is None
