"""The file of the past: whatever a kill, a disk or another program does, what is whole is read."""

import asyncio
import json
import os
import re
import resource
import shutil
import sqlite3
import stat
import subprocess
import tracemalloc
import zlib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.host.model import EPOCH, GIB
from tests.support.past import (
    StoredPast,
    ask_sqlite,
    names_in,
    night,
    small_host,
    status_of,
    times_in,
    watched_past,
)
from tests.support.requirements import do_without, require_root
from vramledger.commands.past import ask_past
from vramledger.errors import RecordingError, StartupError
from vramledger.storage import answers, past_writer
from vramledger.storage.answers import answer_or_problem, open_past
from vramledger.storage.database import PIECES
from vramledger.storage.keeper import open_directory
from vramledger.storage.past_writer import HELD
from vramledger.storage.protocol import AGAIN, AT, NAME

HOUR = 3600.0
DAY = 24 * HOUR
ALL = {"from": 0.0, "to": 1e11}


@contextmanager
def full_disk() -> Iterator[None]:
    """Let files be made but not written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("cut", [1, 0.9, 0.5, 0.1, 0.0])
def test_a_torn_log_is_read_up_to_its_tear(tmp_path: Path, cut: float) -> None:
    """Wherever a power cut ends the log, the readings before are there, and the file is not damaged."""
    past = StoredPast(tmp_path / "past", small_host())
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
    later = StoredPast(copy, small_host())
    later.now = past.now
    later.watch(3)
    later.process.flush()
    kept = times_in(copy)
    assert (kept[:-3], kept[-3:]) == ([float(each) for each in range(len(kept) - 3)], [40.0, 41.0, 42.0])
    assert cut < 1 or len(kept) == 43
    assert not [each for each in names_in(copy) if "damaged" in each]


def problem_of(path: Path, ask: str) -> dict[str, Any]:
    """Return the head of an answer: whether there is one, and whether damage was met."""
    question = json.dumps({"ask": ask, **ALL}).encode()
    head: dict[str, Any] = json.loads(answer_or_problem(path, question, "").split(b"\n")[0])
    return head


@pytest.mark.parametrize("where", [0.0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, "short", "text", "other"])
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
        with file.open("rb+") as opened:
            opened.seek(int(file.stat().st_size // 4096 * float(where)) * 4096)
            opened.write(os.urandom(4096))
    was_noticed = [problem_of(tmp_path, each).get("damaged") for each in ("since", "restore")]
    past = StoredPast(tmp_path, first.host)
    past.now = first.now + 5
    past.sample()
    past.process.flush()
    if any(was_noticed):
        past.process.receive(b"C", b"")
    for _ in range(70):
        past.messages.clear()
        past.process.idle()
        if any(each[:1] == AGAIN for each in past.messages):
            past.recorder.begin_again()  # as the exporter does
        past.sample()
    status = status_of(past)
    assert status["error"] is None
    assert times_in(tmp_path)[-1] == past.now - 1
    assert problem_of(tmp_path, "since") == {}
    assert ask_sqlite(tmp_path, "PRAGMA integrity_check") == [("ok",)]
    aside = [each for each in names_in(tmp_path) if "damaged" in each]
    assert len(aside) <= 1
    if aside:
        assert aside[0] in status["house_error"]


def test_a_wrong_bit_of_a_moment_costs_its_segment_alone(tmp_path: Path) -> None:
    """Where the lines of a segment were changed nothing of it is shown, and everything else is."""
    past = watched_past(tmp_path, 100)
    past.recorder.begin_again()
    past.watch(40)
    past.process.flush()
    with closing(sqlite3.connect(tmp_path / NAME)) as connection:
        longest = "SELECT id, lines FROM piece WHERE id < ? ORDER BY length(lines) DESC LIMIT 1"
        number, lines = connection.execute(longest, [2 * PIECES]).fetchone()
        wrong = bytearray(lines)
        wrong[len(wrong) // 2] ^= 0x04
        connection.execute("UPDATE piece SET lines = ? WHERE id = ?", (bytes(wrong), number))
        connection.commit()
    with open_past(tmp_path) as reader:
        assert reader.find(EPOCH + 130.0) is not None
        assert [each.time for each in reader.readings(EPOCH + 100.0, 1e11)]
        assert not reader.damaged or number % PIECES == 0
        list(reader.readings(0.0, 1e11))
        assert reader.damaged
    past.process.receive(b"C", b"")
    assert min(times_in(tmp_path)) == 100.0
    assert ask_sqlite(tmp_path, "SELECT count(*) FROM holders") == [(3,)], "the summary of that time stays"
    assert "damaged" in status_of(past)["house_error"]


@pytest.mark.parametrize("what", ["host", "version"])
def test_another_hosts_or_a_newer_file_is_put_aside(tmp_path: Path, what: str) -> None:
    """A file of another machine or of a newer version is kept under another name, and read by nobody."""
    watched_past(tmp_path, 10).end()
    assert times_in(tmp_path, "") != []
    if what == "version":
        with closing(sqlite3.connect(tmp_path / NAME)) as connection:
            connection.execute("PRAGMA user_version = 99")
    machine, suffix = ("machine-2", "other-host") if what == "host" else ("machine-1", "newer")
    with pytest.raises(RecordingError):
        times_in(tmp_path, machine)
    later = StoredPast(tmp_path, small_host(), machine=machine)
    later.now = 100.0
    later.watch(5)
    later.end()
    assert [each.rsplit("-", 1)[0] for each in names_in(tmp_path)] == [NAME, f"{NAME}.{suffix}"]
    assert times_in(tmp_path, machine) == [100.0, 101.0, 102.0, 103.0, 104.0]


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
        times_in(where)
    watched_past(where, 5).end()
    assert secret.read_bytes() == b"x"
    assert times_in(where) == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("what", ["user", "mode", "file", "link", "link above"])
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
    elif what == "link above":
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path)
        os.chown(tmp_path / "link", 1234, 1234, follow_symlinks=False)
        path = tmp_path / "link" / "real"
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
    watched_past(ours, 5).end()
    other.mkdir()
    (other / "passwords").touch()
    os.close(open_directory(ours, (65532, 65532)))
    assert (ours.stat().st_uid, stat.S_IMODE(ours.stat().st_mode)) == (65532, 0o700)
    assert {each.stat().st_uid for each in ours.iterdir()} == {65532}
    with pytest.raises(StartupError, match="belongs to user 0"):
        open_directory(other, (65532, 65532))
    assert other.stat().st_uid == 0


def test_the_newest_reading_is_one_that_is_on_the_disk(tmp_path: Path) -> None:
    """However often a full disk fails, no lost reading is called the newest that is stored, or stored."""
    past = StoredPast(tmp_path, small_host())
    past.sample()
    assert status_of(past)["newest"] == EPOCH
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
    assert times_in(tmp_path) == [0.0, past.now - 1]


def test_old_files_that_stay_are_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be removed is reported until it is gone; no reading is lost, and other files go."""
    past = StoredPast(tmp_path, small_host(), retention=HOUR)
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
    past = watched_past(path, 1)
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
        for name in ("ended", "past"):
            watched_past(disk / name, 30).end()
        past = StoredPast(disk / "past", small_host())
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        past.now = 60.0
        past.sample()
        failed = status_of(past)
        assert (failed["stored"], failed["dropped"], failed["error"]) == (0, 1, "Read-only file system")
        assert times_in(disk / "ended")[-1] == 29.0
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        past.recorder.begin_again()
        past.watch(3)
        assert status_of(past)["error"] is None
        assert times_in(disk / "past")[-2:] == [62.0, 63.0]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("ask", ["since", "slider"])
