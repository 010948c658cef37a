"""The memory that the operating system manages, read from files as the kernel writes them."""

from pathlib import Path

import pytest

from tests.support.sure import sure
from tests.support.system_memory import write_host_memory, write_node
from vramledger.model.reading import NodeMemory
from vramledger.readers.hosts.system_memory import HostMemory, SystemMemory

KIB = 1024


def test_this_host_has_memory() -> None:
    """The kernel of this host says how much memory there is, and how much a program could take."""
    found = sure(SystemMemory().host())
    assert 0 < found.available <= found.total


def test_the_figures_of_a_host_and_a_node(tmp_path: Path) -> None:
    """Sizes become bytes, and a node's lines are read without their prefix."""
    write_host_memory(tmp_path, total=1000, available=400)
    write_node(tmp_path, 1, total=500, free=100, file=70, anonymous=30, kernel=9)
    memory = SystemMemory(str(tmp_path), tmp_path)
    assert memory.host() == HostMemory(1000 * KIB, 400 * KIB)
    assert memory.node(1) == NodeMemory(1, 500 * KIB, 100 * KIB, 70 * KIB, 30 * KIB, 9 * KIB)
    assert memory.has_processors(1) is False


def test_shared_memory_of_a_node_is_read_apart(tmp_path: Path) -> None:
    """The kernel cannot drop shared memory and tmpfs, which it counts among the pages of files."""
    write_node(tmp_path, 1, total=500, free=100, file=70, anonymous=30, kernel=9)
    meminfo = tmp_path / "sys/devices/system/node/node1/meminfo"
    meminfo.write_text(meminfo.read_text("ascii") + "Node 1 Shmem:  50 kB\n", "ascii")
    node = sure(SystemMemory(str(tmp_path), tmp_path).node(1))
    assert (node.file, node.shared) == (70 * KIB, 50 * KIB)


def test_more_available_than_there_is_is_all_of_it(tmp_path: Path) -> None:
    """The kernel's estimate never makes free memory larger than the total."""
    write_host_memory(tmp_path, total=1000, available=2000)
    assert SystemMemory(str(tmp_path), tmp_path).host() == HostMemory(1000 * KIB, 1000 * KIB)


@pytest.mark.parametrize(
    "content", ["", "MemTotal: 10 kB\n", "MemTotal: 0 kB\nMemAvailable: 0 kB\n", "\xff\n"]
)
def test_what_the_kernel_does_not_tell_is_not_known(tmp_path: Path, content: str) -> None:
    """Without a total and an estimate there is no figure, and a missing file is the same."""
    (tmp_path / "meminfo").write_text(content, encoding="latin-1")
    memory = SystemMemory(str(tmp_path), tmp_path)
    assert memory.host() is None
    assert SystemMemory(str(tmp_path / "none"), tmp_path).host() is None


def test_a_node_that_is_offline_is_not_empty(tmp_path: Path) -> None:
    """A node without files, without memory, or with more free than it has, has no figures."""
    write_node(tmp_path, 1, total=0, free=0)
    write_node(tmp_path, 2, total=10, free=11)
    memory = SystemMemory(str(tmp_path), tmp_path)
    assert [memory.node(number) for number in (1, 2, 3)] == [None, None, None]
    assert memory.has_processors(3) is None
