"""Forbid our own process to change files, with Landlock (Linux 5.13).

It restricts the calling thread and what that starts, so this is done before there is a second thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from vramledger.logs import fields, log

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The numbers of the system calls, which are the same on x86-64 and ARM."""

_RULE_PATH_BENEATH = 1
_WRITE_FILE, _REMOVE_FILE, _MAKE_FILE, _MAKE_SOCKET = 1 << 1, 1 << 5, 1 << 8, 1 << 9
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Write to a file, and remove or make one of any kind: what the first version of Landlock knows, without
reading and running."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _layout_ = "ms"  # Python 3.14 wants it said; packed, it is the kernel's
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def forbid_changes(sockets_in: Iterable[Path], files_in: Iterable[Path] = ()) -> None:
    """Change no file from now on, except in these directories: of sockets, and of files.

    Files that are open stay as they are. /dev/null may be written to. If the kernel has no Landlock, or a
    filter of system calls forbids it, we log it and go on. It needs ``no_new_privs``.
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
