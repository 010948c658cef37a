"""Become a command without writable and executable memory, as systemd does: ``write_execute WAY COMMAND``."""

import ctypes
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable, Mapping

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_MDWE, _PR_MDWE_REFUSE_EXEC_GAIN = 65, 1

_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1
"""What the filter answers: go on, or EPERM."""

_X86_64 = 0xC000003E
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32
_SHM_EXEC = 0o100000
_FORBIDDEN = {
    9: mmap.PROT_WRITE | mmap.PROT_EXEC,  # mmap
    10: mmap.PROT_EXEC,  # mprotect
    329: mmap.PROT_EXEC,  # pkey_mprotect
    30: _SHM_EXEC,  # shmat
}
"""Bits of the third argument of a system call of x86-64, as systemd has them."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def _prctl(*arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*arguments, *([0] * (5 - len(arguments)))):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def refuse_by_kernel() -> None:
    """Give up memory that becomes executable, as systemd 254 does."""
    _prctl(_PR_SET_MDWE, _PR_MDWE_REFUSE_EXEC_GAIN)


def refuse_by_filter() -> None:
    """Give it up as systemd does before 254."""
    if platform.machine() != "x86_64":
        raise RuntimeError(f"no numbers of system calls for {platform.machine()}")
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _ALLOW)]
    for number, bits in _FORBIDDEN.items():
        code += [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, 4, number), (_LOAD, 0, 0, _THIRD_ARGUMENT)]
        code += [(_AND, 0, 0, bits), (_EQUAL, 0, 1, bits), (_RETURN, 0, 0, _REFUSE)]
    packed = b"".join(struct.pack("<HBBI", *each) for each in (*code, (_RETURN, 0, 0, _ALLOW)))
    instructions = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(packed) // 8, ctypes.addressof(instructions))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


WAYS: Mapping[str, Callable[[], None]] = {"PR_SET_MDWE": refuse_by_kernel, "filter": refuse_by_filter}


def _is_refused() -> bool:
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except PermissionError:
        return True
    return False


if __name__ == "__main__":
    WAYS[sys.argv[1]]()
    if not _is_refused():
        sys.exit(f"{sys.argv[1]} is not in force")
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 that is the purpose
