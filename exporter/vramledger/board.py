"""The newest snapshot, and who waits for the next one."""

from __future__ import annotations

import asyncio

from vramledger.snapshot import Snapshot


class Board:
    """Publish snapshots to everybody who looks; used from the event loop only."""

    def __init__(self, blank: Snapshot) -> None:
        """Show ``blank`` until the first sample has finished."""
        self.snapshot = blank
        self.ready = False
        self.sampler_pid: int | None = None
        self._changed = asyncio.Condition()

    async def publish(self, snapshot: Snapshot) -> None:
        """Show a snapshot and wake all who wait."""
        async with self._changed:
            self.snapshot = snapshot
            self.ready = True
            self._changed.notify_all()

    async def newer(self, serial: int) -> Snapshot:
        """Wait until a snapshot newer than ``serial`` is shown, and return it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.snapshot.serial > serial)
            return self.snapshot
