"""Close counters in a thread of its own: the kernel takes up to 0.1 s for each."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterable


class Closer:
    """Close descriptors one after the other, in the order in which they come."""

    def __init__(self) -> None:
        """Start the thread."""
        self._descriptors: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="vramledger-close", daemon=True).start()

    @property
    def waiting(self) -> int:
        """How many are not closed yet."""
        with self._changed:
            return self._open

    def close(self, descriptors: Iterable[int]) -> None:
        """Close these as soon as those before them are closed."""
        for descriptor in descriptors:
            with self._changed:
                self._open += 1
            self._descriptors.put(descriptor)

    def wait(self, seconds: float) -> bool:
        """Wait until all are closed; tell whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, seconds)

    def _run(self) -> None:
        while True:
            descriptor = self._descriptors.get()
            with contextlib.suppress(OSError):
                os.close(descriptor)
            with self._changed:
                self._open -= 1
                self._changed.notify_all()
