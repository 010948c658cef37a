"""Sample in a command, briefly, without a past; the running exporter is asked first, as it has watched."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import aclosing
from dataclasses import replace

from msgspec import structs

from vramledger.accounting.devices import hidden_on
from vramledger.config import SamplingConfig
from vramledger.errors import StartupError
from vramledger.logs import fields, log
from vramledger.model.reading import DeviceReading, HiddenHolder, Reading
from vramledger.readers.hosts.hidden_holders import find_hidden_holders
from vramledger.readers.hosts.host import Host
from vramledger.sampling.supervisor import Supervisor
from vramledger.verdicts.cleanliness import SearchExtent

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
