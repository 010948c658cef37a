"""``vramledger release``: the exporter releases the GPUs, reports this, and reopens them by itself."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.exporter import QUICK, Exporter, Page, run, serving
from tests.support.requirements import require_root
from tests.support.standin.library import StandIn
from tests.support.waiting import wait_until
from vramledger.serving.control_messages import RELEASE, ControlRequest, write_request


@pytest.fixture
def door(tmp_path: Path) -> str:
    """Return the flag that names a control socket of this test."""
    return f"--control.socket={tmp_path / 'run' / 'control.sock'}"


@pytest.fixture
def exporter(standin: StandIn, door: str) -> Iterator[Exporter]:
    """Run an exporter, and wait for its data."""
    with serving(*QUICK, door, driver=standin.env()) as running:
        running.until(lambda page: page.up, "data")
        yield running


def released(page: Page) -> bool:
    """Tell whether a page says that the GPUs are released."""
    return page.value("released_until_timestamp_seconds") is not None


def test_the_gpus_are_let_go_of_and_taken_back(standin: StandIn, exporter: Exporter, door: str) -> None:
    """After the command no device is open and no failure is counted; ``--resume`` restores the data."""
    sampler = exporter.sampler
    before = exporter.scrape()
    assert exporter.drivers() == [sampler.pid]

    done = run("release", "--for=1h", door, driver=standin.env())

    assert (done.returncode, done.stderr) == (0, "")
    assert "until" in done.stdout
    assert not psutil.pid_exists(sampler.pid) or sampler.status() == psutil.STATUS_ZOMBIE
    assert exporter.drivers() == []
    page = exporter.until(released, "the page to say so")
    assert not page.up
    assert exporter.next_sample().time > page.time, (
        "the timestamp moves: this is no exporter that stands still"
    )
    (starter,) = exporter.process.children(recursive=True)
    assert "vramledger.sampling.starter" in " ".join(starter.cmdline()), "which has no GPU open"
    for name, key in before.samples:
        if name == "vramledger_sample_failures_total":
            assert page.samples[name, key] == before.samples[name, key]
    ledger = json.loads(exporter.get("/api/v1/ledger")[1])
    assert ledger["failure"]["reason"] == "released"
    assert ledger["released_until"] == page.value("released_until_timestamp_seconds")
    assert "release --resume" in ledger["failure"]["message"], "which the page shows as it is"
    assert "level=error" not in exporter.log

    assert run("release", "--resume", door, driver=standin.env()).returncode == 0
    page = exporter.until(lambda page: page.up, "data")
    assert not released(page)


def test_the_gpus_are_taken_back_in_time(standin: StandIn, exporter: Exporter, door: str) -> None:
    """After the given time there is data again by itself. A second command replaces the first."""
    assert run("release", "--for=1h", door, driver=standin.env()).returncode == 0
    assert run("release", "--for=500ms", door, driver=standin.env()).returncode == 0
    exporter.until(lambda page: page.up, "data")


def test_the_longest_release_is_shown(standin: StandIn, exporter: Exporter, door: str) -> None:
    """A release of 30 days, the longest, is shown with its end, and ``--resume`` ends it."""
    assert run("release", "--for=30d", door, driver=standin.env()).returncode == 0
    page = exporter.until(released, "the page to say so")
    until = page.value("released_until_timestamp_seconds") or 0.0
    assert 29 * 86400 < until - page.time <= 30 * 86400 + 1
    assert run("release", "--resume", door, driver=standin.env()).returncode == 0
    exporter.until(lambda page: page.up, "data")


def test_a_host_without_a_driver_can_be_told(standin: StandIn, door: str) -> None:
    """While there is no driver, as during its update, the command works too."""
    standin.driver_error = 9
    with serving(*QUICK, door, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.failures("no-driver"), "a failure")
        assert run("release", door, driver=standin.env()).returncode == 0
        exporter.until(released, "the page to say so")
        standin.driver_error = 0
        assert run("release", "--resume", door, driver=standin.env()).returncode == 0
        exporter.until(lambda page: page.up, "data")


def test_without_an_exporter_it_is_one_line(tmp_path: Path, standin: StandIn) -> None:
    """If no exporter answers, the command says which socket it used and what to do."""
    path = tmp_path / "none.sock"
    done = run("release", f"--control.socket={path}", driver=standin.env())
    assert (done.returncode, done.stdout) == (1, "")
    asked = "is 'vramledger serve' running, with this --control.socket?"
    assert done.stderr == f"vramledger: no exporter answers at {path}; {asked}\n"


def test_a_socket_left_behind_is_replaced(standin: StandIn, tmp_path: Path, door: str) -> None:
    """The next exporter replaces a killed exporter's socket; a live exporter's socket stays."""
    with serving(*QUICK, door, driver=standin.env()) as exporter:
        wait_until((tmp_path / "run" / "control.sock").exists, "the socket, which comes after the page")
        exporter.kill()
    assert (tmp_path / "run" / "control.sock").exists()
    with serving(*QUICK, door, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.up, "data")
        second = run("serve", "--web.listen-address=127.0.0.1:0", door, driver=standin.env())
        assert second.returncode == 1
        assert "another exporter answers there" in second.stderr
        assert run("release", door, driver=standin.env()).returncode == 0
    assert not (tmp_path / "run" / "control.sock").exists()


def test_strangers_are_not_heard(standin: StandIn) -> None:
    """Another user reaches the socket, and cannot release the GPUs: the kernel says who it is."""
    require_root()
    with tempfile.TemporaryDirectory(prefix="control-") as directory:
        Path(directory).chmod(0o755)
        path = Path(directory, "control.sock")
        with serving(*QUICK, f"--control.socket={path}", driver=standin.env()) as exporter:
            exporter.until(lambda page: page.up, "data")
            answer = ask_as_nobody(path)
            assert answer == {
                "version": 1,
                "ok": False,
                "error": "only root and the exporter's own user may request that",
            }
            assert exporter.next_sample().up


def ask_as_nobody(path: Path) -> object:
    """Request a release as another user."""
    program = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        f"s.connect({str(path)!r}); s.send({write_request(ControlRequest(RELEASE, 60.0))!r}); "
        "print(s.recv(4096).decode())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "sent",
    [
        *(b"\n", b"{", b"[]\n", b"x" * 10_000, b"\xff\xfe\n", b'{"resume": true}\n'),
        b'{"version": 1, "ask": "release", "seconds": -1}\n',
        b'{"version": 1, "ask": "release", "seconds": "x"}\n',
        b'{"version": 1, "ask": "release", "seconds": 359999999999996400}\n',
        b'{"version": 1, "ask": "release", "seconds": 1e300}\n',
        b'{"version": 9, "ask": "resume"}\n',
    ],
)
def test_rubbish_is_answered(shared: Exporter, sent: bytes) -> None:
    """Invalid messages to the control socket change nothing and end nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(shared.found["VRAMLEDGER_CONTROL_SOCKET"])
        client.send(sent)
        assert "error" in json.loads(client.recv(4096))
    assert shared.next_sample().up


def test_a_recording_holds_no_gpu(tmp_path: Path, standin: StandIn) -> None:
    """An exporter that replays has no GPUs to release, and the command does not find it."""
    path = tmp_path / "control.sock"
    recording = tmp_path / "short.jsonl.gz"
    assert run("capture", "--duration=300ms", *QUICK, str(recording), driver=standin.env()).returncode == 0
    with serving(f"--source=replay:{recording}", f"--control.socket={path}", driver=standin.env()):
        assert run("release", f"--control.socket={path}", driver=standin.env()).returncode == 1


def test_no_file_is_taken_for_a_stale_socket(standin: StandIn, tmp_path: Path) -> None:
    """A path with another file is refused in one line, and the file stays."""
    file = tmp_path / "notes.txt"
    file.write_text("precious\n")

    done = run("serve", "--web.listen-address=127.0.0.1:0", f"--control.socket={file}", driver=standin.env())

    assert done.returncode == 1
    assert f"cannot make the control socket {file}: it is not a socket; move it away" in done.stderr
    assert file.read_text() == "precious\n"
