"""Run the collectors of a sample: each can fail or hang alone."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from vramledger.logs import COLLECTOR_FAILED, FailureStreaks
from vramledger.model.reading import Reading
from vramledger.readers.collector import Collector, Context, Health, Part

TOGETHER = 1.5
"""Seconds for all collectors of a sample; where several begin to hang, later ones are left out."""


_FIELDS = frozenset(Reading.__struct_fields__)


class Slot:
    """The place of a collector, which is made when it is first run: that may fail too."""

    def __init__(self, name: str, make: Callable[[], Collector]) -> None:
        self.name = name  # the collector's name
        self.collector: Collector | None = None  # the collector, once it is made
        # how it did in the newest sample; None if it had nothing to do
        self.health: tuple[bool, float] | None = None
        self.answered = False  # the newest sample has its part
        self.hangs = False  # it is still in a call that was given up
        self.failed_between = False  # it has failed since that sample
        self._make = make

    def made(self) -> Collector:
        if self.collector is None:
            self.collector = self._make()
        return self.collector

    @property
    def patience(self) -> float:
        """Seconds after which it counts as hanging."""
        return Collector.patience if self.collector is None else self.collector.patience


class _Outcome:
    """What a call of a collector led to; ``part`` is None if there was no answer."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.part: Part | None = None
        self.health: Health | None = (False, None)
        self.error: Exception | None = None
        self.seconds = 0.0


class _CollectorThread(threading.Thread):
    """Call collectors one after the other, until one of them is given up."""

    def __init__(self) -> None:
        super().__init__(name="vramledger-collectors", daemon=True)
        self.lock = threading.Lock()
        self.given_up = False
        self.slot: Slot | None = None
        self.begun = 0.0
        self.left: deque[Slot] = deque()
        self.batches: queue.SimpleQueue[tuple[Callable[[Slot], _Outcome], Callable[[_Outcome], bool]]] = (
            queue.SimpleQueue()
        )
        self.finished: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            call, use = self.batches.get()
            while self.left:
                with self.lock:
                    slot = self.slot = self.left.popleft()
                    self.begun = time.monotonic()
                outcome = call(slot)
                with self.lock:
                    if self.given_up:
                        slot.hangs = False
                        return
                    self.slot = None
                    if not use(outcome):
                        self.left.clear()
            self.finished.put(None)


class CollectorRunner:
    """Run collectors in a thread, and in a new one if one hangs: each costs one thread at most."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self._worker: _CollectorThread | None = None
        self._failing = FailureStreaks(COLLECTOR_FAILED)

    def read(self, context: Context, go_on: Callable[[Slot], bool] = lambda _: True) -> None:
        """Have each give its part of the reading, into the context; end after one without ``go_on``."""

        def use(outcome: _Outcome) -> bool:
            self._use(outcome, context)
            return go_on(outcome.slot)

        self._run(self.slots.values(), partial(self._read, context=context), use)

    def work_between(self, context: Context) -> None:
        """Have those work that have something to do between two samples; a failure is the next sample's."""
        now = time.monotonic()
        slots = [
            slot
            for slot in self.slots.values()
            if slot.collector is not None and now >= slot.collector.work_at
        ]
        if slots:
            self._run(slots, partial(self._work, context=context), self._note_work, between=True)

    def _lacks(self, collector: Collector) -> bool:
        needed = (self.slots.get(name) for name in collector.needs)
        return any(slot is not None and not slot.answered for slot in needed)

    def _read(self, slot: Slot, context: Context) -> _Outcome:
        outcome, begun = _Outcome(slot), time.perf_counter()
        try:
            collector = slot.made()
            if slot.answered:
                collector.accept()
            if not self._lacks(collector):
                outcome.part = collector.read(context)
                if wrong := outcome.part.keys() - _FIELDS:
                    raise TypeError(f"{sorted(wrong)} are not fields of a reading")  # noqa: TRY301 as if the collector had raised it
                outcome.health = collector.health
                outcome.error = next(collector.errors(), None)
        except Exception as error:  # noqa: BLE001 whatever it is, only its own part is missing
            outcome.part, outcome.health, outcome.error = None, (False, None), error
        outcome.seconds = time.perf_counter() - begun
        return outcome

    def _work(self, slot: Slot, context: Context) -> _Outcome:
        outcome = _Outcome(slot)
        try:
            collector = slot.made()
            if not self._lacks(collector):
                collector.work_between(context)
        except Exception as error:  # noqa: BLE001 as above
            outcome.error = error
        return outcome

    def _use(self, outcome: _Outcome, context: Context) -> None:
        slot, succeeded = outcome.slot, outcome.error is None and not outcome.slot.failed_between
        slot.answered, slot.failed_between = outcome.part is not None, False
        if outcome.part is not None:
            context.add(outcome.part)
        if outcome.error is not None:
            self._failing.failed(slot.name, outcome.error)
        elif succeeded and slot.answered:
            self._failing.succeeded(slot.name)
        slot.health = None
        if outcome.health is not None or not succeeded:
            complete, seconds = outcome.health or (False, None)
            slot.health = complete and succeeded, outcome.seconds if seconds is None else seconds

    def _note_work(self, outcome: _Outcome) -> bool:
        if outcome.error is not None:
            outcome.slot.failed_between = True
            self._failing.failed(outcome.slot.name, outcome.error)
        return True

    def _fail(self, slot: Slot, seconds: float, error: Exception | None = None) -> None:
        """Record that a collector has given nothing; without an error, the reason is logged already."""
        slot.health, slot.answered = (False, seconds), False
        if error is not None:
            self._failing.failed(slot.name, error)

    def _run(
        self,
        slots: Iterable[Slot],
        call: Callable[[Slot], _Outcome],
        use: Callable[[_Outcome], bool],
        *,
        between: bool = False,
    ) -> None:
        end = time.monotonic() + TOGETHER
        left = deque[Slot]()
        for slot in slots:
            if slot.hangs:
                self._fail(slot, slot.patience)
            else:
                left.append(slot)
        while left and time.monotonic() < end:
            if self._worker is None:
                self._worker = _CollectorThread()
                self._worker.start()
            self._worker.left = left
            self._worker.batches.put((call, use))
            self._wait(self._worker, between=between)
        for slot in left:
            self._fail(slot, 0.0, TimeoutError("the collectors before it hang, and no time was left"))

    def _wait(self, worker: _CollectorThread, *, between: bool) -> None:
        limit = Collector.patience
        while True:
            try:
                worker.finished.get(timeout=limit)
            except queue.Empty:
                pass
            else:
                return
            with worker.lock:
                slot, seconds = worker.slot, time.monotonic() - worker.begun
                limit = Collector.patience if slot is None else slot.patience - seconds
                if slot is None or limit > 0:
                    continue
                worker.given_up = slot.hangs = True
            self._worker = None
            slot.failed_between = between
            self._fail(slot, seconds, TimeoutError(f"it has not answered for {seconds:.1f} s"))
            return
