"""Recordings give the ledger of the live data, are marked as recordings, and their faults are reported."""

import gzip
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from tests.support.exporter import QUICK, Ended, Page, no_driver, run, serving
from tests.support.host.model import GIB, MIB, Gpu, Host, Process
from tests.support.players.stage import Stage
from tests.support.standin.library import Code, StandIn
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.reading import Reading, encode
from vramledger.sampling.replay import END_PAUSE, demo_recording, encode_header, read_recording


def reading(second: float, *processes: Process) -> Reading:
    """Make a reading of a host with one GPU and its holders, 8 GiB in all."""
    gpu = Gpu(0, 8 * GIB, GIB, lambda _: 0, ((0.0, "GPU-film"),))
    return Host([gpu], processes, Random(1)).reading(second)  # noqa: S311 nothing here is left to chance


def film(path: Path, readings: Iterable[Reading | bytes]) -> Path:
    """Write a recording; bytes are lines as they are."""
    lines = [each if isinstance(each, bytes) else encode(each) for each in readings]
    path.write_bytes(gzip.compress(b"".join([encode_header("a test"), *lines])))
    return path


LATER = b'{"format": "vramledger-recording", "version": 2}\n'
CORRUPT = {
    "not there": (None, "No such file or directory"),
    "of something else": (b"# HELP go\n", "is not a recording; make one with 'vramledger capture'"),
    "of endless brackets": (b"[" * 60000, "is not a recording"),
    "without readings": (encode_header(), "is empty"),
    "of a later version": (LATER, "has version 2, this program"),
    "gzip cut short": (gzip.compress(encode_header() * 999)[:40], "Compressed file ended before"),
    "gzip of noise": (b"\x1f\x8b" + b"noise" * 20, "cannot read the recording"),
    "garbage at once": (encode_header() + b"garbage\n", "line 2: not a reading"),
}
"""One of each kind, and what the message says."""


