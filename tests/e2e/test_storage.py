"""``serve --storage.path``: what was known survives the exporter; a disk costs the storage alone."""

import fcntl
import gzip
import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.exporter import LOOPBACK, QUICK, Ended, Exporter, Page, run, sampling, serving
from tests.support.players.stage import Stage
from tests.support.requirements import do_without, require_host_pid_namespace, require_root
from tests.support.standin.library import GIB, StandIn
from tests.support.waiting import wait_until
from vramledger.sampling.replay import read_recording

IDLE_AFTER = 3.0


def files_in(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def idle_since(page: Page, pid: int) -> float | None:
    return page.value("process_state_since_timestamp_seconds", pid=pid, state="idle")


@pytest.mark.repeats
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_restart_forgets_nothing(standin: StandIn, stage: Stage, tmp_path: Path, end: int) -> None:
    """A new exporter knows who is idle since when, whose parent was seen alive, and what owners have used."""
    require_host_pid_namespace()
    quiet, launcher = stage.start(), stage.start(session=False)
    worker = launcher.start(env={"OMPI_COMM_WORLD_RANK": "0"}, tie="socket")
    standin.device(0).set_processes([(quiet.pid, 8 * GIB), (worker.pid, GIB)])
    storage = tmp_path / "past"
    flags = (*QUICK, f"--idle-after={IDLE_AFTER}s", f"--storage.path={storage}")
    with serving(*flags, driver=standin.env()) as exporter:
        exporter.until(lambda page: idle_since(page, quiet.pid), "the idle holder")
        before = exporter.until(lambda page: page.state(worker.pid) == "idle", "the worker")
        children = exporter.process.children(recursive=True)
        exporter.stop() if end == signal.SIGTERM else exporter.kill()
        for each in children:  # what it had is written by its child when the pipe closes
            each.wait(10)
    assert files_in(storage)
    launcher.end()
    with serving(*flags, driver=standin.env()) as exporter:
        page = exporter.until(lambda page: page.up, "the first sample")
        assert idle_since(page, quiet.pid) == pytest.approx(idle_since(before, quiet.pid), abs=1.1)
        page = exporter.until(lambda page: page.state(worker.pid) == "orphaned", "what lasts")
        for key, value in before.values("owner_memory_byte_seconds_total").items():
            assert page.values("owner_memory_byte_seconds_total")[key] >= value * 0.5
        assert page.values("owner_memory_byte_seconds_total")


def storing(exporter: Exporter) -> psutil.Process:
    children = exporter.process.children(recursive=True)
    (found,) = (each for each in children if "vramledger.storage.process" in " ".join(each.cmdline()[:3]))
    return found


def stores(page: Page) -> float | None:
    """Return whether readings reach the disk, None while that is not known."""
    return page.value("storage_up")


def figure(page: Page, name: str) -> float:
    value = page.value(f"storage_{name}")
    assert value is not None, name
    return value


def until_stored(exporter: Exporter, after: float = 0.0) -> Page:
    """Wait until a reading that is newer than this is on the disk, and return the page that says so."""

    def stored(page: Page) -> bool:
        return stores(page) == 1 and figure(page, "newest_timestamp_seconds") > after

    return exporter.until(stored, "a reading on the disk")


def test_a_hanging_disk_costs_the_storage_alone(standin: StandIn, tmp_path: Path) -> None:
    """While the process that stores hangs, samples and scrapes go on, and the exporter ends in time."""
    with sampling(f"--storage.path={tmp_path / 'past'}", driver=standin.env()) as exporter:
        child = storing(exporter)
        child.suspend()
        try:
            for _ in range(5):
                assert exporter.next_sample().up
            assert exporter.stop().code == 0
        finally:
            child.kill()


def test_a_killed_process_that_stores_is_started_again(standin: StandIn, tmp_path: Path) -> None:
    """However often it is killed, the exporter serves on, stores again, and says what was lost."""
    flags = (*QUICK, f"--storage.path={tmp_path / 'past'}")
    with serving(*flags, driver=standin.env()) as exporter:
        until_stored(exporter)
        for restarts in (1, 2):
            before = exporter.next_sample()
            storing(exporter).kill()
            wait_until(lambda: exporter.log.count("its process has ended") == restarts, "the message")  # noqa: B023
            page = until_stored(exporter, exporter.next_sample().time)
            assert page.up
            assert stores(page) == 1
            assert figure(page, "restarts_total") == restarts
            for name in ("written_bytes_total", "dropped_samples_total"):
                assert figure(page, name) > figure(before, name), name
            (error,) = page.values("storage_last_error_timestamp_seconds").values()
            assert error >= before.time - 1.0
        asked = run("show", "--at", str(page.time), driver={**standin.env(), **exporter.found})
        assert asked.returncode == 0, asked.stderr
        assert exporter.stop().code == 0
    assert files_in(tmp_path / "past") == ["past.sqlite"]


@pytest.mark.thorough
def test_a_start_that_fails_once_is_tried_again(standin: StandIn, tmp_path: Path) -> None:
    """If the exporter has no descriptor left when the process is to be started again, it stores later."""
    with serving(*QUICK, f"--storage.path={tmp_path / 'past'}", driver=standin.env()) as exporter:
        until_stored(exporter)
        limits = exporter.process.rlimit(psutil.RLIMIT_NOFILE)
        exporter.process.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
        try:
            storing(exporter).kill()
            wait_until(lambda: "cannot be started now" in exporter.log, "the message")
        finally:
            exporter.process.rlimit(psutil.RLIMIT_NOFILE, limits)
        page = until_stored(exporter, exporter.next_sample().time)
        assert (stores(page), figure(page, "restarts_total")) == (1, 1)
        assert "restart the exporter" not in exporter.log
        assert exporter.stop().code == 0


@pytest.mark.thorough
def test_who_starts_the_process_that_stores_is_not_needed_by_it(standin: StandIn, tmp_path: Path) -> None:
    """If only the starter is killed, storing goes on; if both are, the exporter serves on and is not "up"."""
    with serving(*QUICK, f"--storage.path={tmp_path / 'past'}", driver=standin.env()) as exporter:
        until_stored(exporter)
        child = storing(exporter)
        keeper = child.parent()
        assert keeper is not None
        keeper.kill()
        until_stored(exporter, exporter.next_sample().time)
        child.kill()
        wait_until(lambda: "Nothing is stored any more" in exporter.log, "the message")
        page = exporter.next_sample()
        assert page.up
        assert stores(page) == 0
        assert exporter.stop().code == 0


@pytest.mark.thorough
def test_the_storage_is_in_the_metrics(standin: StandIn, tmp_path: Path) -> None:
    """A scrape has the size, the limits, the oldest and the newest moment; without a storage nothing."""
    flags = (f"--storage.path={tmp_path / 'past'}", "--storage.retention=2d", "--storage.size=64MiB")
    with serving(*QUICK, *flags, driver=standin.env()) as exporter:
        page = until_stored(exporter)
        begun = figure(page, "newest_timestamp_seconds")
        assert figure(page, "retention_limit_bytes") == 64 * 2**20
        assert figure(page, "retention_limit_seconds") == 2 * 86400
        assert figure(page, "dropped_samples_total") == 0
        assert page.values("storage_last_error_timestamp_seconds") == {}
    with serving(*QUICK, *flags, driver=standin.env()) as exporter:
        page = until_stored(exporter)
        files = [each.stat() for each in (tmp_path / "past").iterdir()]
        assert 0 < figure(page, "size_bytes") <= sum(each.st_blocks for each in files) * 512
        assert figure(page, "oldest_timestamp_seconds") < begun + 0.01  # one of them may be rounded
        assert figure(page, "written_bytes_total") > 0
    with sampling(driver=standin.env()) as exporter:
        assert "vramledger_storage_" not in exporter.scrape().text


@pytest.mark.thorough
def test_a_full_disk_costs_the_storage_alone(standin: StandIn, tmp_path: Path) -> None:
    """On a full disk the exporter samples on, says so once, and stores again when there is room."""
    require_root()
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=False)
    if done.returncode:
        do_without("a mount of tmpfs")
    try:
        (disk / "other").write_bytes(b"x" * 2 * 2**20)
        with serving(*QUICK, f"--storage.path={disk / 'past'}", driver=standin.env()) as exporter:
            wait_until(lambda: "Nothing is stored for now" in exporter.log, "the message")
            page = exporter.until(lambda page: stores(page) == 0, "the metric")
            assert page.up
            assert page.values("storage_last_error_timestamp_seconds", error="No space left on device")
            (disk / "other").unlink()
            wait_until(lambda: "is written again" in exporter.log, "room")
            page = exporter.until(lambda page: stores(page) == 1, "a reading on the disk")
            assert figure(page, "dropped_samples_total") > 0
            assert exporter.log.count("Nothing is stored for now") == 1
        assert files_in(disk / "past")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("what", ["file", "busy"])
