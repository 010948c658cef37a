"""Count the calls of a function in threads of another program, with the kernel's uprobes.

``perf_event_open`` with the PMU ``uprobe`` puts a breakpoint at the function in the memory of one program,
for as long as a counter is open. No other program that maps the same library has one. When our process ends,
however it ends, the kernel closes every counter. Measured on Linux 6.18 beside an H100: to open a counter
takes 0.16 ms, and 60 ms while others are closed. To close one takes 60 to 110 ms, one after the other on the
whole host. A call takes 2 to 3 µs longer.

A counter is never inherited by the threads that the program starts later. For each of them the kernel would
read the library's path again, at our address in the *program's* memory, and the program could not start a
thread any more (seen on Linux 6.18: ``pthread_create`` fails). So a second event, which costs almost nothing,
tells that a thread was started.

It needs CAP_SYS_ADMIN. From Linux 5.8 on CAP_PERFMON was enough, until kernels of 2025 took that back: a
breakpoint in the middle of an instruction destroys a program. Ours are at the beginnings of functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+ +(/.*)$", re.MULTILINE)


class Mapping(NamedTuple):
    """A part of a file that a program has mapped as code."""

    start: int
    end: int
    offset: int
    path: str

    def holds(self, offset: int) -> bool:
        """Tell whether it contains an offset of the file."""
        return self.offset <= offset < self.offset + self.end - self.start


def find_mappings(maps: bytes) -> Iterator[Mapping]:
    """Yield the code of files that a ``maps`` shows."""
    for start, end, rights, offset, path in _MAPPING.findall(maps):
        if b"x" in rights:
            yield Mapping(int(start, 16), int(end, 16), int(offset, 16), os.fsdecode(path))


_PMU = Path("/sys/bus/event_source/devices/uprobe/type")
_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES = struct.Struct("<IIQQQQQIIQQ")
"""``struct perf_event_attr`` up to ``config2``; the kernel takes what is missing as 0."""

_CLOSE_ON_EXEC = 8
_SOFTWARE, _DUMMY = 1, 9
_RECORD_TASKS = 1 << 13
_DISABLE = 0x2401

_PAGE = mmap.PAGESIZE
_HEAD_AT, _TAIL_AT = 1024, 1032
_RECORD = struct.Struct("<IHH")
_FORK, _LOST = 7, 2
_FORK_PIDS = struct.Struct("<II")

_REASONS = {
    errno.EACCES: "it needs CAP_SYS_ADMIN",
    errno.EPERM: "it needs CAP_SYS_ADMIN, and in a container a seccomp profile that allows perf_event_open",
    errno.ENOSYS: "the kernel, or a container's seccomp profile, does not let us call perf_event_open",
    errno.EMFILE: "no file descriptor is left (LimitNOFILE= in systemd, ulimit -n)",
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def uprobe_type() -> int:
    """Return the PMU of uprobes. Raises OSError if there is none (before Linux 4.17), or it is hidden."""
    return int(_PMU.read_text(encoding="ascii"))


def _open_event(attributes: tuple[int, ...], thread: int) -> int:
    number = _SYSTEM_CALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no counters on {platform.machine()}")
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.pack(*attributes), _ATTRIBUTES.size)
    arguments = (number, ctypes.addressof(buffer), thread, -1, -1, _CLOSE_ON_EXEC)
    descriptor = int(_libc.syscall(*map(ctypes.c_long, arguments)))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


def open_counter(pmu: int, path: str, offset: int, thread: int) -> int:
    """Return a counter of a thread's calls. Raises OSError if refused, or it has ended (``ESRCH``)."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    at = ctypes.addressof(name)
    return _open_event((pmu, _ATTRIBUTES.size, 0, 0, 0, 0, 0, 0, 0, at, offset), thread)


def explain(error: OSError) -> str:
    """Return the reason for which the kernel has refused a counter, and what it needs."""
    return _REASONS.get(error.errno or 0) or error.strerror or "the kernel refuses it"


def read_counter(descriptor: int) -> int:
    """Return the number of calls since the counter was opened."""
    return int.from_bytes(os.read(descriptor, 8), "little")


def disable_counter(descriptor: int) -> None:
    """Stop counting at once; the breakpoint goes when the descriptor is closed."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _DISABLE, 0)


class ThreadStarts:
    """Tell whether a thread has started other threads; this costs the program nothing."""

    def __init__(self, thread: int) -> None:
        """Watch one thread. Raises OSError if the kernel refuses it, or the thread has ended."""
        attributes = (_SOFTWARE, _ATTRIBUTES.size, _DUMMY, 0, 0, 0, _RECORD_TASKS, 0, 0, 0, 0)
        descriptor = _open_event(attributes, thread)
        try:
            self._ring = mmap.mmap(descriptor, 2 * _PAGE)
        finally:
            os.close(descriptor)  # the mapping keeps the event open

    def any_since_last(self) -> bool:
        """Tell whether it has started a thread (no process) since; a lost record counts as one."""
        head = self._read_position(_HEAD_AT)
        tail = self._read_position(_TAIL_AT)
        records = bytes(self._byte(at) for at in range(tail, head)) if head - tail <= _PAGE else b""
        self._ring[_TAIL_AT : _TAIL_AT + 8] = struct.pack("<Q", head)
        started = head - tail > _PAGE
        at = 0
        while at < len(records):
            kind, _, size = _RECORD.unpack_from(records, at)
            if kind == _LOST or size < _RECORD.size:
                return True
            if kind == _FORK:
                pid, parent = _FORK_PIDS.unpack_from(records, at + _RECORD.size)
                started = started or pid == parent
            at += size
        return started

    def close(self) -> None:
        """Stop watching."""
        self._ring.close()

    def _read_position(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self._ring, at)[0])

    def _byte(self, at: int) -> int:
        return self._ring[_PAGE + at % _PAGE]


def find_obstacle(root: str) -> str:
    """Say why the calls of programs cannot be counted below ``root``; empty if they can."""
    try:
        pmu = uprobe_type()
    except (OSError, ValueError):
        return "the kernel has no uprobes for perf_event_open (it needs Linux 5.8 or newer)"
    function = ctypes.CDLL(None).ether_ntoa  # every C library has it, and we call it nowhere else
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    try:
        library = _mapping_of(root, address)
        if library is None:
            return "our own C library was not found in our memory"
        offset = address - library.start + library.offset
        counter = open_counter(pmu, library.path, offset, os.getpid())
    except OSError as error:
        return explain(error)
    try:
        function(ctypes.create_string_buffer(6))
        return "" if read_counter(counter) == 1 else "the kernel does not count a call that we made"
    finally:
        os.close(counter)


def _mapping_of(root: str, address: int) -> Mapping | None:
    mappings = find_mappings(Path(f"{root}/self/maps").read_bytes())
    return next((each for each in mappings if each.start <= address < each.end), None)
