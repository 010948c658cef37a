"""Give up permanently the rights that our own process does not need.

Linux keeps capabilities for each thread, so this is done before there is a second one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vramledger.errors import StartupError
from vramledger.logs import fields, log

READ_CAPABILITIES = frozenset({"dac_read_search", "sys_ptrace"})
"""What is needed to read other users' processes: environments, open files, mapped libraries."""

DEFAULT_UID = 65532
"""The user of the container image; it needs no entry in /etc/passwd."""

_USER = "vramledger"
_ROOT = 0
_UID_MAX = 2**32 - 1

COUNT_CAPABILITIES = frozenset({"sys_admin", "perfmon"})
"""What is needed to count the calls of other programs: the second is enough on some kernels."""

_BITS = {"dac_read_search": 2, "sys_ptrace": 19, "sys_admin": 21, "perfmon": 38}
_LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap")

_VERSION_3 = 0x20080522
_SET_DUMPABLE, _BOUNDING_DROP, _NO_NEW_PRIVS, _AMBIENT = 4, 24, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR = 2, 4


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


class User(NamedTuple):
    """A user, and its group."""

    uid: int
    gid: int


class CapabilitySets(NamedTuple):
    """The capability sets of this thread, as bit masks."""

    effective: int
    permitted: int
    inheritable: int


_libc = ctypes.CDLL(None, use_errno=True)


def _call_libc(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, first: int = 0, second: int = 0) -> None:
    _call_libc("prctl", option, *map(ctypes.c_ulong, (first, second, 0, 0)))


def read_capabilities() -> CapabilitySets:
    """Return the capabilities of this thread."""
    data = (_CapabilityData * 2)()
    _call_libc("capget", ctypes.byref(_CapabilityHeader(_VERSION_3, 0)), data)
    low, high = data
    return CapabilitySets(
        low.effective | high.effective << 32,
        low.permitted | high.permitted << 32,
        low.inheritable | high.inheritable << 32,
    )


def _set_capabilities(sets: CapabilitySets) -> None:
    data = (_CapabilityData * 2)(
        *(_CapabilityData(*(each >> shift & 0xFFFFFFFF for each in sets)) for shift in (0, 32))
    )
    _call_libc("capset", ctypes.byref(_CapabilityHeader(_VERSION_3, 0)), data)


def drop_privileges(
    inherit: frozenset[str] = frozenset(), use: frozenset[str] = frozenset(), become: User | None = None
) -> None:
    """Keep no capabilities but these: those to ``use``, and those that child processes ``inherit``.

    After that, no process that we start can gain any other right, not even through a setuid program. With
    ``become``, root becomes that user. If ``use`` is empty, other processes of our user cannot read our
    memory or our files in /proc. If the kernel does not let us give up something, we log it and go on.
    """
    permitted_now = read_capabilities().permitted
    kept = permitted_now & _bit_mask(inherit | use)
    sets = CapabilitySets(permitted_now & _bit_mask(use), kept, permitted_now & _bit_mask(inherit))
    steps: list[Callable[[], None]] = [
        lambda: _prctl(_NO_NEW_PRIVS, 1),
        lambda: _prctl(_AMBIENT, _AMBIENT_CLEAR),
        lambda: _shrink_bounding_set(permitted_now, _bit_mask(inherit | use)),
    ]
    if become is not None:
        steps.append(lambda: _become(become))
    steps.append(lambda: _set_capabilities(sets))
    passed_on = [_BITS[name] for name in sorted(inherit) if permitted_now >> _BITS[name] & 1]
    steps += [partial(_prctl, _AMBIENT, _AMBIENT_RAISE, bit) for bit in passed_on]
    if not use:
        steps.append(lambda: _prctl(_SET_DUMPABLE, 0))
    for step in steps:  # one that fails, as under a filter of system calls, must not stop the others
        try:
            step()
        except OSError as error:
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


def _become(user: User) -> None:
    os.setgroups([])
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def _shrink_bounding_set(permitted_now: int, kept: int) -> None:
    """Shrink the set of capabilities that any descendant can ever get, which needs CAP_SETPCAP."""
    setpcap = 8
    if not permitted_now >> setpcap & 1:
        return
    last = int(_LAST_CAPABILITY.read_text(encoding="ascii"))
    for bit in range(last + 1):
        if not kept >> bit & 1:
            _prctl(_BOUNDING_DROP, bit)


def _bit_mask(names: frozenset[str]) -> int:
    return sum(1 << _BITS[name] for name in names)
