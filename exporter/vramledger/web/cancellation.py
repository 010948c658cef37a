"""End tasks reliably, also those that swallowed their first cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

_REPEAT_AFTER = 3.0
"""Seconds after which a task that goes on is cancelled again: longer than any of ours takes to clean up."""


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end.

    In Python 3.10 and 3.11 ``asyncio.wait_for`` swallows a cancellation that comes in the same turn of the
    loop as its result (bpo-42130): a reading arrived with SIGTERM, and the exporter never ended.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_REPEAT_AFTER)


@asynccontextmanager
async def background_task(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine as a task until the block ends."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        await cancel_and_wait(task)
