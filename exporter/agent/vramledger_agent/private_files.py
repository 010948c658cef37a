"""Files of ours in directories of others: nothing that another user has put into a path leads elsewhere."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NoReturn

from vramledger_agent.errors import StartupError

_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT = 0
_LINKS_MOST = 40
"""As many as the kernel follows."""


def open_folder(path: Path) -> int:
    """Open a directory by way of no link but root's and our own; return a descriptor for names below it.

    It needs no right to read there. Raises PermissionError at another user's link, or OSError.
    """
    left = [*reversed(Path.cwd().joinpath(path).parts)]
    folder, links = os.open("/", _PLACE), 0
    try:
        while left:
            name = left.pop()
            try:
                # With O_DIRECTORY the kernel mounts what it mounts at the first use (autofs).
                below = os.open(name, _PLACE | os.O_DIRECTORY, dir_fd=folder)
            except NotADirectoryError:
                links += 1
                left += reversed(_read_link(name, folder, links).parts)
            else:
                os.close(folder)
                folder = below
    except BaseException:
        os.close(folder)
        raise
    return folder


def _read_link(name: str, folder: int, count: int) -> Path:
    link = os.open(name, _PLACE, dir_fd=folder)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if found.st_uid not in (_ROOT, os.geteuid()):
            raise PermissionError(errno.EPERM, "a link on the way is another user's")
        if count > _LINKS_MOST:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return Path(os.readlink("", dir_fd=link))
    finally:
        os.close(link)


def create_private(path: Path, *, exclusive: bool = False) -> int:
    """Open an empty file for writing, mode 0600; return its descriptor.

    Nothing that another user has put there is written to: no link, no pipe, no file of theirs. ``path``:
    where; an existing file of our own is emptied. ``exclusive``: refuse any existing file. Raises
    FileExistsError if it exists already. Raises StartupError if it belongs to another user, or is neither a
    file nor a device. Raises OSError if it cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_EXCL if exclusive else 0)
    folder = open_folder(path.parent)
    try:
        file = os.open(path.name, flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
            os.fchmod(file, 0o600)
            os.ftruncate(file, 0)
        elif not stat.S_ISCHR(found.st_mode):
            _refuse(path)
        os.set_blocking(file, True)
    except BaseException:
        os.close(file)
        raise
    return file


def remove_private(path: Path, file: int) -> None:
    """Remove a file that we have made, if the path still leads to it. Raises OSError."""
    folder = open_folder(path.parent)
    try:
        if os.path.samestat(os.stat(path.name, dir_fd=folder, follow_symlinks=False), os.fstat(file)):
            os.unlink(path.name, dir_fd=folder)
    finally:
        os.close(folder)


def _refuse(path: Path) -> NoReturn:
    raise StartupError(f"cannot write {path}: it is another user's, or not a plain file; name another")
