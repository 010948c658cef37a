"""Run the child process that stores.

A disk may hang, and then neither a sample nor a scrape waits for it. It may change no file outside its
directory, and ends when the exporter does. If it is killed, ``keeper`` starts it again.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vramledger.logs import configure, fields, log
from vramledger.sampling.privileges import drop_privileges
from vramledger.storage import protocol
from vramledger.storage.past_writer import PastWriter

FLUSH_INTERVAL = 4.0
"""Seconds after which what was added is written: what a kill or a power cut may cost."""

HOUSE_INTERVAL = 30.0
"""Seconds from one look at age and size to the next; each thins one segment at most."""

RETRY_INTERVAL = 10.0
"""Seconds after a failure of the disk until a new segment is begun."""

HOUSE_FAILED = "old files cannot be thinned or removed"

_READ_BYTES = 1 << 20


class StorageProcess:
    """Write what the exporter sends, and say what was written."""

    def __init__(
        self, past: PastWriter, send: Callable[[bytes], None], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._past = past
        self._send = send
        self._monotonic = monotonic
        self._writing = False
        self._failed: str | None = None
        self._house_failed: str | None = None
        self._flushed = self._kept_house = self._monotonic()
        self._retry_at: float | None = None
        self._pending = self._stored = self._dropped = 0
        self._newest: float | None = None
        self._newest_stored: float | None = None
        self._size: int | None = None
        self._oldest: float | None = None

    def receive(self, kind: bytes, content: bytes) -> None:
        """Do what a message says."""
        if kind == protocol.BEGIN:
            self._writing = self._try(lambda: self._past.begin(json.loads(content)), proves=False)
        elif kind == protocol.ADD:
            self._add(content)
        elif kind == protocol.SUMMARY:
            self._past.summarise(json.loads(content))
        elif kind == protocol.CHECK:
            self._writing = self._try(self._past.check, proves=False) and self._writing

    def _add(self, line: bytes) -> None:
        entry, time_of = protocol.read_head(line)
        reading = entry == protocol.READING
        if not self._writing:
            self._dropped += reading
            return
        self._past.add(line)
        if reading:
            self._pending += 1
            self._newest = time_of

    def report(self) -> None:
        """Tell the exporter what was stored since our start, and what was not."""
        status = {
            "stored": self._stored,
            "dropped": self._dropped,
            "written": self._past.written,
            "newest": self._newest_stored,
            "size": self._size,
            "oldest": self._oldest,
            "error": self._failed,
            "house_error": self._house_failed or self._past.aside,
        }
        with suppress(BrokenPipeError):  # the exporter has ended, and what it sent is still to be read
            self._send(protocol.pack(protocol.STATUS, json.dumps(status).encode()))

    def idle(self) -> float:
        """Do what is due, and return the seconds until the next thing is."""
        now = self._monotonic()
        if now - self._flushed >= FLUSH_INTERVAL:
            self.flush()
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._send(protocol.pack(protocol.AGAIN, b""))
        if now - self._kept_house >= HOUSE_INTERVAL:
            self._keep_house()
        return max(0.0, self._flushed + FLUSH_INTERVAL - self._monotonic())

    def _keep_house(self) -> None:
        """Thin and remove what is old; a failure of that loses no reading, so it is reported apart."""
        self._kept_house = self._monotonic()
        failed: str | None = None
        try:
            try:
                self._past.keep_house()
            finally:
                self._measure()
        except OSError as error:
            if error.errno == errno.EUCLEAN:
                self._writing = False
                self._fail(error)
                return
            failed = f"{HOUSE_FAILED}: {error.strerror or error}"
            if failed != self._house_failed:
                log.error(
                    "Old files of the storage cannot be thinned or removed", extra=fields(err=str(error))
                )
        if failed is None and self._house_failed is not None:
            log.info("Old files of the storage are thinned and removed again")
        self._house_failed = failed

    def measure(self) -> None:
        """Look at how much is stored, and since when, if that can be known."""
        with suppress(OSError):
            self._measure()

    def _measure(self) -> None:
        self._size = self._oldest = None
        self._size, self._oldest = self._past.usage()

    def flush(self) -> None:
        """Write what was added, and report it."""
        self._flushed = self._monotonic()
        if self._writing:
            self._writing = self._try(self._past.flush)
        if not self._size or self._oldest is None:  # what was stored first counts before the next look
            self.measure()
        self.report()

    def end(self) -> None:
        """Write the rest, and the end of the segment."""
        if self._writing:
            self._writing = self._try(self._past.end)

    def _try(self, write: Callable[[], None], *, proves: bool = True) -> bool:
        """Write, or begin again later: that a file can be made on a full disk proves nothing."""
        try:
            write()
        except OSError as error:
            self._fail(error)
            return False
        self._stored, self._pending, self._newest_stored = self._stored + self._pending, 0, self._newest
        if proves and self._failed is not None:
            log.info("The storage is written again")
            self._failed = None
        return True

    def _fail(self, error: OSError) -> None:
        """Begin again some time later, or now if the file was put aside: what waited is lost."""
        if self._failed is None:
            log.error("Nothing is stored for now", extra=fields(err=error.strerror or str(error)))
        self._failed = error.strerror or str(error)
        put_aside = error.errno == errno.EUCLEAN
        self._retry_at = self._monotonic() + (0.0 if put_aside else RETRY_INTERVAL)
        self._dropped, self._pending, self._newest = self._dropped + self._pending, 0, self._newest_stored


def serve_pipe(process: StorageProcess, source: int) -> None:
    """Receive messages from a descriptor until it is closed."""
    unread = bytearray()
    while True:
        wait = process.idle()
        if not select.select([source], [], [], wait)[0]:
            continue
        data = os.read(source, _READ_BYTES)
        if not data:
            return
        unread += data
        while len(unread) >= protocol.HEADER.size:
            kind, size = protocol.HEADER.unpack_from(unread)
            if size > protocol.MAX_CONTENT:
                return
            if len(unread) < protocol.HEADER.size + size:
                break
            content = bytes(unread[protocol.HEADER.size : protocol.HEADER.size + size])
            del unread[: protocol.HEADER.size + size]
            process.receive(kind, content)


def _send(message: bytes) -> None:
    left = memoryview(message)
    while left:
        left = left[os.write(1, left) :]


def main() -> None:
    """Store until the exporter ends, or this process is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the exporter's end is ours
    config = json.loads(sys.argv[1])
    configure(*sys.argv[2:4])
    drop_privileges()
    past = PastWriter(
        Path(config["path"]), config["host"], retention=config["retention"], size=config["size"]
    )
    process = StorageProcess(past, _send)
    try:
        process.measure()
        serve_pipe(process, 0)
    except BrokenPipeError:
        pass  # the exporter has ended
    finally:
        process.end()
