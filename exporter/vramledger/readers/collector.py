"""Define what a source of facts is: a collector, which gives a part of a reading and can fail alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from vramledger.model.reading import DeviceReading, ProcessFacts, ProcessRow, Scheduler

Part = Mapping[str, Any]
"""Fields of a reading with their values."""

Health = tuple[bool, float | None]
"""Whether a collector has given all its data, and the seconds that it took; None for the time of the read."""

PATIENCE = 0.5
"""Seconds after which a collector hangs, beyond its own waits; a host may be short of CPUs."""


@dataclass(slots=True)
class Context:
    """What a sample has read so far; a collector changes nothing in it."""

    devices: tuple[DeviceReading, ...] = ()  # what the GPUs answered
    # what the collectors before this one gave, by field of the reading
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[ProcessRow, ...]:
        """The rows of the holders that /proc shows."""
        rows: tuple[ProcessRow, ...] = self.parts.get("rows", ())
        return rows

    @property
    def unseen(self) -> Mapping[int, str]:
        """The pids of holders without a row, and why."""
        unseen: Mapping[int, str] = self.parts.get("unseen", {})
        return unseen

    @property
    def facts(self) -> tuple[ProcessFacts, ...]:
        """What was read of processes that are new or have changed."""
        facts: tuple[ProcessFacts, ...] = self.parts.get("facts", ())
        return facts

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        """What schedulers have assigned."""
        schedulers: tuple[Scheduler, ...] = self.parts.get("schedulers", ())
        return schedulers

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
        yield from ()

    @property
    def health(self) -> Health | None:
        """How it is after a read that raised nothing; None to say nothing, as it has nothing to do."""
        return True, None