def test_a_directory_that_cannot_be_used_ends_the_start(standin: StandIn, tmp_path: Path, what: str) -> None:
    """A wrong --storage.path is one line that says what is wrong; another exporter's is refused too."""
    path = tmp_path / "past"
    path.touch() if what == "file" else path.mkdir()
    opened = os.open(path, os.O_RDONLY)
    if what == "busy":
        fcntl.flock(opened, fcntl.LOCK_EX)
    flags = (f"--storage.path={path}", f"--control.socket={tmp_path}/c", f"--agent.socket={tmp_path}/a")
    done = run("serve", LOOPBACK, *flags, driver=standin.env())
    os.close(opened)
    (line,) = Ended(done.returncode, done.stderr).messages
    assert done.returncode == 1
    assert "--storage.path=" in line


def test_the_exporters_user_owns_the_storage(standin: StandIn, directory: Path) -> None:
    """Started as root, the process that stores is the user that listens, and may write nowhere else."""
    require_root()
    storage = directory / "past"
    with sampling("--web.user=65532", f"--storage.path={storage}", driver=standin.env()) as exporter:
        expected = 65532 if "stays root" not in exporter.log else 0
        assert storing(exporter).uids().effective == expected
        assert storage.stat().st_uid == expected
        assert stat.S_IMODE(storage.stat().st_mode) == 0o700


