"""The exporter's end of counting launches: it says which holders are to be counted, and adds what is known.

The process that counts is started once, before we give up our rights, and never again: only it keeps the
right to count. If it ends, no launches are counted until the exporter is restarted, and the collector fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from vramledger.config import SamplingConfig
from vramledger.logs import fields, log, settings
from vramledger.model.reading import LaunchCount, Reading
from vramledger.sampling.launch_protocol import INTERVAL, OBSTACLE, decode_counts, encode_holders
from vramledger.sampling.protocol import PACKAGE_ROOT
from vramledger.sampling.sampler_process import LINE_LIMIT
from vramledger.serving.source import Attach
from vramledger.web.cancellation import background_task

COLLECTOR = "launches"

LIFETIME = 3 * INTERVAL
"""Seconds for which an answer is shown: the process answers every :data:`INTERVAL` seconds, and takes as long
again where a program's files hang."""

END_TIMEOUT = 10.0
"""Seconds for which our end waits for that of the process: it takes up to 0.1 s for each open counter, and a
service manager waits for it too."""

_START = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from vramledger.sampling.launch_counter import main; main()"
)


class LaunchCounting:
    """What is known of the launches of quiet holders."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use a running process that counts."""
        self._process = process
        self._counts: tuple[LaunchCount, ...] = ()
        self._received = float("-inf")
        self._wanted: frozenset[tuple[int, int]] = frozenset()

    def add_counts(self, reading: Reading) -> Reading:
        """Add to a reading what is known of the holders; old answers are left out."""
        if reading.failure is not None:
            return reading
        alive = time.monotonic() - self._received <= LIFETIME
        counts = tuple(each for each in self._counts if (each.pid, each.start) in self._wanted)
        collectors = {**reading.collectors, COLLECTOR: (alive, 0.0)}
        return replace(reading, launches=counts if alive else (), collectors=collectors)

    def attached(self, attach: Attach) -> Attach:
        """Return what adds our counts to what another step adds."""

        async def attach_both(reading: Reading) -> Reading:
            return self.add_counts(await attach(reading))

        return attach_both

    def set_holders(self, holders: Iterable[tuple[int, int]]) -> None:
        """Count these holders and no others, by pid and start time."""
        wanted = frozenset(holders)
        if wanted == self._wanted or self._process.returncode is not None:
            return
        self._wanted = wanted
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101 PIPE was requested
        stdin.write(encode_holders(wanted))

    async def read_counts(self) -> None:
        """Read the answers until the process ends."""
        out = self._process.stdout
        assert out is not None  # noqa: S101 PIPE was requested
        while line := await out.readline():
            self._counts, self._received = decode_counts(line), time.monotonic()
        status = await self._process.wait()
        if status != OBSTACLE:  # it has said why
            log.error("No launches are counted any more", extra=fields(status=status))


@asynccontextmanager
async def count_launches(config: SamplingConfig) -> AsyncIterator[LaunchCounting]:
    """Start the process that counts, and end it with the block; the kernel then closes what it has open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _START,
        PACKAGE_ROOT,
        str(config.procfs),
        *settings(),
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
