"""Wait for another thread or process: by its condition, with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 30.0
"""Seconds after which a missing event fails the test."""

_PAUSES = (0.005, 0.1)
"""The shortest and the longest pause between two checks, seconds."""

_REST = 8.0
"""A pause is this many times as long as its check: the processor is for what is waited for."""

_LATE = 0.02
"""A pause may also be this share of the time waited so far."""

_T = TypeVar("_T")


def wait_until(condition: Callable[[], _T], what: str, *, patience: float = PATIENCE) -> _T:
    """Check until the condition is true, and return its value; a TimeoutError says what did not come."""
    shortest, longest = _PAUSES
    deadline = (began := time.monotonic()) + patience
    while not (answer := condition()):
        if (now := time.monotonic()) > deadline:
            raise TimeoutError(f"waited {patience:.0f} s in vain for: {what}")
        waited = now - (deadline - patience)
        time.sleep(min(longest, max(shortest, _REST * (now - began), _LATE * waited)))
        began = time.monotonic()
    return answer
