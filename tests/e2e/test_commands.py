"""The command line as a user meets it: exit codes, one-line messages, and what the commands print."""

import json
import os
import signal
import socket
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.exporter import QUICK, Ended, command, entries, environment, run, sampling, serving
from tests.support.players.stage import Stage
from tests.support.standin.library import GIB, Code, StandIn
from vramledger import __version__
from vramledger.cli import parser


@pytest.mark.parametrize("name", ["serve", "show", "check", "doctor"])
def test_a_mount_that_was_forgotten_is_one_line_and_2(
    nothing: dict[str, str], tmp_path: Path, name: str
) -> None:
    """Every command that reads the host's root file system refuses an empty directory in its place."""
    (tmp_path / "host").mkdir()
    done = run(name, f"--path.rootfs={tmp_path / 'host'}", driver=nothing)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert "host is empty; mount the host's root file system there" in line


def started_in_vain(done: subprocess.CompletedProcess[str]) -> str:
    """Return the message of a command that could not start: exit status 1, and one line besides the log."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = Ended(1, done.stderr).messages
    assert line.startswith("vramledger: ")
    return line


def test_a_taken_port_is_one_line_and_1(standin: StandIn) -> None:
    """A taken port ends the start before the driver is asked; the message says how to find its owner."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        done = run("serve", f"--web.listen-address=127.0.0.1:{port}", driver=standin.env())
    message = started_in_vain(done)
    assert f"127.0.0.1:{port}: the port is taken" in message
    assert f"ss -ltnp 'sport = :{port}'" in message
    assert standin.calls("nvmlInit_v2") + standin.calls("nvmlInitWithFlags") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(standin: StandIn, number: signal.Signals) -> None:
    """SIGTERM and SIGINT end the exporter: status 0, the last log line says so, and no process is left."""
    with sampling(driver=standin.env()) as exporter:
        assert exporter.stop(number).code == 0
    log = entries(exporter.ended.log)
    assert [log[0]["msg"], log[-1]["msg"]] == ["Starting vramledger", "Stopped"]
    assert log[0]["version"] == __version__


def test_the_log_can_be_json(nothing: dict[str, str]) -> None:
    """With --log.format=json every line is an object with the keys of logfmt."""
    with serving(*QUICK, "--log.format=json", "--log.level=debug", driver=nothing) as exporter:
        exporter.until(lambda page: page.failures("no-library"), "a failure")
    lines = [json.loads(line) for line in exporter.ended.log.splitlines()]
    assert {"Starting vramledger", "No GPU data", "Stopped"} <= {line["msg"] for line in lines}
    assert all({"time", "level", "source", "msg"} <= set(line) for line in lines)


def test_show_is_a_table(standin: StandIn, stage: Stage) -> None:
    """``show`` prints who holds what and why, and its exit status says that there was data."""
    pid = stage.start().pid
    standin.device(1).set_processes([(pid, 3 * GIB)])
    done = run("show", driver=standin.env())
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("GPU 0  NVIDIA H200")
    assert "no process holds memory here" in done.stdout
    (row,) = [line.split() for line in lines if line.split()[:1] == [str(pid)]]
    assert row[2:5] == ["player.py", "3.00", "GiB"]
    assert "active" in row


def test_show_and_watch_without_a_driver(nothing: dict[str, str]) -> None:
    """Without a driver, ``show`` says why and how to see a simulated host, and its exit status is 1."""
    done = run("show", driver=nothing)
    assert (done.returncode, done.stderr) == (1, "")
    line, advice = done.stdout.splitlines()
    assert advice == "To see a simulated host: vramledger show --source=auto"
    assert line.startswith("No data (no-library): libnvidia-ml.so.1 was not found; install")
    assert json.loads(run("show", "--json", driver=nothing).stdout)["up"] is False


