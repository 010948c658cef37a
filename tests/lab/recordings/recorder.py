"""Record the sampler's readings during a scenario, and let the scenario wait for what is recorded.

This is ``vramledger capture`` with a window: the same sampler, the same masking, the same file, and a
live replay beside it, so that a play waits for a condition and never for a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from tests.support import judging
from tests.support.judging import Entry
from vramledger.commands.capture import capture
from vramledger.config import SamplingConfig
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.masking import Mask
from vramledger.sampling.replay import encode_header
from vramledger.sampling.supervisor import Supervisor

PROGRAMS = Path(__file__).parent / "programs"
LONGEST = 290.0
"""Seconds after which a recording ends in any case."""


class TroubleError(Exception):
    """Say that a scenario did not run as it should."""


class _PublicMask(Mask):
    """The mask of ``capture``, except that the names of our own programs, which are public, stay."""

    _ours = frozenset(path.name for path in PROGRAMS.glob("*.py"))

    def _mask_program(self, name: str) -> str:
        return name if name in self._ours else super()._mask_program(name)


class Recorder(threading.Thread):
    """A running recording."""

    def __init__(self, directory: Path, entry: Entry) -> None:
        """Start to record immediately."""
        super().__init__(name=f"recorder-{entry.name}", daemon=True)
        self.entry = entry
        self.path = directory / entry.file
        self.error: BaseException | None = None
        self.snapshot: Snapshot | None = None
        self._known: set[int] = set()
        self._tied: set[int] = set()
        self._count = 0
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self.start()

    def run(self) -> None:
        """Record until told to end."""
        try:
            asyncio.run(
                capture(
                    self._watched(),
                    self.path,
                    head=encode_header(self.entry.note, self.entry.idle_after),
                    seconds=LONGEST,
                    mask=False,
                )
            )
        except BaseException as error:  # noqa: BLE001 the scenario must see every error
            self.error = error
        with self._changed:
            self._changed.notify_all()

    async def _watched(self) -> AsyncIterator[Reading | None]:
        config = SamplingConfig(interval=self.entry.interval, timeout=2.0)
        mask, judge = _PublicMask(), judging.tracker(self.entry)
        async with aclosing(Supervisor(config).readings()) as readings:  # type: ignore[type-var]
            async for reading in readings:
                if reading is None:
                    continue
                masked = mask.mask_reading(reading)
                with self._changed:
                    self._known |= {facts.pid for facts in reading.facts}
                    self._tied = {each.pid for each in reading.ties}
                    self._count += 1
                    self.snapshot = judge.update(masked)
                    self._changed.notify_all()
                yield masked
                if self._ending.is_set():
                    return

    def until(self, what: str, condition: Callable[[Snapshot], bool], timeout: float = 30.0) -> None:
        """Wait until the newest snapshot meets a condition.

        Raises:
            TroubleError: it has not in time, or the recording has ended.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self.snapshot is None or not condition(self.snapshot):
                if self.error is not None:
                    message = f"{self.entry.name}: the recording failed: {self.error!r}"
                    raise TroubleError(message)
                left = deadline - time.monotonic()
                if left <= 0 or not self.is_alive():
                    seen = judging.states(self.snapshot) if self.snapshot is not None else None
                    message = f"{self.entry.name}: waited {timeout:.0f} s in vain: {what}; seen: {seen}"
                    raise TroubleError(message)
                self._changed.wait(min(left, 0.5))

    def begun(self) -> None:
        """Wait for the first reading."""
        self.until("a first reading", lambda _: True)

    def listed(self, *pids: int) -> None:
        """Wait until pids are listed and the facts about them are known."""
        self.until(
            f"NVML lists {pids}",
            lambda shot: set(pids) <= set(judging.states(shot)) and set(pids) <= self._known,
        )

    def tied(self, *pids: int) -> None:
        """Wait until a reading says what ties pids, whose launcher has ended."""
        self.until(f"what ties {pids}", lambda _: set(pids) <= self._tied)

    def gone(self, *pids: int) -> None:
        """Wait until pids are no longer listed."""
        self.until(f"NVML does not list {pids}", lambda shot: not set(pids) & set(judging.states(shot)))

    def more(self, readings: int) -> None:
        """Wait for this number of further readings."""
        target = self._count + readings
        self.until(
            f"{readings} more readings", lambda _: self._count >= target, 30 + readings * self.entry.interval
        )

    def end(self) -> None:
        """End the recording and wait for its file."""
        self._ending.set()
        self.join(timeout=15)
        if self.is_alive():
            message = f"{self.entry.name}: the recording does not end"
            raise TroubleError(message)
        if self.error is not None:
            message = f"{self.entry.name}: the recording failed: {self.error!r}"
            raise TroubleError(message)
