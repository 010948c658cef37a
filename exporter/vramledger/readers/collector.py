"""Define what a source of facts is: a collector, which gives a part of a reading and can fail alone.

What it reads may hang, so its reads are bounded: only a few threads ever wait for one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, TypeVar

from vramledger.logs import fields, log
from vramledger.model.reading import DeviceReading, ProcessFacts, ProcessRow, Scheduler

Part = Mapping[str, Any]
Health = tuple[bool, float | None]
"""Whether a collector has given all its data, and the seconds that it took; None for the time of the read."""

PATIENCE = 0.5
"""Seconds after which a collector hangs, beyond its own waits; a host may be short of CPUs."""


@dataclass
class Context:
    """What a sample has read so far; a collector changes nothing in it."""

    devices: tuple[DeviceReading, ...] = ()  # what the GPUs answered
    # what the collectors before this one gave, by field of the reading; each is an attribute too
    parts: dict[str, Any] = field(default_factory=dict)
    rows: tuple[ProcessRow, ...] = ()  # those of the holders that /proc shows
    unseen: Mapping[int, str] = field(default_factory=dict)  # the pids of holders without a row, and why
    facts: tuple[ProcessFacts, ...] = ()  # what was read of processes that are new or have changed
    schedulers: tuple[Scheduler, ...] = ()  # what they have assigned

    def __post_init__(self) -> None:
        self.add(self.parts)

    def add(self, part: Part) -> None:
        """Add what a collector gave."""
        self.parts.update(part)
        vars(self).update(part)

    @property
    def listed_pids(self) -> set[int]:
        """The pids that NVML lists."""
        return {entry.pid for device in self.devices for entry in device.processes or ()}


class Collector:
    """A source of facts. Whatever it raises, and however long it takes, costs a sample its own part alone.

    A sample without its part has the defaults of :class:`vramledger.model.reading.Reading`, which say that
    nothing is known. Its methods are called one after the other, in any thread.
    """

    needs: tuple[str, ...] = ("process",)  # the collectors without whose answer it is not asked
    patience: float = PATIENCE  # seconds after which it counts as hanging
    failures: Sequence[Exception] = ()  # what :meth:`errors` has not said yet
    work_at: float = inf  # the monotonic time from which it has something to do between two samples

    def read(self, context: Context) -> Part:
        """Return its part of the reading."""
        raise NotImplementedError

    def accept(self) -> None:
        """Note that a sample has what the last :meth:`read` returned: it need not be said again."""

    def work_between(self, context: Context) -> None:
        """Work between two samples; ``context`` is that of the last one."""

    def errors(self) -> Iterator[Exception]:
        """Yield what has failed in the background, once; the rest of the part is used."""
        failures, self.failures = self.failures, ()
        yield from failures

    @property
    def health(self) -> Health | None:
        """How it is after a read that raised nothing; None to say nothing, as it has nothing to do."""
        return True, None


STUCK_AFTER = 5.0
"""Seconds after which a read is given up; a working read takes well below a millisecond."""

MAX_STUCK = 4
"""The maximum number of threads that hanging reads may block; after that only fallbacks run."""

MAX_WAITING = 4096
"""The maximum number of tasks that wait while no thread is free; far more than a host has GPU processes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Task(Generic[T]):
    key: Hashable
    work: Callable[[], T]
    fallback: Callable[[], T]


class _ReadThread(Generic[T]):
    def __init__(self) -> None:
        self.task: _Task[T] | None = None
        self.uses_fallback = False
        self.began = 0.0


class BoundedReader(Generic[T]):
    """Run tasks one after the other in a thread of their own, and replace that thread when one hangs.

    A task comes with a fallback, which runs instead in these cases: the task hangs, another task with its key
    hangs, or too many threads are already lost. If a fallback hangs too, there is no answer until it returns.
    At most ``max_stuck`` + 1 threads are lost.
    """

    def __init__(
        self,
        *,
        stuck_after: float = STUCK_AFTER,
        max_stuck: int = MAX_STUCK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stuck_after = stuck_after
        self._max_stuck = max_stuck
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[_Task[T]] = deque(maxlen=MAX_WAITING)
        self._results: list[T] = []
        self._errors: dict[Hashable, Exception] = {}
        self._worker: _ReadThread[T] | None = None
        self._stuck: set[_ReadThread[T]] = set()

    @property
    def busy(self) -> bool:
        """Whether a task has no answer yet; a task that was given up has one."""
        with self._changed:
            return self._worker is not None or bool(self._results)

    @property
    def stuck(self) -> int:
        """The number of threads that are lost now."""
        with self._changed:
            return len(self._stuck)

    def submit(self, key: Hashable, work: Callable[[], T], fallback: Callable[[], T]) -> None:
        """Queue a task; a task that already waits under the same key is the same task."""
        with self._changed:
            if all(task.key != key for task in self._queue):
                self._queue.append(_Task(key, work, fallback))
                self._start_worker()

    def collect(self, timeout: float) -> list[T]:
        """Return the results so far, after waiting at most ``timeout`` seconds for the tasks under way.

        A task that has used its time is not waited for again. So a hanging read costs one sample its timeout,
        and not every sample until it is given up. If it ends later, a later call returns its result.
        """
        with self._changed:
            self._abandon_hung_task()
            deadline = self._clock() + timeout
            while self._worker is not None:
                limit = deadline
                if self._worker.task is not None:
                    limit = min(limit, self._worker.began + timeout)
                if (remaining := limit - self._clock()) <= 0:
                    break
                self._changed.wait(remaining)
            results, self._results = self._results, []
            return results

    def take_errors(self) -> dict[Hashable, Exception]:
        """Return what the tasks without a result have raised since the last call, by their keys."""
        if not self._errors:
            return {}
        with self._changed:
            errors, self._errors = self._errors, {}
            return errors

    def _start_worker(self) -> None:
        if self._worker is None and self._queue and len(self._stuck) <= self._max_stuck:
            self._worker = _ReadThread()
            threading.Thread(
                target=self._run, args=(self._worker,), name="vramledger-facts", daemon=True
            ).start()

    def _abandon_hung_task(self) -> None:
        worker = self._worker
        if worker is None or worker.task is None or self._clock() - worker.began < self._stuck_after:
            return
        self._stuck.add(worker)
        if not worker.uses_fallback:
            self._queue.appendleft(worker.task)
        self._worker = None
        self._start_worker()
        log.warning(
            "a read of /proc hangs; continuing without its result",
            extra=fields(task=worker.task.key, stuck=len(self._stuck)),
        )

    def _run(self, worker: _ReadThread[T]) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._worker = None
                    self._changed.notify_all()
                    return
                task = self._queue.popleft()
                worker.task, worker.began = task, self._clock()
                hangs = any(each.task is not None and each.task.key == task.key for each in self._stuck)
                worker.uses_fallback = hangs or len(self._stuck) >= self._max_stuck
            results: list[T] = []
            try:
                results.append(task.fallback() if worker.uses_fallback else task.work())
            except Exception as error:  # noqa: BLE001 after a bug only one process lacks its facts
                with self._changed:
                    self._errors[task.key] = error
            with self._changed:
                self._results += results
                worker.task = None
                if worker in self._stuck:
                    self._stuck.remove(worker)
                    self._start_worker()
                    return
