"""The exporter's end of the storage: send what to store, ask what was, go on from it after a restart.

The process that writes is started by one that we start before we give up our rights, and again when it is
killed. While it is away, or its disk hangs, nothing is stored, and nothing else changes. Questions go to
another process, which is started when somebody asks. It is ended when its answer takes too long, when nobody
waits for it any more, and when nobody has asked for a minute; so no question delays what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from msgspec.structs import asdict

from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import SamplingConfig, StorageConfig
from vramledger.errors import StartupError
from vramledger.logs import fields, log, settings
from vramledger.metrics.storage import SLOW_DISK, StorageHealth
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot
from vramledger.rate_limit import TokenBucket
from vramledger.sampling.privileges import User
from vramledger.sampling.sampler_process import request_start
from vramledger.serving.control_messages import StorageError
from vramledger.storage import protocol
from vramledger.storage.recorder import Recorder
from vramledger.storage.state import advance, recall
from vramledger.views.timeline import Timeline
from vramledger.web.cancellation import background_task

START_SECONDS = 8.0
"""Seconds to wait for the directory; if the disk hangs, the exporter starts from nothing."""

RESTORE_SECONDS = 10.0
"""Seconds within which it says what to go on from; then the exporter starts without it."""

RESTART_SECONDS, RESTART_SECONDS_MAX = 1.0, 300.0
"""Seconds from the end of the process to its next start: twice as many each time; the maximum."""

ENDED = "the process that stores has ended"
NOT_OPENED = "the disk did not answer at the start"
NOT_STARTED = "the process that stores cannot be started"
NOT_ANSWERED = "the process that answers has ended"

GIVEN_UP = "a bug of the exporter"
"""The beginning of the error after which nothing is stored until the exporter is started again."""

END_SECONDS = 5.0

ANSWER_SECONDS = 20.0
"""Seconds for which somebody waits for an answer, with the time until it is his turn."""

READER_IDLE_SECONDS = 60.0
"""Seconds without a question after which the process that reads is ended."""

SHARE, SHARE_BURST = 0.25, 20.0
"""The part of the time that each who asks may have answers computed, and how many seconds at once."""

WAITING_MAX, WAITING_MAX_EACH = 64, 8
"""The questions that may wait, of all and of each who asks; those who may have all of the time are not
counted. That many answers may be kept in memory."""

ASKERS_MAX = 1024

BUFFER_MAX = 4 * 2**20
"""Bytes that may wait for the process; with more, samples are left out until it has read them."""

LIMIT = 2**26


class _Pipes:
    """A process that writes or reads, and the pipes to and from it."""

    def __init__(
        self, to_it: asyncio.WriteTransport, from_it: asyncio.ReadTransport, output: asyncio.StreamReader
    ) -> None:
        self._to_it = to_it
        self._from_it = from_it
        self._output = output

    @classmethod
    async def start(cls, requests: socket.socket, kind: str) -> _Pipes:
        """Have a process started. Raises ConnectionError without a starter, OSError if it cannot now."""
        loop = asyncio.get_running_loop()
        with ExitStack() as opened:
            source, to_it = map(opened.enter_context, _open_pipe())
            from_it, target = map(opened.enter_context, _open_pipe())
            request_start(requests, kind, source.fileno(), target.fileno())
            source.close()
            target.close()
            output = asyncio.StreamReader(limit=LIMIT)
            writing, _ = await loop.connect_write_pipe(asyncio.Protocol, to_it)
            opened.callback(writing.close)
            reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), from_it)
            opened.pop_all()  # close() closes them
        return cls(writing, reading, output)

    @property
    def unsent(self) -> int:
        """The bytes that wait for the process."""
        return self._to_it.get_write_buffer_size()

    def send(self, kind: bytes, content: bytes) -> None:
        self._to_it.write(protocol.pack(kind, content))

    async def receive(self) -> tuple[bytes, bytes]:
        """Return a message's kind and content. Raises asyncio.IncompleteReadError or OSError at its end."""
        kind, size = protocol.HEADER.unpack(await self._output.readexactly(protocol.HEADER.size))
        return kind, await self._output.readexactly(size)

    def close(self) -> None:
        """Close both pipes: a process that reads ends at once, one that writes when it has written all."""
        self._to_it.close()
        self._from_it.close()


class _Reader:
    """The process that answers, started for a question and ended some time after the last one."""

    def __init__(self, requests: socket.socket) -> None:
        self.turn = asyncio.Lock()
        self._requests = requests
        self._pipes: _Pipes | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def answer(self, question: dict[str, Any]) -> bytes:
        """Have an answer computed, until nobody waits. Raises as :meth:`_Pipes.receive`, or OSError."""
        if self._idle is not None:
            self._idle.cancel()
        pipes, self._pipes = self._pipes, None
        kept = pipes is not None
        if pipes is None:
            pipes = await _Pipes.start(self._requests, protocol.READ)
        try:
            pipes.send(protocol.ASK, json.dumps(question).encode())
            _, content = await pipes.receive()
        except (asyncio.IncompleteReadError, OSError):
            pipes.close()
            if not kept:
                raise
            return await self.answer(question)  # it was killed since it answered last
        except BaseException:
            pipes.close()
            raise
        self.end()
        self._pipes = pipes
        self._idle = asyncio.get_running_loop().call_later(READER_IDLE_SECONDS, self.end)
        return content

    def end(self) -> None:
        """End the process."""
        if self._idle is not None:
            self._idle.cancel()
        pipes, self._pipes = self._pipes, None
        if pipes is not None:
            pipes.close()


