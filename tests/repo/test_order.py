"""The order in which the files of tests begin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.listening import PROJECT
from tests.support.order import SHARING, order_of_files, unit_of


def test_the_longest_begin_and_waiting_takes_turns_with_computing() -> None:
    """Of each kind the file with the longest limit comes first; when one kind ends, the other goes on."""
    limits = {"short": 0.0, "long": 600.0, "waits": 0.0, "waits long": 300.0, "shorter": 0.0}

    order = order_of_files(limits, {"waits", "waits long"})

    assert order == ["waits long", "long", "waits", "short", "shorter"]
    assert order_of_files(limits, ()) == ["long", "waits long", "short", "waits", "shorter"]


def test_files_that_share_servers_stay_on_one_worker() -> None:
    """The files of a folder that shares servers are one unit of work; every other file is one alone."""
    assert [folder for folder in SHARING if not (PROJECT / folder / "conftest.py").is_file()] == []
    within = f"{SHARING[0]}/test_one.py::test_a[b::c]"

    assert unit_of(within) == unit_of(f"{SHARING[0]}/test_two.py::test_b") == SHARING[0]
    assert unit_of("tests/unit/test_it.py::Class::test_a") == "tests/unit/test_it.py"


CRASH = "import os\n\ndef test_before(): pass\ndef test_crash(): os._exit(3)\ndef test_after(): pass\n"


def test_a_worker_that_crashes_is_named_and_holds_up_nobody(tmp_path: Path) -> None:
    """What it has not done goes to the others, but for the test in which it crashed."""
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "test_z.py").write_text(CRASH)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n2", "--dist=loadfile", "--no-loadscope-reorder", "."]
    path = ":".join(str(PROJECT / each) for each in (".", "exporter", "exporter/agent"))

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert "crashed while running 'test_z.py::test_crash'" in done.stdout
    assert "1 failed, 14 passed" in done.stdout
