"""The exporter's end of counting launches: it says which holders are to be counted, and adds what is known.

The process that counts is started once, before we give up our rights, and never again: only it keeps the
right to count. If it ends, no launches are counted until the exporter is restarted, and the collector fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from vramledger.config import SamplingConfig
from vramledger.logs import COLLECTOR_FAILED, FailureStreaks, fields, log, settings
from vramledger.model.reading import LaunchCount, Reading
from vramledger.model.records import read_record, write_record
from vramledger.sampling.protocol import COUNT_INTERVAL, COUNT_OBSTACLE, launch_counter_command
from vramledger.sampling.sampler_process import LINE_LIMIT
from vramledger.web.cancellation import background_task

COLLECTOR = "launches"

LIFETIME = 3 * COUNT_INTERVAL
"""Seconds for which an answer is shown: twice :data:`COUNT_INTERVAL`, as a program's files may hang."""

END_TIMEOUT = 10.0
"""Seconds to wait for the process' end: 0.1 s a counter; a service manager waits for it too."""


class LaunchCounting:
    """What is known of the launches of quiet holders."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._counts: tuple[LaunchCount, ...] = ()
        self._received = float("-inf")
        self._wanted: frozenset[tuple[int, int]] = frozenset()
        self._failing = FailureStreaks(COLLECTOR_FAILED)

    async def add_counts(self, reading: Reading) -> Reading:
        """Add to a reading what is known of the holders; old answers are left out."""
        if reading.failure is not None:
            return reading
        alive = time.monotonic() - self._received <= LIFETIME
        counts = tuple(each for each in self._counts if (each.pid, each.start) in self._wanted)
        collectors = {**reading.collectors, COLLECTOR: (alive, 0.0)}
        return replace(reading, launches=counts if alive else (), collectors=collectors)

    def set_holders(self, holders: Iterable[tuple[int, int]]) -> None:
        """Count these holders and no others, by pid and start time."""
        wanted = frozenset(holders)
        if wanted == self._wanted or self._process.returncode is not None:
            return
        self._wanted = wanted
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101 PIPE was requested
        stdin.write(write_record(sorted(wanted)) + b"\n")

    async def read_counts(self) -> None:
        """Read the answers until the process ends."""
        out = self._process.stdout
        assert out is not None  # noqa: S101 PIPE was requested
        while line := await out.readline():
            try:
                self._counts, self._received = read_record(line, tuple[LaunchCount, ...]), time.monotonic()
            except Exception as error:  # noqa: BLE001 the counts become old, and the collector fails
                self._failing.failed(COLLECTOR, error)
            else:
                self._failing.succeeded(COLLECTOR)
        status = await self._process.wait()
        if status != COUNT_OBSTACLE:  # it has said why
            log.error("No launches are counted any more", extra=fields(status=status))


@asynccontextmanager
async def count_launches(config: SamplingConfig) -> AsyncIterator[LaunchCounting]:
    """Start the process that counts, and end it with the block; the kernel then closes what it has open."""
    process = await asyncio.create_subprocess_exec(
        *launch_counter_command(str(config.procfs), *settings()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    counting = LaunchCounting(process)
    async with background_task(counting.read_counts()):
        yield counting
    assert process.stdin is not None  # noqa: S101 PIPE was requested
    process.stdin.close()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), END_TIMEOUT)