def test_an_answer_takes_no_more_memory_for_a_longer_past(tmp_path: Path, ask: str) -> None:
    """A user who begins and ends programs all day makes no question take hundreds of MiB."""
    watched_past(tmp_path, 65)
    rows = 10_000
    with closing(sqlite3.connect(tmp_path / NAME)) as file:
        file.executemany(
            "INSERT INTO event VALUES (?, 'came', 1, 1, NULL, NULL)",
            ((EPOCH + number * 0.01,) for number in range(rows)),
        )
        file.executemany(
            "INSERT INTO holder_minute VALUES (?, 1, 1, 1, 1, 'idle', 'low', 7, 0)",
            ((int(EPOCH) + 100 + number,) for number in range(rows)),
        )
        file.commit()
    tracemalloc.start()
    try:
        content = answer_or_problem(tmp_path, json.dumps({"ask": ask, **ALL}).encode(), "machine-1")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    answered = json.loads(content.split(b"\n", 1)[1])
    assert peak < (2**18 if ask == "since" else 3 * 2**20)
    if ask == "since":
        assert answered["owners"][0]["seconds"] == pytest.approx(rows + 65, abs=2)
    else:
        assert len(answered["marks"]) + answered["marks_dropped"] == rows


def test_a_question_for_too_much_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings of days are refused before they fill the memory, and a span that ends before it begins."""
    monkeypatch.setattr(answers, "READINGS_MAX", 20_000)
    watched_past(tmp_path, 100)

    def problem(**question: object) -> str:
        return str(json.loads(answer_or_problem(tmp_path, json.dumps(question).encode(), ""))["error"])

    assert problem(ask="readings", **ALL) == "its readings have more than 0 MiB; ask for a shorter span"
    for ask in ("since", "slider", "readings"):
        assert problem(ask=ask, **{"from": 2.0, "to": 1.0}) == "the span ends before it begins"


def test_nothing_in_the_file_runs_code(tmp_path: Path) -> None:
    """A view or a trigger that loads a library, and was put there by somebody, is an error and loads none."""
    past = watched_past(tmp_path, 10)
    with closing(sqlite3.connect(tmp_path / NAME)) as file:
        file.executescript(
            "CREATE TRIGGER bad BEFORE INSERT ON piece BEGIN SELECT load_extension('/there/is/none'); END;"
            "DROP VIEW devices; CREATE VIEW devices AS SELECT *, load_extension('/there/is/none') AS uuid,"
            " 1 AS gpu FROM device_minute;"
        )
    said = answer_or_problem(tmp_path, json.dumps({"ask": "slider", **ALL}).encode(), "machine-1")
    past.watch(10)
    assert json.loads(said)["error"] == "its devices is not as this version makes it"
    assert re.search("unsafe use of|not authorized|prohibited", status_of(past)["error"] or "")


def asked(path: Path) -> bytes:
    """Return what a command reads of the fourth second, which it does without an exporter."""
    args = Namespace(control_socket=path / "none", storage_path=path)
    return asyncio.run(ask_past(args, {"ask": AT, "at": EPOCH + 3}))[1]


@pytest.mark.thorough
def test_a_strangers_past_takes_no_memory_without_end(tmp_path: Path) -> None:
    """Lines that unpack to gigabytes are one line of error for who reads them, and a process that ends."""
    watched_past(tmp_path, 5).end()
    packed = zlib.compress(b'{"k":"s","t":1,"p":[' + b"[]," * (80 << 20) + b"[]]}\n")
    with closing(sqlite3.connect(tmp_path / NAME)) as file:
        file.execute("UPDATE piece SET checksum = ?, lines = ?", (zlib.crc32(packed), packed))
        file.commit()
    with pytest.raises(StartupError, match=r"\A[^\n]* more than 2 GiB of memory[^\n]*\Z"):
        asked(tmp_path)


@pytest.mark.parametrize("log", ["-shm", "-wal"])
def test_root_writes_to_no_file_that_a_stranger_links_to(tmp_path: Path, log: str) -> None:
    """SQLite reads a user's past as that user: a hard link in the place of a log leads root to no change."""
    require_root()
    watched_past(tmp_path / "past", 5).end()
    target, content = tmp_path / "target", b"precious\n" * 20_000
    target.write_bytes(content)
    for each in (tmp_path / "past", tmp_path / "past" / NAME):
        os.chown(each, 1234, 1234)
    (link := tmp_path / "past" / (NAME + log)).hardlink_to(target)
    with suppress(StartupError):
        asked(tmp_path / "past")
    assert (target.read_bytes(), target.stat().st_uid) == (content, 0)
    link.unlink()
    assert b'"pid":7' in asked(tmp_path / "past")
    (tmp_path / "past").chmod(0o777)
    with pytest.raises(StartupError, match="other users may write to it"):
        asked(tmp_path / "past")


