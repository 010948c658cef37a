"""Publish the newest snapshot, and let readers wait for the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from msgspec.structs import replace

from vramledger.model.snapshot import Snapshot
from vramledger.views.hidden_names import HiddenNames


def _running_time() -> float:
    """Return seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SnapshotPublisher:
    """Publish snapshots to every reader; used from the event loop only."""

    def __init__(
        self,
        blank: Snapshot,
        *,
        lifetime: float | None = None,
        hidden: HiddenNames | None = None,
        clock: Callable[[], float] = _running_time,
    ) -> None:
        """Show ``blank`` until the first sample, each for ``lifetime``, without what is ``hidden``."""
        self.ready = False
        self.sampler_pid: int | None = None
        self._blank = blank
        self._lifetime = lifetime
        self._clock = clock
        self._hidden = hidden
        self._made: tuple[Snapshot, Snapshot] | None = None
        self._newest = blank
        self._ended = clock()
        self._changed = asyncio.Condition()

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot as the pages show it."""
        whole = self.whole
        if self._hidden is None:
            return whole
        if self._made is None or self._made[0] is not whole:
            self._made = whole, self._hidden.snapshot(whole)
        return self._made[1]

    @property
    def whole(self) -> Snapshot:
        """The newest snapshot, without its data once that is too old, as after a stop."""
        newest = self._newest
        if self._lifetime is None or not newest.up or self._clock() - self._ended <= self._lifetime:
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

    async def publish(self, snapshot: Snapshot, age: float = 0.0) -> None:
        """Show a snapshot, whose sample ended ``age`` seconds ago, and wake all readers that wait."""
        async with self._changed:
            self._newest = snapshot
            self._ended = self._clock() - age
            self.ready = True
            self._changed.notify_all()

    async def wait_for_newer(self, serial: int) -> Snapshot:
        """Wait until a snapshot newer than ``serial`` is published, and return it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newest.serial > serial)
            return self.snapshot
