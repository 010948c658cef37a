"""Ask the running exporter for its ledger: it has watched since it started, a command only since now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

from vramledger import __version__
from vramledger.errors import StartupError
from vramledger.model.records import RecordError
from vramledger.model.snapshot import Snapshot
from vramledger.serving.control_client import NoExporterError, request_snapshot
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
    """Yield what the exporter knows: the newest at once, then whenever it has a newer sample.

    When it restarts, what follows is from the new one, which has watched for less time. Raises
    NoExporterError if no exporter answers, or none does any more. Raises StartupError if it refuses, or has
    another version.
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
