"""``vramledger release``: the exporter releases the GPUs, reports this, and reopens them by itself."""

import json
import socket
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.control_client import request_bytes
from tests.support.exporter import QUICK, Exporter, Page, run, serving
from tests.support.standin.library import StandIn


def released(page: Page) -> bool:
    return page.value("released_until_timestamp_seconds") is not None


def test_the_gpus_are_let_go_of_and_taken_back(shared: Exporter) -> None:
    """After the command no device is open and no failure is counted; ``--resume`` restores the data."""
    sampler = shared.sampler
    before = shared.scrape()
    assert shared.drivers() == [sampler.pid]

    done = run("release", "--for=1h", driver=shared.found)

    assert (done.returncode, done.stderr) == (0, "")
    assert "until" in done.stdout
    assert not psutil.pid_exists(sampler.pid) or sampler.status() == psutil.STATUS_ZOMBIE
    assert shared.drivers() == []
    page = shared.until(released, "the page to say so")
    assert not page.up
    assert shared.next_sample().time > page.time, "the timestamp moves: this is no exporter that hangs"
    (starter,) = shared.process.children(recursive=True)
    assert "vramledger.sampling.starter" in " ".join(starter.cmdline()), "which has no GPU open"
    assert page.values("sample_failures_total") == before.values("sample_failures_total")
    ledger = json.loads(shared.get("/api/v1/ledger")[1])
    assert ledger["failure"]["reason"] == "released"
    assert ledger["released_until"] == page.value("released_until_timestamp_seconds")
    assert "release --resume" in ledger["failure"]["message"], "which the page shows as it is"
    assert "level=error" not in shared.log

    assert run("release", "--resume", driver=shared.found).returncode == 0
    page = shared.until(lambda page: page.up, "data")
    assert not released(page)


def test_the_gpus_are_taken_back_in_time(shared: Exporter) -> None:
    """After the given time there is data again by itself. A second command replaces the first."""
    assert run("release", "--for=1h", driver=shared.found).returncode == 0
    assert run("release", "--for=500ms", driver=shared.found).returncode == 0
    shared.until(lambda page: page.up, "data")


def test_a_host_without_a_driver_can_be_told(standin: StandIn) -> None:
    """While there is no driver, as during its update, the command works too."""
    standin.driver_error = 9
    with serving(*QUICK, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.failures("no-driver"), "a failure")
        assert run("release", driver=exporter.found).returncode == 0
        exporter.until(released, "the page to say so")
        standin.driver_error = 0
        assert run("release", "--resume", driver=exporter.found).returncode == 0
        exporter.until(lambda page: page.up, "data")


@pytest.mark.parametrize("replaying", [False, True])
def test_without_an_exporter_it_is_one_line(nothing: dict[str, str], tmp_path: Path, replaying: bool) -> None:
    """If none answers, or one that replays and has no GPU, it says which socket it used and what to do."""
    flag = f"--control.socket={tmp_path}/control.sock"
    with serving("--source=auto", flag, driver=nothing) if replaying else nullcontext():
        done = run("release", flag, driver=nothing)
    asked = "is 'vramledger serve' running, with this --control.socket?"
    told = f"{asked} One that plays a recording answers no command"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"vramledger: no exporter answers at {tmp_path}/control.sock; {told}\n"


@pytest.mark.parametrize(
    "sent",
    [
        *(b"\r\n", b"{\r\n", b"x" * 10_000, b"\xff\xfe\r\n", b"GET\r\n\r\n"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        *(request_bytes("POST", "/release", each) for each in ("", "[", '{"seconds": 60, "force": true}')),
        *(
            request_bytes("POST", "/release", f'{{"seconds": {each}}}')
            for each in ("-1", '"x"', "359999999999996400", "1e300")
        ),
        *(
            request_bytes("GET", each)
            for each in ("/release", "/", "/past?ask=readings", "/snapshot?after=1&uid=0")
        ),
        b"POST /release HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /release HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n\x1f\x8b\x08\x00aaaaa",
    ],
)
def test_rubbish_is_answered(shared: Exporter, sent: bytes) -> None:
    """Invalid messages to the control socket change nothing and end nothing, and are refused or cut off."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(shared.found["VRAMLEDGER_CONTROL_SOCKET"])
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent)
            assert not client.recv(4096).startswith(b"HTTP/1.1 200")
    assert shared.next_sample().up
