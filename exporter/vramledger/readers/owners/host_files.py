"""Read the host's files below one root, and never follow a link out of it.

A pod with ``/var/log`` mounted may put links where the kubelet's directories are expected. So every part of a
path is opened on its own, without following links, and only plain files are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vramledger.readers.hosts.stat import open_plain

MAX_NAMES = 20_000
"""The maximum number of entries of a directory; a part of a larger one would not show what is missing."""

_HIERARCHIES = ("sys/fs/cgroup", "sys/fs/cgroup/unified", "sys/fs/cgroup/systemd")
"""Where systemd delegates cgroups: version 2, or the named hierarchy of version 1."""

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

    def users_own(self, cgroup: str) -> bool:
        """Tell whether a cgroup certainly belongs to another user than root, who names what is below it."""
        for root in _HIERARCHIES:
            with suppress(OSError, ValueError), self._open_directory(f"{root}{cgroup}") as descriptor:
                if os.fstat(descriptor).st_uid != 0:
                    return True
        return False

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
