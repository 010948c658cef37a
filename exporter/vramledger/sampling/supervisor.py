"""Keep a sampler alive and hand on its readings: deadlines, kill, restart with back-off.

A sampler that says nothing in time is killed. One that cannot be killed (a call stuck in the kernel)
is never joined by a second: unkillable readers piling up is how nvidia-smi takes hosts down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import vramledger
from vramledger.config import SamplingConfig
from vramledger.errors import DriverError, RecordingError
from vramledger.logs import fields, log, settings
from vramledger.model.reading import RELEASED, Reading, decode
from vramledger.readers.hosts.driver_watch import DriverWatch
from vramledger.sampling.protocol import DEVICES_CHANGED, DRIVER_FAILED, encode_config

START_TIMEOUT = 60.0
"""Seconds to the first reading: without the persistence daemon nvmlInit wakes each GPU for seconds."""

SILENCE_GRACE = 2.0
"""Seconds beyond interval and timeout after which a silent sampler counts as hung."""

SECOND_READ_TIMEOUT = 0.1
"""Seconds for an answer after the deadline: when it was us who were stopped, it lies in the pipe already."""

HUNG_AFTER = 30.0
"""Seconds without an answer of any device after which a fresh sampler is tried: NVML may find them again."""

BACKOFF = (0.1, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the first, second, … restart; the last one repeats. A sign of the driver ends the wait."""

MAX_EARLY_RESTARTS = 20
EARLY_RESTART_PERIOD = 300.0
"""So many waits in so many seconds may a sign end in vain: a file that always changes starts not for ever."""

STABLE_AFTER = 10.0
"""Seconds for which a sampler must have worked that its end says nothing of the next one's: it is replaced
within a sampling period. So is the first that had data and ended sooner, as by the kernel when memory is
short; after the next one that does there is a wait, so that none is started for ever."""

PACKAGE_ROOT = str(Path(vramledger.__file__).parents[1])
START_PROGRAM = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from vramledger.sampling.sampler import main; main()"
)
"""Not ``-m``: that puts the current directory first on the path, and root's sampler would import a
``queue.py`` that somebody left there. (``-P`` is 3.11's, and ``-I`` loses packages of the user's own.)"""

LINE_LIMIT = 64 * 1024 * 1024

RELEASE_TIMEOUT = 60.0
"""Seconds in which a sampler that is told to let go of the GPUs must have ended."""


def reading_timeout(config: SamplingConfig) -> float:
    """Return how many seconds a sampler that works may say nothing, and its last reading counts as now."""
    return config.interval + config.timeout + SILENCE_GRACE


