"""Run the exporter without memory that is writable and executable: ``tests.tools.gpu.write_execute OUT``.

That is what systemd's ``MemoryDenyWriteExecute=yes`` forbids: from systemd 254 by ``PR_SET_MDWE`` of Linux
6.3, before by a filter of system calls. Both are tried beside a program that holds memory, each against an
exporter without them: the same series, bytes and exit statuses of the commands. ``OUT/write-execute.md`` has
what was found. About 20 s; ``--rehearse`` does the same on the stand-in driver.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import platform
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.support.exporter import SOURCES, Exporter, Page, run, serving
from tests.support.standin.library import GIB
from tests.tools.gpu.trust import ROOT, Told
from tests.tools.recordings.rehearsal import Rehearsal
from tests.tools.soak.table import Row, markdown

SECONDS = 4.0
"""For which each exporter samples: GPM needs two samples, and some readings have a pace of their own."""

FLAGS = ("--sample.interval=250ms", "--collector.launches")
COMMANDS = ("show", "doctor", "check")

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
    """Give it up as systemd does before 254.

    Raises:
        RuntimeError: the numbers of the system calls of this processor are not known here.
    """
    if platform.machine() != "x86_64":
        message = f"no numbers of system calls for {platform.machine()}"
        raise RuntimeError(message)
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _ALLOW)]
    for number, bits in _FORBIDDEN.items():
        code += [
            (_LOAD, 0, 0, _NUMBER),
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _THIRD_ARGUMENT),
            (_AND, 0, 0, bits),
            (_EQUAL, 0, 1, bits),
            (_RETURN, 0, 0, _REFUSE),
        ]
    packed = b"".join(struct.pack("<HBBI", *each) for each in (*code, (_RETURN, 0, 0, _ALLOW)))
    instructions = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(packed) // 8, ctypes.addressof(instructions))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


WAYS: Mapping[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "PR_SET_MDWE": refuse_by_kernel,
    "filter": refuse_by_filter,
}


def is_refused() -> bool:
    """Tell whether this process gets no memory that is writable and executable."""
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except PermissionError:
        return True
    return False


def confined(way: str, command: Sequence[str]) -> None:
    """Become a command that has given it up; its children inherit that."""
    WAYS[way]()
    if is_refused() != (way != "nothing"):
        sys.exit(f"{way} is not in force")
    os.execvp(command[0], list(command))  # noqa: S606 that is the purpose


class Found(NamedTuple):
    """What an exporter showed."""

    series: frozenset[str]
    held: float | None
    failures: float
    codes: Mapping[str, int]
    executable: int
    """Mappings of the exporter and all its processes that are writable and executable."""


def _series(page: Page) -> frozenset[str]:
    """Return every series that does not come and go by itself: names, and labels of devices."""
    return frozenset(
        " ".join((name, *(f"{label}={value}" for label, value in labels if label in ("gpu", "collector"))))
        for name, labels in page.samples
    )


def _writable_and_executable(exporter: Exporter) -> int:
    processes = (exporter.process, *exporter.process.children(recursive=True))
    maps = (Path(f"/proc/{each.pid}/maps").read_text() for each in processes)
    return sum(line.split()[1].startswith("rwx") for text in maps for line in text.splitlines())


def observe(way: str, holder: int, env: Mapping[str, str], place: Path) -> Found:
    """Run an exporter in one of the ways, and the commands beside it."""
    wrapper = (sys.executable, "-m", "tests.tools.gpu.write_execute", f"--confine={way}", "--")
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (SOURCES, ROOT)))}
    with serving(*FLAGS, f"--storage.path={place}", driver={**env, **paths}, wrapper=wrapper) as exporter:
        exporter.until(lambda page: page.up and page.value("process_memory_bytes", pid=holder), "the holder")
        time.sleep(SECONDS)
        page = exporter.next_sample()
        codes = {
            each: run(each, driver={**env, **paths}, wrapper=wrapper).returncode
            for each in COMMANDS  # without the exporter: they read the driver themselves
        }
        failures = sum(page.values("sample_failures_total").values())
        held = page.value("process_memory_bytes", pid=holder)
        return Found(_series(page), held, failures, codes, _writable_and_executable(exporter))


def compare(found: Mapping[str, Found]) -> Iterator[Row]:
    """Yield what differs from an exporter that may do everything."""
    free = found["nothing"]
    for way, each in found.items():
        lost, more = sorted(free.series - each.series), sorted(each.series - free.series)
        figures = (
            f"{len(each.series)} kinds of series",
            f"lost {lost or 'none'}, more {more or 'none'}",
            f"{each.held} bytes of the holder",
            f"{each.failures:.0f} failed samples",
            f"{each.executable} mappings rwx",
            f"exit statuses {dict(each.codes)}",
        )
        same = not lost and each.held == free.held is not None and each.codes == free.codes
        yield Row(way, "; ".join(figures), good=same and not each.failures)


def main() -> int:
    """Try each way; 1 when one loses something."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.gpu.write_execute", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on the stand-in driver")
    parser.add_argument("--confine", choices=WAYS, help=argparse.SUPPRESS)
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:own])
    if args.confine:
        confined(args.confine, words[own + 1 :])
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Found] = {}
    rows = [Row("kernel", f"{platform.release()}, {platform.machine()}", good=None)]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="write-execute-")))
        env = Rehearsal(scratch / "rehearsal").env() if args.rehearse else {}
        holder = Told("tests.tools.gpu.holder", "0", env=env)
        stack.callback(holder.end)
        holder.tell(GIB)
        holder.answer()
        with ThreadPoolExecutor(len(WAYS)) as pool:
            tried = {way: pool.submit(observe, way, holder.pid, env, scratch / way) for way in WAYS}
        for way, each in tried.items():
            if error := each.exception():
                rows.append(Row(way, f"{type(error).__name__}: {error}".replace("\n", " "), good=False))
            else:
                found[way] = each.result()
    if "nothing" in found:
        rows += compare(found)
    text = "\n".join(markdown(rows)) + "\n"
    (args.out / "write-execute.md").write_text(text, encoding="utf-8")
    print(text)
    return int(any(row.good is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
