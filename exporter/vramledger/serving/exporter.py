"""The exporter at work: a source, the board that its snapshots go to, and the web server in front of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext

from vramledger import __version__
from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.server import AgentServer, run_agent_server
from vramledger.config import Config
from vramledger.logs import fields, log
from vramledger.readers.hosts.open_device_files import read_open_device_files
from vramledger.sampling import malloc
from vramledger.sampling.privileges import READ_CAPABILITIES, drop_privileges
from vramledger.sampling.supervisor import Supervisor, reading_timeout
from vramledger.serving.control_socket import DEFAULT_PATH, ControlResponse, serve_control
from vramledger.serving.publisher import SnapshotPublisher
from vramledger.serving.source import SnapshotSource, idle_after, open_source, snapshots
from vramledger.web.cancellation import cancelled


async def serve_until_told(config: Config) -> None:
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
        await cancelled(opening)
    await cancelled(waiting)
    log.info("Stopped")


async def _serve_source(
    config: Config, source: SnapshotSource, kind: str, recording: str | None, stop: asyncio.Task[bool]
) -> None:
    """Serve one source until ``stop`` is done."""
    with _no_certificates():
        from vramledger.web.app import serve  # noqa: PLC0415 aiohttp takes 100 ms, which other commands save

    history = HoldingTracker(
        idle_after=idle_after(config.idle_after, source),
        interval=config.sampling.interval,
        source=kind,
        recording=recording,
        owners_max=config.owners_max,
    )
    board = SnapshotPublisher(
        history.blank, lifetime=reading_timeout(config.sampling) if kind == "nvml" else None
    )

    async def publish(listener: AgentServer | None) -> None:
        down: tuple[str, str] | None = None
        tidied = time.monotonic()
        read = (
            snapshots(source, history)
            if listener is None
            else snapshots(source, history, listener.add_agents)
        )
        async with aclosing(read) as published:  # type: ignore[type-var]
            async for snapshot in published:
                board.sampler_pid = source.pid
                await board.publish(snapshot)
                if snapshot.released_until is not None:
                    pass  # somebody asked for it, and the source has logged it
                elif snapshot.failure is not None and snapshot.failure != down:
                    reason, message = snapshot.failure
                    log.error("No GPU data", extra=fields(reason=reason, err=message))
                elif snapshot.up and down is not None:
                    log.info("GPU data is back", extra=fields(devices=len(snapshot.devices)))
                down = snapshot.failure
                if time.monotonic() - tidied > malloc.FREE_INTERVAL:
                    tidied = time.monotonic()
                    malloc.free_unused()

    # The pids of a recording are another machine's.
    live = kind == "nvml" and "agent" in config.sampling.collectors
    heard = run_agent_server(config.agent_socket, config.sampling.procfs, lambda: board.snapshot)

    def bound() -> None:
        drop_privileges(READ_CAPABILITIES)

    async with (
        serve(config, board, bound),
        _controlled(config, source),
        heard if live else nullcontext() as listener,
    ):
        malloc.freeze_objects()
        publishing = asyncio.create_task(publish(listener))
        await asyncio.wait({publishing, stop}, return_when=asyncio.FIRST_COMPLETED)
        if publishing.done():
            publishing.result()
        await cancelled(publishing)


@contextmanager
def _no_certificates() -> Iterator[None]:
    """Have OpenSSL find no authorities in the block.

    aiohttp reads the system's 140 when it is loaded, for its client, which we never use: 33 ms and 0.7 MiB.
    """
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, os.devnull))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@asynccontextmanager
async def _controlled(config: Config, source: SnapshotSource) -> AsyncIterator[None]:
    """Listen to ``vramledger release``, where there is a driver to release."""
    if not isinstance(source, Supervisor):
        yield
        return

    async def handle(request: Mapping[str, object]) -> ControlResponse:
        seconds = request.get("release")
        if isinstance(seconds, (int, float)) and seconds > 0:
            until = await source.release(seconds)
            if held := await asyncio.to_thread(read_open_device_files):
                return {"error": f"the GPUs are not released: still open by pid: {held}; please report this"}
            return {"released_until": until}
        if request.get("resume") is True:
            source.resume()
            return {"released_until": None}
        return {"error": "that is no request of this version; use the vramledger that runs the exporter"}

    path = config.control_socket
    async with serve_control(path or DEFAULT_PATH, handle, required=path is not None):
        yield
