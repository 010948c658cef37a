"""Run the exporter: a source, the publisher of its snapshots, and the web server in front of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

import vramledger
from vramledger import __version__
from vramledger.accounting.tracker import TOLD_AFTER, HoldingTracker
from vramledger.agent_server.server import run_agent_server
from vramledger.config import CONTROL_SOCKET, Config, SamplingConfig, StorageConfig
from vramledger.logs import fields, log
from vramledger.model.snapshot import Snapshot
from vramledger.readers.hosts.driver_watch import (
    has_device_class,
    open_control_device,
    read_open_device_files,
)
from vramledger.sampling import malloc
from vramledger.sampling.privileges import User, can_run_as, drop_privileges, find_user, forbid_changes
from vramledger.sampling.sampler_process import Starter
from vramledger.sampling.supervisor import Supervisor, reading_timeout
from vramledger.serving.control_messages import (
    At,
    ControlError,
    PastHead,
    PastQuestion,
    Readings,
    Released,
    SnapshotHead,
    SnapshotRequest,
    StorageError,
)
from vramledger.serving.publisher import SnapshotPublisher
from vramledger.serving.service_manager import is_managed, notify_service_manager, wait_for_forbidden_driver
from vramledger.serving.source import SnapshotSource, attach_agents, idle_threshold, open_source, snapshots
from vramledger.storage.protocol import HIDE
from vramledger.views.hidden_names import HiddenNames, host_key, public_view
from vramledger.views.ledger_json import ledger_text, write_answer
from vramledger.web.cancellation import cancel_and_wait
from vramledger.web.server_part import import_server_only

VISITORS = "visitors of the page"
"""They ask as one: who they are is not known."""


_Answer = TypeVar("_Answer")


async def while_alive(pidfd: int, answering: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Return an answer, not computed further if who asked ends. Raises ControlError then."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(answering)
    if pidfd >= 0:
        loop.add_reader(pidfd, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        task.cancel()
        if pidfd < 0 or not select.select([pidfd], [], [], 0)[0]:
            raise
        raise ControlError("who asked has ended") from None
    finally:
        loop.remove_reader(pidfd)


class PastDesk:
    """Answer commands that ask for the past."""

    def __init__(self, *, expected: bool, hidden: HiddenNames | None = None) -> None:
        """Start without a storage. If one is ``expected``, the exporter sets it when it is open."""
        self.storage: Storage | None = None
        self._expected = expected
        self._hiding = {} if hidden is None else {HIDE: hidden.key.hex()}

    async def answer_page(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a question of the page. Raises StorageError if there is none, or not yet."""
        if self.storage is None:
            raise StorageError(self._without())
        return await self.storage.request({**question, **self._hiding}, asker=VISITORS)

    async def answer(self, asked: PastQuestion, caller: Caller) -> tuple[PastHead, bytes]:
        """Return the answer to a command. Raises ControlError if not allowed, or nothing is stored yet."""
        if self.storage is None:
            raise ControlError(self._without())
        if isinstance(asked, Readings):
            caller.check_control()
        question = msgspec.to_builtins(asked)
        if isinstance(asked, At) and not caller.trusted:
            question["uid"] = caller.peer.uid
        if not caller.trusted:
            question |= self._hiding
        asker = None if caller.trusted else f"uid {caller.peer.uid}"
        head, content = await while_alive(caller.peer.pidfd, self.storage.request(question, asker=asker))
        return PastHead(__version__, head), content

    def _without(self) -> str:
        if self._expected:  # the control socket and the page answer before it is open
            return "it is still starting; ask again in a moment"
        return "it keeps no past; start it with --storage.path"


