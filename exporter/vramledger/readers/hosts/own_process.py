"""Read what a process of ours uses (CPU, memory, open files), and what it may see of a host."""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from vramledger.readers.hosts.stat import split_lines

_READ_MAX = 4096
_TICKS = float(os.sysconf("SC_CLK_TCK"))
_PAGE = os.sysconf("SC_PAGE_SIZE")


def own_cgroup() -> tuple[str, ...]:
    """Return the lines of our own cgroups; none where they cannot be read."""
    try:
        return split_lines(Path("/proc/self/cgroup").read_bytes())
    except OSError:
        return ()


class OwnProcess:
    """A process of ours, its files kept open: finding them took a third of a scrape, and pids are reused."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid
        self._directory = f"/proc/{'self' if pid is None else pid}"
        self._files: dict[str, int] = {}

    def __del__(self) -> None:
        for each in self._files.values():
            os.close(each)

    def read(self) -> dict[str, float]:
        """Return its readable figures, named as prometheus_client's ProcessCollector does without prefix."""
        figures: dict[str, float] = {}
        with suppress(OSError):
            # After the name in parentheses, which may have spaces: state, parent, and so on.
            fields = os.pread(self._opened("stat"), _READ_MAX, 0).rpartition(b")")[2].split()
            figures["cpu_seconds_total"] = (int(fields[11]) + int(fields[12])) / _TICKS
            figures["start_time_seconds"] = int(fields[19]) / _TICKS + _boot_time()
            figures["virtual_memory_bytes"] = int(fields[20])
            figures["resident_memory_bytes"] = int(fields[21]) * _PAGE
        with suppress(OSError):
            # Linux 6.2 and newer say it as the size of the directory, older ones 0.
            directory = self._opened("fd")
            number = os.fstat(directory).st_size or len(os.listdir(directory))  # noqa: PTH208 a descriptor
            figures["max_fds"] = self._most_descriptors()
            figures["open_fds"] = number
        return figures

    def _opened(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(f"{self._directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return self._files[name]

    def _most_descriptors(self) -> float:
        if self.pid is None:
            return float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        limits = os.pread(self._opened("limits"), _READ_MAX, 0).partition(b"Max open files")[2]
        return float(limits.split(maxsplit=1)[0])


@lru_cache(maxsize=1)
def _boot_time() -> float:
    lines = Path("/proc/stat").read_bytes().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(b"btime "))


_CAPABILITIES = {"dac_read_search": 2, "sys_ptrace": 19, "sys_admin": 21}


class OwnRights(NamedTuple):
    """Our effective capabilities, ``hidepid`` (others' processes are hidden), ``wsl`` (Linux in Windows)."""

    uid: int
    capabilities: frozenset[str]
    hidepid: bool
    wsl: bool = False


def read_own_rights(procfs: Path) -> OwnRights:
    """Return what we may do; what cannot be read counts as not allowed."""
    effective = 0
    for line in _read_lines(procfs / "self" / "status"):
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    names = frozenset(name for name, bit in _CAPABILITIES.items() if effective >> bit & 1)
    mounts = [line.split() for line in _read_lines(procfs / "self" / "mounts")]
    hidepid = any(
        len(mount) > 3  # noqa: PLR2004 device, directory, type, options
        # The kernel writes some characters as octal numbers.
        and re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount[1]) == str(procfs)
        and mount[2] == "proc"
        and any(
            each.startswith("hidepid=") and each not in ("hidepid=0", "hidepid=off")
            for each in mount[3].split(",")
        )
        for mount in mounts
    )
    return OwnRights(os.geteuid(), names, hidepid, is_wsl(procfs))


def is_wsl(procfs: Path) -> bool:
    """Tell whether this is a Linux in Windows (WSL2), by the name of its kernel."""
    return any("microsoft" in line.lower() for line in _read_lines(procfs / "sys" / "kernel" / "osrelease"))


def _read_lines(path: Path) -> list[str]:
    try:
        # A path is bytes, which Python shows in this way whatever the locale is.
        return os.fsdecode(path.read_bytes()).split("\n")
    except OSError:
        return []
