"""Read the memory that the operating system manages: the host's, and that of a GPU which is a NUMA node.

The kernel answers all of it from counters, so no read can hang.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from vramledger.model.reading import NodeMemory

_KIB: Final = 1024
_NODES: Final = "devices/system/node"
_KERNEL: Final = ("Slab", "KernelStack", "PageTables")


class HostMemory(NamedTuple):
    """The host's memory, bytes: all of it, and what a program could take without swapping."""

    total: int
    available: int


class SystemMemory:
    """The memory of one host."""

    def __init__(self, procfs: str = "/proc", rootfs: Path = Path("/")) -> None:
        """Look below a proc file system, and at the nodes of the host's root, or at our own without them."""
        self._meminfo = Path(procfs, "meminfo")
        below = rootfs / "sys" / _NODES
        # A container may have the host's files without its mounts; the kernel shows its nodes everywhere.
        self._nodes = below if below.is_dir() else Path("/sys") / _NODES

    def host(self) -> HostMemory | None:
        """Return the host's memory; None where the kernel does not tell (before 3.14)."""
        values = _read(self._meminfo)
        total, available = values.get("MemTotal"), values.get("MemAvailable")
        if not total or available is None:
            return None
        return HostMemory(total, min(available, total))

    def node(self, number: int) -> NodeMemory | None:
        """Return the memory of a node; None where it is offline, or its figures are not readable."""
        values = _read(self._nodes / f"node{number}" / "meminfo")
        total, free = values.get("MemTotal"), values.get("MemFree")
        if not total or free is None or free > total:
            return None
        kernel = sum(values.get(name, 0) for name in _KERNEL)
        file, anonymous = values.get("FilePages", 0), values.get("AnonPages", 0)
        shared = values.get("Shmem")
        # The counters are read one after the other, and shared memory is a part of the pages of files.
        shared = None if shared is None else min(shared, file)
        return NodeMemory(number, total, free, file, anonymous, kernel, shared)

    def has_processors(self, number: int) -> bool | None:
        """Tell whether a node has CPUs, which a GPU's node never has; None when not known."""
        try:
            return bool((self._nodes / f"node{number}" / "cpulist").read_text(encoding="ascii").strip())
        except (OSError, ValueError):
            return None


def _read(path: Path) -> dict[str, int]:
    """Return the bytes by name of a file like ``/proc/meminfo``; empty when it is not readable.

    In the file of a node each line begins with ``Node 1``.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return {}
    values = {}
    for line in lines:
        name, _, rest = line.partition(":")
        number = rest.removesuffix("kB").strip()
        if number.isdecimal() and rest.endswith("kB"):
            values[name.split()[-1]] = int(number) * _KIB
    return values
