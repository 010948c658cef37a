"""Listen on a Unix socket at a path: create it, replace one that a dead exporter left, remove it."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vramledger.errors import StartupError

_ROOT = 0
_DIRECTORY_MODE = 0o755
_MAX_PATH_BYTES = 107
"""The longest path that the kernel takes (sun_path, less the zero byte); the name bound first is shorter."""


class SocketSettings(NamedTuple):
    """Which kind of socket to make, and what to tell a user when that fails."""

    kind: socket.SocketKind  # SOCK_SEQPACKET or SOCK_STREAM
    mode: int  # permissions of the file
    backlog: int  # connections that wait in the kernel
    failure: str  # begins every message; the path follows
    in_use: str  # says that another exporter listens at the path, and what to do
    remedy: str = ""  # ends the message after an error of the operating system
    parents: bool = False  # whether missing directories above its own are made, too
    pass_credentials: bool = False  # whether the kernel says with each message who sent it


class SocketFile:
    """A listening socket at a path; the file is removed at the end if it is still ours."""

    def __init__(self, path: Path, settings: SocketSettings, owner: int | None = None) -> None:
        """Listen in a directory of root, us or ``owner``, replace a dead socket. Raises StartupError."""
        self.path = path
        try:
            _make_directory(path.parent, parents=settings.parents)
            _check_directory(path.parent, {_ROOT, os.geteuid(), owner})
            _check_free(path, settings)
            self.socket = _listen(path, settings, owner)
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise StartupError(f"{settings.failure} {path}: {reason}{settings.remedy}") from error
        self._identity = _identity(path)
        self._barred: frozenset[int] = frozenset()

    def bar(self, users: frozenset[int]) -> frozenset[int]:
        """Let the kernel refuse just these users when they connect; return whom it refuses from now on."""
        users -= {_ROOT, os.geteuid()}
        if users != self._barred:
            try:
                os.setxattr(self.path, "system.posix_acl_access", _access_list(users))
            except OSError:  # a file system without access lists, or the file is gone
                return frozenset()
            self._barred = users
        return users

    def close(self) -> None:
        self.socket.close()
        self.remove()

    def remove(self) -> None:
        """Remove the file, unless another exporter has put its own there."""
        if _identity(self.path) == self._identity:
            with suppress(OSError):
                self.path.unlink()


_ENTRY = struct.Struct("<HHI")


def _access_list(barred: Collection[int]) -> bytes:
    """Return the access list of a socket that all but some users may connect to (posix_acl_xattr.h)."""
    nobody, both = 2**32 - 1, 0o6
    users = [(0x02, 0, uid) for uid in sorted(barred)]
    entries = [(0x01, both, nobody), *users, *((tag, both, nobody) for tag in (0x04, 0x10, 0x20))]
    return struct.pack("<I", 2) + b"".join(_ENTRY.pack(*each) for each in entries)


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino
    return None


def _listen(path: Path, settings: SocketSettings, owner: int | None) -> socket.socket:
    """Listen under a temporary name, and rename the socket to its path, as a file of ``owner``.

    So nobody ever finds a socket that is not ready or has wrong permissions, and a stale one is replaced in
    one step.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:  # a longer path can be made, but not connected to
        raise ValueError(f"the path is longer than {_MAX_PATH_BYTES} bytes")
    new = path.with_name(f".{os.getpid()}")
    listening = socket.socket(socket.AF_UNIX, settings.kind | socket.SOCK_CLOEXEC)
    try:
        listening.setblocking(False)  # noqa: FBT003 the standard library's
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, settings.pass_credentials)
        with suppress(FileNotFoundError):
            new.unlink()
        # Not changed afterwards: the name could be another file's by then.
        before = os.umask(0o777 & ~settings.mode)
        try:
            listening.bind(str(new))
        finally:
            os.umask(before)
        if owner is not None:  # whom we become must still be able to bar users; a container may not let us
            with suppress(OSError):
                os.chown(new, owner, -1, follow_symlinks=False)
        listening.listen(settings.backlog)
        new.replace(path)
    except BaseException:
        listening.close()
        with suppress(OSError, ValueError):
            new.unlink()
        raise
    return listening


def _make_directory(directory: Path, *, parents: bool) -> None:
    """Make a directory that everybody may read, whatever our umask is."""
    if not directory.exists():
        before = os.umask(0o777 & ~_DIRECTORY_MODE)  # also of those above it, and before anybody can use them
        try:
            directory.mkdir(parents=parents, exist_ok=True)
        finally:
            os.umask(before)


def _check_directory(directory: Path, owners: Collection[int | None]) -> None:
    """Check that nobody else may put another file in the place of ours. Raises ValueError if others may."""
    place = directory.stat()
    private = place.st_gid in {_ROOT, place.st_uid}  # root's group, or a user's own
    others = stat.S_IWOTH if private else stat.S_IWOTH | stat.S_IWGRP
    if place.st_uid not in owners or place.st_mode & others:
        raise ValueError(
            f"others may write in {directory}; use a directory of root or of the exporter's user alone"
        )
    trusted = {*owners, Path("/").stat().st_uid}  # root, also where a user namespace has no number for it
    for each in {*directory.absolute().parents, *directory.resolve().parents}:
        above = each.stat()
        open_to_all = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
        if open_to_all or above.st_uid not in trusted:
            raise ValueError(f"others may rename what is in {each}")


def _check_free(path: Path, settings: SocketSettings) -> None:
    try:
        file_mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(file_mode):
        raise StartupError(f"{settings.failure} {path}: it is not a socket; move it away")
    with socket.socket(socket.AF_UNIX, settings.kind | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)  # noqa: FBT003 the standard library's
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return  # stale: the exporter that made it was killed
        except BlockingIOError:
            pass  # somebody listens and is busy
    raise StartupError(f"{settings.failure} {path}: {settings.in_use}")
