"""Read the host's files below one root, and never follow a link out of it.

A pod with ``/var/log`` mounted may put links where the kubelet's directories are expected. So every part of a
path is opened on its own, without following links, and only plain files are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vramledger.readers.hosts.stat import open_plain, split_lines
from vramledger.readers.owners.cgroups import UNIT, hierarchy_paths

MAX_NAMES = 20_000
"""The maximum number of entries of a directory; a part of a larger one would not show what is missing."""

_CGROUPS = "sys/fs/cgroup"

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class DirectoryListing(NamedTuple):
    names: frozenset[str]  # the names
    # device and inode. Two listings with the same identity are of the same directory; after a mount at its
    # path the identity is another one
    identity: tuple[int, int]
    modified: float  # Unix time at which a name was last added or removed


class HostFiles:
    """The host's file system below ``rootfs``; the result is None for what is missing or not allowed."""

    def __init__(self, rootfs: Path) -> None:
        """Remember the root, which is the operator's choice and may itself be a link."""
        self._rootfs = rootfs

    def list_directory(self, path: str) -> DirectoryListing | None:
        """Return all names in a directory such as ``var/log/pods``, None when it cannot be listed."""
        try:
            with self._open_directory(path) as descriptor, os.scandir(descriptor) as entries:
                status = os.fstat(descriptor)
                names = frozenset(entry.name for entry in _all_entries(entries))
                return DirectoryListing(names, (status.st_dev, status.st_ino), status.st_mtime)
        except (OSError, ValueError):
            return None

    def list_names(self, path: str) -> frozenset[str] | None:
        """Return the names in a directory, None when not all of them can be listed."""
        listing = self.list_directory(path)
        return None if listing is None else listing.names

    def list_directories(self, path: str) -> frozenset[str] | None:
        """Return the names of the directories in a directory, None when not all of them can be listed."""
        try:
            with self._open_directory(path) as descriptor, os.scandir(descriptor) as entries:
                found = _all_entries(entries)
                return frozenset(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
        except (OSError, ValueError):
            return None

    def has_directory(self, path: str) -> bool | None:
        """Tell whether a directory exists; None when not known."""
        try:
            with self._open_directory(path):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError):
            return None

    def users_own(self, controllers: str, cgroup: str) -> bool:
        """Tell whether others than root name what is below a cgroup, given as in ``/proc/PID/cgroup``.

        A unit at which we cannot look may be delegated to its user.
        """
        path = self._path_from_root(controllers, cgroup)
        for root in self._find_hierarchies(controllers) if path else ():
            place, _, name = f"{root}{path}".rpartition("/")
            with suppress(OSError, ValueError), self._open_directory(place) as directory:
                # It is not opened: its owner may forbid that.
                status = os.stat(_checked_part(name), dir_fd=directory, follow_symlinks=False)
                groups = stat.S_IWGRP if status.st_gid else 0
                return status.st_uid != 0 or bool(status.st_mode & (groups | stat.S_IWOTH))
        return UNIT.fullmatch(cgroup.rpartition("/")[2]) is not None

    def _find_hierarchies(self, controllers: str) -> Iterable[str]:
        if not controllers:
            return f"{_CGROUPS}/unified", _CGROUPS
        wanted = set(controllers.removeprefix("name=").split(","))
        found = sorted(self.list_directories(_CGROUPS) or ())
        return [f"{_CGROUPS}/{name}" for name in found if wanted.intersection(name.split(","))]

    def _path_from_root(self, controllers: str, cgroup: str) -> str:
        """Return the path from a hierarchy's root, empty if not known: we may be in a namespace below it.

        Then it is known for what is as far outside as the host's first process, which is at the root.
        """
        outside = "/.." * cgroup.split("/").count("..")
        first = split_lines(self.read("proc/1/cgroup", 65_536) or b"") if outside else ()
        at_root = {(controllers, outside), (controllers, f"{outside}/init.scope")}
        known = not outside or not at_root.isdisjoint(hierarchy_paths(first))
        return cgroup.removeprefix(outside) if known else ""

    def read(self, path: str, cap: int) -> bytes | None:
        """Return a plain file's content, None if it is not a plain file or longer than ``cap`` bytes."""
        place, _, name = path.rpartition("/")
        try:
            with self._open_directory(place) as directory:
                descriptor = open_plain(_checked_part(name), os.O_NOFOLLOW, at=directory)
                try:
                    if os.fstat(descriptor).st_size > cap:
                        return None
                    data = bytearray()
                    while chunk := os.read(descriptor, 65536):
                        data += chunk
                        if len(data) > cap:
                            return None
                    return bytes(data)
                finally:
                    os.close(descriptor)
        except (OSError, ValueError):
            return None

    @contextmanager
    def _open_directory(self, path: str) -> Iterator[int]:
        descriptor = os.open(self._rootfs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in path.split("/"):
                below = os.open(_checked_part(part), _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            with suppress(OSError):
                os.close(descriptor)


def _all_entries(entries: Iterable[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
    for count, entry in enumerate(entries):
        if count >= MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} entries")
        yield entry


def _checked_part(name: str) -> str:
    """Return one part of a path unchanged. Raises ValueError if it would lead somewhere else."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(name)
    return name