class Storage:
    """The processes that store and answer, as the exporter sees them; used from the event loop only."""

    def __init__(
        self, keeper: asyncio.subprocess.Process, requests: socket.socket, health: StorageHealth
    ) -> None:
        self._keeper = keeper
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._writer: _Pipes | None = None
        # Those who may have all of the time wait for nobody else.
        self._trusted, self._others = _Reader(requests), _Reader(requests)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._spent: dict[str, TokenBucket] = {}
        self._waiting: Counter[str | None] = Counter()
        self._ready = False
        self._error = NOT_OPENED
        self.health = health
        self.again = threading.Event()
        self.failed = False

    async def open(self, timeout: float = START_SECONDS) -> None:
        """Wait until the directory is open, and have the process that stores started.

        Raises StartupError if it cannot be used. Raises asyncio.TimeoutError if the disk does not answer;
        :meth:`run` waits on. Raises OSError if the process cannot be requested.
        """
        await asyncio.wait_for(self._wait_until_ready(), timeout)
        await self._start()

    async def _wait_until_ready(self) -> None:
        answer = await self._loop.sock_recv(self._requests, protocol.PACKET_BYTES)
        if answer != protocol.READY:
            raise StartupError(
                answer.decode() or "the process that stores could not be started; see its message above"
            )
        self._ready = True

    async def _start(self) -> None:
        self._writer = await _Pipes.start(self._requests, protocol.WRITE)

    def send(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Send what is to be stored; leave it out if the process does not keep up."""
        messages = list(messages)
        readings = sum(
            kind == protocol.ADD and protocol.read_head(content)[0] == protocol.READING
            for kind, content in messages
        )
        if self._writer is None:
            self.health.record_dropped(readings, self._error)  # it was logged
            return
        if self._writer.unsent > BUFFER_MAX:
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
            self._writer.send(kind, content)
        self.health.record_sent(readings)

    async def request(
        self, question: dict[str, Any], timeout: float = ANSWER_SECONDS, asker: str | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a question: its head and its content.

        Each of them has one question in the queue of all, and a share of the time; None for those who may
        have all of it. Raises StorageError if there is none, or it says why not.
        """
        if not self._ready:
            raise StorageError(self._error)
        counted = self._waiting if asker is not None else Counter[str | None]()
        if counted[asker] >= WAITING_MAX_EACH or counted.total() >= WAITING_MAX:
            raise StorageError("too many ask for the past at the same time; try again")
        counted[asker] += 1
        try:
            answer = await asyncio.wait_for(self._answer_in_turn(question, asker), timeout)
        except asyncio.TimeoutError as error:
            raise StorageError(
                "the storage does not answer in time; ask for a shorter span, or see the exporter's log"
            ) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise StorageError(f"{NOT_ANSWERED}: {error}") from error
        finally:
            counted[asker] -= 1
            counted += Counter()  # forgets who waits no longer
        first, _, content = answer.partition(b"\n")
        head: dict[str, Any] = json.loads(first)
        if head.pop("damaged", False) and self._writer is not None:
            self._writer.send(protocol.CHECK, b"")
        if "error" in head:
            raise StorageError(str(head["error"]))
        return head, content

    async def _answer_in_turn(self, question: dict[str, Any], asker: str | None) -> bytes:
        if asker is None:
            async with self._trusted.turn:
                return await self._trusted.answer(question)
        turn = self._turns.setdefault(asker, asyncio.Lock())
        async with turn, self._others.turn:
            begun = self._loop.time()
            if asker not in self._spent and len(self._spent) >= ASKERS_MAX:
                self._spent = {who: each for who, each in self._spent.items() if not each.is_full(begun)}
            bucket = self._spent.setdefault(asker, TokenBucket(begun, SHARE, SHARE_BURST))
            if bucket.is_empty(begun):
                raise StorageError("the past was asked for too much lately; try again in some seconds")
            try:
                return await self._others.answer(question)
            finally:
                now = self._loop.time()
                bucket.charge(now, now - begun)

    async def run(self) -> None:
        """Receive what the process says, and have it started whenever there is none."""
        wait = RESTART_SECONDS
        try:
            if not self._ready:
                await self._wait_until_ready()
                await self._start_until_it_works(0.0)
                log.info("The disk of the storage answers: samples are stored from now on")
            while True:
                began = self._loop.time()
                with contextlib.suppress(asyncio.IncompleteReadError, OSError, ValueError):
                    await self._receive()
                self._disconnect()
                self._error = ENDED
                self.health.record_end(ENDED)
                if self._loop.time() - began > RESTART_SECONDS_MAX:
                    wait = RESTART_SECONDS
                log.error(
                    "Nothing is stored: its process has ended, and is started again", extra=fields(in_s=wait)
                )
                wait = await self._start_until_it_works(wait)
                self.health.record_restart()
        except (StartupError, ConnectionError) as error:
            self._error = f"{NOT_STARTED}: {error}"
            self.health.record_error(self._error)
            log.error(
                "Nothing is stored any more: the process that stores cannot be started; restart the exporter",
                extra=fields(err=str(error)),
            )

    async def _start_until_it_works(self, wait: float) -> float:
        """Have the process started again, return the next wait. Raises ConnectionError without a starter."""
        while True:
            await asyncio.sleep(wait)
            wait = min(max(2 * wait, RESTART_SECONDS), RESTART_SECONDS_MAX)
            try:
                await self._start()
            except ConnectionError:
                raise
            except OSError as error:
                self._error = f"{NOT_STARTED}: {error.strerror or error}"
                self.health.record_error(self._error)
                log.error(
                    "Nothing is stored: its process cannot be started now, and is tried again",
                    extra=fields(err=error.strerror or str(error), in_s=wait),
                )
            else:
                self.again.set()
                return wait

    async def _receive(self) -> None:
        pipes = self._writer
        assert pipes is not None  # noqa: S101 it was started
        while True:
            kind, content = await pipes.receive()
            if kind == protocol.AGAIN:
                self.again.set()
            elif kind == protocol.STATUS:
                self.health.record_status(json.loads(content))

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    async def end(self) -> None:
        """Let the process write what it has received, and end; if it hangs, it ends when its disk answers."""
        self._trusted.end()
        self._others.end()
        self._disconnect()
        self._requests.close()
        if not self._ready:  # it still opens the directory
            with contextlib.suppress(ProcessLookupError):
                self._keeper.kill()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._keeper.wait(), END_SECONDS)


