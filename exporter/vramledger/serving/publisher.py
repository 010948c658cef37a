"""Publish the newest snapshot, and let readers wait for the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from vramledger.model.snapshot import Snapshot
from vramledger.views.hidden_names import HiddenNames


def _running_time() -> float:
    """Return seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SnapshotPublisher:
    """Publish snapshots to every reader; used from the event loop only."""

    def __init__(
        self, blank: Snapshot, *, lifetime: float | None = None, clock: Callable[[], float] = _running_time
    ) -> None:
        """Show ``blank`` until the first sample; a snapshot is shown for ``lifetime``, None for ever."""
        self.ready = False
        self.sampler_pid: int | None = None
        self._blank = blank
        self._lifetime = lifetime
        self._clock = clock
        self._newest = blank
        self._published = clock()
        self._changed = asyncio.Condition()

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot, without its data once that is too old, as after a stop."""
        newest = self._newest
        if self._lifetime is None or not newest.up or self._clock() - self._published <= self._lifetime:
            return newest
        why = f"no sample for more than {self._lifetime:.0f} s: the exporter was stopped or got no CPU time"
        return replace(
            self._blank,
            serial=newest.serial,
            time=newest.time,
            duration=newest.duration,
            failure=("timeout", why),
            failures=newest.failures,
        )

    async def publish(self, snapshot: Snapshot) -> None:
        """Show a snapshot and wake all readers that wait."""
        async with self._changed:
            self._newest = snapshot
            self._published = self._clock()
            self.ready = True
            self._changed.notify_all()

    async def wait_for_newer(self, serial: int) -> Snapshot:
        """Wait until a snapshot newer than ``serial`` is published, and return it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newest.serial > serial)
            return self._newest


class HidingPublisher:
    """Give the web pages what a publisher has, without the names that they do not show."""

    def __init__(self, publisher: SnapshotPublisher, hidden: HiddenNames) -> None:
        self._publisher = publisher
        self._hidden = hidden
        self._made: tuple[Snapshot, Snapshot] | None = None

    @property
    def ready(self) -> bool:
        """Whether the first attempt at a sample has finished, with success or not."""
        return self._publisher.ready

    @property
    def sampler_pid(self) -> int | None:
        """The sampler's process id, None while there is none."""
        return self._publisher.sampler_pid

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot; made once."""
        return self._hide(self._publisher.snapshot)

    async def wait_for_newer(self, serial: int) -> Snapshot:
        """Wait until a snapshot newer than ``serial`` is published, and return it."""
        return self._hide(await self._publisher.wait_for_newer(serial))

    def _hide(self, snapshot: Snapshot) -> Snapshot:
        if self._made is None or self._made[0] is not snapshot:
            self._made = snapshot, self._hidden.snapshot(snapshot)
        return self._made[1]
