"""Measure the storage, and kill it: ``python -m tests.tools.storage night`` and ``... kills --count 1000``.

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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.support.host.model import EPOCH
from tests.support.past import BOOT_ID, GOLDEN, GOLDEN_MOMENTS, StoredPast, night, shown_facts
from vramledger.storage.archive import Archive, open_directory
from vramledger.storage.moments import compute
from vramledger.storage.process import StorageProcess, serve_pipe
from vramledger.storage.protocol import ADD, AT, BEGIN, PAGE, RESTORE, SINCE, SLIDER, pack
from vramledger.storage.questions import answer
from vramledger.storage.report import make_report
from vramledger.storage.segments import READING, STATE, VERSION, write_entry

LOST_MAX = 5.0
_AT_ONCE = 50
_SECONDS = 8.0
_DISK_BYTES = 512 * 1024


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
                past.archive.flush()
            if past.now % 30 == 0:
                past.archive.keep_house()
            at.append(time.process_time())
            for name, begin, end in zip(spent, at, at[1:], strict=False):
                spent[name] += end - begin
            past.now += 1.0
        past.archive.flush()
        seconds = past.now
        storing = (spent["record"] + spent["store"]) / seconds * 1e3
        print(f"{holders} holders, {hours:g} h: storing takes {storing:.2f} ms of CPU a second")
        steps: dict[str, list[int]] = {}
        for each in past.archive.names():
            size = os.stat(each.name, dir_fd=past.directory).st_size
            steps.setdefault(each.step, []).append(size)
        for step, sizes in steps.items():
            mean = sum(sizes) / len(sizes) * 2 / 1000
            print(f"step {step}: {len(sizes)} segments, {mean:.0f} kB for an hour of one device")
        for name, ago in (("5 s", 5.0), ("40 min", 2400.0), ("half of it", seconds / 2)):
            question = {"ask": AT, "at": EPOCH + seconds - ago, "view": PAGE}
            print(f"a jump to {name} ago: {_timed(past.archive, question) * 1e3:.0f} ms")
        span = {"from": EPOCH, "to": EPOCH + seconds}
        print(f"the slider's scale: {_timed(past.archive, {'ask': SLIDER, **span}) * 1e3:.0f} ms")
        print(f"a report: {_timed(past.archive, {'ask': SINCE, **span}) * 1e3:.0f} ms")
        print(f"what a restart needs: {_timed(past.archive, {'ask': RESTORE}) * 1e3:.0f} ms")


def _timed(archive: Archive, question: dict[str, object]) -> float:
    begun = time.perf_counter()
    answer(archive, question)
    return time.perf_counter() - begun


def _store_until_killed(directory: Path, pipe: int) -> None:
    """Be the process that stores."""
    process = StorageProcess(Archive(open_directory(directory), "machine"), lambda _: None)
    serve_pipe(process, pipe)
    process.end()


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
        if self.directory.exists() and any(each.suffix != ".gz" for each in self.directory.iterdir()):
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
    if not directory.exists():
        return None
    file = open_directory(directory)
    try:
        readings = Archive(file, "machine").readings(0.0, float("inf"))
        return max((entry.time for entry in readings), default=None)
    finally:
        os.close(file)


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
        size = f"size={4 * 2**20 + _DISK_BYTES}"
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
    begin = past.now
    for thinned in (2 * 3600.0, 0.0):
        past.watch(1000)
        past.process.end()
        past.recorder.begin_again()
        reached, past.now = past.now, past.now + thinned
        for _ in range(3):
            past.archive.keep_house()
        past.now = reached
    past.watch(150)
    past.archive.flush()
    shown = {}
    for at in GOLDEN_MOMENTS:
        moment = past.archive.find(EPOCH + at)
        assert moment is not None
        shown[str(EPOCH + at)] = shown_facts(compute(moment, EPOCH + at).snapshot)
    report = make_report(past.archive, EPOCH + begin, EPOCH + past.now)
    content = {"moments": shown, "owners": report["owners"], "leftovers": report["leftovers"]}
    (directory / "shown.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.storage")
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
