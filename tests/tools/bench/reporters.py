"""The program ``python -m tests.tools.bench.reporters PATH COUNT``: processes that report to an exporter.

It prints their pids on one line and ends, with all of them, when its stdin is closed. Each connects when
there is somebody to connect to, and reports once a second, at a moment of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from contextlib import suppress

from tests.tools.bench.agents import message

GPUS = 8


def _report(path: str, ordinal: int, late: float) -> None:
    time.sleep(late)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sequence in range(1, sys.maxsize):
        try:
            connection.send(message(sequence, ordinal), socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            connection.close()
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with suppress(OSError):
                connection.connect(path)
        time.sleep(1)


def main() -> None:
    """Start, report, wait, end."""
    libc = ctypes.CDLL(None)
    count = int(sys.argv[2])
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            _report(sys.argv[1], number % GPUS, number / count)
        pids.append(pid)
    print(*pids, flush=True)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for _ in pids:
        os.wait()


if __name__ == "__main__":
    main()
