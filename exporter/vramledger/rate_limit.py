"""Limit how often something may happen: a rate a second, and a burst after a pause."""

from __future__ import annotations

import time
from collections.abc import Callable

_LINE_INTERVAL = 60.0
"""Seconds between two lines of the log about what others can cause."""


class TokenBucket:
    """A bucket of tokens that fills at a rate, in tokens a second, up to a burst."""

    def __init__(self, now: float, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._updated = now

    def consume(self, now: float) -> bool:
        """Take one token out; return False if none is left."""
        self._tokens, self._updated = self._tokens_at(now), now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def charge(self, now: float, cost: float) -> None:
        """Take out what something has cost, also if that leaves a debt."""
        self._tokens, self._updated = self._tokens_at(now) - cost, now

    def is_empty(self, now: float) -> bool:
        """Tell whether no token is left, without taking one."""
        return self._tokens_at(now) < 1

    def is_full(self, now: float) -> bool:
        """Tell whether a full burst is available, because nothing was consumed lately."""
        return self._tokens_at(now) >= self._burst

    @property
    def wait(self) -> float:
        """Seconds after the last :meth:`consume` or :meth:`charge` at which there is a token again."""
        return max(0.0, (1 - self._tokens) / self._rate)

    def _tokens_at(self, now: float) -> float:
        return min(self._burst, self._tokens + max(0.0, now - self._updated) * self._rate)


class LineLimit:
    """Allow one line of the log in an interval, and count what is left out between two."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until = float("-inf")
        self._dropped = 0

    def admit(self) -> int | None:
        """Return how many lines were left out before this one; None if this one is left out as well."""
        now = self._clock()
        if now < self._silent_until:
            self._dropped += 1
            return None
        dropped, self._dropped = self._dropped, 0
        self._silent_until = now + _LINE_INTERVAL
        return dropped
