"""Limit the open counters, and close each (up to 0.1 s) in a thread; their number bounds our end too."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator


class CounterPool:
    """The counters of all holders."""

    def __init__(self, limit: int) -> None:
        """Start the closing thread; ``limit`` counts open counters and those that wait to be closed."""
        self.limit = limit
        self._closing: deque[int] = deque()
        self._open = self._opening = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="vramledger-close", daemon=True).start()

    @property
    def open(self) -> int:
        """How many are not closed yet."""
        with self._changed:
            return self._open

    def reserve(self, count: int) -> bool:
        """Reserve the places of some counters; tell whether there are as many."""
        with self._changed:
            if self._open + count > self.limit:
                return False
            self._open += count
            return True

    def release(self, count: int) -> None:
        """Free the reserved places of counters that were not opened."""
        with self._changed:
            self._open -= count
            self._changed.notify_all()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Close nothing meanwhile: the kernel lets each counter that we open wait for one that it closes."""
        with self._changed:
            self._opening += 1
        try:
            yield
        finally:
            with self._changed:
                self._opening -= 1
                self._changed.notify_all()

    def close(self, descriptors: Collection[int], *, first: bool = False) -> None:
        """Close these in their order, after those that wait already or ``first``."""
        with self._changed:
            if first:
                self._closing.extendleft(reversed([*descriptors]))
            else:
                self._closing.extend(descriptors)
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until none is open; tell whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing and not self._opening)
                descriptor = self._closing.popleft()
            with contextlib.suppress(OSError):
                os.close(descriptor)
            self.release(1)
