"""The exporter's end of the storage: send what to store, ask what was, go on from it after a restart.

The process that writes is started once, before we give up our rights. If it ends, or its disk hangs, nothing
is stored or answered from then on, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from vramledger.storage.moments import advance, recall
from vramledger.storage.protocol import AGAIN, ANSWER, ASK, HEADER, READY, pack, storage_command
from vramledger.storage.questions import AT, READINGS, RESTORE
from vramledger.storage.recorder import Recorder
from vramledger.storage.segments import READING, Entry
from vramledger.views.timeline import Timeline
from vramledger.web.cancellation import background_task

START_SECONDS = 8.0
"""Seconds within which the process opens its directory; a disk that hangs longer is not waited for."""

RESTORE_SECONDS = 10.0
"""Seconds within which it says what to go on from; then the exporter starts without it."""

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

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use a process that was started."""
        self._process = process
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._loop = asyncio.get_running_loop()
        self.again = threading.Event()
        self.failed = False

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.returncode is None

    async def wait_until_ready(self) -> None:
        """Wait until it has opened its directory.

        Raises:
            StartupError: it cannot.
            asyncio.TimeoutError: the disk does not answer.
        """
        kind, content = await asyncio.wait_for(self._receive(), START_SECONDS)
        if kind != READY or content:
            raise StartupError(content.decode() or "the process that stores could not be started")

    def send(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Send what is to be stored; leave it out if the process does not keep up."""
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101 PIPE was requested
        if not self.alive:
            return  # run() has logged it
        if pipe.transport.get_write_buffer_size() > BUFFER_MAX:
            self.again.set()
            if not self.failed:
                self.failed = True
                log.error("Nothing is stored for now", extra=fields(err="the disk does not keep up"))
            return
        if self.failed:
            self.failed = False
            log.info("Samples are stored again")
        for kind, content in messages:
            pipe.write(pack(kind, content))

    async def request(
        self, question: dict[str, Any], timeout: float = ANSWER_SECONDS
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request: its head and its content.

        Raises:
            StorageError: there is none, or it says why not.
        """
        if not self.alive:
            message = "the process that stores has ended; restart the exporter"
            raise StorageError(message)
        if len(self._waiting) >= WAITING_MAX:
            message = "too many ask for the past at the same time; try again"
            raise StorageError(message)
        future = self._loop.create_future()
        self._waiting.append(future)
        assert self._process.stdin is not None  # noqa: S101 PIPE was requested
        self._process.stdin.write(pack(ASK, json.dumps(question).encode()))
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
        """Receive its messages until it ends."""
        try:
            while True:
                kind, content = await self._receive()
                if kind == ANSWER and self._waiting:
                    future = self._waiting.popleft()
                    if not future.done():
                        future.set_result(content)
                elif kind == AGAIN:
                    self.again.set()
        except (asyncio.IncompleteReadError, OSError, ValueError):
            status = await self._process.wait()
            log.error("Nothing is stored any more: its process has ended", extra=fields(status=status))
        finally:
            for future in self._waiting:
                if not future.done():
                    future.set_result(json.dumps({"error": "the process that stores has ended"}).encode())

    async def _receive(self) -> tuple[bytes, bytes]:
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101 PIPE was requested
        kind, size = HEADER.unpack(await pipe.readexactly(HEADER.size))
        return kind, await pipe.readexactly(size)

    async def abandon(self) -> None:
        """End it at once. From Python 3.12 on, its pipes must not outlive the event loop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self.end()

    async def end(self) -> None:
        """Let it write what it has got, and end."""
        assert self._process.stdin is not None  # noqa: S101 PIPE was requested
        self._process.stdin.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_SECONDS)


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
        self._recorder: Recorder | None = recorder
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
            recorder = self._recorder if self._earlier is None else None
            messages: list[tuple[bytes, bytes]] = []
            if recorder is not None:
                messages += self._recorded(recorder, reading)
            snapshot = self._tracker.update(reading)
            if recorder is not None:
                with self._guarded():
                    messages += recorder.summarise(snapshot)
                self._loop.call_soon_threadsafe(self._storage.send, messages)
            return snapshot

    def _recorded(self, recorder: Recorder, reading: Reading) -> list[tuple[bytes, bytes]]:
        if self._storage.again.is_set():
            self._storage.again.clear()
            recorder.begin_again()
        messages: list[tuple[bytes, bytes]] = []
        with self._guarded():
            messages += recorder.record(reading)
        return messages

    @contextlib.contextmanager
    def _guarded(self) -> Any:  # noqa: ANN401 a context manager
        try:
            yield
        except Exception as error:  # noqa: BLE001 a bug must cost the storage alone
            log.exception("Nothing is stored any more; please report this", extra=fields(err=repr(error)))
            self._recorder = None

    def last_messages(self) -> list[tuple[bytes, bytes]]:
        """Return what is stored at our end."""
        messages: list[tuple[bytes, bytes]] = []
        with self._lock:
            if self._recorder is not None and self._earlier is None:
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
            for value in content["readings"]:
                advance(tracker, timeline, Entry(READING, 0.0, value))
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
        log.info("Going on from what is stored", extra=fields(readings=len(content["readings"])))


@asynccontextmanager
async def store(
    config: Config, tracker: HoldingTracker, timeline: Timeline, idle_after: float, user: User | None
) -> AsyncIterator[tuple[Storage, StoredTracker] | None]:
    """Start the process that stores, and yield it with the accounting that records; None without a storage.

    Raises:
        StartupError: the directory cannot be used.
    """
    if config.storage is None:
        yield None
        return
    process = await asyncio.create_subprocess_exec(
        *storage_command(_arguments(config.storage, config.sampling.rootfs, user), *settings()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LIMIT,
    )
    storage = Storage(process)
    try:
        await storage.wait_until_ready()
    except asyncio.TimeoutError:
        log.error("Nothing is stored: the disk does not answer", extra=fields(path=config.storage.path))
        try:
            yield None
        finally:
            await storage.abandon()
        return
    except asyncio.IncompleteReadError as error:
        await storage.abandon()
        message = "the process that stores has ended; see its message above"
        raise StartupError(message) from error
    except StartupError:
        await storage.abandon()
        raise
    recorder = Recorder(tracker, timeline, idle_after, config.sampling.interval)
    stored = StoredTracker(tracker, timeline, recorder, storage)
    async with background_task(storage.run()):
        try:
            head, content = await storage.request({"ask": RESTORE}, RESTORE_SECONDS)
            if head["found"]:
                stored.set_earlier(head["header"], json.loads(content))
        except StorageError as error:
            log.warning("Cannot go on from what is stored: starting without it", extra=fields(err=str(error)))
        try:
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
