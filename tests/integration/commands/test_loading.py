"""The modules that a command loads before it does anything: a user waits for them."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from vramledger.sampling.protocol import starter_command

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

    modules = set(done.stdout.split()) - {
        "vramledger.model",
        "vramledger.model.holder_facts",
        "psutil",
    }  # flags
    loaded = {module.split(".")[1] for module in modules}
    assert loaded <= {
        "agent_protocol",
        "cli",
        "commands",
        "config",
        "errors",
        "listener",
        "logs",
        "printable",
        "serving",
    }
    assert "psutil" not in done.stdout.split()


def test_the_starter_loads_little() -> None:
    """The process that starts samplers is there all the time: it loads no logging, no JSON and no typing."""
    command = [word.replace("main()", "print(*sys.modules)") for word in starter_command("{}")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    loaded = set(done.stdout.split())
    assert "vramledger.sampling.starter" in loaded
    assert not loaded & {"site", "enum", "collections", "contextlib", "re", "vramledger.logs"}


SERVER_ONLY = """
import sys
from vramledger.web.server_part import import_server_only

import_server_only()
import vramledger.web.app
print([name for name in sys.modules if name in ("aiohttp.client", "aiohttp.connector")])
import aiohttp
print(aiohttp.__version__, hasattr(aiohttp, "nothing"), aiohttp.ClientSession.__module__, aiohttp.__version__)
import_server_only()
print(aiohttp is sys.modules["aiohttp"], sys.modules["aiohttp.web"] is aiohttp.web, type(aiohttp).__name__)
"""


def test_the_exporter_loads_no_client() -> None:
    """The server loads nothing of aiohttp's client, and who asks for the client later gets it."""
    done = subprocess.run([sys.executable, "-c", SERVER_ONLY], capture_output=True, text=True, check=True)

    version = metadata.version("aiohttp")
    assert done.stdout.splitlines() == ["[]", f"{version} False aiohttp.client {version}", "True True module"]


def test_the_version_loads_no_command() -> None:
    """``--version`` is printed before any command is loaded."""
    program = "import sys; from vramledger.cli import main; main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("vramledger ")
    assert "vramledger.cli" in done.stderr
    assert "vramledger.commands.show" not in done.stderr
