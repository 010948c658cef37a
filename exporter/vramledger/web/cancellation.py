"""Ends tasks for good, also those that did not hear it the first time."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN = 3.0
# Seconds after which a task that goes on is cancelled again: more than any of ours takes to clean up.


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end.

    In Python 3.10 and 3.11 ``asyncio.wait_for`` swallows a cancellation that comes in the same turn of the
    loop as what it waits for (bpo-42130). Seen: a reading came with SIGTERM, and the exporter never ended.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN)
