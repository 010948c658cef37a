"""End only the main thread, with the raw system call, while another thread lives with the memory."""

from __future__ import annotations

import ctypes
import platform
import threading
import time

from tests.lab.recordings.programs import cue, gpu

EXIT = {"x86_64": 60, "aarch64": 93}
"""Number of SYS_exit, which ends a thread (exit_group would end the process)."""


def _live_on() -> None:
    while True:
        time.sleep(1)


if __name__ == "__main__":
    cue.enter()
    gpu.open_gpu().hold(3 * gpu.GIB)
    threading.Thread(target=_live_on).start()
    cue.announce("leader")
    ctypes.CDLL(None).syscall(EXIT[platform.machine()], 0)
