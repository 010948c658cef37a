"""Sample in a command, briefly, without a past; the running exporter is asked first, as it has watched."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

from msgspec import structs
from msgspec.structs import replace

from vramledger import __version__
from vramledger.accounting.devices import hidden_on
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import SamplingConfig
from vramledger.errors import StartupError
from vramledger.logs import fields, log
from vramledger.model.reading import DeviceReading, HiddenHolder, Reading
from vramledger.model.records import RecordError
from vramledger.model.snapshot import Snapshot
from vramledger.readers.hosts.hidden_holders import find_hidden_holders
from vramledger.readers.hosts.host import Host
from vramledger.sampling.supervisor import Supervisor
from vramledger.serving.control_client import NoExporterError, request_snapshot
from vramledger.verdicts.cleanliness import SearchExtent
from vramledger.views.ledger_json import read_answer
from vramledger.views.timeline import HoldingGrowth, Key

_RESTART_SECONDS = 5.0
"""Seconds for which an exporter that has given a sample may be away: systemd restarts it after 2 s."""

_RETRY_INTERVAL = 0.25


class ExporterLedger(NamedTuple):
    """What the exporter knows now."""

    snapshot: Snapshot  # its newest
    growth: Mapping[Key, HoldingGrowth]  # how the holdings have grown, as its page shows it
    idle_after: float  # its idle threshold, seconds
    agent_socket: Path | None  # where it listens for agents; None where it takes none


async def follow_exporter(path: Path) -> AsyncIterator[ExporterLedger]:
    """Yield what the exporter knows: the newest at once, then each newer sample, also of one that restarts.

    Raises NoExporterError if none answers any more, StartupError if it refuses or has another version.
    """
    token: str | None = None
    wait = 0.0
    answered: float | None = None
    while True:
        try:
            head, text = await request_snapshot(path, token, wait)
        except NoExporterError:
            if answered is None or time.monotonic() - answered > _RESTART_SECONDS:
                raise
            await asyncio.sleep(_RETRY_INTERVAL)
            continue
        if head.program != __version__:
            raise StartupError(f"the exporter is vramledger {head.program}, this is {__version__}")
        if head.token == token:
            answered = answered and time.monotonic()
            continue  # no newer sample yet
        token, wait = head.token, head.wait
        try:
            answer = read_answer(text)
        except RecordError as error:
            raise StartupError(f"the exporter's answer cannot be read: {error}") from error
        if answer.snapshot.time is None:
            # It has just started. One that ends before its first sample, again and again, is not waited for.
            continue
        answered = time.monotonic()
        socket = Path(head.agent_socket) if head.agent_socket is not None else None
        yield ExporterLedger(answer.snapshot, dict(answer.growth), head.idle_after, socket)


async def exporter_snapshots(path: Path) -> AsyncIterator[Snapshot]:
    """Yield only the snapshots of :func:`follow_exporter`."""
    async with aclosing(follow_exporter(path)) as ledgers:  # type: ignore[type-var]
        async for ledger in ledgers:
            yield ledger.snapshot


SAMPLES_MIN = 2
"""The number of consecutive samples that must agree: the first sample of a process precedes its facts."""

SAMPLE_INTERVAL = 0.25
"""Seconds from one sample to the next: the result needs several, and somebody waits for it."""


COLLECTORS = frozenset({"ledger", "process", "reservations", "hardware", "ties"})
"""A GPU that must be reset may refuse nothing but the queries of its hardware."""


def sample_fast(config: SamplingConfig, collectors: frozenset[str] = COLLECTORS) -> SamplingConfig:
    """Return a configuration that samples as fast as somebody who waits needs it."""
    return replace(config, interval=min(config.interval, SAMPLE_INTERVAL), collectors=collectors)


async def own_readings(supervisor: Supervisor) -> AsyncIterator[Reading]:
    """Yield what samplers read; each has an end."""
    async with aclosing(supervisor.readings()) as readings:  # type: ignore[type-var]
        async for reading in readings:
            if reading is not None:
                yield reading


async def own_snapshots(supervisor: Supervisor, tracker: HoldingTracker) -> AsyncIterator[Snapshot]:
    """Yield what a command's own accounting makes of its samples."""
    async with aclosing(own_readings(supervisor)) as readings:  # type: ignore[type-var]
        async for reading in readings:
            yield tracker.update(reading)


def log_own_look(error: StartupError) -> None:
    """Log that no exporter is asked, and why."""
    log.info(
        "Sampling without an exporter: what was before is not known, such as who was idle or orphaned",
        extra=fields(why=str(error)),
    )


def listed_pids(devices: Iterable[DeviceReading]) -> set[int]:
    """Return the processes that the driver lists."""
    return {entry.pid for device in devices for entry in device.processes or ()}


def search_hidden(
    host: Host, devices: Collection[DeviceReading], sampler: int | None
) -> tuple[tuple[HiddenHolder, ...] | None, SearchExtent]:
    """Search for holders that the driver does not list; return them, and how far the search went."""
    found = find_hidden_holders(host, {os.getpid(), sampler or 0}, listed_pids(devices))
    holders, unreadable = found or (None, 0)
    return holders, SearchExtent(found is not None, unreadable)


def hidden_on_gpu(
    device: DeviceReading, holders: tuple[HiddenHolder, ...] | None
) -> tuple[HiddenHolder, ...] | None:
    """Return who has the device's file open; that of a MIG instance is its GPU's."""
    return hidden_on(structs.replace(device, parent=None), holders)
