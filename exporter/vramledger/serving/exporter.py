"""Run the exporter: a source, the publisher of its snapshots, and the web server in front of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext

from vramledger import __version__
from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.server import run_agent_server
from vramledger.config import CONTROL_SOCKET, Config
from vramledger.logs import fields, log
from vramledger.model.snapshot import Snapshot
from vramledger.readers.hosts.open_device_files import read_open_device_files
from vramledger.sampling import malloc
from vramledger.sampling.privileges import READ_CAPABILITIES, drop_privileges
from vramledger.sampling.supervisor import Supervisor, reading_timeout
from vramledger.serving.control_messages import RESUME, ControlError, ControlRequest, ControlResponse
from vramledger.serving.control_socket import serve_control
from vramledger.serving.launch_counting import LaunchCounting, count_launches
from vramledger.serving.publisher import SnapshotPublisher
from vramledger.serving.service_manager import notify_service_manager
from vramledger.serving.source import (
    Attach,
    SnapshotSource,
    attach_nothing,
    idle_threshold,
    open_source,
    snapshots,
)
from vramledger.web.cancellation import cancel_and_wait


async def serve_until_signalled(config: Config) -> None:
    """Serve until SIGTERM or SIGINT."""
    malloc.use_one_arena()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info(
        "Starting vramledger",
        extra=fields(version=__version__, python=sys.version.split()[0], pid=os.getpid()),
    )
    waiting = asyncio.create_task(stop.wait())
    opening = asyncio.create_task(open_source(config.source, config.replay_speed, config.sampling))
    await asyncio.wait({opening, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if opening.done():
        await _serve_source(config, *opening.result(), waiting)
    else:
        await cancel_and_wait(opening)
    await cancel_and_wait(waiting)
    log.info("Stopped")


async def _serve_source(
    config: Config, source: SnapshotSource, kind: str, recording: str | None, stop: asyncio.Task[bool]
) -> None:
    """Serve one source until ``stop`` is done."""
    from vramledger.web.app import serve  # noqa: PLC0415 aiohttp takes 100 ms, which other commands save

    tracker = HoldingTracker(
        idle_after=idle_threshold(config.idle_after, source),
        interval=config.sampling.interval,
        source=kind,
        recording=recording,
        owners_max=config.owners_max,
    )
    lifetime = reading_timeout(config.sampling) if kind == "nvml" else None
    publisher = SnapshotPublisher(tracker.blank, lifetime=lifetime)
    # The pids of a recording belong to another machine.
    agents = (
        run_agent_server(config.agent_socket, config.sampling.procfs, lambda: publisher.snapshot)
        if kind == "nvml" and "agent" in config.sampling.collectors
        else nullcontext()
    )
    counts = (
        count_launches(config.sampling)
        if kind == "nvml" and "launches" in config.sampling.collectors
        else nullcontext()
    )
    async with (
        counts as launch_counting,  # before the web server: after that we have no right to count any more
        serve(config, publisher, on_bound=_drop_privileges),
        _control_socket(config, source),
        agents as agent_server,
        notify_service_manager(),
    ):
        malloc.freeze_objects()
        attach: Attach = attach_nothing if agent_server is None else agent_server.add_agents
        if launch_counting is not None:
            attach = launch_counting.attached(attach)
        produced = snapshots(source, tracker, attach)
        publishing = asyncio.create_task(_publish(source, produced, publisher, launch_counting))
        await asyncio.wait({publishing, stop}, return_when=asyncio.FIRST_COMPLETED)
        if publishing.done():
            publishing.result()
        await cancel_and_wait(publishing)


def _drop_privileges() -> None:
    drop_privileges(READ_CAPABILITIES)


async def _publish(
    source: SnapshotSource,
    produced: AsyncIterator[Snapshot],
    publisher: SnapshotPublisher,
    launch_counting: LaunchCounting | None,
) -> None:
    """Publish every snapshot, log when the data is gone or back, and free unused memory from time to time."""
    failure: tuple[str, str] | None = None
    trimmed = time.monotonic()
    async with aclosing(produced):  # type: ignore[type-var]
        async for snapshot in produced:
            publisher.sampler_pid = source.pid
            await publisher.publish(snapshot)
            if launch_counting is not None:
                launch_counting.set_holders(snapshot.to_count)
            _log_change(snapshot, failure)
            failure = snapshot.failure
            if time.monotonic() - trimmed > malloc.FREE_INTERVAL:
                trimmed = time.monotonic()
                malloc.free_unused()


def _log_change(snapshot: Snapshot, before: tuple[str, str] | None) -> None:
    """Log that there is no data or that there is data again, if this differs from the snapshot before."""
    if snapshot.released_until is not None:
        return  # the release was requested, and the source has logged it
    if snapshot.failure is not None and snapshot.failure != before:
        reason, message = snapshot.failure
        log.error("No GPU data", extra=fields(reason=reason, err=message))
    elif snapshot.up and before is not None:
        log.info("GPU data is back", extra=fields(devices=len(snapshot.devices)))


@asynccontextmanager
async def _control_socket(config: Config, source: SnapshotSource) -> AsyncIterator[None]:
    """Listen for ``vramledger release``, if there is a driver to release."""
    if not isinstance(source, Supervisor):
        yield
        return

    async def handle_request(request: ControlRequest) -> ControlResponse:
        if request.ask == RESUME:
            source.resume()
            return ControlResponse(released_until=None)
        until = await source.release(request.seconds)
        if held := await asyncio.to_thread(read_open_device_files):
            message = f"the GPUs are not released: still open by pid: {held}; please report this"
            raise ControlError(message)
        return ControlResponse(until)

    path = config.control_socket
    async with serve_control(path or CONTROL_SOCKET, handle_request, required=path is not None):
        yield
