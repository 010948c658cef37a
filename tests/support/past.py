"""A stored past: a simulated host, recorded by the exporter's own parts, faster than it happens."""

import asyncio
import json
import os
import socket
import sqlite3
from contextlib import closing
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from tests.support.host.model import EPOCH, GIB, Gpu, Host, Process
from tests.support.host.programs import Fixed, Held, Torch, idle, in_bursts, notebook, sawtooth, steady
from vramledger.accounting.tracker import HoldingTracker
from vramledger.logs import settings
from vramledger.metrics.storage import StorageHealth
from vramledger.model.reading import Reading, decode, encode
from vramledger.model.snapshot import DeviceSnapshot, Snapshot
from vramledger.serving.storage import Storage
from vramledger.storage.answers import answer, open_past
from vramledger.storage.keeper import open_directory
from vramledger.storage.past_writer import PastWriter
from vramledger.storage.process import StorageProcess
from vramledger.storage.protocol import HEADER, NAME, STATUS, Moment, keeper_command
from vramledger.storage.recorder import Recorder
from vramledger.views.timeline import Timeline

BOOT_ID = "boot-1"
IDLE_AFTER = 600.0


def night(holders: int, random: Random) -> Host:
    """Return a host with a GPU and this many holders: trainings, notebooks, idle ones, some that end."""
    processes = []
    for number in range(holders):
        kind = number % 5
        work = in_bursts(random, 30, 5)
        program = (
            Torch(sawtooth(random, 2 * GIB, 0.5 * GIB, 7.0), work),
            notebook(random, 1.5 * GIB, 900),
            Held(steady(2 * GIB), idle),
            Held(steady(GIB), in_bursts(random, 20, 60)),
            Torch(steady(2 * GIB), in_bursts(random, 60, 600)),
        )[kind]
        process = Process(4000 + 10 * number, {0: program}, begin=-100.0 + number * 37 % 200)
        process.user, process.command = ("ada", "bob", "carol")[number % 3], f"train_{number % 7}.py"
        process.agent = kind == 0
        if kind == 3:
            process.end = 3000.0 + 400 * number
        processes.append(process)
    return Host([Gpu()], processes, random)


GOLDEN = Path(__file__).parents[1] / "recordings" / "storage"
"""Segments that each version of the format has written, with what they must show."""

GOLDEN_MOMENTS = (130.5, 1300.0, 1930.0)
"""Seconds after the beginning: in a thinned segment, in a whole one, and in one that was being written."""


def shown_facts(snapshot: Snapshot) -> dict[str, Any]:
    """Return what must not change in how a moment is shown: bytes, states, grades, owners, times."""
    return {
        "time": snapshot.time,
        "ooms": [list(each) for each in snapshot.ooms],
        "devices": [_shown_device(snapshot, device) for device in snapshot.devices],
    }


def _shown_device(snapshot: Snapshot, device: DeviceSnapshot) -> dict[str, Any]:
    states = device.ledger.states if device.ledger else {}
    owners = device.owner_usage.owners if device.owner_usage else ()
    holdings = [
        [each.pid, each.state.value, each.grade.value, each.held, each.since, *owner_of(snapshot, each.pid)]
        for each in device.holdings
    ]
    return {
        "uuid": device.reading.uuid,
        "states": {state.value: held for state, held in states.items()},
        "holdings": holdings,
        "owners": sorted([each.type, each.name, sum(each.byte_seconds.values())] for each in owners),
    }


def owner_of(snapshot: Snapshot, pid: int) -> tuple[str, str]:
    facts = snapshot.facts_of(pid)
    owner = None if facts is None else facts.owner_or_user
    return ("unknown", "") if owner is None else (owner.type, owner.name)


