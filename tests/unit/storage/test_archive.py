"""The directory: whatever a kill, a power cut or another program leaves there, what is whole is read."""

from __future__ import annotations

import gzip
import json
import os
import resource
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.host.model import EPOCH, GIB, Gpu, Host, Process
from tests.support.host.programs import Fixed
from tests.support.past import BOOT_ID, StoredPast, night
from tests.support.requirements import require_root
from vramledger.errors import StartupError
from vramledger.model.reading import (
    CgroupLimit,
    MemoryReading,
    ProcessUtilization,
    Reading,
)
from vramledger.model.reading_json import decode
from vramledger.storage.archive import Archive, open_directory
from vramledger.storage.moments import compute
from vramledger.storage.protocol import HEADER, STATUS
from vramledger.storage.reduction import expand_reading, reduce_reading
from vramledger.storage.segments import READING
from vramledger.views.table import render_table

HOUR = 3600.0


def small(seed: int = 1) -> Host:
    """Return a host with one holder."""
    return Host([Gpu()], [Process(7, {0: Fixed(GIB)}, begin=-900.0)], Random(seed))  # noqa: S311 a simulation


def stored(path: Path, seconds: float) -> list[str]:
    """Store some time, and return the names of the files."""
    past = StoredPast(path, small())
    past.watch(seconds)
    past.end()
    return sorted([each.name for each in path.iterdir()])


def names(path: Path) -> list[str]:
    """Return the names of the files."""
    return sorted(each.name for each in path.iterdir())


def opened(path: Path, machine: str = "machine-1") -> Archive:
    """Return the archive of a directory, as a later exporter opens it."""
    return Archive(open_directory(path), machine, clock=lambda: EPOCH + HOUR)


def times_in(path: Path) -> list[float]:
    """Return the times of all readings of a directory."""
    directory = open_directory(path)
    try:
        return times(Archive(directory, "machine-1"))
    finally:
        os.close(directory)


def times(archive: Archive) -> list[float]:
    """Return the times of all readings."""
    return [entry.time - EPOCH for entry in archive.readings(0.0, float("inf"))]


def status_of(past: StoredPast) -> dict[str, Any]:
    """Have what waits written, and return what the process that stores says then."""
    past.process.receive(b"Q", b"{}")
    statuses: list[dict[str, Any]] = [
        json.loads(each[HEADER.size :]) for each in past.messages if each[:1] == STATUS
    ]
    return statuses[-1]


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
    past.process.receive(b"Q", b'{"ask": "restore"}')  # writes what waits
    for second in (0, 1, 59, 119, 120, 121, 199):
        moment = past.archive.find(EPOCH + second + 0.5)
        assert moment is not None
        found, then = compute(moment, EPOCH + second + 0.5).snapshot, published[second]
        assert found.time == then.time
        for device, before in zip(found.devices, then.devices, strict=True):
            assert device.ledger == before.ledger
            assert [(h.pid, h.state, h.grade, h.why, h.held) for h in device.holdings] == [
                (h.pid, h.state, h.grade, h.why, h.held) for h in before.holdings
            ]
            assert device.owner_usage is not None
        assert found.processes == then.processes
        assert found.ooms == then.ooms


@pytest.mark.parametrize("step", [1, 7])
def test_a_torn_segment_is_read_up_to_its_tear(tmp_path: Path, step: int) -> None:
    """Wherever a live segment ends, the readings before are there, and none that was not stored."""
    past = StoredPast(tmp_path, small())
    for _ in range(40):
        past.sample()
        past.process.receive(b"Q", b"{}")
    (name,) = names(tmp_path)
    whole = (tmp_path / name).read_bytes()
    before = -1
    for size in range(0, len(whole) + 1, step):
        (tmp_path / name).write_bytes(whole[:size])
        found = times_in(tmp_path)
        assert found == [float(each) for each in range(len(found))]
        assert len(found) >= before
        before = len(found)
        assert names(tmp_path) == [name], "a torn end is not damage"
    if step == 1:
        assert before == 40


@pytest.mark.parametrize(
    "tail", [b"\0" * 5000, b"\xff" * 300, os.urandom(2000)], ids=["zeros", "ones", "noise"]
)
def test_what_a_power_cut_leaves_at_the_end_is_ignored(tmp_path: Path, tail: bytes) -> None:
    """Blocks that were allocated and never written cost nothing that was written before."""
    past = StoredPast(tmp_path, small())
    past.watch(30)
    past.process.receive(b"Q", b"{}")
    (name,) = names(tmp_path)
    with (tmp_path / name).open("ab") as file:
        file.write(tail)
    assert len(times_in(tmp_path)) == 30


