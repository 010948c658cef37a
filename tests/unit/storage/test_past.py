"""The file of the past: whatever a kill, a disk or another program does, what is whole is read."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.host.model import EPOCH, GIB, Gpu, Host, Process
from tests.support.host.programs import Fixed
from tests.support.past import BOOT_ID, StoredPast, night
from tests.support.requirements import do_without, require_root
from vramledger.errors import RecordingError, StartupError
from vramledger.model.reading import CgroupLimit, MemoryReading, ProcessUtilization, Reading
from vramledger.model.reading_json import decode
from vramledger.storage.answers import answer_or_problem, open_past
from vramledger.storage.database import PIECES
from vramledger.storage.keeper import open_directory
from vramledger.storage.protocol import AGAIN, HEADER, NAME, STATUS, Moment
from vramledger.storage.reduction import expand_reading, reduce_reading
from vramledger.storage.state import compute
from vramledger.storage.writing import HELD, LOG_BYTES
from vramledger.views.table import render_table

HOUR = 3600.0
DAY = 24 * HOUR
ALL = {"from": 0.0, "to": 1e11}


def small(seed: int = 1) -> Host:
    """Return a host with one holder."""
    return Host([Gpu()], [Process(7, {0: Fixed(GIB)}, begin=-900.0)], Random(seed))  # noqa: S311 a simulation


def names(path: Path) -> list[str]:
    """Return the names of the files."""
    return sorted(each.name for each in path.iterdir())


def times(path: Path, host: str = "machine-1") -> list[float]:
    """Return the times of all readings, as a reader beside the exporter sees them."""
    with open_past(path, host) as past:
        return [entry.time - EPOCH for entry in past.readings(0.0, float("inf"))]


def found(path: Path, at: float) -> Moment | None:
    """Return what is stored for a moment."""
    with open_past(path) as past:
        return past.find(at)


def query(path: Path, sql: str, *values: object) -> list[Any]:
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


def again(past: StoredPast) -> bool:
    """Do what is due in the process that stores; begin again if it says so, as the exporter does."""
    past.messages.clear()
    past.process.idle()
    if not any(each[:1] == AGAIN for each in past.messages):
        return False
    past.recorder.begin_again()
    return True


@contextmanager
def full_disk() -> Iterator[None]:
    """Let files be made but not written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_moment_is_what_the_exporter_published(tmp_path: Path) -> None:
    """Ledger, states, evidence, owners and processes of a past second are those that were published then."""
    past = StoredPast(tmp_path, night(10, Random(2)))  # noqa: S311 a simulation
    published = [past.sample() for _ in range(200)]
    past.process.flush()
    for second in (0, 1, 59, 119, 120, 121, 199):
        moment = found(tmp_path, EPOCH + second + 0.5)
        assert moment is not None
        shown, then = compute(moment, EPOCH + second + 0.5).snapshot, published[second]
        assert shown.time == then.time
        for device, before in zip(shown.devices, then.devices, strict=True):
            assert device.ledger == before.ledger
            assert [(h.pid, h.state, h.grade, h.why, h.held) for h in device.holdings] == [
                (h.pid, h.state, h.grade, h.why, h.held) for h in before.holdings
            ]
            assert device.owner_usage is not None
        assert shown.processes == then.processes
        assert shown.ooms == then.ooms


@pytest.mark.parametrize("cut", [1, 0.9, 0.5, 0.1, 0.0])
def test_a_torn_log_is_read_up_to_its_tear(tmp_path: Path, cut: float) -> None:
    """Wherever a power cut ends the log, the readings before are there, and the file is not damaged."""
    past = StoredPast(tmp_path / "past", small())
    for _ in range(40):
        past.sample()
        past.process.flush()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (NAME, f"{NAME}-wal"):
        shutil.copy(tmp_path / "past" / name, copy)
    log = copy / f"{NAME}-wal"
    size = log.stat().st_size
    with log.open("rb+") as file:
        file.truncate(int(size * cut))
        file.seek(0, os.SEEK_END)
        file.write(os.urandom(5000))
    later = StoredPast(copy, small())
    later.now = past.now
    later.watch(3)
    later.process.flush()
    kept = times(copy)
    assert kept[:-3] == [float(each) for each in range(len(kept) - 3)]
    assert kept[-3:] == [40.0, 41.0, 42.0]
    assert cut < 1 or len(kept) == 43
    assert not [each for each in names(copy) if "damaged" in each]


