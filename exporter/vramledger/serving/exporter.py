"""Run the exporter: a source, the publisher of its snapshots, and the web server in front of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import vramledger
from vramledger import __version__
from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.server import run_agent_server
from vramledger.config import CONTROL_SOCKET, Config, SamplingConfig, StorageConfig
from vramledger.logs import fields, log
from vramledger.model.snapshot import Snapshot
from vramledger.readers.hosts.driver_watch import has_device_class, open_control_device
from vramledger.readers.hosts.open_device_files import read_open_device_files
from vramledger.sampling import malloc
from vramledger.sampling.landlock import forbid_changes
from vramledger.sampling.privileges import User, can_run_as, drop_privileges, find_user
from vramledger.sampling.sampler_process import Starter
from vramledger.sampling.supervisor import Supervisor, reading_timeout
from vramledger.serving.callers import Caller
from vramledger.serving.control_messages import (
    RESUME,
    ControlError,
    ControlRequest,
    ControlResponse,
    LedgerHeader,
)
from vramledger.serving.control_socket import ControlHandlers, serve_control
from vramledger.serving.launch_counting import LaunchCounting, count_launches
from vramledger.serving.past_desk import PastDesk
from vramledger.serving.publisher import SnapshotPublisher
from vramledger.serving.service_manager import (
    is_managed,
    notify_service_manager,
    wait_for_forbidden_driver,
)
from vramledger.serving.source import (
    Attach,
    SnapshotSource,
    attach_nothing,
    idle_threshold,
    open_source,
    snapshots,
)
from vramledger.views.ledger_answer import write_answer
from vramledger.views.public_view import public_view
from vramledger.web.cancellation import cancel_and_wait
from vramledger.web.server_part import import_server_only

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vramledger.serving.storage import Storage, StoredTracker
    from vramledger.web.services import PageState


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
    # aiohttp takes 60 ms, which other commands save
    import_server_only()
    from vramledger.web.app import serve  # noqa: PLC0415
    from vramledger.web.services import PageState  # noqa: PLC0415

    idle_after = idle_threshold(config.idle_after, source)
    tracker = HoldingTracker(
        idle_after=idle_after,
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
    page = PageState()
    managed = is_managed() and kind == "nvml"
    if kind != "nvml" and config.storage is not None:
        log.info("A recording is not stored", extra=fields(path=config.storage.path))
        config = replace(config, storage=None)
    # A recording is opened again at each pass, and may be root's alone.
    user = _choose_user(config) if isinstance(source, Supervisor) else None
    # What needs a right comes first: the sockets, then the processes that count and that start samplers.
    past, wait = PastDesk(expected=config.storage is not None), reading_timeout(config.sampling)
    page.past = None if config.storage is None else past.answer_page
    storing = (
        nullcontext()
        if config.storage is None
        else _store(config.storage, config.sampling, tracker, page, idle_after, user)
    )
    async with (
        agents as agent_server,
        _control_socket(config, source, _LedgerDesk(publisher, page, idle_after, wait), page, past),
        counts as launch_counting,
        storing as stored,
        _starter(config, source) as start_starter,
        serve(config, publisher, lambda: _give_up_rights(config, start_starter, user), page),
        notify_service_manager(),
    ):
        malloc.freeze_objects()
        past.storage = None if stored is None else stored[0]
        attach: Attach = attach_nothing if agent_server is None else agent_server.add_agents
        if launch_counting is not None:
            attach = launch_counting.attached(attach)
        produced = snapshots(source, tracker if stored is None else stored[1], attach)
        publishing = asyncio.create_task(_publish(source, produced, publisher, launch_counting))
        forbidden = asyncio.create_task(
            wait_for_forbidden_driver(partial(has_device_class, config.sampling.procfs), open_control_device)
            if managed
            else asyncio.Event().wait()
        )
        await asyncio.wait({publishing, stop, forbidden}, return_when=asyncio.FIRST_COMPLETED)
        if publishing.done():
            publishing.result()
        if forbidden.done():
            log.warning(
                "Ending, to be started again: a driver has come, and only a new start allows its devices"
            )
        await cancel_and_wait(publishing, forbidden)


def _store(  # noqa: PLR0913, PLR0917 what it joins
    storage: StorageConfig,
    sampling: SamplingConfig,
    tracker: HoldingTracker,
    page: PageState,
    idle_after: float,
    user: User | None,
) -> AbstractAsyncContextManager[tuple[Storage, StoredTracker]]:
    """Return what stores, during a block; only here it is loaded."""
    from vramledger.metrics.storage import collect  # noqa: PLC0415
    from vramledger.serving.storage import store  # noqa: PLC0415
    from vramledger.serving.storage_health import StorageHealth  # noqa: PLC0415

    health = StorageHealth(storage.size, storage.retention)
    page.collect = lambda: collect(health.figures())
    return store(storage, sampling, tracker, page.timeline, idle_after, user=user, health=health)


def _choose_user(config: Config) -> User | None:
    """Return the user that we become, None to stay who we are; make the sockets' directories for it.

    Raises:
        StartupError: there is no user of this name.
    """
    user = find_user(config.web_user)
    if user is None:
        return None
    program = (vramledger.__file__, os.__file__, sys.modules["aiohttp"].__file__)
    if not can_run_as(user, filter(None, program)):
        return None
    for path in _socket_paths(config):
        if not path.parent.exists():
            with suppress(OSError):  # the socket's own message says why
                path.parent.mkdir(mode=0o755, parents=True)
                os.chown(path.parent, *user)
    return user


@asynccontextmanager
async def _starter(config: Config, source: SnapshotSource) -> AsyncIterator[Callable[[], None]]:
    """Yield a function that starts the process which starts samplers; that ends with the block."""
    started: list[Starter] = []

    def start() -> None:
        if isinstance(source, Supervisor):
            started.append(Starter(config.sampling))
            source.use_starter(started[0])

    try:
        yield start
    finally:
        for each in started:
            each.close()


def _socket_paths(config: Config) -> tuple[Path, Path]:
    return config.agent_socket, config.control_socket or CONTROL_SOCKET


def _give_up_rights(config: Config, start_starter: Callable[[], None], user: User | None) -> None:
    """Leave every right to the process that starts samplers."""
    start_starter()
    drop_privileges(become=user)
    forbid_changes(path.parent for path in _socket_paths(config))


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
async def _control_socket(
    config: Config, source: SnapshotSource, desk: _LedgerDesk, page: PageState, past: PastDesk
) -> AsyncIterator[None]:
    """Listen for commands, if this is the exporter of a host and not of a recording."""
    if not isinstance(source, Supervisor):
        yield
        return
    handlers = ControlHandlers(
        control=lambda request: _control(source, request),
        ledger=desk.answer,
        past=past.answer,
        page_open=page.open_to_all,
    )
    path = config.control_socket
    async with serve_control(path or CONTROL_SOCKET, handlers, required=path is not None):
        yield


async def _control(source: Supervisor, request: ControlRequest) -> ControlResponse:
    """Release the GPUs, or reopen them."""
    if request.ask == RESUME:
        source.resume()
        return ControlResponse(released_until=None)
    until = await source.release(request.seconds)
    if held := await asyncio.to_thread(read_open_device_files):
        message = f"the GPUs are not released: still open by pid: {held}; please report this"
        raise ControlError(message)
    return ControlResponse(until)


class _LedgerDesk:
    """Answer commands that ask for the ledger; an answer is written once for all who may see the same."""

    def __init__(self, publisher: SnapshotPublisher, page: PageState, idle_after: float, wait: float) -> None:
        self._publisher = publisher
        self._page = page
        self._idle_after = idle_after
        self._wait = wait
        self._run = secrets.token_hex(4)
        self._token = ""
        self._answers: dict[int | None, asyncio.Future[bytes]] = {}

    async def answer(self, request: ControlRequest, caller: Caller) -> tuple[LedgerHeader, bytes]:
        """Return the newest snapshot; wait for one if the client has the newest already."""
        snapshot = self._publisher.snapshot
        if request.after == self._token_of(snapshot):
            newer = self._publisher.wait_for_newer(snapshot.serial)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(newer, self._wait)
            snapshot = self._publisher.snapshot
        token = self._token_of(snapshot)
        if token != self._token:
            self._token, self._answers = token, {}
        viewer = None if caller.trusted else caller.peer.uid
        if viewer not in self._answers:
            writing = asyncio.to_thread(self._write, snapshot, viewer)
            self._answers[viewer] = asyncio.ensure_future(writing)
        text = await asyncio.shield(self._answers[viewer])
        return LedgerHeader(__version__, token, self._wait, self._idle_after, len(text)), text

    def _token_of(self, snapshot: Snapshot) -> str:
        return f"{self._run}-{snapshot.serial}-{int(snapshot.up)}"

    def _write(self, snapshot: Snapshot, viewer: int | None) -> bytes:
        shown = snapshot if viewer is None else public_view(snapshot, viewer)
        return write_answer(shown, self._page.timeline.growth(shown))