@pytest.mark.parametrize("content_and_message", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_recording_does_not_start(
    nothing: dict[str, str], tmp_path: Path, content_and_message: tuple[bytes | None, str]
) -> None:
    """For a file without one valid reading, a command prints one line that names it, and ends with 1."""
    content, message = content_and_message
    path = tmp_path / "film.jsonl.gz"
    if content is not None:
        path.write_bytes(content)
    done = run("serve", f"--source=replay:{path}", driver=nothing)
    (line,) = Ended(done.returncode, done.stderr).messages
    assert done.returncode == 1
    assert line.startswith("vramledger: ")
    assert message in line
    assert str(path) in line


def test_a_recording_that_breaks_off_is_no_data(nothing: dict[str, str], tmp_path: Path) -> None:
    """A recording with a fault plays up to the fault, reports the reason without data, and starts again."""
    path = film(tmp_path / "film.jsonl.gz", [reading(0), reading(0.2), b"garbage\n"])
    with serving(f"--source=replay:{path}", driver=nothing) as exporter:
        page = exporter.until(lambda page: page.failures("recording") >= 1, "the flaw")
        exporter.until(lambda page: page.up, "the next pass")
        page = exporter.until(lambda page: page.failures("recording") >= 2, "the flaw again")
        assert not page.up
        assert page.failures("internal") == 0
    assert "line 4: not a reading" in exporter.ended.log


def test_a_recording_that_is_emptied_under_us(nothing: dict[str, str], tmp_path: Path) -> None:
    """A recording with one reading, or with none left, neither overloads nor stops the exporter."""
    path = film(tmp_path / "film.jsonl.gz", [reading(0)])
    with serving(f"--source=replay:{path}", driver=nothing) as exporter:
        exporter.until(lambda page: page.up, "its only reading")
        before = exporter.next_sample()
        path.write_bytes(encode_header())
        emptied = time.monotonic()
        exporter.until(lambda _: time.monotonic() - emptied > 2 * END_PAUSE, "a pass without a reading")
        assert exporter.scrape().time >= before.time
        assert exporter.stop().code == 0


def test_a_recording_that_is_deleted_under_us(nothing: dict[str, str], tmp_path: Path) -> None:
    """When its file is removed the replay has no data; it continues when there is a file again."""
    path = film(tmp_path / "film.jsonl.gz", [reading(0), reading(0.2)])
    with serving(f"--source=replay:{path}", driver=nothing) as exporter:
        exporter.until(lambda page: page.up, "its data")
        content = path.read_bytes()
        path.unlink()
        exporter.until(lambda page: page.failures("recording") and not page.up, "its loss")
        path.write_bytes(content)
        exporter.until(lambda page: page.up, "its data again")


def test_a_replay_is_what_was_live(standin: StandIn, stage: Stage, tmp_path: Path) -> None:
    """A capture gives the live exporter's figures, replayed or passed to the ledger directly."""
    first, second, third = stage.start(), stage.start(), stage.start()
    standin.device(0).set_processes(
        [(first.pid, 3 * GIB), (second.pid, GIB)], graphics=[(first.pid, 4 * GIB)]
    )
    standin.device(0).set_memory(unattributed=7 * MIB)
    standin.device(1).set_processes([(third.pid, 5 * GIB)], mps=[(second.pid, None)])
    standin.device(1).busy(third.pid, sm=0.5)
    path = tmp_path / "film.jsonl.gz"

    def known(page: Page) -> bool:
        return page.labels("process_info", "command") == {"player.py"}

    with serving(*QUICK, driver=standin.env()) as exporter:
        exporter.until(known, "all facts")
        flags = ("--no-mask", "--duration=300ms", "--sample.interval=100ms")
        recorded = run("capture", str(path), *flags, driver=standin.env())
        live = exporter.next_sample()
    assert recorded.returncode == 0
    assert f"NOT masked, in {path}; replay: vramledger serve --source=replay:{path}" in recorded.stdout
    assert live.ledger(1)["active"] == 5 * GIB

    with serving(f"--source=replay:{path}", driver=no_driver(tmp_path / "lib")) as exporter:
        page = exporter.until(known, "all facts")
        assert page.ledger_series() == live.ledger_series()
        assert page.value("source_info", source="replay", recording="film.jsonl.gz") == 1
        ledger = json.loads(exporter.get("/api/v1/ledger")[1])
        assert (ledger["source"], ledger["recording"]) == ("replay", "film.jsonl.gz")

    tracker = HoldingTracker(idle_after=600)
    for each in read_recording(path):
        snapshot = tracker.update(each)
    for device in snapshot.devices:
        assert device.ledger is not None
        ledger = {state.value: size for state, size in device.ledger.states.items()}
        ledger |= {"free": device.ledger.free, "unattributed": device.ledger.unattributed}
        ledger["driver_reserved"] = device.ledger.driver_reserved or 0
        assert {state: size for state, size in ledger.items() if size} == live.ledger(device.reading.index)


def test_a_masked_capture_names_nobody(standin: StandIn, stage: Stage, tmp_path: Path) -> None:
    """A file that ``capture`` writes has bytes and states, and no UUID, user or program of this host."""
    standin.device(0).set_processes([(stage.start().pid, 3 * GIB)])
    path = tmp_path / "film.jsonl.gz"
    done = run("capture", str(path), "--duration=300ms", "--sample.interval=100ms", driver=standin.env())
    assert re.match(r"\d+ readings, masked, in ", done.stdout)
    text = gzip.decompress(path.read_bytes()).decode()
    real = json.loads(run("show", "--json", driver=standin.env()).stdout)
    assert real["devices"][0]["uuid"] not in text
    assert f'"user":"{real["devices"][0]["holdings"][0]["user"]}"' not in text
    shown = json.loads(run("show", "--json", f"--source=replay:{path}", driver=standin.env()).stdout)
    assert shown["source"] == "replay"
    assert shown["devices"][0]["memory"] == real["devices"][0]["memory"]


def test_auto_without_a_driver_is_loudly_a_recording(nothing: dict[str, str]) -> None:
    """Without a driver, ``--source=auto`` says in log, metrics and page that it shows a simulation."""
    with serving("--source=auto", driver=nothing) as exporter:
        page = exporter.until(lambda page: page.up, "the demo_recording recording")
        assert page.labels("source_info", "source") == {"replay"}
        assert page.labels("source_info", "recording") == {f"{demo_recording().name} (simulated)"}
        assert json.loads(exporter.get("/api/v1/ledger")[1])["source"] == "replay"
        assert "RECORDING, not this host" in exporter.log
    shown = run("show", "--source=auto", driver=nothing)
    assert shown.stdout.startswith(f"RECORDING {demo_recording().name} (simulated): ")
    assert shown.returncode == 0


def test_auto_with_a_driver_is_this_host(standin: StandIn) -> None:
    """With a driver, ``--source=auto`` uses it alone: while it refuses, while it works, after it is lost."""
    standin.driver_error = Code.NO_PERMISSION
    with serving(*QUICK, "--source=auto", driver=standin.env()) as exporter:
        pages = [exporter.until(lambda page: page.failures("no-permission"), "the refusal")]
        standin.driver_error = Code.SUCCESS
        pages.append(exporter.until(lambda page: page.up, "the data"))
        standin.reload_driver()
        pages.append(exporter.until(lambda page: not page.up, "the loss"))
    assert [page.labels("source_info", "source") for page in pages] == [{"nvml"}] * 3
