"""Read what cgroups may take of a GPU's memory, and what they have: the kernel's ``dmem`` controller.

From documentation, not seen with a GPU: the kernel has it from 6.14 on, and NVIDIA's driver from 615 on, with
a region ``nvidia/PCI-ADDRESS/vidmem`` for each GPU. The kernel answers from counters, so no read can hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vramledger.model.reading import CgroupLimit
from vramledger.readers.hosts.stat import split_lines

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
        """Look at the hierarchy of version 2 below the host's root, and at our own place in it."""
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
        """Return the value of each region in a file; empty when it is not readable."""
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
