"""``vramledger attach``: start the agent in a running program, where Python supports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import listening
from tests.support.listening import AGENT_ROOT, FAKE, FakeExporter, go_on
from tests.support.requirements import require_newer, require_root
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.cli import main
from vramledger_agent.commands.attach import effective_user, write_files

NOBODY = 65534
WAITING = """
import os, signal, sys
signal.pthread_sigmask(0, [signal.SIGUSR1])
if user := int(os.environ.get("TEST_USER", "0")):
    os.setgid(user); os.setuid(user)
import torch
kept = torch.Tensor(8)
print("up", flush=True)
while signal.sigtimedwait([signal.SIGUSR1], 0.01) is None:
    pass
print([name for name in globals() if not name.startswith("__")])
print([entry for entry in sys.path if "exporter" in entry])
"""
COMMAND = "import sys; from vramledger_agent.cli import main; sys.exit(main(['attach', *sys.argv[1:]]))"


@pytest.fixture(name="place")
def fixture_place() -> Iterator[Path]:
    """Return a directory that every user may enter, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="vl-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def environment(path: Path, **variables: str) -> dict[str, str]:
    """Return a program's environment, without anything of the agent."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VRAM"))}
    return {**usual, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1", **variables}


def start(python: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a program with a tensor and without the agent; it ends on SIGUSR1."""
    process = listening.start(WAITING, environment(FAKE, **variables), python=python)
    assert sure(process.stdout).readline() == "up\n"
    return process


def attach(python: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Attach with the same Python, which has the agent alone; return the status and the message."""
    done = subprocess.run(
        [python, "-c", COMMAND, *arguments], env=environment(AGENT_ROOT, **variables),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Let a program end by itself, and return what it printed."""
    process.send_signal(signal.SIGUSR1)
    return process.communicate(timeout=60)


@pytest.mark.parametrize("version", ["3.14", "3.15"])
def test_attach(version: str, place: Path) -> None:
    """A running program is reported from then on; its names and import path do not change."""
    python = require_newer(f"python{version}")
    with FakeExporter(place / "agent.sock") as exporter:
        process = start(python)
        said = attach(python, str(process.pid), "--agent.socket", str(exporter.path), "--allow-reclaim")
        assert said == (0, f"The agent runs in process {process.pid}.\n")
        report = exporter.reports[exporter.watch(process).pid][-1]
        out, errors = end(process)

    assert report["frameworks"][0]["devices"][0]["allocated"] == 8
    assert report["consents"] == ["reclaim"]
    assert errors == ""
    assert "begin" not in out.splitlines()[0]
    assert out.splitlines()[1] == "[]"


def test_attach_to_another_users_process() -> None:
    """Root can attach to any process; the process itself reports when it cannot read the agent."""
    require_root()
    python = require_newer("python3.14")
    process = start(python, TEST_USER=str(NOBODY))
    status, said = attach(python, str(process.pid))
    assert end(process)[1] == ""
    refused = (f"process {process.pid} cannot load the agent", "must be able to read")
    expected = refused if status else (f"The agent runs in process {process.pid}.\n",)
    assert all(each in said for each in expected)


def test_attach_where_it_cannot_be() -> None:
    """No process, no Python, another version, debugging off: one line each, and no change there."""
    python = require_newer("python3.14")
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        status, said = attach(python, str(sleeper.pid))
        sleeper.kill()
    assert (status, "accepts no script" in said, said.count("\n")) == (1, True, 1)
    assert attach(python, str(sleeper.pid)) == (1, f"vramledger-agent: there is no process {sleeper.pid}\n")
    process = start(python, PYTHON_DISABLE_REMOTE_DEBUG="1")
    status, said = attach(python, str(process.pid))
    assert (status, "not enabled" in said, end(process)[1]) == (1, True, "")


def test_attach_to_one_in_a_long_call(place: Path) -> None:
    """A program in a long call gets the agent after the command has ended, and nothing is left."""
    python = require_newer("python3.14")
    program = "import sys, torch\nkept = torch.Tensor(8)\nfor _ in range(2):\n    sys.stdin.readline()\n"
    with FakeExporter(place / "agent.sock") as exporter:
        process = listening.start(program, environment(FAKE), python=python)
        wchan = Path(f"/proc/{process.pid}/wchan")
        wait_until(lambda: "pipe" in wchan.read_text(), "the program to wait at its pipe")
        arguments = (str(process.pid), "--agent.socket", str(exporter.path))
        status, said = attach(python, *arguments, TMPDIR=str(place))
        assert (status, "did not run the script" in said) == (1, True)
        assert list(place.glob("vramledger-attach-*"))
        go_on(process)
        exporter.watch(process)
        wait_until(lambda: not list(place.glob("vramledger-attach-*")), "the files to be removed")
        assert process.communicate("\n", timeout=60) == ("", "")


def test_a_process_that_ends_meanwhile(tmp_path: Path) -> None:
    """It has no user, and the script is written even then: the attempt shows that the process is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=60)
    arguments = Namespace(pid=gone.pid, socket=None, allow_reclaim=False, allow_snapshot=False)
    assert effective_user(os.getpid()) == os.geteuid()
    assert effective_user(gone.pid) is effective_user(99_999_999_999_999) is None, "above the largest pid"
    write_files(tmp_path, arguments, os.geteuid(), 0.0).close()
    assert (tmp_path / "start.py").exists()


@pytest.mark.skipif(hasattr(sys, "remote_exec"), reason="this Python can attach")
def test_attach_with_an_older_python(capsys: pytest.CaptureFixture[str]) -> None:
    """On a Python that cannot attach, the message says which can, and what to do instead."""
    assert main(["attach", str(os.getpid())]) == 1
    assert "Python 3.14 or newer" in capsys.readouterr().err
