"""Strangers who make our files, or send all they may: they cost an error, and nothing of ours."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from tests.support.agent_client import report, torch
from tests.support.exporter import QUICK, no_driver, run, serving
from tests.support.players.stage import Stage
from tests.support.requirements import require_root
from tests.support.standin.library import StandIn
from tests.support.waiting import wait_until
from vramledger.errors import StartupError
from vramledger.sampling.replay import MAX_LINE_BYTES, encode_header
from vramledger_agent.private_file import create_private
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

NOBODY = 65534


@pytest.mark.parametrize("command", ["show", "diff"])
def test_a_snapshot_that_crashes_the_interpreter(tmp_path: Path, command: str) -> None:
    """A snapshot that no Python survives is an error of one line."""
    file = tmp_path / "deep.pickle"
    file.write_bytes(
        b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\x01s."
    )  # a dictionary; its key: a million tuples
    paths = [str(file)] * (2 if command == "diff" else 1)
    done = run("snapshot", command, *paths, driver=no_driver(tmp_path / "none"))
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
    done = run("serve", f"--source=replay:{file}", driver=no_driver(tmp_path / "none"))
    assert done.returncode == 1
    assert "the line is longer than 8 MiB" in done.stderr


def test_a_capture_is_its_owners_alone(tmp_path: Path, standin_library: Path) -> None:
    """A recording, which may name users and programs, has mode 0600, also in place of an older file."""
    file = tmp_path / "old.jsonl.gz"
    file.touch(0o644)
    with StandIn(tmp_path, standin_library, devices=1) as standin:
        for path in (file, tmp_path / "new.jsonl.gz"):
            done = run("capture", str(path), "--no-mask", "--duration=1ms", driver=standin.env())
            assert done.returncode == 0, done.stderr
            assert path.stat().st_mode & 0o777 == 0o600
            assert gzip.decompress(path.read_bytes()).count(b"\n") >= 2


def test_a_capture_follows_no_link(tmp_path: Path, standin_library: Path) -> None:
    """What another user has put in place of the recording is not written to."""
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("kept")
    link.symlink_to(victim)
    with StandIn(tmp_path, standin_library, devices=1) as standin:
        done = run("capture", str(link), "--no-mask", "--duration=1ms", driver=standin.env())
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert victim.read_text() == "kept"


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


SCRAPE_TIMEOUT = 10.0
"""Seconds: Prometheus' default."""


def test_scrapes_come_before_agents(tmp_path: Path, standin_library: Path, stage: Stage) -> None:
    """While eight users send expensive reports as fast as they can, scrapes have their data in time."""
    require_root()
    place = stage.directory / "agents"  # where every user may look
    costly = json.dumps(report(zz=[[] for _ in range(16_000)], frameworks=[torch()]))
    assert len(costly) <= MAX_MESSAGE_BYTES
    with (
        StandIn(tmp_path, standin_library, devices=1) as standin,
        serving(*QUICK, f"--agent.socket={place}", driver=standin.env()) as exporter,
    ):
        wait_until(place.exists, "the socket")
        exporter.until(lambda page: page.up, "data")
        for number in range(8):
            stage.start(("flood", str(place), 60, costly), user=60_000 + number)
        exporter.until(lambda page: (page.value("agent_connections") or 0) > 400, "their connections")
        for _ in range(5):
            exporter.next_sample()
            assert exporter.scrape(SCRAPE_TIMEOUT).up