class StoredPast:
    """An exporter of a simulated host with its storage, in one process and by the host's clock."""

    idle_after = IDLE_AFTER

    def __init__(
        self, path: Path, host: Host, *, machine: str = "machine-1", retention: float = inf, size: float = inf
    ) -> None:
        self.path = path
        self.host = host
        self.now = 0.0  # seconds since the beginning
        os.close(open_directory(path))
        self.writer = PastWriter(
            path, machine, retention=retention, size=size, clock=lambda: EPOCH + self.now
        )
        self.messages: list[bytes] = []
        self.process = StorageProcess(self.writer, self.messages.append, monotonic=lambda: self.now)
        self.tracker = HoldingTracker(idle_after=self.idle_after, interval=host.interval)
        self.timeline = Timeline()
        self.recorder = Recorder(self.tracker, self.timeline, self.idle_after, host.interval)

    def reading(self, boot_id: str = BOOT_ID) -> Reading:
        """Return the reading of this moment, as a sampler sends it."""
        return decode(encode(self.host.reading(self.now, boot_id=boot_id)))

    def sample(self, reading: Reading | None = None) -> Snapshot:
        """Take a sample, of this reading if there is one, store it, and go on by one interval."""
        reading = reading or self.reading()
        messages = list(self.recorder.record(reading))
        snapshot = self.tracker.update(reading)
        self.timeline.record(snapshot)
        for kind, content in (*messages, *self.recorder.summarise(snapshot)):
            self.process.receive(kind, content)
        self.now += self.host.interval
        return snapshot

    def send_to(self, storage: Storage) -> None:
        """Send this moment's reading to an exporter's storage; who has said "again" has lost those before."""
        if storage.again.is_set():
            storage.again.clear()
            self.recorder.begin_again()
        reading = self.reading()
        storage.send(self.recorder.record(reading))
        self.tracker.update(reading)
        self.now += 1

    def watch(self, seconds: float) -> Snapshot:
        end = self.now + seconds
        while True:
            snapshot = self.sample()
            if self.now >= end:
                return snapshot

    def end(self) -> None:
        for kind, content in self.recorder.last_state():
            self.process.receive(kind, content)
        self.process.end()

    def ask(self, **question: object) -> tuple[dict[str, Any], Any]:
        """Write what waits, and return the head of an answer and its content, as JSON values."""
        self.process.flush()
        first, _, content = answer(self.path, question).partition(b"\n")
        lines = [json.loads(each) for each in content.splitlines()]
        return json.loads(first), lines if question["ask"] == "readings" else lines[0]


async def start_storage(path: Path, *before: str) -> tuple[Storage, asyncio.subprocess.Process]:
    """Start the process that stores, behind another command; return what talks to it, and the process."""
    config = {"path": str(path), "retention": 1e9, "size": 2**29, "user": None, "host": "machine-1"}
    command = keeper_command(json.dumps(config), *settings())
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with other:
        keeper = await asyncio.create_subprocess_exec(*before, *command, stdin=other.fileno())
    return Storage(keeper, ours, StorageHealth(2**29, 1e9)), keeper


def small_host(interval: float = 1.0) -> Host:
    processes = [Process(7, {0: Fixed(GIB)}, begin=-900.0)]
    return Host([Gpu()], processes, Random(1), interval=interval)  # noqa: S311 a simulation


def watched_past(path: Path, seconds: int) -> StoredPast:
    """Return the past of a small host that was watched for some seconds, all of it on the disk."""
    past = StoredPast(path, small_host())
    past.watch(seconds)
    past.process.flush()
    return past


def names_in(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def times_in(path: Path, host: str = "machine-1") -> list[float]:
    """Return the times of all readings, as a reader beside the exporter sees them."""
    with open_past(path, host) as past:
        return [entry.time - EPOCH for entry in past.readings(0.0, inf)]


def moment_in(path: Path, at: float) -> Moment | None:
    with open_past(path) as past:
        return past.find(at)


def ask_sqlite(path: Path, sql: str, *values: object) -> list[Any]:
    """Return what a person with ``sqlite3`` gets."""
    with closing(sqlite3.connect(f"file:{path / NAME}?mode=ro", uri=True)) as connection:
        return connection.execute(sql, values).fetchall()


def status_of(past: StoredPast) -> dict[str, Any]:
    """Have what waits written, and return what the process that stores says then."""
    past.process.flush()
    statuses: list[dict[str, Any]] = [
        json.loads(each[HEADER.size :]) for each in past.messages if each[:1] == STATUS
    ]
    return statuses[-1]
