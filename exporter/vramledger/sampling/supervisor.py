"""Keep a sampler alive and pass on its readings: deadlines, kill, restart with back-off.

A sampler that is silent for too long is killed. If a sampler cannot be killed (a call stuck in the kernel),
no second one is started: a growing number of unkillable nvidia-smi processes is known to make hosts unusable.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from msgspec.structs import replace

from vramledger.config import SamplingConfig
from vramledger.errors import DriverError, RecordingError
from vramledger.logs import fields, log
from vramledger.model.reading import ASLEEP, RELEASED, Reading, decode
from vramledger.readers.hosts.driver_watch import DriverWatch
from vramledger.sampling.protocol import DEVICES_CHANGED, DRIVER_FAILED
from vramledger.sampling.sampler_process import SamplerProcess, Starter, start_child

START_TIMEOUT = 60.0
"""Seconds until the first reading: without the persistence daemon nvmlInit wakes each GPU for seconds."""

SILENCE_GRACE = 2.0
"""Seconds beyond interval and timeout after which a silent sampler counts as hung."""

SECOND_READ_TIMEOUT = 0.1
"""Seconds for an answer after the deadline: of a stopped exporter it is in the pipe already."""

HUNG_AFTER = 30.0
"""Seconds without an answer from any device until a new sampler, which may find them again."""

BACKOFF = (0.1, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the first, second, … restart; the last value repeats. New driver files end the wait."""

MAX_EARLY_RESTARTS = 20
EARLY_RESTART_PERIOD = 300.0
"""At most 20 early restarts in 300 s, so that a file that keeps changing cannot cause a restart loop."""

STABLE_AFTER = 10.0
"""Seconds after which a sampler counts as working. When such a sampler ends, it is replaced within a
sampling period, because its end says nothing about the next one. The first sampler that had data and ended
sooner, for example killed by the kernel when memory was short, is also replaced within that time. After the
next such end there is a wait, so that a failure that repeats does not cause a restart loop."""

RELEASE_TIMEOUT = 60.0


def reading_timeout(config: SamplingConfig) -> float:
    """Return the seconds for which a working sampler may be silent; its last reading counts as current."""
    return max(config.interval, config.calm_interval) + config.timeout + SILENCE_GRACE


