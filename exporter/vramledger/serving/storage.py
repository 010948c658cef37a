"""The exporter's end of the storage: send what to store, ask what was, go on from it after a restart.

The process that writes is started by one that we start before we give up our rights, and again when it is
killed. While it is away, or its disk hangs, nothing is stored or answered, and nothing else changes.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vramledger import __version__
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import Config, StorageConfig
from vramledger.errors import StartupError, VramledgerError
from vramledger.logs import fields, log, settings
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.privileges import User
from vramledger.serving.callers import Caller
from vramledger.serving.control_messages import ControlError, ControlRequest, PastHeader
from vramledger.serving.storage_health import SLOW_DISK, StorageHealth
from vramledger.storage.moments import advance, recall
from vramledger.storage.protocol import (
    ADD,
    AGAIN,
    ANSWER,
    ASK,
    HEADER,
    PACKET_BYTES,
    READY,
    START,
    STATUS,
    keeper_command,
    pack,
)
from vramledger.storage.questions import AT, READINGS, RESTORE
from vramledger.storage.recorder import Recorder
from vramledger.storage.segments import READING, Entry, read_head
from vramledger.views.timeline import Timeline
from vramledger.web.cancellation import background_task

START_SECONDS = 8.0
"""Seconds within which the process opens its directory; a disk that hangs longer is not waited for."""

RESTORE_SECONDS = 10.0
"""Seconds within which it says what to go on from; then the exporter starts without it."""

RESTART_SECONDS, RESTART_SECONDS_MAX = 1.0, 300.0
"""Seconds from the end of the process to its next start: twice as many each time; the maximum."""

ENDED = "the process that stores has ended"

GIVEN_UP = "a bug of the exporter"
"""The beginning of the error after which nothing is stored until the exporter is started again."""

ANSWER_SECONDS = 20.0
END_SECONDS = 5.0

WAITING_MAX = 8
"""The maximum number of requests that wait: the process answers one after the other."""

BUFFER_MAX = 4 * 2**20
"""Bytes that may wait for the process; with more, samples are left out until it has read them."""

LIMIT = 2**26


class StorageError(VramledgerError):
    """The storage does not answer, or says why it cannot."""


class Storage:
    """The process that stores, as the exporter sees it; used from the event loop only."""

    def __init__(
        self, keeper: asyncio.subprocess.Process, requests: socket.socket, health: StorageHealth
    ) -> None:
        """Use a process that starts the one that stores, and our end of the socket to it."""
        self._keeper = keeper
        self._requests = requests
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._loop = asyncio.get_running_loop()
        self._input: asyncio.WriteTransport | None = None
        self._output: asyncio.StreamReader | None = None
        self._output_pipe: asyncio.ReadTransport | None = None
        self.health = health
        self.again = threading.Event()
        self.failed = False

    async def open(self) -> None:
        """Wait until the directory is open, and have the process that stores started.

        Raises:
            StartupError: it cannot be used.
            asyncio.TimeoutError: the disk does not answer.
        """
        receiving = self._loop.sock_recv(self._requests, PACKET_BYTES)
        answer = await asyncio.wait_for(receiving, START_SECONDS)
        if answer != READY:
            raise StartupError(
                answer.decode() or "the process that stores could not be started; see its message above"
            )
        await self._start()

    async def _start(self) -> None:
        """Have a process that stores started.

        Raises:
            OSError: it cannot be requested.
        """
        source, to_it = os.pipe2(os.O_CLOEXEC)
        from_it, target = os.pipe2(os.O_CLOEXEC)
        ours = [os.fdopen(to_it, "wb", buffering=0), os.fdopen(from_it, "rb", buffering=0)]
        try:
            descriptors = array.array("i", [source, target])
            self._requests.sendmsg([START], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        except OSError:
            for each in ours:
                each.close()
            raise
        finally:
            os.close(source)
            os.close(target)
        output = asyncio.StreamReader(limit=LIMIT)
        self._input, _ = await self._loop.connect_write_pipe(asyncio.Protocol, ours[0])
        self._output_pipe, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), ours[1]
        )
        self._output = output

    def send(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Send what is to be stored; leave it out if the process does not keep up."""
        messages = list(messages)
        readings = sum(kind == ADD and read_head(content)[0] == READING for kind, content in messages)
        if self._input is None:
            self.health.record_dropped(readings, ENDED)  # run() has logged it
            return
        if self._input.get_write_buffer_size() > BUFFER_MAX:
            self.again.set()
            self.health.record_dropped(readings, SLOW_DISK)
            if not self.failed:
                self.failed = True
                log.error("Nothing is stored for now", extra=fields(err=SLOW_DISK))
            return
        if self.failed:
            self.failed = False
            log.info("Samples are stored again")
        for kind, content in messages:
            self._input.write(pack(kind, content))
        self.health.record_sent(readings)

    async def request(
        self, question: dict[str, Any], timeout: float = ANSWER_SECONDS
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request: its head and its content.

        Raises:
            StorageError: there is none, or it says why not.
        """
        if self._input is None:
            raise StorageError(ENDED)
        if len(self._waiting) >= WAITING_MAX:
            message = "too many ask for the past at the same time; try again"
            raise StorageError(message)
        future = self._loop.create_future()
        self._waiting.append(future)
        self._input.write(pack(ASK, json.dumps(question).encode()))
        try:
            answer = await asyncio.wait_for(asyncio.shield(future), timeout)
        except asyncio.TimeoutError as error:
            message = "the storage does not answer in time; see the exporter's log"
            raise StorageError(message) from error
        first, _, content = answer.partition(b"\n")
        head: dict[str, Any] = json.loads(first)
        if "error" in head:
            raise StorageError(str(head["error"]))
        return head, content

    async def run(self) -> None:
        """Receive what the process says, and have it started again whenever it has ended."""
        wait = RESTART_SECONDS
        while True:
            began = self._loop.time()
            with contextlib.suppress(asyncio.IncompleteReadError, OSError, ValueError):
                await self._receive()
            self._disconnect()
            self.health.record_end(ENDED)
            if self._loop.time() - began > RESTART_SECONDS_MAX:
                wait = RESTART_SECONDS
            log.error(
                "Nothing is stored: its process has ended, and is started again", extra=fields(in_s=wait)
            )
            await asyncio.sleep(wait)
            wait = min(2 * wait, RESTART_SECONDS_MAX)
            try:
                await self._start()
            except OSError as error:
                log.error(
                    "Nothing is stored any more: the process that stores cannot be started; "
                    "restart the exporter",
                    extra=fields(err=error.strerror or str(error)),
                )
                return
            self.health.record_restart()
            self.again.set()

    async def _receive(self) -> None:
        """Receive messages until the process has ended."""
        pipe = self._output
        assert pipe is not None  # noqa: S101 it was started
        while True:
            kind, size = HEADER.unpack(await pipe.readexactly(HEADER.size))
            content = await pipe.readexactly(size)
            if kind == ANSWER and self._waiting:
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(content)
            elif kind == AGAIN:
                self.again.set()
            elif kind == STATUS:
                self.health.record_status(json.loads(content))

    def _disconnect(self) -> None:
        """Close the pipes of a process that has ended, and answer who waits for it."""
        for pipe in (self._input, self._output_pipe):
            if pipe is not None:
                pipe.close()
        self._input = self._output_pipe = None
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(json.dumps({"error": ENDED}).encode())

    async def end(self) -> None:
        """Let the process write what it has received, and end; if it hangs, it ends when its disk answers."""
        if self._input is not None:
            self._input.close()
        self._requests.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._keeper.wait(), END_SECONDS)
        self._disconnect()

    async def abandon(self) -> None:
        """End it before it has opened its directory."""
        with contextlib.suppress(ProcessLookupError):
            self._keeper.kill()
        await self.end()


class PastDesk:
    """Answer commands that ask for the past."""

    def __init__(self) -> None:
        """Start without a storage, until the exporter has one."""
        self.storage: Storage | None = None

    async def answer_page(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a question of the page.

        Raises:
            StorageError: there is none.
        """
        if self.storage is None:
            message = "nothing is stored"
            raise StorageError(message)
        return await self.storage.request(question)

    async def answer(self, request: ControlRequest, caller: Caller) -> tuple[PastHeader, bytes]:
        """Return the answer to a command's question.

        Raises:
            ControlError: this caller may not ask that, or nothing is stored.
        """
        if self.storage is None:
            message = "it keeps no past; start it with --storage.path"
            raise ControlError(message)
        question = dict(request.question)
        if question["ask"] == READINGS:
            caller.check_control()
        if question["ask"] == AT and not caller.trusted:
            question["uid"] = caller.peer.uid
        head, content = await self.storage.request(question)
        return PastHeader(__version__, head, len(content)), content


class StoredTracker:
    """The accounting of an exporter that stores: record each reading, and go on from the last one.

    A bug of the storage costs the storage alone.
    """

    def __init__(
        self, tracker: HoldingTracker, timeline: Timeline, recorder: Recorder, storage: Storage
    ) -> None:
        """Wrap the accounting."""
        self._tracker = tracker
        self._timeline = timeline
        self._recorder = recorder
        self._given_up: str | None = None
        self._storage = storage
        self._loop = asyncio.get_running_loop()
        self._earlier: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._lock = threading.Lock()

    def set_earlier(self, header: dict[str, Any], content: dict[str, Any]) -> None:
        """Set what an earlier exporter has stored; the first reading of the same boot goes on from it."""
        self._earlier = header, content

    def reset(self) -> None:
        """Forget all that is known of the host."""
        self._tracker.reset()

    def update(self, reading: Reading) -> Snapshot:
        """Record a reading, account for it, and record what it publishes."""
        with self._lock:
            if self._earlier is not None and reading.boot_id and reading.failure is None:
                self._go_on(reading)
            recording = self._earlier is None and self._given_up is None
            messages = self._recorded(reading) if recording else []
            lost = self._given_up
            snapshot = self._tracker.update(reading)
            if recording:
                with self._guarded():
                    messages += self._recorder.summarise(snapshot)
                self._loop.call_soon_threadsafe(self._storage.send, messages)
            if lost is not None:
                self._loop.call_soon_threadsafe(self._storage.health.record_dropped, 1, lost)
            return snapshot

    def _recorded(self, reading: Reading) -> list[tuple[bytes, bytes]]:
        if self._storage.again.is_set():
            self._storage.again.clear()
            self._recorder.begin_again()
        messages: list[tuple[bytes, bytes]] = []
        with self._guarded():
            messages += self._recorder.record(reading)
        return messages

    @contextlib.contextmanager
    def _guarded(self) -> Any:  # noqa: ANN401 a context manager
        try:
            yield
        except Exception as error:  # noqa: BLE001 a bug must cost the storage alone
            log.exception("Nothing is stored any more; please report this", extra=fields(err=repr(error)))
            self._given_up = f"{GIVEN_UP}: {error!r}"
            self._loop.call_soon_threadsafe(self._storage.health.record_given_up, self._given_up)

    def last_messages(self) -> list[tuple[bytes, bytes]]:
        """Return what is stored at our end."""
        messages: list[tuple[bytes, bytes]] = []
        with self._lock:
            if self._given_up is None and self._earlier is None:
                with self._guarded():
                    messages += self._recorder.last_state()
        return messages

    def _go_on(self, reading: Reading) -> None:
        """Go on from what an earlier exporter has stored, if it was of this boot."""
        assert self._earlier is not None  # noqa: S101 the caller has checked
        (header, content), self._earlier = self._earlier, None
        if header.get("boot") != reading.boot_id:
            log.info("The host was booted since something was stored: starting without it")
            return
        tracker, timeline = self._tracker.fresh(), Timeline()
        try:
            recall(tracker, timeline, content["state"], self._tracker.settings)
            for time, value in content["readings"]:
                advance(tracker, timeline, Entry(READING, time, value))
            known, seen = tracker.remembered(), timeline.remembered()
            last = known["_last"]
        except Exception as error:  # noqa: BLE001 whatever a file holds, we sample
            log.warning("Cannot go on from what is stored: starting without it", extra=fields(err=str(error)))
            return
        if isinstance(last, float) and last > reading.monotonic:
            log.warning("What is stored is newer than the clock: starting without it")
            return
        self._tracker.recall(known)
        self._timeline.recall(seen)
        log.info("Continuing from the stored state", extra=fields(readings=len(content["readings"])))


@asynccontextmanager
async def store(  # noqa: PLR0913 what it joins
    config: Config,
    tracker: HoldingTracker,
    timeline: Timeline,
    idle_after: float,
    *,
    user: User | None,
    health: StorageHealth | None,
) -> AsyncIterator[tuple[Storage, StoredTracker] | None]:
    """Start the process that stores, and yield it with the accounting that records; None without a storage.

    Raises:
        StartupError: the directory cannot be used.
    """
    if config.storage is None or health is None:
        yield None
        return
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)  # noqa: FBT003 the standard library's
    with other:
        keeper = await asyncio.create_subprocess_exec(
            *keeper_command(_arguments(config.storage, config.sampling.rootfs, user), *settings()),
            stdin=other.fileno(),
        )
    storage = Storage(keeper, ours, health)
    try:
        await storage.open()
    except asyncio.TimeoutError:
        log.error("Nothing is stored: the disk does not answer", extra=fields(path=config.storage.path))
        health.record_error("the disk did not answer at the start")
        try:
            yield None
        finally:
            await storage.abandon()
        return
    except OSError as error:
        await storage.abandon()
        message = "the process that stores could not be started; see its message above"
        raise StartupError(message) from error
    except StartupError:
        await storage.abandon()
        raise
    recorder = Recorder(tracker, timeline, idle_after, config.sampling.interval)
    stored = StoredTracker(tracker, timeline, recorder, storage)
    try:
        async with background_task(storage.run()):
            try:
                head, content = await storage.request({"ask": RESTORE}, RESTORE_SECONDS)
                if head["found"]:
                    stored.set_earlier(head["header"], json.loads(content))
            except StorageError as error:
                log.warning(
                    "Cannot go on from what is stored: starting without it", extra=fields(err=str(error))
                )
            yield storage, stored
    finally:
        storage.send(stored.last_messages())
        await storage.end()


def _arguments(config: StorageConfig, rootfs: Path, user: User | None) -> str:
    return json.dumps(
        {
            "path": str(config.path),
            "retention": config.retention,
            "size": config.size,
            "user": user,
            "host": _machine_id(rootfs),
        }
    )


def _machine_id(rootfs: Path) -> str:
    """Return what identifies this host, empty if that is not known."""
    try:
        return (rootfs / "etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