def _open_pipe() -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    return FileIO(reader, "rb"), FileIO(writer, "wb")


class StoredTracker:
    """The accounting that records each reading and goes on; a bug of the storage costs it alone."""

    def __init__(
        self, tracker: HoldingTracker, timeline: Timeline, recorder: Recorder, storage: Storage
    ) -> None:
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
            recall(tracker, timeline, content["state"])
            for time, value in content["readings"]:
                advance(tracker, timeline, protocol.Entry(protocol.READING, time, value))
        except Exception as error:  # noqa: BLE001 whatever a file holds, we sample
            log.warning("Cannot go on from what is stored: starting without it", extra=fields(err=str(error)))
            return
        if tracker.state.last is not None and tracker.state.last > reading.monotonic:
            log.warning("What is stored is newer than the clock: starting without it")
            return
        self._tracker.recall(tracker.state)
        self._timeline.recall(timeline.state)
        log.info("Continuing from the stored state", extra=fields(readings=len(content["readings"])))


@asynccontextmanager
async def store(  # noqa: PLR0913 what it joins
    config: StorageConfig,
    sampling: SamplingConfig,
    tracker: HoldingTracker,
    timeline: Timeline,
    idle_after: float,
    *,
    user: User | None,
    health: StorageHealth,
) -> AsyncIterator[tuple[Storage, StoredTracker]]:
    """Start the process that stores; yield it with its accounting. Raises StartupError if unusable."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)  # noqa: FBT003 the standard library's
    with other:
        keeper = await asyncio.create_subprocess_exec(
            *protocol.keeper_command(_arguments(config, sampling.rootfs, user), *settings()),
            stdin=other.fileno(),
        )
    storage = Storage(keeper, ours, health)
    recorder = Recorder(tracker, timeline, idle_after, sampling.interval)
    stored = StoredTracker(tracker, timeline, recorder, storage)
    try:
        await _open(storage, config.path)
        async with background_task(storage.run()):
            try:
                head, content = await storage.request({"ask": protocol.RESTORE}, RESTORE_SECONDS)
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


async def _open(storage: Storage, path: Path) -> None:
    """Open a storage, or start with a hanging disk. Raises StartupError if it cannot be used."""
    try:
        await storage.open()
    except asyncio.TimeoutError:
        log.error("Nothing is stored until the disk answers", extra=fields(path=path))
        storage.health.record_error(NOT_OPENED)
    except OSError as error:
        raise StartupError(f"{NOT_STARTED}: {error.strerror or error}") from error


def _arguments(config: StorageConfig, rootfs: Path, user: User | None) -> str:
    host = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        host = (rootfs / "etc/machine-id").read_text(encoding="ascii").strip()
    return json.dumps({**asdict(config), "path": str(config.path), "user": user, "host": host})
