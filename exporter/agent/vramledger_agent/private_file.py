"""Create files that only their owner may read, also in a folder of all users."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NoReturn

from vramledger_agent.errors import StartupError


def create_private(path: Path, *, exclusive: bool = False) -> int:
    """Open an empty file for writing, mode 0600; return its descriptor.

    Nothing that another user has put there is written to: no link, no pipe, no file of theirs. ``path``:
    where; an existing file of our own is emptied. ``exclusive``: refuse any existing file. Raises
    FileExistsError if it exists already. Raises StartupError if it belongs to another user, or is neither a
    file nor a device. Raises OSError if it cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_EXCL if exclusive else 0)
    file = os.open(path, flags, 0o600)
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


def _refuse(path: Path) -> NoReturn:
    message = f"cannot write {path}: it is another user's, or not a plain file; name another"
    raise StartupError(message)