@pytest.mark.parametrize("place", [*range(10, 1000, 90), -9, -8, -5, -1])
def test_a_wrong_bit_of_a_whole_segment_is_noticed(tmp_path: Path, place: int) -> None:
    """Wherever a whole segment was changed, nothing of it is shown; but for a bit that gzip does not use."""
    past = StoredPast(tmp_path, small())
    past.watch(60)
    past.process.end()
    past.archive.keep_house()
    (name,) = names(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    whole = gzip.decompress(content)
    content[place] ^= 0x04
    (tmp_path / name).write_bytes(content)
    found = times(opened(tmp_path))
    if names(tmp_path) == [name]:
        assert gzip.decompress(content) == whole
        assert found == [float(each) for each in range(60)]
    else:
        assert found == []
        assert names(tmp_path) == [f"{name}.damaged"]


def test_a_damaged_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A whole segment with one wrong byte is renamed, logged once, and not loaded."""
    past = StoredPast(tmp_path, small())
    past.watch(60)
    past.process.end()
    past.archive.keep_house()
    (name,) = names(tmp_path)
    assert name.endswith(".1s.gz")
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / name).write_bytes(content)
    later = opened(tmp_path)
    assert later.find(EPOCH + 30) is None
    assert later.newest() is None
    assert names(tmp_path) == [f"{name}.damaged"]
    assert len([each for each in caplog.records if "not loaded" in each.message]) == 1


def test_another_hosts_files_are_put_aside(tmp_path: Path) -> None:
    """Files of another machine are renamed; those of an unknown one are read."""
    (name,) = stored(tmp_path, 10)
    assert times(opened(tmp_path, "")) != []
    assert times(opened(tmp_path, "machine-2")) == []
    assert names(tmp_path) == [f"{name}.other-host"]


def test_a_newer_versions_files_are_put_aside(tmp_path: Path) -> None:
    """A file of a later format is renamed and not loaded."""
    (name,) = stored(tmp_path, 10)
    text = gzip.decompress((tmp_path / name).read_bytes())
    first, rest = text.split(b"\n", 1)
    head = first[9:].replace(b'"version": 1', b'"version": 99')
    (tmp_path / name).write_bytes(gzip.compress(b"%08x %b\n" % (zlib.crc32(head), head) + rest))
    assert opened(tmp_path).newest() is None
    assert names(tmp_path) == [f"{name}.newer"]


def test_what_is_old_is_thinned(tmp_path: Path) -> None:
    """After an hour a moment each two minutes stays, after a day each ten; changes of holders all stay."""
    past = StoredPast(tmp_path, small())
    past.watch(1900)
    marks = list(past.archive.summaries(0.0, float("inf")))
    past.process.end()
    for age, steps, least in ((0.0, {"1s"}, 0.9), (2 * HOUR, {"2m"}, 110.0), (30 * HOUR, {"10m"}, 540.0)):
        past.now = 1900.0 + age
        for _ in range(4):
            past.archive.keep_house()
        assert {each.step for each in past.archive.names()} == steps
        found = times(past.archive)
        assert min(later - earlier for earlier, later in pairwise(found)) >= least
        moment = past.archive.find(EPOCH + 1000.0)
        assert moment is not None
        assert compute(moment, EPOCH + 1000.0).snapshot.devices[0].holdings[0].held == GIB
        kept = [(at, value) for at, _, value in past.archive.summaries(0.0, float("inf"))]
        assert [each for each in kept if each in [(at, value) for at, _, value in marks]]


def test_a_file_that_cannot_be_read_stops_no_thinning(tmp_path: Path) -> None:
    """Files that fail, or cannot even be renamed, are reported, and newer ones are thinned all the same."""
    (tmp_path / "5.live.gz").symlink_to("elsewhere")
    (tmp_path / "6.live.gz").write_bytes(b"x" * 100)
    (tmp_path / "6.live.gz.damaged").mkdir()
    past = StoredPast(tmp_path, small())
    past.watch(1900)
    past.process.end()
    for _ in past.archive.names():
        with pytest.raises(OSError, match="symbolic links"):
            past.archive.keep_house()
    assert {each.step for each in past.archive.names() if each.begin > EPOCH - 1} == {"1s"}


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
    past.process.end()
    for age in (0.0, 2 * HOUR, 30 * HOUR):
        past.now = 130.0 + age
        past.archive.keep_house()
        moment = past.archive.find(EPOCH + 129.5)
        assert moment is not None
        table = render_table(compute(moment, EPOCH + 129.5).snapshot)
        assert [each for each in lines if each not in table] == [], age


def test_age_and_size_are_limited(tmp_path: Path) -> None:
    """Segments beyond the retention go first by age, then by size; what is not ours stays."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    past = StoredPast(tmp_path, small())
    past.watch(5500)
    past.process.end()
    assert len(past.archive.names()) == 4
    limited = Archive(past.directory, "machine-1", size=20_000, clock=lambda: EPOCH + past.now)
    limited.keep_house()
    size, oldest = limited.usage()
    assert size <= 20_000
    assert oldest is not None
    assert oldest > EPOCH
    aged = Archive(past.directory, "machine-1", retention=60.0, clock=lambda: EPOCH + past.now + 5 * HOUR)
    aged.keep_house()
    assert names(tmp_path) == ["notes.txt"]


def test_files_are_private(tmp_path: Path) -> None:
    """Directory and files are for their owner alone, whatever the umask."""
    old = os.umask(0)
    try:
        (name,) = stored(tmp_path / "a" / "past", 5)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a" / "past").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "past" / name).stat().st_mode) == 0o600


def test_no_link_is_followed(tmp_path: Path) -> None:
    """A link in the place of a segment is neither read nor written through."""
    (tmp_path / "past").mkdir(mode=0o700)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    for number in ("", "-1"):
        (tmp_path / "past" / f"{EPOCH}{number}.live.gz").symlink_to(secret)
    stored(tmp_path / "past", 5)
    assert secret.read_bytes() == b"x"
    assert times(opened(tmp_path / "past")) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    """Something that is not a plain file is put aside without waiting for it."""
    os.mkfifo(tmp_path / f"{EPOCH}.live.gz")
    assert opened(tmp_path).newest() is None


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
    """Root's exporter gives its user an empty directory or one with segments, and no other."""
    require_root()
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    (other / "passwords").touch()
    os.close(open_directory(empty, (65532, 65532)))
    assert (empty.stat().st_uid, stat.S_IMODE(empty.stat().st_mode)) == (65532, 0o700)
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
    past.process.receive(b"Q", b"{}")
    moment = past.archive.find(EPOCH + 300.0)
    assert moment is not None
    found = compute(moment, EPOCH + 300.0)
    assert found.snapshot.time == EPOCH + 59
    assert found.gap_until == EPOCH + 660
    inside = past.archive.find(EPOCH + 59.7)
    assert inside is not None
    assert compute(inside, EPOCH + 59.7).gap_until is None
    assert past.archive.find(EPOCH - 5.0) is None


def test_neither_environments_nor_arguments_are_stored(tmp_path: Path) -> None:
    """Of allow-listed variables only numbers and words are kept; nothing else of a program is read."""
    secret = "postgres://ada:hunter2@db/x"  # noqa: S105 a test's
    host = small()
    host.processes[0].settings = (("CUDA_VISIBLE_DEVICES", "0,1"), ("TF_CONFIG", secret))
    past = StoredPast(tmp_path, host)
    past.watch(130)
    past.process.end()
    texts = [gzip.decompress((tmp_path / name).read_bytes()) for name in names(tmp_path)]
    assert any(b"CUDA_VISIBLE_DEVICES" in each for each in texts)
    assert all(b"hunter2" not in each and secret.encode() not in each for each in texts)


def test_readings_keep_what_verdicts_need(tmp_path: Path) -> None:
    """Nothing that is above zero becomes zero, and bytes stay exact."""
    past = StoredPast(tmp_path, night(5, Random(3)))  # noqa: S311 a simulation
    readings = []
    for _ in range(30):
        readings.append(past.reading())
        past.sample()
    past.process.receive(b"Q", b"{}")
    found = [
        expand_reading(entry.value, entry.time)
        for entry in past.archive.readings(0.0, float("inf"))
        if entry.kind == READING
    ]
    for reading, kept in zip(readings, found, strict=True):
        (device,), (stored_device,) = reading.devices, kept["devices"]
        assert stored_device["memory"] == list(device.memory or ())
        assert stored_device["processes"] == [list(each) for each in device.processes or ()]
        for name, value in stored_device["activity"].items():
            assert (value > 0) == ((device.activity or {})[name] > 0)


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
    found = decode(json.dumps(expand_reading(value, round(reading.time, 2))))
    assert json.dumps(value) == before
    assert found.agents == reading.agents
    assert found.time == reading.time
    assert found.monotonic == pytest.approx(reading.monotonic, abs=0.011)
    assert found.devices[0].memory == device.memory
    rows = found.devices[0].process_utilization or ()
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
    assert times(past.archive) == [0.0, past.now - 1]


def test_old_files_that_stay_are_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be removed is reported until it is gone; no reading is lost, and other files go."""
    past = StoredPast(tmp_path, small(), retention=HOUR)
    caplog.set_level("INFO")
    stuck, other = tmp_path / "5.live.gz.tmp", tmp_path / "6.live.gz.damaged"
    stuck.mkdir()
    other.write_bytes(b"x")
    past.now = 8 * 24 * HOUR
    for _ in range(5):
        past.watch(40)
        past.process.idle()
        status = status_of(past)
        assert (status["error"], status["dropped"], status["stored"]) == (None, 0, past.now - 8 * 24 * HOUR)
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
    past = StoredPast(tmp_path, small())
    past.sample()
    assert status_of(past)["size"]
    os.close(past.directory)
    past.now += 60
    past.process.idle()
    status = status_of(past)
    assert (status["size"], status["oldest"]) == (None, None)
    assert status["house_error"]
