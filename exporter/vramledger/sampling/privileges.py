"""Give up permanently the rights that our own process does not need.

Linux keeps capabilities for each thread, so this is done before there is a second one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from vramledger.errors import StartupError
from vramledger.logs import fields, log
from vramledger.sampling.capabilities import keep_only

DEFAULT_UID = 65532
"""The user of the container image; it needs no entry in /etc/passwd."""

_USER = "vramledger"
_ROOT = 0
_UID_MAX = 2**32 - 1


class User(NamedTuple):
    """A user, and its group."""

    uid: int
    gid: int


def drop_privileges(
    inherit: frozenset[str] = frozenset(), use: frozenset[str] = frozenset(), become: User | None = None
) -> None:
    """Keep no capabilities but these, as :func:`keep_only` does, and log what could not be given up."""
    log_failures(keep_only(inherit, use, become))


def log_failures(failed: Iterable[OSError]) -> None:
    """Log what :func:`keep_only` could not give up."""
    for error in failed:
        log.warning("Could not give up all privileges", extra=fields(err=error))


def find_user(name: str | None) -> User | None:
    """Return the user that the part which listens becomes; None where we are not root, or it is root.

    Without a name it is ``vramledger`` where the host has this user, otherwise :data:`DEFAULT_UID`, which
    needs no entry.

    Raises:
        StartupError: there is no such user.
    """
    if os.geteuid() != _ROOT:
        return None
    import pwd  # noqa: PLC0415 only root needs it

    try:
        known = (
            pwd.getpwuid(int(name)) if name is not None and name.isdigit() else pwd.getpwnam(name or _USER)
        )
    except KeyError:
        if name is None or name.isdigit():
            uid = DEFAULT_UID if name is None else int(name)
            return User(uid, uid) if 0 < uid < _UID_MAX else None
        message = f"--web.user={name}: there is no such user; make it, or give a number"
        raise StartupError(message) from None
    return User(known.pw_uid, known.pw_gid) if known.pw_uid != _ROOT else None


def can_run_as(user: User, files: Iterable[str]) -> bool:
    """Tell whether root can become a user who may read these files: those of our own program."""
    groups = os.getgroups()
    try:
        os.setgroups([])
        os.setegid(user.gid)
        os.seteuid(user.uid)
        for each in files:
            os.close(os.open(each, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        log.warning(
            "The part that listens stays root, without any capability", extra=fields(uid=user.uid, err=error)
        )
        return False
    finally:
        if os.geteuid() != _ROOT:
            os.seteuid(_ROOT)
        if os.getegid() != os.getgid():
            os.setegid(os.getgid())
        with suppress(OSError):
            os.setgroups(groups)
    return True
