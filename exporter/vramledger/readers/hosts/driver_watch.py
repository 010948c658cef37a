"""Look at the driver's files: whether it was loaded or changed, and which of them a process has open.

A call to a driver that may be missing needs a separate process, which takes a third of a second of CPU time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_LIBRARY = "libnvidia-ml.so.1"
_CACHE = Path("/etc/ld.so.cache")

FileState = tuple[str, object]


class DriverWatch:
    """Where to look for the driver's files.

    - the library, where the dynamic loader would find it: an installation or an upgrade;
    - ``/proc/driver/nvidia/version``, which the kernel module has while it is loaded, and a line for each GPU
      that it has found;
    - the device files, which the first user of a loaded module makes, with their owner and mode.
    """

    def __init__(self, procfs: Path, rootfs: Path) -> None:
        self._module = procfs / "driver" / "nvidia"
        self._devices = sorted({Path("/dev"), rootfs / "dev"})
        self._libraries = [_CACHE, *(Path(each) / _LIBRARY for each in _library_directories())]

    def read_state(self) -> frozenset[FileState]:
        """Return the state of the files, to compare; a file that we cannot see counts as missing."""
        return frozenset(
            [*_stat_files(self._libraries), *self._read_module(), *_stat_files(self._device_paths())]
        )

    def _read_module(self) -> Iterator[FileState]:
        with suppress(OSError):
            yield "version", (self._module / "version").read_bytes()
        with suppress(OSError):
            yield "gpus", tuple(sorted(os.listdir(self._module / "gpus")))  # noqa: PTH208 only names

    def _device_paths(self) -> Iterator[Path]:
        for place in self._devices:
            with suppress(OSError):
                yield from (place / name for name in os.listdir(place) if name.startswith("nvidia"))  # noqa: PTH208


def has_device_class(procfs: Path) -> bool:
    """Tell whether a driver has registered its devices: systemd allows them by the name of their class."""
    try:
        lines = (procfs / "devices").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split()[1:] in (["nvidia"], ["nvidia-frontend"]) for line in lines)


def open_control_device(path: Path = Path("/dev/nvidiactl")) -> int:
    """Open the driver's control device for a moment; return 0, or the error as errno."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or -1
    return 0


def _stat_files(paths: Iterable[Path]) -> Iterator[FileState]:
    for path in paths:
        with suppress(OSError):
            status = path.stat()  # of the file that a link leads to: an upgrade changes it
            yield str(path), (status.st_dev, status.st_ino, status.st_rdev, status.st_ctime_ns)


def _library_directories() -> list[str]:
    configured = [each for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    triplet = f"{os.uname().machine}-linux-gnu"
    default = [f"/lib/{triplet}", f"/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/usr/lib"]
    return list(dict.fromkeys([*configured, *default]))


DEVICE_PREFIX = "/dev/nvidia"
_PROC = Path("/proc")
"""This is the real /proc, not --path.procfs: these processes are in our own PID namespace."""


def read_open_device_files(prefix: str = DEVICE_PREFIX) -> dict[int, list[str]]:
    """Return the open files of this process and its descendants that begin with ``prefix``, by pid."""
    found = {}
    for pid in (os.getpid(), *_child_pids(os.getpid())):
        if names := sorted(open_files(pid, prefix)):
            found[pid] = names
    return found


def _child_pids(pid: int) -> Iterable[int]:
    for listed in (_PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            for child in map(int, listed.read_text(encoding="ascii").split()):
                yield child
                yield from _child_pids(child)


def open_files(pid: int, prefix: str) -> set[str]:
    """Return the open files of a process that begin with ``prefix``; none if we may not see them."""
    found: set[str] = set()
    with suppress(OSError):  # the process has ended, or has rights that we gave up
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith(prefix):
                    found.add(target)
    return found
