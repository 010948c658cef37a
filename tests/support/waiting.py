"""Wait for another thread or process: by its condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 30.0
"""Seconds after which a missing event fails the test."""

_PAUSE = 0.005

_T = TypeVar("_T")


def wait_until(condition: Callable[[], _T], what: str, *, patience: float = PATIENCE) -> _T:
    """Check until the condition is true, and return its value.

    Raises:
        TimeoutError: it has not become true; the message says what did not come.
    """
    deadline = time.monotonic() + patience
    while not (answer := condition()):
        if time.monotonic() > deadline:
            message = f"waited {patience:.0f} s in vain for: {what}"
            raise TimeoutError(message)
        time.sleep(_PAUSE)
    return answer