class Supervisor:
    """Run samplers, one at a time, and yield what they read."""

    idle_after: float | None = None
    """A live host asks for nothing; a recording may."""

    def __init__(self, config: SamplingConfig) -> None:
        """Prepare; nothing is started before :meth:`readings` is iterated."""
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._failed = 0
        self._spared = False
        self._signs = DriverWatch(config.procfs, config.rootfs)
        self._seen = self._signs.read_state()
        self._hurries: deque[float] = deque(maxlen=MAX_EARLY_RESTARTS)
        self._late: list[Reading] = []
        self._away: _Away | None = None
        self._called = asyncio.Event()
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The running sampler's pid."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def readings(self) -> AsyncIterator[Reading | None]:
        """Yield readings for ever; a failure of the sampler is a reading with a ``failure``."""
        try:
            while True:
                while (away := self._stay_away()) is not None:
                    self._gone.set()
                    yield away
                    await self._called_within(self._config.interval)
                self._gone.clear()
                self._seen = self._signs.read_state()
                try:
                    process = await self._start()
                except OSError as error:  # no memory, no process to be had, Python being upgraded
                    why = f"cannot start a sampler with {sys.executable}: {error.strerror}; trying again"
                    yield _failure("internal", why)
                    await self._called_within(self._config.interval)  # to try costs next to nothing
                    continue
                worked = False
                async for reading in self._until_end(process):
                    if reading.failure is None and not worked:
                        worked = True
                        if self._hurries:
                            self._hurries.pop()  # it was not in vain
                    yield reading
                if self._away is not None:
                    self._failed = 0
                elif process.returncode == DEVICES_CHANGED:
                    log.info("The number of GPUs changed, starting a fresh sampler")
                else:
                    await self._back_off(worked=worked)
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the sampler, which releases every driver handle."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        _kill(process)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), SILENCE_GRACE)

    async def release(self, seconds: float) -> float:
        """End the sampler, which releases every driver handle, and start no other one for some time.

        Returns:
            The Unix time at which sampling goes on by itself.

        Raises:
            DriverError: the sampler cannot be ended now; it will be released as soon as it ends.
        """
        self._away = _Away(time.monotonic() + seconds, time.time() + seconds)
        self._called.set()
        if self._process is not None:
            _kill(self._process)
        try:
            await asyncio.wait_for(self._gone.wait(), RELEASE_TIMEOUT)
        except asyncio.TimeoutError as error:
            message = (
                "the GPUs are not released yet: a call of the sampler is stuck in the driver (see 'dmesg'); "
                "they are as soon as it ends"
            )
            reason = "timeout"
            raise DriverError(reason, message) from error
        log.info("Released the GPUs", extra=fields(seconds=seconds))
        return self._away.until

    def resume(self) -> None:
        """Sample again, before the time of :meth:`release` is over."""
        self._away = None
        self._called.set()

    def _stay_away(self) -> Reading | None:
        """Return what there is to say while the GPUs are released, None when they are not."""
        away = self._away
        if away is not None and away.end <= time.monotonic():
            away = self._away = None
        if away is None:
            if self._gone.is_set():
                log.info("Taking the GPUs back")
            return None
        clock = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(away.until))
        message = f"the GPUs are let go of until {clock}; 'vramledger release --resume' takes them back"
        return replace(_failure(RELEASED, message), released_until=away.until)

    async def _called_within(self, seconds: float) -> bool:
        """Wait, unless :meth:`release` or :meth:`resume` calls; tell whether one did."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._called.wait(), seconds)
        called = self._called.is_set()
        self._called.clear()
        return called

    async def _back_off(self, *, worked: bool) -> None:
        """Wait before the next start, the longer the more were in vain; a sign of the driver ends it.

        Args:
            worked: the sampler that has ended had data.
        """
        if worked and not self._spared:
            self._spared = True
            await self._called_within(BACKOFF[0])
            return
        end = time.monotonic() + BACKOFF[min(self._failed, len(BACKOFF) - 1)]
        self._failed += 1
        while (left := end - time.monotonic()) > 0:
            if await self._called_within(min(left, self._config.interval)):
                return
            now = time.monotonic()
            spent = len(self._hurries) == MAX_EARLY_RESTARTS and now - self._hurries[0] < EARLY_RESTART_PERIOD
            if not spent and self._signs.read_state() != self._seen:
                log.info("The driver's files have changed, starting a fresh sampler")
                self._hurries.append(now)
                self._failed = 0
                return

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            START_PROGRAM,
            PACKAGE_ROOT,
            encode_config(self._config),
            *settings(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
        )
        log.debug("Started a sampler", extra=fields(pid=self._process.pid))
        return self._process

    async def _until_end(self, process: asyncio.subprocess.Process) -> AsyncIterator[Reading]:
        """Yield one sampler's readings; return when it has ended or had to be ended."""
        deadline = START_TIMEOUT
        begun = time.monotonic()
        hung_since: float | None = None
        while True:
            reading, over = (None, True) if self._away else await self._next(process, deadline)
            if self._away is not None:
                reading, over = None, True  # what it said before it was ended, and that it ended
            deadline = reading_timeout(self._config)
            if reading is not None and self._is_now(reading):
                yield self._with_late(reading)
            if over:  # published first: a sampler that is stuck in the kernel may not die for long
                await self._end(process)
                return
            if reading is None or reading.failure is not None:
                continue
            if time.monotonic() - begun > STABLE_AFTER:
                self._failed, self._spared = 0, False
            self._failed = min(self._failed, 1)
            if not reading.devices or any(device.error is None for device in reading.devices):
                hung_since = None
            elif hung_since is None:
                hung_since = reading.monotonic
            elif reading.monotonic - hung_since > HUNG_AFTER:
                log.warning("No GPU has answered for long, starting a fresh sampler")
                await self._end(process)
                return

    def _is_now(self, reading: Reading) -> bool:
        """Tell whether a reading may be shown; keep it if not.

        After a stop of the whole exporter the pipe holds readings from before: never shown as new.
        """
        if time.monotonic() - reading.monotonic <= reading_timeout(self._config):
            return True
        self._late.append(reading)
        return False

    def _with_late(self, reading: Reading) -> Reading:
        """Add what late readings had and no other will have: facts of new processes, and events."""
        late, self._late = [*self._late, reading], []
        if len(late) == 1:
            return reading
        return replace(
            reading,
            facts=tuple(facts for each in late for facts in each.facts),
            events=tuple(event for each in late for event in each.events),
        )

    async def _next(
        self, process: asyncio.subprocess.Process, deadline: float
    ) -> tuple[Reading | None, bool]:
        """Return the next reading, or the failure that makes an end of the sampler, and whether it is one.

        No reading when the sampler has ended and its last line has already said why.
        """
        out = process.stdout
        assert out is not None  # noqa: S101 it was asked for with PIPE
        line: bytes | None = None
        for seconds in (deadline, SECOND_READ_TIMEOUT):
            with contextlib.suppress(asyncio.TimeoutError):
                line = await asyncio.wait_for(out.readline(), seconds)
                break
        if line is None:
            return _failure(
                "timeout", f"the sampler said nothing for {deadline:.0f} s and is being killed"
            ), True
        if not line:
            status = await process.wait()
            if status in (DEVICES_CHANGED, DRIVER_FAILED):
                return None, True
            return _failure("sampler-exit", f"the sampler ended with status {status} and is restarted"), True
        try:
            return decode(line), False
        except RecordingError:
            return _failure("sampler-exit", "the sampler's output broke off and it is restarted"), True

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kill a sampler and wait for its end, however long the kernel holds it."""
        _kill(process)
        try:
            await asyncio.wait_for(process.wait(), SILENCE_GRACE)
        except asyncio.TimeoutError:
            log.error(
                "The sampler cannot be killed: a call is stuck in the driver; no GPU data until it ends",
                extra=fields(pid=process.pid),
            )
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a sampler that has not been waited for.

    Not by its own ``kill``: that reaps it first, behind the back of asyncio's thread that waits for it,
    which then complains about an unknown child and makes up an exit status (Python 3.10 and 3.11).
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _failure(reason: str, message: str) -> Reading:
    return Reading(time=time.time(), monotonic=time.monotonic(), failure=(reason, message))


class _Away(NamedTuple):
    """When the GPUs are taken back: by the monotonic clock, and for people."""

    end: float
    until: float


async def read_once(config: SamplingConfig, samples: int = 1) -> list[Reading]:
    """Take a few samples and end the sampler again, as the one-off commands do."""
    supervisor = Supervisor(config)
    readings: list[Reading] = []
    stream = supervisor.readings()
    try:
        async for reading in stream:
            if reading is not None:
                readings.append(reading)
            if len(readings) == samples or readings[-1].failure is not None:
                break
    finally:
        await supervisor.stop()
        await stream.aclose()  # type: ignore[attr-defined]
    return readings
