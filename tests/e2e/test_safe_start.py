"""The user and the directory of the start must not decide what code the exporter runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.standin.library import StandIn


def test_the_current_directory_is_no_place_for_code(tmp_path: Path, standin: StandIn, project: Path) -> None:
    """The sampler imports no module from the current directory, even if it has a library's name."""
    for name in ("queue", "ctypes", "collections", "json"):
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w').close()\n")
    start = (
        "import sys; sys.path[:1] == [''] and sys.path.pop(0)\n"  # as a console script has it
        "from vramledger.cli import main\n"
        "sys.exit(main(['show']))"
    )

    done = subprocess.run(
        [sys.executable, "-c", start],
        cwd=tmp_path,
        env={**os.environ, **standin.env(), "PYTHONPATH": str(project / "exporter")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "NVIDIA H200" in done.stdout
    assert not (tmp_path / "EXECUTED").exists()
