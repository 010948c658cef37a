"""Whether a driver has come, gone or changed: by files that do so with it, read without asking it.

A question to a driver that may not be there takes a process of its own, a third of a second of a processor
each time; to read the state of these files takes a third of a millisecond, so every sample can.
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
    """Where the driver's files are looked for.

    - the library, where the dynamic loader would find it: an installation or an upgrade;
    - ``/proc/driver/nvidia/version``, which the kernel module has while it is loaded, and a line for each GPU
      that it has found;
    - the device files, which the first user of a loaded module makes, and what their owner and mode are.
    """

    def __init__(self, procfs: Path, rootfs: Path) -> None:
        """Prepare to look below these; the library and the devices of a container are its own."""
        self._module = procfs / "driver" / "nvidia"
        self._devices = sorted({Path("/dev"), rootfs / "dev"})
        self._libraries = [_CACHE, *(Path(each) / _LIBRARY for each in _library_directories())]

    def read_state(self) -> frozenset[FileState]:
        """Return what there is, to be compared with what there was; what cannot be seen is not there."""
        return frozenset(
            [*_stat_files(self._libraries), *self._read_module(), *_stat_files(self._device_paths())]
        )

    def _read_module(self) -> Iterator[FileState]:
        with suppress(OSError):
            yield "version", (self._module / "version").read_bytes()
        with suppress(OSError):
            yield "gpus", tuple(sorted(os.listdir(self._module / "gpus")))  # noqa: PTH208 names alone

    def _device_paths(self) -> Iterator[Path]:
        for place in self._devices:
            with suppress(OSError):
                yield from (place / name for name in os.listdir(place) if name.startswith("nvidia"))  # noqa: PTH208


def _stat_files(paths: Iterable[Path]) -> Iterator[FileState]:
    for path in paths:
        with suppress(OSError):
            status = path.stat()  # of what a link leads to: an upgrade changes that
            yield str(path), (status.st_dev, status.st_ino, status.st_rdev, status.st_ctime_ns)


def _library_directories() -> list[str]:
    """Return the directories in which the loader looks, of those that drivers are installed in."""
    configured = [each for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    triplet = f"{os.uname().machine}-linux-gnu"
    default = [f"/lib/{triplet}", f"/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/usr/lib"]
    return list(dict.fromkeys([*configured, *default]))
