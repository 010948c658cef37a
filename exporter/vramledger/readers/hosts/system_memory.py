"""Read the memory that the operating system manages: the host's, and that of a GPU which is a NUMA node.

On a Tegra with the nvgpu driver (Jetson Orin and older) also who holds memory of its GPU and its other
engines: nvmap's list, from reports and the sources of the driver, not seen. The kernel answers all of it from
counters, so no read can hang.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from vramledger.model.reading import NodeMemory, ProcessEntry

_KIB: Final = 1024
_NODES: Final = "devices/system/node"
_CLIENTS: Final = "sys/kernel/debug/nvmap/iovmm/clients"
_CLIENT: Final = re.compile(
    r"\S+\s+(?P<process>.*?)\s+(?P<pid>\d+)\s+(?P<size>\d+)K\s*", re.ASCII | re.DOTALL
)
"""A line of nvmap's list: the name of the client, the process, its pid and its KiB."""
_MOST_CLIENTS: Final = 2**20
_LAST_PID: Final = 2**22
_KERNEL: Final = ("Slab", "KernelStack", "PageTables")


class HostMemory(NamedTuple):
    """The host's memory, bytes: all of it, and what a program could take without swapping."""

    total: int
    available: int


class SystemMemory:
    """The memory of one host."""

    def __init__(self, procfs: str = "/proc", rootfs: Path = Path("/")) -> None:
        """Look below a proc file system, and at the nodes of the host's root, or at our own without them."""
        self._procfs = Path(procfs)
        self._meminfo = self._procfs / "meminfo"
        self._clients = rootfs / _CLIENTS
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

    def nvmap_clients(self) -> tuple[ProcessEntry, ...] | None:
        """Return who has memory of nvmap, by pid; None where the list is missing, unreadable or garbage.

        Only root may read it, and debugfs must be mounted. A client without a process (pid 0) is the kernel's
        own. A program may put line breaks into its name, and so whole lines into the list: where a line does
        not have the name that the kernel gives its process, the list is garbage.
        """
        try:
            with self._clients.open("rb") as file:
                text = file.read(_MOST_CLIENTS).decode(errors="replace")
        except OSError:
            return None
        heading, *lines = text.split("\n")
        if heading.split() != ["CLIENT", "PROCESS", "PID", "SIZE"]:
            return None
        held: dict[int, int] = {}
        for line in lines:
            if line.split()[:1] in ([], ["total"]):
                continue
            found = _CLIENT.fullmatch(line)
            if found is None or int(found["pid"]) > _LAST_PID:
                return None
            pid = int(found["pid"])
            if pid and found["process"] != self._name_of(pid):
                return None
            held[pid] = held.get(pid, 0) + int(found["size"]) * _KIB
        held.pop(0, None)
        return tuple(ProcessEntry(pid, size, "C") for pid, size in sorted(held.items()))

    def _name_of(self, pid: int) -> str | None:
        try:
            name = (self._procfs / str(pid) / "comm").read_bytes().decode(errors="replace")
        except OSError:
            return None
        return name.removesuffix("\n").strip()

    def has_processors(self, number: int) -> bool | None:
        """Tell whether a node has CPUs, which a GPU's node never has; None when not known."""
        try:
            return bool((self._nodes / f"node{number}" / "cpulist").read_text(encoding="ascii").strip())
        except (OSError, ValueError):
            return None


def _read(path: Path) -> dict[str, int]:
    """Return the bytes by name of a file like ``/proc/meminfo``, or a node's; empty if unreadable."""
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
