"""What the past has of what was published: its moments, what is thinned, and what is never stored."""

import json
import os
import sqlite3
import stat
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from tests.support.host.model import EPOCH, GIB
from tests.support.past import (
    BOOT_ID,
    StoredPast,
    ask_sqlite,
    moment_in,
    names_in,
    night,
    small_host,
    status_of,
    times_in,
    watched_past,
)
from tests.support.sure import sure
from vramledger.model.reading import CgroupLimit, MemoryReading, ProcessUtilization, Reading, decode
from vramledger.storage.answers import open_past
from vramledger.storage.past_writer import LOG_BYTES
from vramledger.storage.protocol import NAME
from vramledger.storage.reduction import expand_reading, reduce_reading
from vramledger.storage.state import compute
from vramledger.views.table import render_table

HOUR = 3600.0
ALL = {"from": 0.0, "to": 1e11}


def test_every_moment_is_what_the_exporter_published(tmp_path: Path) -> None:
    """Ledger, states, evidence, owners and processes of a past second are those that were published then."""
    past = StoredPast(tmp_path, night(10, Random(2)))  # noqa: S311 a simulation
    published = [past.sample() for _ in range(200)]
    past.process.flush()
    for second in (0, 1, 59, 119, 120, 121, 199):
        moment = sure(moment_in(tmp_path, EPOCH + second + 0.5))
        shown, then = compute(moment, EPOCH + second + 0.5).snapshot, published[second]
        assert shown.time == then.time
        for device, before in zip(shown.devices, then.devices, strict=True):
            assert device.ledger == before.ledger
            assert [(h.pid, h.state, h.grade, h.why, h.held) for h in device.holdings] == [
                (h.pid, h.state, h.grade, h.why, h.held) for h in before.holdings
            ]
            assert device.owner_usage is not None
        assert (shown.processes, shown.ooms) == (then.processes, then.ooms)


def test_what_is_old_is_thinned(tmp_path: Path) -> None:
    """After an hour a moment each two minutes stays, after a day each ten; the summary stays as it is."""
    past = StoredPast(tmp_path, small_host(interval=5.0))
    past.watch(1900)
    past.recorder.begin_again()
    past.sample()
    past.process.flush()
    before = ask_sqlite(tmp_path, "SELECT * FROM holders")
    for age, steps, least in ((0.0, {0, 1}, 0.9), (2 * HOUR, {120}, 110.0), (30 * HOUR, {600}, 540.0)):
        past.now = 1901.0 + age
        for _ in range(4):
            past.writer.keep_house()
        with open_past(tmp_path) as reader:
            assert {each.step for each in list(reader.segments())[:-1]} == steps - {0}
        kept = [each for each in times_in(tmp_path) if each < 1790]
        assert min(later - earlier for earlier, later in pairwise(kept)) >= least
        moment = sure(moment_in(tmp_path, EPOCH + 1000.0))
        assert compute(moment, EPOCH + 1000.0).snapshot.devices[0].holdings[0].held == GIB
        assert ask_sqlite(tmp_path, "SELECT * FROM holders") == before


class _LimitedPast(StoredPast):
    """The past of an exporter whose own cgroup, like its holder's, limits memory."""

    def reading(self, boot_id: str = BOOT_ID) -> Reading:
        """Return a reading of a part of a device, and of a cgroup's limit."""
        reading = super().reading(boot_id)
        limit = CgroupLimit("/slurm/job_41", GIB, 40 * GIB, 20 * GIB)
        devices = (replace(each, limits=(limit,), partition=70 * GIB) for each in reading.devices)
        return replace(reading, devices=tuple(devices))


def test_a_part_of_a_device_is_never_shown_as_the_whole(tmp_path: Path) -> None:
    """The past has the lines of cgroups' limits and of a partition, also where it is thinned."""
    host = small_host()
    host.processes[0].cgroup = "/slurm/job_41"
    past = _LimitedPast(tmp_path, host)
    shown = render_table(past.watch(130))
    lines = [each for each in shown.splitlines() if "limit: " in each or "PARTITION: " in each]
    assert len(lines) == 2
    past.recorder.begin_again()
    past.sample()
    past.process.flush()
    for age in (0.0, 2 * HOUR, 30 * HOUR):
        past.now = 130.0 + age
        past.writer.keep_house()
        table = render_table(compute(sure(moment_in(tmp_path, EPOCH + 129.5)), EPOCH + 129.5).snapshot)
        assert [each for each in lines if each not in table] == [], age


