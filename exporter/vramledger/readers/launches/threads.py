"""Know which threads certainly have not run: asleep at two looks, without a switch in between."""

from __future__ import annotations

import os
import re
import time

from vramledger.readers.hosts.stat import read_small

_STATE = re.compile(rb"^State:\s*(\S)", re.MULTILINE)
_SWITCHES = re.compile(rb"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_SLEEPS = b"SDTtIK"
_DRIVER_THREAD = re.compile(rb"^Name:\tcuda-EvtHandlr$", re.MULTILINE)
"""libcuda's own waking thread, which calls nothing; a program that takes its name harms itself."""

_SCHEDULER_CLOCK = 2
"""``CPUCLOCK_SCHED``: with a pid it makes the number of the clock of a process' CPU time, in nanoseconds."""


def list_threads(root: str, pid: int) -> list[int]:
    """Return the threads of a process. Raises OSError if it has ended."""
    return [int(name) for name in os.listdir(f"{root}/{pid}/task")]  # noqa: PTH208 pathlib is 3 x slower


def sleep_mark(root: str, pid: int, thread: int) -> int | None:
    """Return a number that stays the same while a sleeping thread does not run; None if it does not sleep.

    It is the thread's count of context switches: a thread cannot run and sleep again without one. Raises
    OSError if it has ended.
    """
    status = read_small(f"{root}/{pid}/task/{thread}/status")
    if _DRIVER_THREAD.search(status):
        return 0
    state = _STATE.search(status)
    counts = _SWITCHES.findall(status)
    if state is None or state[1] not in _SLEEPS or len(counts) != 2:  # noqa: PLR2004 voluntary and not
        return None
    return sum(map(int, counts))


def cpu_time(pid: int) -> int | None:
    """Return a process' CPU time in ns, ended threads too, None if unreadable; equal: nothing ran."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _SCHEDULER_CLOCK)
    except OSError:
        return None
