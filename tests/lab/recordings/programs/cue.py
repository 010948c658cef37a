"""How a program reports to the script that started it: JSON lines on stdout, inherited by its children.

Every program ends by itself after a while, whatever becomes of the script that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys

LIFETIME = 300
"""Seconds after which the kernel ends a program: no run may leave a process behind."""


def enter() -> None:
    """Start: limit this program's life. Children of ``fork`` and ``spawn`` call it for themselves."""
    signal.alarm(LIFETIME)


def announce(role: str, **facts: object) -> None:
    """Report that ``role`` is ready: it holds its memory, and works from now on."""
    namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 /proc's links lead to no path
    line = json.dumps({"role": role, "pid": os.getpid(), "namespace": namespace, **facts}) + "\n"
    os.write(1, line.encode())  # one write, because lines of several processes in one pipe must not mix


def fall_silent() -> None:
    """Read and write nothing more: the script that reads the output could still want this program."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)


def wait() -> None:
    """Sleep until a signal or the end of a life; SIGTERM ends the program in the ordinary way."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()