TYPE_CHECKING = False
if TYPE_CHECKING:  # they load much: aiohttp, SQLite
    from vramledger.serving.control_socket import Caller
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
        told_after=TOLD_AFTER,
    )
    lifetime = reading_timeout(config.sampling) if kind == "nvml" else None
    hidden = HiddenNames(host_key(config.sampling.rootfs)) if config.hide_names else None
    publisher = SnapshotPublisher(tracker.blank, lifetime=lifetime, hidden=hidden)
    # A recording is opened again at each pass, and may be root's alone.
    user = _choose_user(config) if isinstance(source, Supervisor) else None
    # The pids of a recording belong to another machine.
    agents = (
        run_agent_server(
            config.agent_socket,
            config.sampling.procfs,
            lambda: publisher.whole,
            None if user is None else user.uid,
        )
        if kind == "nvml" and _agent_socket(config) is not None
        else nullcontext()
    )
    page = PageState()
    managed = is_managed() and kind == "nvml"
    if kind != "nvml" and config.storage is not None:
        log.info("A recording is not stored", extra=fields(path=config.storage.path))
        config = replace(config, storage=None)
    # What needs a right comes first: the sockets, then the process that starts samplers.
    past = PastDesk(expected=config.storage is not None, hidden=hidden)
    wait = reading_timeout(config.sampling)
    page.past = None if config.storage is None else past.answer_page
    storing = (
        nullcontext()
        if config.storage is None
        else _store(config.storage, config.sampling, tracker, page, idle_after, user)
    )
    async with (
        agents as agent_server,
        _control_socket(
            config,
            source,
            user,
            _LedgerDesk(publisher, page, idle_after, wait, hidden, _agent_socket(config)),
            page,
            past,
        ),
        storing as stored,
        AsyncExitStack() as starter,
        serve(config, publisher, lambda: _give_up_rights(config, source, starter, user), page),
        notify_service_manager(),
    ):
        malloc.freeze_objects()
        past.storage = None if stored is None else stored[0]
        add_agents = None if agent_server is None else attach_agents(agent_server.add_agents)
        produced = snapshots(source, tracker if stored is None else stored[1], add_agents)
        publishing = asyncio.create_task(_publish(source, produced, publisher))
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
    from vramledger.metrics.storage import StorageHealth, collect  # noqa: PLC0415
    from vramledger.serving.storage import store  # noqa: PLC0415

    health = StorageHealth(storage.size, storage.retention)
    page.collect = lambda: collect(health.figures())
    return store(storage, sampling, tracker, page.timeline, idle_after, user=user, health=health)


def _choose_user(config: Config) -> User | None:
    """Return the user that we become, with its directories, or None. Raises StartupError if unknown."""
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


def _socket_paths(config: Config) -> tuple[Path, Path]:
    return config.agent_socket, config.control_socket or CONTROL_SOCKET


def _agent_socket(config: Config) -> str | None:
    return str(config.agent_socket.absolute()) if "agent" in config.sampling.collectors else None


def _give_up_rights(config: Config, source: SnapshotSource, stack: AsyncExitStack, user: User | None) -> None:
    """Leave every right to the process that starts samplers, which ends with the stack."""
    if isinstance(source, Supervisor):
        starter = Starter(config.sampling)
        stack.callback(starter.close)
        source.use_starter(starter)
    drop_privileges(become=user)
    forbid_changes(path.parent for path in _socket_paths(config))


async def _publish(
    source: SnapshotSource, produced: AsyncIterator[Snapshot], publisher: SnapshotPublisher
) -> None:
    """Publish every snapshot, log when the data is gone or back, and free unused memory from time to time."""
    failure: tuple[str, str] | None = None
    trimmed = time.monotonic()
    async with aclosing(produced):  # type: ignore[type-var]
        async for snapshot in produced:
            publisher.sampler_pid = source.pid
            # The exporter may have been stopped since it received the sample.
            age = 0.0 if snapshot.ended is None else time.monotonic() - snapshot.ended
            await publisher.publish(snapshot, max(0.0, age))
            _log_change(snapshot, failure)
            failure = snapshot.failure
            if time.monotonic() - trimmed > malloc.FREE_INTERVAL:
                trimmed = time.monotonic()
                malloc.free_unused()