def test_age_and_size_are_limited(tmp_path: Path) -> None:
    """What is beyond the retention goes by age, then by size; what is not ours stays."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / f"{NAME}.damaged-5").write_bytes(b"x" * 100)
    past = StoredPast(tmp_path, night(10, Random(1)), size=4 * LOG_BYTES + 150_000)  # noqa: S311 a simulation
    largest = 0
    for _ in range(40):
        past.recorder.begin_again()
        past.watch(5)
        past.process.flush()
        past.writer.keep_house()
        largest = max(largest, (tmp_path / NAME).stat().st_size)
    assert not (tmp_path / f"{NAME}.damaged-5").exists()
    assert largest <= 170_000
    size, oldest = past.writer.usage()
    assert size <= 4 * LOG_BYTES + 150_000
    assert EPOCH < sure(oldest) < EPOCH + past.now - 30, "no more goes than must"
    assert ask_sqlite(tmp_path, "SELECT min(time) FROM holders")[0][0] >= oldest
    past.end()
    aged = StoredPast(tmp_path, small_host(), retention=HOUR)
    aged.now = past.now + 5 * HOUR
    aged.sample()
    aged.process.flush()
    aged.writer.keep_house()
    assert times_in(tmp_path) == [aged.now - 1]
    assert ask_sqlite(tmp_path, "SELECT count(*) FROM holders") == [(1,)]
    assert "notes.txt" in names_in(tmp_path)


def test_a_clock_that_goes_back_loses_nothing(tmp_path: Path) -> None:
    """Both passes through a time are kept, rows of the same second stay apart, and a restart goes on."""
    past = watched_past(tmp_path, 300)
    back = 240.0
    ahead, past.now = past.now, past.now - back
    for _ in range(120):
        reading = past.reading()
        past.sample(replace(reading, monotonic=reading.monotonic + back))
    past.process.flush()
    assert ahead == 300.0
    assert len(times_in(tmp_path)) == 420
    assert ask_sqlite(tmp_path, "SELECT count(*), max(until) - min(begin) > 290 FROM watch") == [(2, 1)]
    assert ask_sqlite(tmp_path, "SELECT sum(seconds) FROM holders") == [(299 + 119,)]
    with open_past(tmp_path) as reader:
        newest = reader.newest()
    assert sure(newest).readings[-1].time == EPOCH + past.now - 1, "what was written last"


def test_files_are_private(tmp_path: Path) -> None:
    """Directory and files are for their owner alone, whatever the umask."""
    old = os.umask(0)
    try:
        past = watched_past(tmp_path / "a" / "past", 5)
        assert names_in(tmp_path / "a" / "past") == [NAME, f"{NAME}-shm", f"{NAME}-wal"]
        modes = {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "a" / "past").iterdir()}
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a" / "past").stat().st_mode) == 0o700
    assert modes == {0o600}
    past.end()
    assert names_in(tmp_path / "a" / "past") == [NAME], "who ends in order leaves one file"


def test_a_time_without_an_exporter_is_said(tmp_path: Path) -> None:
    """Between two runs the last known moment is named, with the time until which nothing is stored."""
    past = watched_past(tmp_path, 60)
    past.recorder.begin_again()
    past.now += 600
    past.watch(60)
    past.process.flush()
    shown = compute(sure(moment_in(tmp_path, EPOCH + 300.0)), EPOCH + 300.0)
    assert (shown.snapshot.time, shown.gap_until) == (EPOCH + 59, EPOCH + 660)
    assert compute(sure(moment_in(tmp_path, EPOCH + 59.7)), EPOCH + 59.7).gap_until is None
    assert moment_in(tmp_path, EPOCH - 5.0) is None
    _, report = past.ask(ask="since", **ALL)
    times = [(each["kind"], each["time"] - EPOCH) for each in report["interruptions"]]
    assert times == [("exporter-ended", 59.0), ("exporter-began", 660.0)]
    assert report["covered_seconds"] == 59 + 59


def test_a_stopped_program_is_no_interruption_of_the_exporter(tmp_path: Path) -> None:
    """A holder that gets SIGSTOP has a mark of its own, and the exporter went on."""
    host = small_host()
    host.processes[0].fates["stopped"] = 20.0
    past = StoredPast(tmp_path, host)
    past.watch(60)
    past.process.flush()
    _, report = past.ask(ask="since", **ALL)
    assert report["interruptions"] == []
    _, slider = past.ask(ask="slider", **ALL)
    assert [each["pid"] for each in slider["marks"] if each["kind"] == "stopped"] == [host.processes[0].pid]


def test_neither_environments_nor_arguments_are_stored(tmp_path: Path) -> None:
    """Of allow-listed variables only numbers and words are kept; nothing else of a program is read."""
    secret = "postgres://ada:hunter2@db/x"  # noqa: S105 a test's
    host = small_host()
    host.processes[0].settings = (("CUDA_VISIBLE_DEVICES", "0,1"), ("TF_CONFIG", secret))
    past = StoredPast(tmp_path, host)
    past.watch(130)
    past.process.flush()
    with open_past(tmp_path) as reader:
        texts = [json.dumps(entry.value) for each in reader.segments() for entry in reader.entries(each)]
    assert any("CUDA_VISIBLE_DEVICES" in each for each in texts)
    assert all("hunter2" not in each for each in texts)
    assert "hunter2" not in "\n".join(sqlite3.connect(tmp_path / NAME).iterdump())
    assert b"hunter2" not in (tmp_path / f"{NAME}-wal").read_bytes()


def test_readings_keep_what_verdicts_need(tmp_path: Path) -> None:
    """Nothing that is above zero becomes zero, and bytes stay exact."""
    past = StoredPast(tmp_path, night(5, Random(3)))  # noqa: S311 a simulation
    readings = []
    for _ in range(30):
        readings.append(past.reading())
        past.sample()
    past.process.flush()
    with open_past(tmp_path) as reader:
        kept = [expand_reading(entry.value, entry.time) for entry in reader.readings(0.0, float("inf"))]
    for reading, value in zip(readings, kept, strict=True):
        (device,), (stored_device,) = reading.devices, value["devices"]
        assert stored_device["memory"] == list(device.memory or ())
        assert stored_device["processes"] == [list(each) for each in device.processes or ()]
        for name, each in stored_device["activity"].items():
            assert (each > 0) == ((device.activity or {})[name] > 0)


@pytest.mark.parametrize("reserved", [None, 600, 0])
@pytest.mark.parametrize("free", [400, 0, 7])
def test_what_is_left_out_of_a_reading_is_made_again(tmp_path: Path, reserved: int | None, free: int) -> None:
    """Times, free bytes and an agent's allocations are those of the reading, though they do not add up."""
    past = StoredPast(tmp_path, night(25, Random(4)))  # noqa: S311 a simulation
    past.now = 61.0
    reading = past.reading()
    row = ProcessUtilization(4711, EPOCH - 3000.04, 0.5, 0.0, 0.0, 0.0)
    (device,) = reading.devices
    memory = MemoryReading(1000, free, 500, reserved)
    device = replace(device, memory=memory, process_utilization=(row, row._replace(pid=1)))
    reading = replace(reading, time=EPOCH + 0.37, monotonic=12345.678, devices=(device,))
    assert reading.agents
    value = json.loads(json.dumps(reduce_reading(reading)))
    before = json.dumps(value)
    back = decode(json.dumps(expand_reading(value, round(reading.time, 2))))
    assert json.dumps(value) == before
    assert (back.agents, back.time) == (reading.agents, reading.time)
    assert back.monotonic == pytest.approx(reading.monotonic, abs=0.011)
    assert back.devices[0].memory == device.memory
    rows = back.devices[0].process_utilization or ()
    assert [(each.pid, each.time) for each in rows] == [(4711, EPOCH - 3000.0), (1, EPOCH - 3000.0)]


def test_the_first_bytes_are_not_reported_as_none(tmp_path: Path) -> None:
    """As soon as something is on the disk, its size and its time are in the report."""
    past = StoredPast(tmp_path, small_host())
    past.process.measure()
    past.sample()
    tail = status_of(past)
    assert tail["stored"] == 1
    assert tail["size"] > 0
    assert (tail["oldest"], tail["newest"]) == (EPOCH, EPOCH)
