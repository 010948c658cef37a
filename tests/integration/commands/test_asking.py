"""``vramledger snapshot`` and ``reclaim`` reach the agent in a program through a real exporter."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.exporter import SOURCES, command, environment, no_driver, run, serving
from tests.support.requirements import require_root
from tests.support.waiting import wait_until
from vramledger.agent_server.connection import MESSAGE_RATE
from vramledger.agent_server.discovery import request_agents
from vramledger.commands import reclaim

FRAMEWORKS = Path(__file__).parents[2] / "support" / "frameworks" / "standin"

PROGRAM = """
import gc, sys, time, torch

kept = []


def evaluate():
    kept.append(torch.Tensor(3_000_000))


def main():
    gc.disable()
    optimizer = torch.optim.Adam([torch.Tensor(1000)])
    large = torch.Tensor(500_000_000)
    large.itself = large
    del large
    steps = 0
    while True:
        if "still" not in sys.argv:
            optimizer.step()
            steps += 1
        evaluate()
        with open("alive", "w") as file:
            file.write(f"{len(kept)} {steps} {torch.cuda.memory.recording}")
        time.sleep(0.01)


main()
"""
"""A training that keeps its evaluations' results, and has half a gigabyte in a dead reference cycle."""

CONSENTS = ["--allow-snapshot", "--allow-reclaim"]
KEEPING = "program.py:8 evaluate"


class Training(NamedTuple):
    """A running program, and how to reach its agent."""

    pid: int
    directory: Path
    socket: Path
    driver: dict[str, str]

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ours."""
        return run(*arguments, f"--agent.socket={self.socket}", driver=self.driver)

    @property
    def state(self) -> list[str]:
        """Return what the program reports: results kept, steps, whether it is recorded."""
        return (self.directory / "alive").read_text(encoding="utf-8").split(maxsplit=2) or ["0", "0", ""]


@pytest.fixture
def training(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    """Start the program under an exporter, with the consents that a test's parameter names."""
    flags, arguments = getattr(request, "param", (CONSENTS, []))
    monkeypatch.chdir(tmp_path)
    driver = no_driver(tmp_path / "driver")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="agent-") as run_directory, ExitStack() as stack:
        os.chmod(run_directory, 0o755)  # noqa: PTH101, S103 as /run/vramledger is
        path = Path(run_directory, "agent.sock")
        stack.enter_context(serving(f"--agent.socket={path}", driver=driver))
        command_line = command(
            "run", f"--agent.socket={path}", *flags, "--", sys.executable, str(program), *arguments
        )
        environ = environment(driver)
        environ["PYTHONPATH"] = f"{SOURCES}{os.pathsep}{FRAMEWORKS}"
        with subprocess.Popen(command_line, env=environ) as process:
            try:
                found = Training(process.pid, tmp_path, path, driver)

                def answers() -> bool:
                    assert process.poll() is None
                    time.sleep(1 / MESSAGE_RATE)  # the maximum, because the test sends requests too
                    try:
                        return any(agent.pid == process.pid for agent in request_agents(path))
                    except FileNotFoundError:  # it listens for scrapes before it makes the socket
                        return False

                wait_until(answers, "the agent")
                yield found
                assert process.poll() is None, "the program goes on as if nothing had been asked"
            finally:
                process.send_signal(signal.SIGKILL)


def test_leak_is_found_in_a_running_program(training: Training) -> None:
    """Two recordings of a running program show which of its lines keep memory; the files are private."""
    for name in ("a", "b"):
        done = training.ask("snapshot", str(training.pid), "--for=1s", f"--output={name}.pickle")
        assert done.returncode == 0, done.stderr
        file = training.directory / f"{name}.pickle"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    compared = training.ask("snapshot", "diff", "a.pickle", "b.pickle")
    shown = training.ask("snapshot", "show", "b.pickle")
    page = training.ask("snapshot", "show", "b.pickle", "--html=b.html")

    # On a busy machine more is allocated between the recordings than in them; that has a line of its own.
    assert KEEPING in "".join(compared.stdout.splitlines()[2:4])
    assert f"came through {training.directory}/{KEEPING}" in compared.stdout
    assert KEEPING in shown.stdout
    assert page.returncode == 0
    assert KEEPING in (training.directory / "b.html").read_text(encoding="utf-8")
    wait_until(lambda: training.state[2] == "None", "the history to be off again")