def problem_of(path: Path, ask: str) -> dict[str, Any]:
    """Return the head of an answer: whether there is one, and whether damage was met."""
    question = json.dumps({"ask": ask, **ALL}).encode()
    head: dict[str, Any] = json.loads(answer_or_problem(path, question, "").split(b"\n")[0])
    return head


def damage(path: Path, part: float) -> None:
    """Overwrite a page of a file with noise."""
    with path.open("rb+") as file:
        file.seek(int(path.stat().st_size // 4096 * part) * 4096)
        file.write(os.urandom(4096))


@pytest.mark.parametrize("where", [0.0, *(each / 16 for each in range(1, 16)), "short", "text", "other"])
def test_a_damaged_file_is_put_aside(tmp_path: Path, where: float | str) -> None:
    """Whatever page has noise, storing goes on: in a new file where the old one cannot be used."""
    first = StoredPast(tmp_path, night(5, Random(1)))  # noqa: S311 a simulation
    first.watch(130)
    first.end()
    file = tmp_path / NAME
    if where == "short":
        os.truncate(file, 5000)
    elif where == "text":
        file.write_text("not a database" * 1000, encoding="ascii")
    elif where == "other":
        file.unlink()
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("CREATE TABLE mine (x)")
    else:
        assert isinstance(where, float)
        damage(file, where)
    was_noticed = [problem_of(tmp_path, each).get("damaged") for each in ("since", "restore")]
    past = StoredPast(tmp_path, first.host)
    past.now = first.now + 5
    past.sample()
    past.process.flush()
    if any(was_noticed):
        past.process.receive(b"C", b"")
    for _ in range(70):
        again(past)
        past.sample()
    status = status_of(past)
    assert status["error"] is None
    assert times(tmp_path)[-1] == past.now - 1
    assert problem_of(tmp_path, "since") == {}
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]
    aside = [each for each in names(tmp_path) if "damaged" in each]
    assert len(aside) <= 1
    if aside:
        assert aside[0] in status["house_error"]


def test_a_wrong_bit_of_a_moment_costs_its_segment_alone(tmp_path: Path) -> None:
    """Where the lines of a segment were changed nothing of it is shown, and everything else is."""
    past = StoredPast(tmp_path, small())
    past.watch(1900)
    past.process.flush()
    with closing(sqlite3.connect(tmp_path / NAME)) as connection:
        number, lines = connection.execute(
            "SELECT id, lines FROM piece ORDER BY length(lines) DESC LIMIT 1"
        ).fetchone()
        wrong = bytearray(lines)
        wrong[len(wrong) // 2] ^= 0x04
        connection.execute("UPDATE piece SET lines = ? WHERE id = ?", (bytes(wrong), number))
        connection.commit()
    assert number // PIECES == 1
    with open_past(tmp_path) as reader:
        assert reader.find(EPOCH + 1850.0) is not None
        assert [each.time for each in reader.readings(EPOCH + 1800.0, 1e11)]
        assert not reader.damaged or number % PIECES == 0
        list(reader.readings(0.0, 1e11))
        assert reader.damaged
    past.process.receive(b"C", b"")
    assert min(times(tmp_path)) == 1800.0
    assert query(tmp_path, "SELECT count(*) FROM holders")[0][0] > 30, "the summary of that time stays"
    assert "damaged" in status_of(past)["house_error"]


@pytest.mark.parametrize("what", ["host", "version"])
def test_another_hosts_or_a_newer_file_is_put_aside(tmp_path: Path, what: str) -> None:
    """A file of another machine or of a newer version is kept under another name, and read by nobody."""
    past = StoredPast(tmp_path, small())
    past.watch(10)
    past.end()
    assert times(tmp_path, "") != []
    if what == "version":
        with closing(sqlite3.connect(tmp_path / NAME)) as connection:
            connection.execute("PRAGMA user_version = 99")
    machine, suffix = ("machine-2", "other-host") if what == "host" else ("machine-1", "newer")
    with pytest.raises(RecordingError):
        times(tmp_path, machine)
    later = StoredPast(tmp_path, small(), machine=machine)
    later.now = 100.0
    later.watch(5)
    later.end()
    assert [each.rsplit("-", 1)[0] for each in names(tmp_path)] == [NAME, f"{NAME}.{suffix}"]
    assert times(tmp_path, machine) == [100.0, 101.0, 102.0, 103.0, 104.0]


def test_what_is_old_is_thinned(tmp_path: Path) -> None:
    """After an hour a moment each two minutes stays, after a day each ten; the summary stays as it is."""
    past = StoredPast(tmp_path, small())
    past.watch(1900)
    past.recorder.begin_again()
    past.sample()
    past.process.flush()
    before = query(tmp_path, "SELECT * FROM holders")
    for age, steps, least in ((0.0, {0, 1}, 0.9), (2 * HOUR, {120}, 110.0), (30 * HOUR, {600}, 540.0)):
        past.now = 1901.0 + age
        for _ in range(4):
            past.writer.keep_house()
        with open_past(tmp_path) as reader:
            assert {each.step for each in list(reader.segments())[:-1]} == steps - {0}
        kept = [each for each in times(tmp_path) if each < 1790]
        assert min(later - earlier for earlier, later in pairwise(kept)) >= least
        moment = found(tmp_path, EPOCH + 1000.0)
        assert moment is not None
        assert compute(moment, EPOCH + 1000.0).snapshot.devices[0].holdings[0].held == GIB
        assert query(tmp_path, "SELECT * FROM holders") == before


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
    host = small()
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
        moment = found(tmp_path, EPOCH + 129.5)
        assert moment is not None
        table = render_table(compute(moment, EPOCH + 129.5).snapshot)
        assert [each for each in lines if each not in table] == [], age


def test_age_and_size_are_limited(tmp_path: Path) -> None:
    """What is beyond the retention goes by age, then by size; what is not ours stays."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / f"{NAME}.damaged-5").write_bytes(b"x" * 100)
    past = StoredPast(tmp_path, night(25, Random(1)), size=4 * LOG_BYTES + 200_000)  # noqa: S311 a simulation
    largest = 0
    for _ in range(90):
        past.watch(60)
        past.process.flush()
        past.writer.keep_house()
        largest = max(largest, (tmp_path / NAME).stat().st_size)
    assert not (tmp_path / f"{NAME}.damaged-5").exists()
    assert largest <= 400_000
    size, oldest = past.writer.usage()
    assert size <= 4 * LOG_BYTES + 200_000
    assert oldest is not None
    assert oldest > EPOCH
    assert query(tmp_path, "SELECT min(time) FROM holders")[0][0] >= oldest
    past.end()
    aged = StoredPast(tmp_path, small(), retention=HOUR)
    aged.now = past.now + 5 * HOUR
    aged.sample()
    aged.process.flush()
    aged.writer.keep_house()
    assert times(tmp_path) == [aged.now - 1]
    assert query(tmp_path, "SELECT count(*) FROM holders") == [(1,)]
    assert "notes.txt" in names(tmp_path)


def test_a_clock_that_goes_back_loses_nothing(tmp_path: Path) -> None:
    """Both passes through a time are kept, rows of the same second stay apart, and a restart goes on."""
    past = StoredPast(tmp_path, small())
    past.watch(300)
    back = 240.0
    ahead, past.now = past.now, past.now - back
    for _ in range(120):
        reading = past.reading()
        reading = replace(reading, monotonic=reading.monotonic + back)
        for kind, content in past.recorder.record(reading):
            past.process.receive(kind, content)
        snapshot = past.tracker.update(reading)
        for kind, content in past.recorder.summarise(snapshot):
            past.process.receive(kind, content)
        past.now += 1.0
    past.process.flush()
    assert ahead == 300.0
    assert len(times(tmp_path)) == 420
    assert query(tmp_path, "SELECT count(*), max(until) - min(begin) > 290 FROM watch") == [(2, 1)]
    assert query(tmp_path, "SELECT sum(seconds) FROM holders") == [(299 + 119,)]
    with open_past(tmp_path) as reader:
        newest = reader.newest()
    assert newest is not None
    assert newest.readings[-1].time == EPOCH + past.now - 1, "what was written last"


def test_files_are_private(tmp_path: Path) -> None:
    """Directory and files are for their owner alone, whatever the umask."""
    old = os.umask(0)
    try:
        past = StoredPast(tmp_path / "a" / "past", small())
        past.watch(5)
        past.process.flush()
        assert names(tmp_path / "a" / "past") == [NAME, f"{NAME}-shm", f"{NAME}-wal"]
        modes = {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "a" / "past").iterdir()}
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a" / "past").stat().st_mode) == 0o700
    assert modes == {0o600}
    past.end()
    assert names(tmp_path / "a" / "past") == [NAME], "who ends in order leaves one file"


@pytest.mark.parametrize("what", ["link", "pipe", "directory"])
def test_what_is_no_plain_file_is_neither_read_nor_written(tmp_path: Path, what: str) -> None:
    """A link, a pipe or a directory in the place of the file is renamed, without waiting for it."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    where = tmp_path / "past"
    where.mkdir(mode=0o700)
    if what == "link":
        (where / NAME).symlink_to(secret)
    elif what == "pipe":
        os.mkfifo(where / NAME)
    else:
        (where / NAME).mkdir()
    with pytest.raises(RecordingError, match="not a plain file"):
        times(where)
    past = StoredPast(where, small())
    past.watch(5)
    past.end()
    assert secret.read_bytes() == b"x"
    assert times(where) == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("what", ["user", "mode", "file", "link"])
def test_a_directory_that_others_control_is_refused(tmp_path: Path, what: str) -> None:
    """Another user's directory or link, one that others may write to, and a file give a one-line error."""
    require_root()
    path = tmp_path / "past"
    if what == "file":
        path.write_text("", encoding="utf-8")
    elif what == "link":
        (tmp_path / "real").mkdir()
        path.symlink_to(tmp_path / "real")
        os.chown(path, 1234, 1234, follow_symlinks=False)
    else:
        path.mkdir()
        if what == "user":
            os.chown(path, 1234, 1234)
        else:
            path.chmod(0o777)
    with pytest.raises(StartupError, match=r"--storage\.path=") as refused:
        open_directory(path)
    assert "\n" not in str(refused.value)


def test_root_gives_away_only_what_is_ours(tmp_path: Path) -> None:
    """Root's exporter gives its user an empty directory or one with a past, and no other."""
    require_root()
    ours, other = tmp_path / "ours", tmp_path / "other"
    past = StoredPast(ours, small())
    past.watch(5)
    past.process.flush()
    past.end()
    other.mkdir()
    (other / "passwords").touch()
    os.close(open_directory(ours, (65532, 65532)))
    assert (ours.stat().st_uid, stat.S_IMODE(ours.stat().st_mode)) == (65532, 0o700)
    assert {each.stat().st_uid for each in ours.iterdir()} == {65532}
    with pytest.raises(StartupError, match="belongs to user 0"):
        open_directory(other, (65532, 65532))
    assert other.stat().st_uid == 0


def test_a_time_without_an_exporter_is_said(tmp_path: Path) -> None:
    """Between two runs the last known moment is named, with the time until which nothing is stored."""
    past = StoredPast(tmp_path, small())
    past.watch(60)
    past.recorder.begin_again()
    past.now += 600
    past.watch(60)
    past.process.flush()
    moment = found(tmp_path, EPOCH + 300.0)
    assert moment is not None
    shown = compute(moment, EPOCH + 300.0)
    assert shown.snapshot.time == EPOCH + 59
    assert shown.gap_until == EPOCH + 660
    inside = found(tmp_path, EPOCH + 59.7)
    assert inside is not None
    assert compute(inside, EPOCH + 59.7).gap_until is None
    assert found(tmp_path, EPOCH - 5.0) is None
    _, report = past.ask(ask="since", **ALL)
    assert [(each["kind"], each["time"] - EPOCH) for each in report["interruptions"]] == [
        ("exporter-ended", 59.0),
        ("exporter-began", 660.0),
    ]
    assert report["covered_seconds"] == 59 + 59


def test_a_stopped_program_is_no_interruption_of_the_exporter(tmp_path: Path) -> None:
    """A holder that gets SIGSTOP has a mark of its own, and the exporter went on."""
    host = small()
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
    host = small()
    host.processes[0].settings = (("CUDA_VISIBLE_DEVICES", "0,1"), ("TF_CONFIG", secret))
    past = StoredPast(tmp_path, host)
    past.watch(130)
    past.process.flush()
    with open_past(tmp_path) as reader:
        texts = [json.dumps(entry.value) for each in reader.segments() for entry in reader.entries(each)]
    assert any("CUDA_VISIBLE_DEVICES" in each for each in texts)
    assert all("hunter2" not in each for each in texts)
    dumped = "\n".join(sqlite3.connect(tmp_path / NAME).iterdump())
    assert "hunter2" not in dumped
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
    device = replace(
        device,
        memory=MemoryReading(1000, free, 500, reserved),
        process_utilization=(row, row._replace(pid=1)),
    )
    reading = replace(reading, time=EPOCH + 0.37, monotonic=12345.678, devices=(device,))
    assert reading.agents
    value = json.loads(json.dumps(reduce_reading(reading)))
    before = json.dumps(value)
    back = decode(json.dumps(expand_reading(value, round(reading.time, 2))))
    assert json.dumps(value) == before
    assert back.agents == reading.agents
    assert back.time == reading.time
    assert back.monotonic == pytest.approx(reading.monotonic, abs=0.011)
    assert back.devices[0].memory == device.memory
    rows = back.devices[0].process_utilization or ()
    assert [(each.pid, each.time) for each in rows] == [(4711, EPOCH - 3000.0), (1, EPOCH - 3000.0)]


def test_the_first_bytes_are_not_reported_as_none(tmp_path: Path) -> None:
    """As soon as something is on the disk, its size and its time are in the report."""
    past = StoredPast(tmp_path, small())
    past.process.measure()
    past.sample()
    tail = status_of(past)
    assert tail["stored"] == 1
    assert tail["size"] > 0
    assert (tail["oldest"], tail["newest"]) == (EPOCH, EPOCH)


def test_the_newest_reading_is_one_that_is_on_the_disk(tmp_path: Path) -> None:
    """However often a full disk fails, no lost reading is called the newest that is stored, or stored."""
    past = StoredPast(tmp_path, small())
    past.sample()
    before = status_of(past)
    assert before["newest"] == EPOCH
    for failures in (1, 2, 3):
        past.sample()
        with full_disk():
            failed = status_of(past)
        assert (failed["newest"], failed["stored"], failed["dropped"]) == (EPOCH, 1, failures)
        assert failed["error"]
        past.recorder.begin_again()
    past.sample()
    after = status_of(past)
    assert (after["newest"], after["stored"], after["error"]) == (EPOCH + past.now - 1, 2, None)
    assert times(tmp_path) == [0.0, past.now - 1]


def test_old_files_that_stay_are_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be removed is reported until it is gone; no reading is lost, and other files go."""
    past = StoredPast(tmp_path, small(), retention=HOUR)
    caplog.set_level("INFO")
    stuck, other = tmp_path / f"{NAME}.damaged-5", tmp_path / f"{NAME}.newer-6"
    stuck.mkdir()
    other.write_bytes(b"x")
    for each in (stuck, other):
        os.utime(each, (5, 5))
    past.now = 8 * DAY
    for _ in range(5):
        past.watch(40)
        past.process.idle()
        status = status_of(past)
        assert (status["error"], status["dropped"], status["stored"]) == (None, 0, past.now - 8 * DAY)
        assert "Is a directory" in status["house_error"]
    assert not other.exists()
    stuck.rmdir()
    past.watch(40)
    past.process.idle()
    assert status_of(past)["house_error"] is None
    assert [each.message for each in caplog.records] == [
        "Old files of the storage cannot be thinned or removed",
        "Old files of the storage are thinned and removed again",
    ]


def test_a_directory_that_cannot_be_read_has_no_size(tmp_path: Path) -> None:
    """When files cannot be counted, neither their size is known nor since when something is stored."""
    path = tmp_path / "past"
    past = StoredPast(path, small())
    past.sample()
    assert status_of(past)["size"]
    path.rename(tmp_path / "elsewhere")
    past.now += 60
    past.process.idle()
    status = status_of(past)
    assert (status["size"], status["oldest"]) == (None, None)
    assert status["house_error"]


def test_a_file_system_that_becomes_read_only_costs_the_past_alone(tmp_path: Path) -> None:
    """What cannot be written is said; what is there is read, also without a log; later it goes on."""
    require_root()
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=False).returncode:
        do_without("a mount of tmpfs")
    try:
        ended = StoredPast(disk / "ended", small())
        ended.watch(30)
        ended.end()
        past = StoredPast(disk / "past", small())
        past.watch(30)
        past.end()
        past = StoredPast(disk / "past", small())
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        past.now = 60.0
        past.sample()
        failed = status_of(past)
        assert (failed["stored"], failed["dropped"], failed["error"]) == (0, 1, "Read-only file system")
        assert times(disk / "ended")[-1] == 29.0
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        past.recorder.begin_again()
        past.watch(3)
        assert status_of(past)["error"] is None
        assert times(disk / "past")[-2:] == [62.0, 63.0]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_reader_never_delays_what_is_stored(tmp_path: Path) -> None:
    """Beside a reader in a transaction, and others that ask all the time, all is written at once."""
    past = StoredPast(tmp_path, small())
    past.watch(100)
    past.process.flush()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            query(tmp_path, "SELECT owner, sum(held * seconds) FROM holders GROUP BY owner")

    with closing(sqlite3.connect(f"file:{tmp_path / NAME}?mode=ro", uri=True)) as held:
        held.execute("BEGIN")
        assert held.execute("SELECT count(*) FROM holders").fetchone()
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for each in threads:
            each.start()
        try:
            for number in range(20):
                past.watch(5)
                assert status_of(past)["stored"] == 105 + 5 * number
        finally:
            stop.set()
            for each in threads:
                each.join()
        assert held.execute("SELECT max(time + seconds) FROM holders").fetchone() == (EPOCH + 99,)


def test_a_reader_of_hours_does_not_fill_the_disk(tmp_path: Path) -> None:
    """The log stops at its limit with an error that says why; after the reader it is moved and gone."""
    past = StoredPast(tmp_path, night(25, Random(1)), size=16 * 2**20)  # noqa: S311 a simulation
    past.watch(10)
    past.process.flush()
    log = tmp_path / f"{NAME}-wal"
    with closing(sqlite3.connect(f"file:{tmp_path / NAME}?mode=ro", uri=True)) as held:
        held.execute("BEGIN")
        assert held.execute("SELECT count(*) FROM holders").fetchone()
        while (status := status_of(past))["error"] is None:
            past.watch(4)
            assert log.stat().st_size < 4 * LOG_BYTES + 2**18
        assert status["error"] == HELD
        lost = status["dropped"]
        assert lost
    past.recorder.begin_again()
    past.watch(5)
    status = status_of(past)
    assert (status["error"], status["dropped"]) == (None, lost)
    assert log.stat().st_size < LOG_BYTES
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]


def test_somebody_who_writes_to_the_file_costs_readings_and_no_more(tmp_path: Path) -> None:
    """While another program has the file for writing nothing is stored, and that is said."""
    past = StoredPast(tmp_path, small())
    past.watch(10)
    past.process.flush()
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        past.watch(3)
        assert status_of(past)["error"] == "database is locked"
    past.recorder.begin_again()
    past.watch(3)
    assert status_of(past)["error"] is None


def test_the_command_of_sqlite_reads_beside_the_exporter(tmp_path: Path) -> None:
    """``sqlite3 FILE`` shows the tables while they are written, and leaves nothing behind."""
    if shutil.which("sqlite3") is None:
        do_without("sqlite3")
    past = StoredPast(tmp_path, small())
    past.watch(65)
    past.process.flush()
    done = subprocess.run(
        ["sqlite3", "-readonly", tmp_path / NAME, "SELECT pid, state, held FROM holders LIMIT 1"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == f"7|active|{GIB}\n"
    past.watch(5)
    assert status_of(past)["error"] is None