class Supervisor:
    """Run samplers, one at a time, and yield what they read."""

    idle_after: float | None = None
    """A live host has no threshold of its own; a recording may."""

    def __init__(self, config: SamplingConfig) -> None:
        self._config = config
        self._start: Callable[[SamplingConfig], Awaitable[SamplerProcess]] = start_child
        self._process: SamplerProcess | None = None
        self._failures = 0
        self._retried_at_once = False
        self._driver_watch = DriverWatch(config.procfs, config.rootfs)
        self._driver_state = self._driver_watch.read_state()
        self._early_restarts: deque[float] = deque(maxlen=MAX_EARLY_RESTARTS)
        self._late_readings: list[Reading] = []
        self._release: _Release | None = None
        self._killed: SamplerProcess | None = None
        self._woken = asyncio.Event()
        self._gpus_released = asyncio.Event()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def use_starter(self, starter: Starter) -> None:
        """Have samplers started by a process that has the rights for it, because we give ours up."""
        self._start = starter.start

    async def readings(self) -> AsyncIterator[Reading | None]:
        """Yield readings for ever; a failure of the sampler is a reading with a ``failure``."""
        try:
            while True:
                while (released := self._released_reading()) is not None:
                    self._note_released()
                    yield released
                    await self._wait_for_call(self._config.interval)
                self._gpus_released.clear()
                self._driver_state = self._driver_watch.read_state()
                try:
                    process = await self._start_sampler()
                except OSError as error:  # no memory, no process available, or Python is being upgraded
                    why = f"cannot start a sampler with {sys.executable}: {error.strerror}; trying again"
                    yield _failed_reading("internal", why)
                    await self._wait_for_call(self._config.interval)  # a try costs almost nothing
                    continue
                worked = False
                async for reading in self._read_until_end(process):
                    if reading.failure is None and not worked:
                        worked = True
                        if self._early_restarts:
                            self._early_restarts.pop()  # the attempt had a result
                    yield reading
                if self._is_released(process):
                    self._failures = 0
                elif process.returncode == DEVICES_CHANGED:
                    log.info("The number of GPUs changed, starting a fresh sampler")
                else:
                    await self._back_off(worked=worked)
        finally:
            await self.stop()

    async def stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.kill_now()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), SILENCE_GRACE)

    async def release(self, seconds: float) -> float:
        """End the sampler, which releases every driver handle, and start no other one for some time.

        Returns the Unix time at which sampling goes on by itself. Raises DriverError if the sampler cannot be
        ended now; the GPUs will be released as soon as it ends.
        """
        # A release that replaces another one waits for the same event.
        settled = asyncio.Event() if self._release is None else self._release.settled
        release = self._release = _Release(time.monotonic() + seconds, time.time() + seconds, settled)
        self._woken.set()
        if self._process is not None:
            self._killed = self._process
            self._process.kill_now()
        try:
            await asyncio.wait_for(settled.wait(), RELEASE_TIMEOUT)
        except asyncio.TimeoutError as error:
            message = (
                "the GPUs are not released yet: a call of the sampler is stuck in the "
                "driver (see 'dmesg'); they will be as soon as it ends"
            )
            reason = "timeout"
            raise DriverError(reason, message) from error
        if self._is_reopened(release):
            reason, message = "internal", "another command has reopened the GPUs"
            raise DriverError(reason, message)
        log.info("Released the GPUs", extra=fields(seconds=seconds))
        return release.until

    def _is_released(self, process: SamplerProcess) -> bool:
        """Tell whether a sampler ends for a release, also when the GPUs have been reopened since."""
        return self._release is not None or process is self._killed

    def _is_reopened(self, release: _Release) -> bool:
        return self._release is None and release.end > time.monotonic()

    def resume(self) -> None:
        self._end_release()
        self._woken.set()

    def _end_release(self) -> None:
        """End the release that there may be; the command that waits for it gets its answer."""
        if self._release is not None:
            self._release.settled.set()
        self._release = None

    def _note_released(self) -> None:
        self._gpus_released.set()
        if self._release is not None:
            self._release.settled.set()

    def _released_reading(self) -> Reading | None:
        release = self._release
        if release is not None and release.end <= time.monotonic():
            self._end_release()
            release = None
        if release is None:
            if self._gpus_released.is_set():
                log.info("Reopening the GPUs")
            return None
        clock = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(release.until))
        message = f"the GPUs are released until {clock}; 'vramledger release --resume' reopens them"
        return replace(_failed_reading(RELEASED, message), released_until=release.until)

    async def _wait_for_call(self, seconds: float) -> bool:
        """Wait ``seconds``, or until :meth:`release` or :meth:`resume` is called; tell whether one was."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        called = self._woken.is_set()
        self._woken.clear()
        return called

    async def _back_off(self, *, worked: bool) -> None:
        """Wait before the next start, longer after each failed one, or until the driver's files change."""
        if worked and not self._retried_at_once:
            self._retried_at_once = True
            await self._wait_for_call(BACKOFF[0])
            return
        end = time.monotonic() + BACKOFF[min(self._failures, len(BACKOFF) - 1)]
        self._failures += 1
        while (left := end - time.monotonic()) > 0:
            if await self._wait_for_call(min(left, self._config.interval)):
                return
            now = time.monotonic()
            limit_reached = (
                len(self._early_restarts) == MAX_EARLY_RESTARTS
                and now - self._early_restarts[0] < EARLY_RESTART_PERIOD
            )
            if not limit_reached and self._driver_watch.read_state() != self._driver_state:
                log.info("The driver's files have changed, starting a fresh sampler")
                self._early_restarts.append(now)
                self._failures = 0
                return

    async def _start_sampler(self) -> SamplerProcess:
        self._process = await self._start(self._config)
        log.debug("Started a sampler", extra=fields(pid=self._process.pid))
        return self._process

    async def _read_until_end(self, process: SamplerProcess) -> AsyncIterator[Reading]:
        deadline = START_TIMEOUT
        begun = time.monotonic()
        hung_since: float | None = None
        while True:
            released = self._is_released(process)
            reading, over = (None, True) if released else await self._read_next(process, deadline)
            if self._is_released(process):
                reading, over = None, True  # the output from before its end, and the fact that it has ended
            deadline = reading_timeout(self._config)
            if reading is not None and self._is_current(reading):
                yield self._with_late_readings(reading)
            if over:  # published first: a sampler that is stuck in the kernel may not die for a long time
                await self._end_sampler(process)
                return
            if reading is None or reading.failure is not None:
                continue
            if time.monotonic() - begun > STABLE_AFTER:
                self._failures, self._retried_at_once = 0, False
            self._failures = min(self._failures, 1)
            if not reading.devices or any(device.error in (None, ASLEEP) for device in reading.devices):
                hung_since = None
            elif hung_since is None:
                hung_since = reading.monotonic
            elif reading.monotonic - hung_since > HUNG_AFTER:
                log.warning("No GPU has answered for a long time, starting a fresh sampler")
                await self._end_sampler(process)
                return

    def _is_current(self, reading: Reading) -> bool:
        """Tell whether a reading may be shown: after a stop of the exporter the pipe holds old ones."""
        if time.monotonic() - reading.monotonic <= reading_timeout(self._config):
            return True
        self._late_readings.append(reading)
        return False

    def _with_late_readings(self, reading: Reading) -> Reading:
        """Add what only late readings have: facts of new processes, and events."""
        late, self._late_readings = [*self._late_readings, reading], []
        if len(late) == 1:
            return reading
        return replace(
            reading,
            facts=tuple(facts for each in late for facts in each.facts),
            events=tuple(event for each in late for event in each.events),
        )

    async def _read_next(self, process: SamplerProcess, deadline: float) -> tuple[Reading | None, bool]:
        """Return the next reading or failure; nothing if the sampler's last line has said why it ended."""
        out = process.stdout
        assert out is not None  # noqa: S101 PIPE was requested
        line: bytes | None = None
        for seconds in (deadline, SECOND_READ_TIMEOUT):
            with contextlib.suppress(asyncio.TimeoutError):
                line = await asyncio.wait_for(out.readline(), seconds)
                break
        if line is None:
            return _failed_reading(
                "timeout", f"the sampler sent nothing for {deadline:.0f} s and is being killed"
            ), True
        if not line:
            status = await process.wait()
            if status in (DEVICES_CHANGED, DRIVER_FAILED):
                return None, True
            return _failed_reading(
                "sampler-exit", f"the sampler ended with status {status} and is restarted"
            ), True
        try:
            return decode(line), False
        except RecordingError:
            return _failed_reading("sampler-exit", "the sampler's output broke off and it is restarted"), True

    async def _end_sampler(self, process: SamplerProcess) -> None:
        process.kill_now()
        try:
            await asyncio.wait_for(process.wait(), SILENCE_GRACE)
        except asyncio.TimeoutError:
            log.error(
                "The sampler cannot be killed: a call is stuck in the driver; no GPU data until it ends",
                extra=fields(pid=process.pid),
            )
            await process.wait()


def _failed_reading(reason: str, message: str) -> Reading:
    return Reading(time=time.time(), monotonic=time.monotonic(), failure=(reason, message))


class _Release(NamedTuple):
    end: float  # the monotonic time at which it ends
    until: float  # the same as Unix time
    settled: asyncio.Event  # whether the GPUs are released, or another command has ended it before


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
