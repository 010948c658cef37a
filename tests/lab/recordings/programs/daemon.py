"""Become a daemon the old way (fork, setsid, fork), then hold memory."""

from __future__ import annotations

import os

from tests.lab.recordings.programs import gpu
from tests.lab.recordings.programs.holder import hold

if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    hold("daemon", gpu.GIB)
