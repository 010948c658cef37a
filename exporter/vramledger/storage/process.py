"""Run the child process that stores, and answers what the past was.

It is a process of its own because a disk may hang, and then neither a sample nor a scrape waits for it; and
because those who look at the past must not slow down those who look at the present. It may change no file
outside its directory, and ends when the exporter does: what it has got by then is written.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vramledger.errors import StartupError, VramledgerError
from vramledger.logs import configure, fields, log
from vramledger.sampling.landlock import forbid_changes
from vramledger.sampling.privileges import User, drop_privileges
from vramledger.storage.archive import Archive, lock_directory, open_directory
from vramledger.storage.protocol import (
    ADD,
    AGAIN,
    ANSWER,
    ASK,
    BEGIN,
    HEADER,
    MAX_CONTENT,
    READY,
    pack,
)
from vramledger.storage.questions import answer

FLUSH_INTERVAL = 4.0
"""Seconds after which what was added is written: what a kill or a power cut may cost."""

HOUSE_INTERVAL = 30.0
"""Seconds from one look at age and size to the next; each thins one segment at most."""

RETRY_INTERVAL = 10.0
"""Seconds after a failure of the disk until a new segment is begun."""

LOCK_SECONDS = 5.0
"""For how long we wait for the process of an exporter that has just ended, which still writes."""

_NICENESS = 10
_READ_BYTES = 1 << 20


class StorageProcess:
    """Write what the exporter sends, and answer what it asks."""

    def __init__(self, archive: Archive, send: Callable[[bytes], None]) -> None:
        """Start without a segment."""
        self._archive = archive
        self._send = send
        self._writing = False
        self._failed: str | None = None
        self._flushed = self._kept_house = time.monotonic()
        self._retry_at: float | None = None

    def receive(self, kind: bytes, content: bytes) -> None:
        """Do what a message says."""
        if kind == BEGIN:
            self._writing = self._try(lambda: self._archive.begin(json.loads(content)))
        elif kind == ADD and self._writing:
            self._archive.add(content)
        elif kind == ASK:
            self._flush()
            self._send(pack(ANSWER, self._answer(content)))

    def _answer(self, content: bytes) -> bytes:
        try:
            return answer(self._archive, json.loads(content))
        except (VramledgerError, OSError, ValueError, LookupError, TypeError) as error:
            return json.dumps({"error": str(error)}).encode() + b"\n"

    def idle(self) -> float:
        """Do what is due, and return the seconds until the next thing is."""
        now = time.monotonic()
        if now - self._flushed >= FLUSH_INTERVAL:
            self._flush()
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._send(pack(AGAIN, b""))
        if now - self._kept_house >= HOUSE_INTERVAL:
            self._keep_house()
        return max(0.0, self._flushed + FLUSH_INTERVAL - time.monotonic())

    def _keep_house(self) -> None:
        self._kept_house = time.monotonic()
        try:
            self._archive.keep_house()
        except OSError as error:
            self._complain(error)

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._writing:
            self._writing = self._try(self._archive.flush)

    def end(self) -> None:
        """Write the rest, and the end of the segment."""
        if self._writing:
            self._try(self._archive.end)

    def _try(self, write: Callable[[], None]) -> bool:
        """Write; after a failure, begin again some time later."""
        try:
            write()
        except OSError as error:
            self._complain(error)
            self._retry_at = time.monotonic() + RETRY_INTERVAL
            return False
        if self._failed is not None:
            log.info("The storage is written again")
            self._failed = None
        return True

    def _complain(self, error: OSError) -> None:
        if self._failed is None:
            log.error("Nothing is stored for now", extra=fields(err=error.strerror or str(error)))
        self._failed = error.strerror or str(error)


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
        while len(unread) >= HEADER.size:
            kind, size = HEADER.unpack_from(unread)
            if size > MAX_CONTENT:
                return
            if len(unread) < HEADER.size + size:
                break
            content = bytes(unread[HEADER.size : HEADER.size + size])
            del unread[: HEADER.size + size]
            process.receive(kind, content)


def _send(message: bytes) -> None:
    left = memoryview(message)
    while left:
        left = left[os.write(1, left) :]


def _open(config: dict[str, Any]) -> int:
    """Open the directory, and wait for its lock.

    Raises:
        StartupError: it cannot be used, or another exporter uses it.
    """
    path, user = Path(config["path"]), config["user"]
    directory = open_directory(path, tuple(user) if user else None)
    end = time.monotonic() + LOCK_SECONDS
    while not lock_directory(directory):
        if time.monotonic() > end:
            message = f"--storage.path={path} is in use by another exporter; give each its own"
            raise StartupError(message)
        time.sleep(0.05)
    return directory


def main() -> None:
    """Store until the exporter ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the exporter's end is ours
    config = json.loads(sys.argv[1])
    configure(*sys.argv[2:4])
    try:
        directory = _open(config)
    except StartupError as error:
        _send(pack(READY, str(error).encode()))
        return
    drop_privileges(become=User(*config["user"]) if config["user"] else None)
    forbid_changes([], [Path(config["path"])])
    with suppress(OSError):  # a filter of system calls may forbid it
        os.nice(_NICENESS)
    archive = Archive(directory, config["host"], retention=config["retention"], size=config["size"])
    process = StorageProcess(archive, _send)
    try:
        _send(pack(READY, b""))
        serve_pipe(process, 0)
    except BrokenPipeError:
        pass  # the exporter has ended
    finally:
        process.end()
