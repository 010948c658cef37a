"""Measure the storage, and kill it: ``python -m tests.lab.storage night`` and ``... kills --count 1000``.

``night`` plays hours of 25 holders into a storage, and prints what disk and processor pay and how long a jump
takes. ``kills`` ends the process that stores at random moments, by SIGKILL, also on a disk that is full, and
checks that no more than the last 5 s are lost. ``golden`` writes segments for the tests of later versions;
run it once for each version of the format, and keep the earlier ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from tests.support.host.model import EPOCH
from tests.support.past import BOOT_ID, GOLDEN, GOLDEN_MOMENTS, StoredPast, night, shown_facts
from vramledger.errors import RecordingError
from vramledger.storage.answers import answer, open_past
from vramledger.storage.database import VERSION
from vramledger.storage.keeper import open_directory
from vramledger.storage.process import StorageProcess, serve_pipe
from vramledger.storage.protocol import (
    ADD,
    AT,
    BEGIN,
    NAME,
    PAGE,
    READING,
    RESTORE,
    SINCE,
    SLIDER,
    STATE,
    SUMMARY,
    pack,
    write_entry,
)
from vramledger.storage.state import compute
from vramledger.storage.writing import PastWriter

LOST_MAX = 5.0
_AT_ONCE = 50
_SECONDS = 8.0
_DISK_BYTES = 16 * 2**20


def measure_night(hours: float, holders: int) -> None:
    """Print size, CPU time and the time of a jump."""
    with tempfile.TemporaryDirectory() as directory:
        past = StoredPast(Path(directory), night(holders, Random(1)))  # noqa: S311 a simulation
        spent = {"record": 0.0, "account": 0.0, "store": 0.0}
        while past.now < hours * 3600:
            reading = past.reading()
            at = [time.process_time()]
            messages = list(past.recorder.record(reading))
            at.append(time.process_time())
            snapshot = past.tracker.update(reading)
            past.timeline.record(snapshot)
            at.append(time.process_time())
            messages += past.recorder.summarise(snapshot)
            for kind, content in messages:
                past.process.receive(kind, content)
            if past.now % 4 == 0:
                past.writer.flush()
            if past.now % 30 == 0:
                past.writer.keep_house()
            at.append(time.process_time())
            for name, begin, end in zip(spent, at, at[1:], strict=False):
                spent[name] += end - begin
            past.now += 1.0
        past.writer.flush()
        seconds = past.now
        for name, each in spent.items():
            print(f"{name}: {each / seconds * 1e3:.3f} ms of CPU a second")
        storing = (spent["record"] + spent["store"]) / seconds * 1e3
        print(f"{holders} holders, {hours:g} h: storing takes {storing:.2f} ms of CPU a second")
        _print_sizes(past, hours)
        for name, ago in (("5 s", 5.0), ("40 min", 2400.0), ("half of it", seconds / 2)):
            question = {"ask": AT, "at": EPOCH + seconds - ago, "view": PAGE}
            print(f"a jump to {name} ago: {_timed(past.path, question) * 1e3:.0f} ms")
        span = {"from": EPOCH, "to": EPOCH + seconds}
        print(f"the slider's scale: {_timed(past.path, {'ask': SLIDER, **span}) * 1e3:.0f} ms")
        print(f"a report: {_timed(past.path, {'ask': SINCE, **span}) * 1e3:.0f} ms")
        print(f"what a restart needs: {_timed(past.path, {'ask': RESTORE}) * 1e3:.0f} ms")


def _print_sizes(past: StoredPast, hours: float) -> None:
    with closing(sqlite3.connect(past.path / NAME)) as connection:
        rows = connection.execute(
            "SELECT step, count(DISTINCT segment.id), sum(length(lines)), count(*) FROM segment JOIN piece "
            "ON piece.id BETWEEN segment.id * 65536 AND segment.id * 65536 + 65535 GROUP BY step"
        )
        for step, count, size, pieces in rows:
            hour = size / count * 2 / 1000
            print(f"step {step} s: {count} segments, {pieces} pieces, {hour:.0f} kB for an hour")
        for table in ("holder_minute", "device_minute", "event", "holder"):
            (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 ours
            print(f"{table}: {count / hours:.0f} rows an hour")
        connection.execute("VACUUM INTO ?", (str(past.path / "copy"),))
        before = (past.path / "copy").stat().st_size
    with closing(sqlite3.connect(past.path / "copy", isolation_level=None)) as copy:
        for table in ("piece", "segment"):
            copy.execute(f"DELETE FROM {table}")  # noqa: S608 ours
        copy.execute("VACUUM")
        pages, free = (
            copy.execute(f"PRAGMA {each}").fetchone()[0] for each in ("page_count", "freelist_count")
        )
    summary = (pages - free) * 4096
    (past.path / "copy").unlink()
    print(f"the file: {(past.path / NAME).stat().st_size / 1000:.0f} kB, packed {before / 1000:.0f} kB")
    print(f"of that the summary: {summary / 1000 / hours:.0f} kB for an hour")
    print(f"written to the log: {past.writer.written / 1e6 / hours:.1f} MB an hour")


def _timed(path: Path, question: dict[str, object]) -> float:
    begun = time.perf_counter()
    answer(path, question)
    return time.perf_counter() - begun


def _store_until_killed(directory: Path, pipe: int) -> None:
    """Be the process that stores."""
    os.close(open_directory(directory))
    process = StorageProcess(PastWriter(directory, "machine"), lambda _: None)
    serve_pipe(process, pipe)
    process.end()


def _summary(now: float, held: int) -> dict[str, object]:
    """Return the summary of a host whose holder changes its state each second."""
    state = ("active", "idle")[int(now) % 2]
    holder = ["user", "ada", "ada", "train.py", state, "proven", held, False]
    device = {"gpu": 0, "total": 2**31, "used": held, "peak": held, "wasted": 0, "unattributed": 0}
    return {"time": now, "up": True, "devices": {"GPU-1": {**device, "holders": {"7/1": holder}}}, "ooms": {}}


class _Running:
    """One process that stores, and when it will be killed."""

    def __init__(self, directory: Path, end: float, others: list[_Running]) -> None:
        reader, self.writer = os.pipe()
        self.directory, self.end = directory, end
        self.begun = self.newest = time.time()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for other in (self, *others):
                    os.close(other.writer)
                _store_until_killed(directory, reader)
            finally:
                os._exit(0)
        os.close(reader)
        header = {"time": self.begun, "boot": BOOT_ID, "interval": 1.0, "idle_after": 600.0, "owners_max": 25}
        self.send(BEGIN, json.dumps(header).encode())
        self.send(ADD, write_entry(STATE, self.begun, {}))

    def send(self, kind: bytes, content: bytes) -> None:
        """Send it a message."""
        os.write(self.writer, pack(kind, content))

    def store(self, now: float, random: Random) -> None:
        """Have a reading stored, ten a second."""
        if now - self.newest >= 0.1:
            self.newest = now
            self.send(ADD, write_entry(READING, now, {"time": now, "noise": random.randbytes(64).hex()}))
            self.send(SUMMARY, json.dumps(_summary(now, random.randrange(2**30))).encode())

    def kill(self) -> None:
        """Kill it as the kernel does."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.writer)

    def faults(self, filled_at: float | None) -> list[str]:
        """Return what is wrong with what it left."""
        until = min(self.newest, filled_at or self.newest)
        found = _newest(self.directory) or self.begun
        wrong = [f"{self.directory.name}: lost {until - found:.1f} s"] if until - found > LOST_MAX else []
        if self.directory.exists() and any("damaged" in each.name for each in self.directory.iterdir()):
            wrong.append(f"{self.directory.name}: a torn file was taken for a damaged one")
        return wrong