@pytest.mark.repeats(kept=3)
@pytest.mark.parametrize(
    ("arguments", "streams", "why"),
    [
        ("show", ">/dev/full", "No space left"),
        ("show", "<&- >&-", "Bad file descriptor; free some space or write elsewhere"),
        ("show", "<&- >&- 2>&-", ""),
        ("show", ">&-", "Bad file descriptor; free some space or write elsewhere"),
        ("show --json", ">/dev/full", "No space left"),
        ("doctor", ">/dev/full", "No space left"),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_1(
    nothing: dict[str, str], arguments: str, streams: str, why: str
) -> None:
    """On a full disk, or with streams closed, a command says so once, writes to no other file, and ends."""
    done = run(*arguments.split(), driver=nothing, wrapper=("sh", "-c", f'exec "$@" {streams}', "sh"))
    if why:
        assert started_in_vain(done).startswith(f"vramledger: cannot write to standard output: {why}")
    assert (done.returncode, done.stdout) == (1, "")


def test_show_in_ascii(standin: StandIn) -> None:
    """A terminal that cannot show a character gets a question mark in its place."""
    done = run("show", driver={**standin.env(), "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert " ? free " in done.stdout


def test_watching_ends_with_its_reader_and_on_interrupt(standin: StandIn) -> None:
    """``show --watch | head`` ends silently, and ^C ends it with status 130; neither prints a traceback."""
    words, pipe = command("show", "--watch", "--sample.interval=50ms"), subprocess.PIPE
    for end in ("close", "interrupt"):
        with subprocess.Popen(words, env=environment(standin.env()), stdout=pipe, stderr=pipe) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().startswith(b"GPU 0")
            if end == "close":
                process.stdout.close()
            else:
                process.send_signal(signal.SIGINT)
            assert process.stderr.read() == b""
            assert process.wait(30) == (0 if end == "close" else 130)


def test_doctor_finds_nothing_wrong_or_says_what(standin: StandIn, stage: Stage) -> None:
    """``doctor`` lists what is in order and what is not, with a remedy for each gap; its status is 0 or 1."""
    standin.device(0).set_processes([(stage.start().pid, GIB)])
    done = run("doctor", driver=standin.env())
    lacks = [line for line in done.stdout.splitlines() if line.startswith("LACK")]
    assert done.returncode == (1 if lacks else 0)  # this machine's gaps: no root, another namespace
    assert "ok    driver: 580.159.04, CUDA up to 13.0" in done.stdout
    assert f"ok    GPU 0 {standin.device(0).uuid}: NVIDIA H200; tells everything" in done.stdout

    standin.device(1).lost = True
    standin.fail("nvmlDeviceGetComputeRunningProcesses_v3", Code.UNKNOWN, 0)
    done = run("doctor", driver=standin.env())
    assert done.returncode == 1
    assert "gives no data: lost" in done.stdout
    assert "not reported: process list" in done.stdout
    lines = done.stdout.splitlines()
    assert all("remedy: " in after for line, after in pairwise(lines) if line.startswith("LACK"))
    assert any(line.startswith("LIMIT alerts: no scheduler") for line in lines)


def test_a_person_is_told_of_a_wait(standin: StandIn, tmp_path: Path) -> None:
    """A command that says nothing for a while says so on a terminal, before it waits."""
    terminal, stderr = os.openpty()
    words = command("capture", *QUICK, "--duration=1s", str(tmp_path / "capture"))
    environ = environment(standin.env())
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=stderr) as running:
        os.close(stderr)
        said = b""
        while b"Recording for 1s." not in said:
            said += os.read(terminal, 1024)  # an error when the command has ended
        assert running.poll() is None, "it still waits"
    os.close(terminal)


def test_a_capture_without_a_driver_spoils_nothing(nothing: dict[str, str], tmp_path: Path) -> None:
    """``capture`` without a driver prints one line, ends with 1, and keeps an older file of that name."""
    older = tmp_path / "incident.jsonl.gz"
    older.write_bytes(b"precious")
    done = run("capture", str(older), driver=nothing)
    assert "libnvidia-ml.so.1 was not found" in started_in_vain(done)
    assert older.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("place", "blocks", "why"),
    [
        ("no/file", "unlimited", "No such file or directory"),
        ("/dev/full", "unlimited", "No space left on device"),
        ("film.gz", "1", "File too large"),
    ],
)
def test_a_capture_that_cannot_be_written(
    standin: StandIn, tmp_path: Path, place: str, blocks: str, why: str
) -> None:
    """Without a directory, or on a disk that is full at once or later, ``capture`` says so in one line."""
    standin.device(0).set_processes([(pid, pid) for pid in range(1000, 1300)])  # more than a block
    path = str(tmp_path / place)
    wrapper = ("sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh")
    done = run("capture", *QUICK, "--duration=1s", path, driver=standin.env(), wrapper=wrapper)
    assert f"cannot write {path}: {why}" in started_in_vain(done)


def test_help_says_where_to_start(nothing: dict[str, str]) -> None:
    """``--help`` says where to start and has examples, and each is a command line that is accepted."""
    done = run("--help", driver=nothing)
    assert done.returncode == 0
    assert "Start with 'vramledger doctor'" in done.stdout
    examples = [
        line.split("   ")[0].split()[1:] for line in done.stdout.splitlines() if "  vramledger " in line
    ]
    assert [each[0] for each in examples] == ["show", "fit", "end", "serve"]
    examples[1][1] = "1"  # PID
    for example in examples:
        parser().parse_args(example)
