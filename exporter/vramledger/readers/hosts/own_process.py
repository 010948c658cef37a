"""Read what a process of ours uses: CPU time, memory, open files.

In the real /proc, not in ``--path.procfs``: our processes are in our own PID namespace.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_READ_MAX = 4096
_TICKS = float(os.sysconf("SC_CLK_TCK"))
_PAGE = os.sysconf("SC_PAGE_SIZE")


def read_own_process(pid: int | None = None) -> dict[str, float]:
    """Return the figures of a process, ours if there is no ``pid``; without those that cannot be read.

    The names are those of prometheus_client's ProcessCollector without its prefix, the units theirs.
    """
    directory = f"/proc/{'self' if pid is None else pid}"
    figures: dict[str, float] = {}
    with suppress(OSError):
        # After the name in parentheses, which may have spaces: state, parent, and so on.
        fields = _read_file(f"{directory}/stat").rpartition(b")")[2].split()
        figures["cpu_seconds_total"] = (int(fields[11]) + int(fields[12])) / _TICKS
        figures["start_time_seconds"] = int(fields[19]) / _TICKS + _boot_time()
        figures["virtual_memory_bytes"] = int(fields[20])
        figures["resident_memory_bytes"] = int(fields[21]) * _PAGE
    with suppress(OSError):
        limits = _read_file(f"{directory}/limits").partition(b"Max open files")[2]
        descriptors = os.listdir(f"{directory}/fd")  # noqa: PTH208 a Path for each takes longer
        figures["max_fds"] = float(limits.split(maxsplit=1)[0])
        figures["open_fds"] = len(descriptors)
    return figures


@lru_cache(maxsize=1)
def _boot_time() -> float:
    lines = Path("/proc/stat").read_bytes().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(b"btime "))


def _read_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _READ_MAX)
    finally:
        os.close(descriptor)
