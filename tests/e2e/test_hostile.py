"""Strangers who make our files, or send all they may: they cost an error, and nothing of ours."""

import gzip
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.agent_client import report, torch
from tests.support.exporter import QUICK, run, serving
from tests.support.players.stage import Stage
from tests.support.requirements import require_root
from tests.support.standin.library import StandIn
from tests.support.stranger import as_user
from tests.support.waiting import wait_until
from vramledger.commands.fit import read_file
from vramledger.errors import RecordingError, StartupError
from vramledger.sampling.replay import MAX_LINE_BYTES, encode_header
from vramledger_agent.private_files import create_private, remove_private
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

NOBODY = 65534


@pytest.mark.parametrize("command", ["show", "diff"])
def test_a_snapshot_that_crashes_the_interpreter(tmp_path: Path, command: str) -> None:
    """A snapshot that no Python survives is an error of one line."""
    file = tmp_path / "deep.pickle"
    key = b"\x85" * 1_000_000  # a million tuples
    file.write_bytes(b"\x80\x04})" + key + b"K\x01s.")
    paths = [str(file)] * (2 if command == "diff" else 1)
    done = run("snapshot", command, *paths, driver={})
    assert done.returncode == 1
    # Python 3.14 notices the end of its stack itself.
    assert done.stderr.endswith("it is broken or hostile (SIGSEGV)\n") or "RecursionError" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.repeats
@pytest.mark.parametrize("byte", [b"[", b" ", b"0"])
def test_a_recording_of_one_line(tmp_path: Path, byte: bytes) -> None:
    """A recording of some kilobytes that holds a line of gigabytes is refused at its beginning."""
    file = tmp_path / "line.jsonl.gz"
    with gzip.open(file, "wb", compresslevel=1) as out:
        out.write(encode_header())
        for _ in range(64):
            out.write(byte * (MAX_LINE_BYTES // 2))
    done = run("serve", f"--source=replay:{file}", driver={})
    assert done.returncode == 1
    assert "the line is longer than 8 MiB" in done.stderr


@pytest.mark.parametrize("piece", [b"[],", b"1,", b"\n", b'{"":', b"[{"])
def test_a_file_that_becomes_gigabytes(tmp_path: Path, piece: bytes) -> None:
    """A file of some kilobytes whose JSON would take gigabytes is an error of one line."""
    file = tmp_path / "values.json.gz"
    with gzip.open(file, "wb", compresslevel=1) as out:
        out.write(b"[" + piece * 2_000_000 + b"0]")
    with pytest.raises(RecordingError, match="more than 2,000,000 values"):
        read_file(file, None)


@pytest.mark.parametrize("place", ["new", "old", "link"])
def test_a_capture_is_its_owners_alone(standin: StandIn, tmp_path: Path, place: str) -> None:
    """A recording, which may name users, has mode 0600, also in place of an older file, and no link."""
    victim, file = tmp_path / "victim", tmp_path / "film.jsonl.gz"
    victim.write_text("kept")
    if place == "old":
        file.touch(0o644)
    elif place == "link":
        file.symlink_to(victim)
    done = run("capture", str(file), "--no-mask", "--duration=1ms", driver=standin.env())
    assert (done.returncode, "cannot write" in done.stderr) == ((1, True) if place == "link" else (0, False))
    assert victim.read_text() == "kept"
    if place != "link":
        assert file.stat().st_mode & 0o777 == 0o600
        assert gzip.decompress(file.read_bytes()).count(b"\n") >= 2


def test_nothing_of_others_is_written_to(tmp_path: Path) -> None:
    """Links, pipes, hard links and files of other users are refused, and keep what they have."""
    require_root()
    for name in ("theirs", "mine"):
        (tmp_path / name).write_text("kept")
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    (tmp_path / "second").hardlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("theirs", "mine", "pipe", "."):
        with pytest.raises((StartupError, OSError)):
            create_private(tmp_path / name)
    os.close(reader)
    assert (tmp_path / "theirs").read_text() == (tmp_path / "mine").read_text() == "kept"
    os.close(create_private(Path(os.devnull)))


def test_no_link_of_others_leads_to_our_files(tmp_path: Path) -> None:
    """What we write and remove is where we were told, whatever another user makes of the path meanwhile."""
    require_root()
    for name in ("ours", "victim"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("kept")
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    mine.symlink_to("ours")
    theirs.mkdir()
    made = create_private(theirs / "file")
    theirs.rename(tmp_path / "before")
    theirs.symlink_to(tmp_path / "victim")
    os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    for act in (lambda: create_private(theirs / "file"), lambda: remove_private(theirs / "file", made)):
        with pytest.raises(PermissionError):
            act()
    theirs.unlink()
    (tmp_path / "victim").rename(theirs)
    remove_private(theirs / "file", made)
    os.close(made)

    assert (theirs / "file").read_text() == "kept"
    os.close(create_private(mine / ".." / "mine" / "file"))
    assert (tmp_path / "ours" / "file").read_text() == ""
    with TemporaryDirectory() as inbox:  # which its user may not read
        os.chown(inbox, NOBODY, NOBODY)
        Path(inbox).chmod(0o300)
        with as_user(NOBODY):
            os.close(create_private(Path(inbox, "file")))


def test_scrapes_come_before_agents(standin: StandIn, stage: Stage) -> None:
    """While eight users send expensive reports as fast as they can, scrapes have their data in time."""
    require_root()
    place = stage.directory / "agents"  # where every user may look
    costly = json.dumps(report(zz=[[] for _ in range(16_000)], frameworks=[torch()]))
    assert len(costly) <= MAX_MESSAGE_BYTES
    with serving(*QUICK, f"--agent.socket={place}", driver=standin.env()) as exporter:
        wait_until(place.exists, "the socket")
        exporter.until(lambda page: page.up, "data")
        for number in range(8):
            stage.start(("flood", str(place), 60, costly), user=60_000 + number)
        exporter.until(lambda page: (page.value("agent_connections") or 0) > 400, "their connections")
        for _ in range(5):
            exporter.next_sample()
            assert exporter.scrape(timeout=10.0).up, "as Prometheus waits"
