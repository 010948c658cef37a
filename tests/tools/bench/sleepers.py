"""The program ``python -m tests.tools.bench.sleepers COUNT``: the parent of sleeping processes.

It prints their pids on one line and ends, with all of them, when its stdin is closed. Each has the ten
open files of a small daemon, for the search through ``/proc/*/fd``, and is killed by the kernel should we
be: nothing is left behind whatever happens to the benchmark.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

FILES = 10


def main() -> None:
    """Start, report, wait, end."""
    libc = ctypes.CDLL(None)
    null = os.open(os.devnull, os.O_RDWR)
    pids = []
    for _ in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            for number in range(FILES):
                os.dup2(null, number)
            os.execvp("sleep", ["sleep", "86400"])  # noqa: S606 - a shell would be a process more
        pids.append(pid)
    print(*pids, flush=True)
    sys.stdin.read()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for _ in pids:
        os.wait()


if __name__ == "__main__":
    main()
