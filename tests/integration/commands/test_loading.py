"""The modules that a command loads before it does anything: a user waits for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from vramledger.cli import parser
parser([sys.argv[1]])
print(*(module for module in sys.modules if module.startswith("vramledger.") or module == "psutil"))
"""


@pytest.mark.parametrize("command", ["run", "release"])
def test_what_only_passes_something_on_loads_nothing_of_the_exporter(command: str) -> None:
    """``run`` precedes every program of its user, ``release`` a reset: neither loads sampling."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command], capture_output=True, text=True, check=True
    )

    loaded = {module.split(".")[1] for module in done.stdout.split() if module != "psutil"}
    assert loaded <= {"agent_protocol", "cli", "commands", "config", "errors", "logs", "serving"}
    assert "psutil" not in done.stdout.split()


def test_the_version_loads_no_command() -> None:
    """``--version`` is printed before any command is loaded."""
    program = "import sys; from vramledger.cli import main; main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("vramledger ")
    assert "vramledger.cli" in done.stderr
    assert "vramledger.commands.show" not in done.stderr