def test_a_reader_of_hours_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log stops at its limit with an error that says why; after the reader it is moved and gone."""
    monkeypatch.setattr(past_writer, "LOG_BYTES", 2**18)
    past = StoredPast(tmp_path, night(25, Random(1)), size=2**21)  # noqa: S311 a simulation
    past.watch(10)
    past.process.flush()
    log = tmp_path / f"{NAME}-wal"
    with closing(sqlite3.connect(f"file:{tmp_path / NAME}?mode=ro", uri=True)) as held:
        held.execute("BEGIN")
        assert held.execute("SELECT count(*) FROM holders").fetchone()
        while (status := status_of(past))["error"] is None:
            past.watch(4)
            assert log.stat().st_size < 5 * 2**18
        assert status["error"] == HELD
        lost = status["dropped"]
        assert lost
    past.recorder.begin_again()
    past.watch(5)
    status = status_of(past)
    assert (status["error"], status["dropped"]) == (None, lost)
    assert log.stat().st_size < 2**18
    assert ask_sqlite(tmp_path, "PRAGMA integrity_check") == [("ok",)]


def test_somebody_who_writes_to_the_file_costs_readings_and_no_more(tmp_path: Path) -> None:
    """While another program has the file for writing nothing is stored, and that is said."""
    past = watched_past(tmp_path, 10)
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
    past = watched_past(tmp_path, 65)
    done = subprocess.run(
        ["sqlite3", "-readonly", tmp_path / NAME, "SELECT pid, state, held FROM holders LIMIT 1"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == f"7|active|{GIB}\n"
    past.watch(5)
    assert status_of(past)["error"] is None
