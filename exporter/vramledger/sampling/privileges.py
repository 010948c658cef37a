"""Give up rights that we do not need, before a second thread (Linux keeps them by thread); die together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
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
    uid: int
    gid: int


def drop_privileges(use: frozenset[str] = frozenset(), become: User | None = None) -> None:
    """Keep no capabilities but these, as :func:`keep_only` does, and log what could not be given up."""
    log_failures(keep_only(use=use, become=become))


def log_failures(failed: Iterable[OSError]) -> None:
    """Log what :func:`keep_only` could not give up."""
    for error in failed:
        log.warning("Could not give up all privileges", extra=fields(err=error))


def find_user(name: str | None) -> User | None:
    """Return the user that the part which listens becomes; None where we are not root, or it is root.

    Without a name it is ``vramledger`` where the host has this user, otherwise :data:`DEFAULT_UID`, which
    needs no entry. Raises StartupError if there is no such user.
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
        raise StartupError(f"--web.user={name}: there is no such user; make it, or give a number") from None
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


_PARENT_DEATH_SIGNAL = 1


def end_with_parent() -> None:
    """Have the kernel kill us when the exporter dies: while a call hangs, we cannot notice a closed pipe."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The numbers of the system calls, which are the same on x86-64 and ARM."""

_RULE_PATH_BENEATH = 1
_WRITE_FILE, _REMOVE_FILE, _MAKE_FILE, _MAKE_SOCKET = 1 << 1, 1 << 5, 1 << 8, 1 << 9
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Write, remove or make files of any kind: the first Landlock, without reading and running."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _layout_ = "ms"  # Python 3.14 wants it said; packed, it is the kernel's
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def forbid_changes(sockets_in: Iterable[Path], files_in: Iterable[Path] = ()) -> None:
    """Change no file from now on, except in these directories: of sockets, and of files.

    If the kernel has no Landlock, or a filter of system calls forbids it, we log it and go on. It needs
    ``no_new_privs``.
    """
    try:
        ruleset = _call(_CREATE_RULESET, ctypes.byref(_Ruleset(_CHANGES)), ctypes.sizeof(_Ruleset), 0)
        try:
            for directory in {*sockets_in}:
                _allow(ruleset, directory, _MAKE_SOCKET | _REMOVE_FILE)
            for directory in {*files_in}:
                _allow(ruleset, directory, _MAKE_FILE | _WRITE_FILE | _REMOVE_FILE)
            _allow(ruleset, Path(os.devnull), _WRITE_FILE)
            _call(_RESTRICT_SELF, ruleset, 0)
        finally:
            os.close(ruleset)
    except OSError as error:
        log.info("The kernel does not forbid us to change files", extra=fields(err=error.strerror))
    else:
        log.debug("May change no file but the sockets")


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = _PathBeneath(access, beneath)
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(beneath)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
