"""Choose where readings come from, and turn them into snapshots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from vramledger.config import IDLE_AFTER, SamplingConfig
from vramledger.logs import COLLECTOR_FAILED, FailureStreaks, fields, log
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import Replay, demo_recording
from vramledger.sampling.supervisor import Supervisor, read_once

DEMO_SKIP = 480.0
"""Seconds after which the bundled recording has a holder that is idle, one orphaned, one working."""

NO_DRIVER = ("no-library", "no-driver", "no-devices")
"""Without a GPU, --source=auto shows a recording; any other failure is this host's, and may end."""

_QUICK = 0.003
"""Seconds: a reading whose predecessor took less is accounted in the event loop. A thread costs 0.2 ms
more, and the readings of a host with 25 holders take 0.8 ms."""


class SnapshotSource(Protocol):
    """The origin of readings: a sampler, or a recording."""

    @property
    def pid(self) -> int | None:
        """Return the pid of the process that samples."""

    @property
    def idle_after(self) -> float | None:
        """Return the idle threshold of a recording, in seconds."""

    def readings(self) -> AsyncIterator[Reading | None]:
        """Yield readings for ever; None means that what follows is a new start."""


def idle_threshold(configured: float | None, source: SnapshotSource) -> float:
    """Return the idle threshold in seconds: the configured one, otherwise the recording's, otherwise ours."""
    return configured or source.idle_after or IDLE_AFTER


async def open_source(
    source: str, speed: float, sampling: SamplingConfig, *, demo_skip: float = 0.0
) -> tuple[SnapshotSource, str, str | None]:
    """Return the source, its kind, and its recording's name, begun after ``demo_skip`` with auto."""
    if source.startswith("replay:"):
        replay = Replay(Path(source.removeprefix("replay:")), speed)
        return replay, "replay", replay.name
    if source == "auto":
        (reading,) = await read_once(sampling)
        if reading.failure is not None and reading.failure[0] in NO_DRIVER:
            replay = Replay(demo_recording(), speed, demo_skip)
            log.warning(
                "NO NVIDIA DRIVER: showing a RECORDING, not this host",
                extra=fields(reason=reading.failure[0], err=reading.failure[1], recording=replay.name),
            )
            return replay, "replay", replay.name
    return Supervisor(sampling), "nvml", None


Attach = Callable[[Reading], Awaitable[Reading]]
"""Add to a reading what the sampler cannot know."""


def attach_agents(add: Attach) -> Attach:
    """Return what adds the agents to a reading; a failure costs it them alone."""
    failing = FailureStreaks(COLLECTOR_FAILED)

    async def attach(reading: Reading) -> Reading:
        begun = time.perf_counter()
        try:
            reading = await add(reading)
        except Exception as error:  # noqa: BLE001 whatever it is, only its own part is missing
            failing.failed("agent", error)
            failed = {"agent": (False, time.perf_counter() - begun)}
            return replace(reading, collectors={**reading.collectors, **failed})
        failing.succeeded("agent")
        return reading

    return attach


class Accounting(Protocol):
    """What makes snapshots of readings."""

    def update(self, reading: Reading) -> Snapshot:
        """Account for a reading."""

    def reset(self) -> None:
        """Forget all that is known of the host."""


def _account(tracker: Accounting, reading: Reading) -> tuple[Snapshot, float]:
    begun = time.perf_counter()
    return tracker.update(reading), time.perf_counter() - begun


async def snapshots(
    source: SnapshotSource, tracker: Accounting, attach: Attach | None = None
) -> AsyncIterator[Snapshot]:
    """Yield the snapshot of every reading of a source, also of an invalid one."""
    took = _QUICK
    async with aclosing(source.readings()) as readings:  # type: ignore[type-var]
        async for reading in readings:
            if reading is None:
                tracker.reset()
                continue
            try:
                attached = reading if attach is None else await attach(reading)
                if took < _QUICK:
                    snapshot, took = _account(tracker, attached)
                else:
                    snapshot, took = await asyncio.to_thread(_account, tracker, attached)
            except Exception as error:  # noqa: BLE001 only the sample of an invalid reading is missing
                log.debug("Traceback", exc_info=error)
                if isinstance(source, Replay):
                    reason, remedy = "recording", f"record {source.path} again"
                else:
                    reason, remedy = "internal", "please report this"
                failure = reason, f"a reading is invalid ({error!r}); {remedy}"
                snapshot = tracker.update(Reading(reading.time, reading.monotonic, failure=failure))
            yield snapshot
