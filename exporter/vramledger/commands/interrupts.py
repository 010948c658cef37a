"""Let an interrupt cancel a command that waits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_until_interrupted(command: Coroutine[Any, Any, Result]) -> Result:
    """Run a command's coroutine to its end. Raises KeyboardInterrupt if it was interrupted.

    The first interrupt cancels it at its next wait, a second one ends it; where interrupts are ignored they
    stay so. ``asyncio.run`` does this since Python 3.11. Before, it is raised at any line of the loop.
    """
    interrupted = False

    async def run_cancelled_by_interrupt() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 this is one

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            nonlocal interrupted
            if interrupted:
                raise KeyboardInterrupt
            interrupted = True
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # wakes the loop up: a signal alone does not end its wait

        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler:
            return await command
        signal.signal(signal.SIGINT, interrupt)
        try:
            return await command
        finally:
            signal.signal(signal.SIGINT, before)

    try:
        return asyncio.run(run_cancelled_by_interrupt())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