def _log_change(snapshot: Snapshot, before: tuple[str, str] | None) -> None:
    if snapshot.released_until is not None:
        return  # the release was requested, and the source has logged it
    if snapshot.failure is not None and snapshot.failure != before:
        reason, message = snapshot.failure
        log.error("No GPU data", extra=fields(reason=reason, err=message))
    elif snapshot.up and before is not None:
        log.info("GPU data is back", extra=fields(devices=len(snapshot.devices)))


@asynccontextmanager
async def _control_socket(  # noqa: PLR0913, PLR0917 what it joins
    config: Config,
    source: SnapshotSource,
    user: User | None,
    desk: _LedgerDesk,
    page: PageState,
    past: PastDesk,
) -> AsyncIterator[None]:
    """Listen for commands, if this is the exporter of a host and not of a recording."""
    if not isinstance(source, Supervisor):
        yield
        return
    from vramledger.serving.control_socket import ControlHandlers, serve_control  # noqa: PLC0415 it is aiohttp

    handlers = ControlHandlers(
        release=lambda seconds: _release(source, seconds),
        document=desk.document,
        snapshot=desk.answer,
        past=past.answer,
        page_open=page.open_to_all,
    )
    path, owner = config.control_socket, None if user is None else user.uid
    async with serve_control(path or CONTROL_SOCKET, handlers, required=path is not None, owner=owner):
        yield


async def _release(source: Supervisor, seconds: float | None) -> Released:
    if seconds is None:
        source.resume()
        return Released(released_until=None)
    until = await source.release(seconds)
    if held := await asyncio.to_thread(read_open_device_files):
        raise ControlError(f"the GPUs are not released: still open by pid: {held}; please report this")
    return Released(until)


class _LedgerDesk:
    """Answer commands that ask for the ledger; an answer is written once for all who may see the same."""

    def __init__(  # noqa: PLR0913, PLR0917 what an answer is made of
        self,
        publisher: SnapshotPublisher,
        page: PageState,
        idle_after: float,
        wait: float,
        hidden: HiddenNames | None,
        agent_socket: str | None,
    ) -> None:
        self._publisher = publisher
        self._page = page
        self._idle_after = idle_after
        self._wait = wait
        self._hidden = hidden
        self._agent_socket = agent_socket
        self._run = secrets.token_hex(4)
        self._token = ""
        self._answers: dict[object, asyncio.Future[bytes]] = {}

    async def answer(self, request: SnapshotRequest, caller: Caller) -> tuple[SnapshotHead, bytes]:
        """Return the newest snapshot; wait for one if the client has the newest already."""
        snapshot = self._publisher.whole
        if request.after == self._token_of(snapshot):
            newer = self._publisher.wait_for_newer(snapshot.serial)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(newer, self._wait)
            snapshot = self._publisher.whole
        viewer = None if caller.trusted else caller.peer.uid
        text = await self._share(snapshot, viewer, lambda: self._write(snapshot, viewer))
        token = self._token_of(snapshot)
        return SnapshotHead(__version__, token, self._wait, self._idle_after, self._agent_socket), text

    async def document(self) -> bytes:
        """Return the JSON document of the newest snapshot, as the page's address gives it."""
        snapshot = self._publisher.snapshot
        growth = self._page.timeline.growth
        return await self._share(snapshot, "document", lambda: ledger_text(snapshot, growth(snapshot)))

    async def _share(self, snapshot: Snapshot, key: object, make: Callable[[], bytes]) -> bytes:
        """Return what is made once for a snapshot, whoever asks for it."""
        token = self._token_of(snapshot)
        if token != self._token:
            self._token, self._answers = token, {}
        if key not in self._answers:
            self._answers[key] = asyncio.ensure_future(asyncio.to_thread(make))
        return await asyncio.shield(self._answers[key])

    def _token_of(self, snapshot: Snapshot) -> str:
        return f"{self._run}-{snapshot.serial}-{int(snapshot.up)}"

    def _write(self, shown: Snapshot, viewer: int | None) -> bytes:
        if viewer is not None:
            shown = shown if self._hidden is None else self._hidden.snapshot(shown, viewer)
            shown = public_view(shown, viewer)
        return write_answer(shown, self._page.timeline.growth(shown))