def kill_some(count: int, disk: Path, random: Random) -> list[str]:
    """End processes at random moments, all at once; return what was lost beyond the limit."""
    running: list[_Running] = []
    for number in range(count):
        end = time.time() + random.uniform(0.2, _SECONDS)
        running.append(_Running(disk / f"past-{number}", end, running))
    full = time.time() + random.uniform(1.0, _SECONDS) if random.random() < 0.5 else None
    filled_at: float | None = None
    wrong = []
    while running:
        now = time.time()
        if full is not None and now >= full and filled_at is None:
            filled_at = now
            _fill(disk)
        for each in list(running):
            each.store(now, random)
            if now >= each.end:
                running.remove(each)
                each.kill()
                wrong += each.faults(filled_at)
        time.sleep(0.02)
    return wrong


def _newest(directory: Path) -> float | None:
    """Return the time of the newest reading that is stored, None where there is none."""
    if not (directory / NAME).exists():
        return None
    with suppress(RecordingError), open_past(directory) as past:
        if past.connection.execute("PRAGMA integrity_check").fetchone()[0] != "ok" or past.damaged:
            return float("-inf")
        rows = past.connection.execute("SELECT max(time + seconds) FROM holder_minute").fetchone()[0]
        newest = max((entry.time for entry in past.readings(0.0, float("inf"))), default=None)
        if newest is not None and (rows is None or not newest - 1 <= rows <= newest):
            return float("-inf")  # the summary goes as far as the readings
        return newest
    return None


