"""Read memory that the kernel counts: the host's, that of a GPU which is a NUMA node, and cgroups' shares.

On a Tegra with the nvgpu driver (Jetson Orin and older) also who holds memory of its GPU and its other
engines: nvmap's list. What cgroups may take of a GPU's memory is in the ``dmem`` controller, from Linux 6.14
on, and with NVIDIA's driver from 615 on, with a region ``nvidia/PCI-ADDRESS/vidmem`` for each GPU. Both are
from documentation, not seen. The kernel answers all of it from counters, so no read can hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from vramledger.model.reading import CgroupLimit, NodeMemory, ProcessEntry
from vramledger.readers.hosts.stat import split_lines

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
    def __init__(self, procfs: str = "/proc", rootfs: Path = Path("/")) -> None:
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


CGROUPS: Final = "sys/fs/cgroup"
_REGION: Final = re.compile(
    r"nvidia/(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/vidmem", re.IGNORECASE
)
_CAP: Final = 65536
_MOST_PARTS: Final = 32
_UNLIMITED: Final = "max"


def chain_of(path: str) -> tuple[str, ...]:
    """Return a cgroup and those above it, the root left out; empty for a path outside our own namespace."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts or len(parts) > _MOST_PARTS:
        return ()
    return tuple("/" + "/".join(parts[:count]) for count in range(len(parts), 0, -1))


class DeviceMemoryCgroups:
    """The cgroups of one host, as far as they account for the memory of its GPUs."""

    def __init__(self, procfs: str = "/proc", rootfs: Path = Path("/")) -> None:
        self._root = rootfs / CGROUPS
        self._own = Path(procfs, "self/cgroup")

    @property
    def mount(self) -> str:
        """Where the host has mounted the hierarchy."""
        return f"/{CGROUPS}"

    def region(self, pci_bus_id: str | None) -> str | None:
        """Return the name of a GPU's region, None where the kernel or the driver has none."""
        for name in self._values(self._root / "dmem.capacity"):
            found = _REGION.fullmatch(name)
            if found is not None and pci_bus_id is not None and _same_address(found["pci"], pci_bus_id):
                return name
        return None

    def read(self, region: str, paths: Iterable[str]) -> tuple[CgroupLimit, ...] | None:
        """Return what these cgroups may take of a region; a cgroup without any figure is left out.

        A guarantee of ``max`` is one of the whole region. None if a limit is not readable: without it a
        cgroup would look like one that has no limit.
        """
        capacity = _bytes(self._values(self._root / "dmem.capacity").get(region))
        limits = []
        for path in paths:
            directory = self._root / path.strip("/")
            current, minimum, maximum = (
                self._values(directory / f"dmem.{name}").get(region) for name in ("current", "min", "max")
            )
            if (current, maximum, minimum) == (None, None, None) or not directory.exists():
                continue
            if maximum != _UNLIMITED and _bytes(maximum) is None:
                return None
            guaranteed = capacity if minimum == _UNLIMITED else _bytes(minimum)
            limits.append(CgroupLimit(path, guaranteed, _bytes(maximum), _bytes(current)))
        return tuple(limits)

    def own_chain(self) -> tuple[str, ...]:
        """Return our own cgroup and those above it; empty when it is not known, or when it is the root."""
        try:
            lines = split_lines(self._own.read_bytes())
        except OSError:
            return ()
        return next((chain_of(line[3:]) for line in lines if line.startswith("0::")), ())

    def _values(self, path: Path) -> dict[str, str]:
        try:
            with path.open("rb") as file:
                lines = file.read(_CAP).decode(errors="replace").splitlines()
        except OSError:
            return {}
        return dict(pair for line in lines if len(pair := tuple(line.split())) == 2)  # type: ignore[misc]  # noqa: PLR2004


def _same_address(one: str, other: str) -> bool:
    """Compare PCI addresses, whose domain may have four digits or eight."""
    first, second = one.lower().split(":", 1), other.lower().split(":", 1)
    try:
        return int(first[0], 16) == int(second[0], 16) and first[1] == second[1]
    except (ValueError, IndexError):
        return False


def _bytes(value: str | None) -> int | None:
    return int(value) if value is not None and value.isascii() and value.isdecimal() else None
