"""Measure the storage: ``python -m tests.lab.storage night``.

``night`` plays hours of 25 holders into a storage, and prints what disk and processor pay and how long a jump
takes. ``golden`` writes segments for the tests of later versions; run it once for each version of the format,
and keep the earlier ones.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from random import Random

from tests.support.host.model import EPOCH
from tests.support.past import GOLDEN, GOLDEN_MOMENTS, StoredPast, night, shown_facts
from vramledger.storage.answers import answer, open_past
from vramledger.storage.database import VERSION
from vramledger.storage.protocol import (
    AT,
    NAME,
    PAGE,
    RESTORE,
    SINCE,
    SLIDER,
)
from vramledger.storage.state import compute


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
    commands.add_parser("golden", help="write the segments with which later versions are tested")
    args = parser.parse_args()
    if args.command == "golden":
        write_golden()
    else:
        measure_night(args.hours, args.holders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