def _fill(disk: Path) -> None:
    with (disk / "other").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def kill_many(count: int) -> int:
    """Kill in groups, each on a small disk of its own; return the exit status."""
    seed = int(time.time())
    random = Random(seed)  # noqa: S311 moments of kills
    wrong: list[str] = []
    done = fulls = 0
    while done < count:
        disk = Path(tempfile.mkdtemp(prefix="storage-kills-"))
        size = f"size={_DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", disk], check=True)
        try:
            group = min(_AT_ONCE, count - done)
            wrong += kill_some(group, disk, random)
            fulls += group if (disk / "other").exists() else 0
            done += group
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
            shutil.rmtree(disk)
        print(f"{done} ended, {fulls} beside a full disk; {len(wrong)} lost more than {LOST_MAX:g} s")
    print(*wrong, f"seed {seed}", sep="\n")
    return 1 if wrong else 0


def write_golden() -> None:
    """Store half an hour of 6 holders as this version of the format does, with what must be shown of it."""
    directory = GOLDEN / f"v{VERSION}"
    directory.mkdir(parents=True)
    past = StoredPast(directory, night(6, Random(1)))  # noqa: S311 a simulation
    for thinned in (2 * 3600.0, 0.0):
        past.watch(1000)
        past.process.flush()
        past.recorder.begin_again()
        past.sample()
        reached, past.now = past.now, past.now + thinned
        past.writer.keep_house()
        past.now = reached
    past.watch(150)
    past.process.flush()
    shown = {}
    for at in GOLDEN_MOMENTS:
        with open_past(directory) as found:
            moment = found.find(EPOCH + at)
        assert moment is not None
        shown[str(EPOCH + at)] = shown_facts(compute(moment, EPOCH + at).snapshot)
    report = past.ask(ask=SINCE, **{"from": EPOCH, "to": EPOCH + past.now})[1]
    past.process.end()
    content = {"moments": shown, "owners": report["owners"], "leftovers": report["leftovers"]}
    (directory / "shown.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.storage")
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("night")
    measured.add_argument("--hours", type=float, default=10.0)
    measured.add_argument("--holders", type=int, default=25)
    killed = commands.add_parser("kills")
    killed.add_argument("--count", type=int, default=1000)
    commands.add_parser("golden", help="write the segments with which later versions are tested")
    args = parser.parse_args()
    if args.command == "golden":
        write_golden()
        return 0
    if args.command == "kills":
        return kill_many(args.count)
    measure_night(args.hours, args.holders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