def test_a_step_is_recorded_and_memory_is_given_back(training: Training) -> None:
    """``--step`` records one allocation of a step; ``reclaim`` frees the dead cycle's half gigabyte."""
    done = training.ask("snapshot", str(training.pid), "--step", "--output=step.pickle")
    assert done.returncode == 0, done.stderr
    assert " 1 events" in done.stdout
    done = training.ask("reclaim", str(training.pid))
    assert done.returncode == 0, done.stderr
    assert "device 0: 47" in done.stdout  # 500,000,000 bytes are 476.8 MiB, in segments of 2 MiB
    assert "MiB freed" in done.stdout
    assert "paused for" in done.stdout


@pytest.mark.parametrize(
    ("training", "flags", "said"),
    [
        ((CONSENTS, ["still"]), ["--for=200ms"], ("safe_point", "within 0.2 s")),
        (([], []), [], ("--allow-reclaim", "--allow-snapshot")),
    ],
    ids=["without a step", "without consent"],
    indirect=["training"],
)
def test_a_program_that_does_nothing(training: Training, flags: list[str], said: tuple[str, str]) -> None:
    """Without steps or consent the error says what to do; no file is left, and the program continues."""
    given = training.ask("reclaim", str(training.pid), *flags)
    step = ["--step"] if flags else []
    recorded = training.ask("snapshot", str(training.pid), *step, *flags, "--output=x.pickle")
    assert given.returncode == recorded.returncode == 1
    assert (said[0] in given.stderr, said[1] in recorded.stderr) == (True, True)
    assert not (training.directory / "x.pickle").exists()
    wait_until(lambda: training.state[2] == "None", "the history to be off again")


@pytest.mark.parametrize("after", [None, "3", -1, 10**400])
def test_a_figure_that_is_missing_is_not_zero(after: object) -> None:
    """A missing or impossible figure in the program's answer becomes neither 0 nor a crash."""
    told = {"ordinal": 0, "reserved_before": 2**30, "reserved_after": after, "allocated_after": 0}
    lines = reclaim.reclaim_lines({"devices": [told], "paused": 10**400})
    assert lines == ["a device: the program did not report what it holds now"]


def test_another_user_is_refused(training: Training) -> None:
    """A user who is neither root nor the program's user gets nothing."""
    require_root()
    arguments = ["reclaim", str(training.pid), f"--agent.socket={training.socket}"]
    code = (
        # All imports come first: the other user may not be able to read this interpreter's library.
        "import encodings.ascii, os, shutil, sys; import vramledger_agent.client;"
        " from vramledger.cli import main, parser; parser();"
        " os.setgid(65534); os.setuid(65534);"
        f" sys.exit(main({arguments!r}))"
    )
    asking, environ = [sys.executable, "-c", code], environment(training.driver)
    done = subprocess.run(asking, env=environ, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "another user" in done.stderr


@pytest.mark.parametrize("arguments", [["reclaim", "1"], ["snapshot", "1", "--output=x.pickle"]])
def test_without_an_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """If no exporter listens, the error says what to start, and no file is left or overwritten."""
    monkeypatch.chdir(tmp_path)
    done = run(*arguments, f"--agent.socket={tmp_path}/none.sock", driver={})
    assert (done.returncode, "start 'vramledger serve'" in done.stderr) == (1, True)
    assert not (tmp_path / "x.pickle").exists()
    (tmp_path / "x.pickle").write_text("mine", encoding="ascii")
    if arguments[0] == "snapshot":
        assert "already exists" in run(*arguments, driver={}).stderr
    assert (tmp_path / "x.pickle").read_text(encoding="ascii") == "mine"
