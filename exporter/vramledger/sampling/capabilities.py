"""Keep some capabilities and give up all other rights; it imports little, as logging takes 3 MiB."""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ_CAPABILITIES = frozenset({"dac_read_search", "sys_ptrace"})
"""What is needed to read other users' processes: environments, open files, mapped libraries."""

_BITS = {"dac_read_search": 2, "sys_ptrace": 19}
_SETPCAP = 8

_VERSION_3 = 0x20080522
_SET_DUMPABLE, _BOUNDING_READ, _BOUNDING_DROP, _NO_NEW_PRIVS, _AMBIENT = 4, 23, 24, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR = 2, 4


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def _call_libc(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, first: int = 0, second: int = 0) -> None:
    _call_libc("prctl", option, *map(ctypes.c_ulong, (first, second, 0, 0)))


def read_permitted() -> int:
    """Return the thread's capabilities as a bit mask. Raises OSError if the kernel does not tell."""
    data = (_CapabilityData * 2)()
    _call_libc("capget", ctypes.byref(_CapabilityHeader(_VERSION_3, 0)), data)
    low, high = data
    return int(low.permitted | high.permitted << 32)


def _set_capabilities(effective: int, permitted: int, inheritable: int) -> None:
    data = (_CapabilityData * 2)(
        *(
            _CapabilityData(*(each >> shift & 0xFFFFFFFF for each in (effective, permitted, inheritable)))
            for shift in (0, 32)
        )
    )
    _call_libc("capset", ctypes.byref(_CapabilityHeader(_VERSION_3, 0)), data)


def keep_only(
    inherit: frozenset[str] = frozenset(),
    use: frozenset[str] = frozenset(),
    become: tuple[int, int] | None = None,
) -> list[OSError]:
    """Keep no capabilities but these: those to ``use``, and those that child processes ``inherit``.

    After that, no process that we start can gain any other right, not even through a setuid program. With
    ``become``, root becomes that user and group. If ``use`` is empty, other processes of our user cannot read
    our memory or our files in /proc. Returns what the kernel did not let us give up; all else is given up.
    Raises OSError if the kernel does not tell what we have.
    """
    permitted = read_permitted()
    kept = _bit_mask(inherit | use)
    steps: list[Callable[[], None]] = [
        lambda: _prctl(_NO_NEW_PRIVS, 1),
        lambda: _prctl(_AMBIENT, _AMBIENT_CLEAR),
        lambda: _shrink_bounding_set(permitted, kept),
    ]
    if become is not None:
        steps.append(lambda: _become(*become))
    steps.append(
        lambda: _set_capabilities(
            permitted & _bit_mask(use), permitted & kept, permitted & _bit_mask(inherit)
        )
    )
    passed_on = [_BITS[name] for name in sorted(inherit) if permitted >> _BITS[name] & 1]
    steps += [_raise_ambient(bit) for bit in passed_on]
    if not use:
        steps.append(lambda: _prctl(_SET_DUMPABLE, 0))
    failed = []
    for step in steps:  # one that fails, as under a filter of system calls, must not stop the others
        try:
            step()
        except OSError as error:
            failed.append(error)
    return failed


def _raise_ambient(bit: int) -> Callable[[], None]:
    return lambda: _prctl(_AMBIENT, _AMBIENT_RAISE, bit)


def _become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _shrink_bounding_set(permitted: int, kept: int) -> None:
    """Shrink the set of capabilities that any descendant can ever get, which needs CAP_SETPCAP."""
    if not permitted >> _SETPCAP & 1:
        return
    bit = 0
    while _libc.prctl(_BOUNDING_READ, *map(ctypes.c_ulong, (bit, 0, 0, 0))) >= 0:  # there may be no /proc
        if not kept >> bit & 1:
            _prctl(_BOUNDING_DROP, bit)
        bit += 1


def _bit_mask(names: frozenset[str]) -> int:
    return sum(1 << _BITS[name] for name in names)