def test_commands_show_the_past(standin: StandIn, stage: Stage, tmp_path: Path) -> None:
    """``show --at``, ``--since`` and ``capture --last`` ask the exporter; without it they read the files."""
    require_host_pid_namespace()
    holder = stage.start()
    standin.device(0).set_processes([(holder.pid, 8 * GIB)])
    path = f"--storage.path={tmp_path / 'past'}"
    with serving(*QUICK, path, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.state(holder.pid), "the holder")
        then = exporter.next_sample().time
        standin.device(0).set_processes([])
        exporter.until(lambda page: not page.state(holder.pid), "the end of the holding")
        ended = exporter.next_sample().time
        until_stored(exporter, ended)
        asked = check_past(holder.pid, then, path, {**standin.env(), **exporter.found}, tmp_path)
        empty = run("show", "--at=-0.1s", "--json", driver={**standin.env(), **exporter.found})
        assert json.loads(empty.stdout)["devices"][0]["holdings"] == []
    assert check_past(holder.pid, then, path, standin.env(), tmp_path) == asked


def check_past(
    pid: int, then: float, path: str, driver: dict[str, str], directory: Path
) -> list[dict[str, object]]:
    """Check what the commands say of a moment in which the holder was there; return its holdings."""

    def said(*arguments: str) -> str:
        done = run(*arguments, path, driver=driver)
        assert done.returncode == 0, done.stderr
        return done.stdout

    table = said("show", "--at", str(then))
    assert "As it was at" in table
    assert str(pid) in table
    assert str(pid) in said("show", f"--at={then}", f"--why={pid}")
    assert "GIB-HOURS" in said("show", "--since", "-1h")
    (owner,) = json.loads(said("show", "--since", "-1h", "--json"))["owners"]
    assert owner["highest"] == 8 * GIB
    assert owner["byte_seconds"] >= 0
    recording = directory / "incident.jsonl.gz"
    said("capture", str(recording), "--last", "1h")
    assert any(device.processes for each in read_recording(recording) for device in each.devices)
    assert b"GPU-00000000-0000-0000-0000" not in gzip.decompress(recording.read_bytes()), "it is masked"
    found: list[dict[str, object]] = json.loads(said("show", f"--at={then}", "--json"))["devices"][0][
        "holdings"
    ]
    assert [each["pid"] for each in found] == [pid]
    return found
