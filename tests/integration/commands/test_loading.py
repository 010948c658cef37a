"""The modules that a command loads before it does anything: a user waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from vramledger.sampling.protocol import child_command

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


def test_the_starter_loads_little() -> None:
    """The process that starts samplers is there all the time: it loads no logging, no JSON and no typing."""
    command = child_command("sampling.starter")
    program = command[2].replace("main()", "print(*sys.modules)")
    done = subprocess.run(
        [command[0], "-S", "-c", program, *command[3:]], capture_output=True, text=True, check=True
    )

    loaded = set(done.stdout.split())
    assert "vramledger.sampling.starter" in loaded
    assert not loaded & {"logging", "json", "typing", "pathlib", "re", "socket", "vramledger.logs"}


AUTHORITIES = """
import os, ssl, sys
from contextlib import nullcontext
from vramledger.serving.exporter import no_authorities

counts = []
load = ssl.SSLContext.load_default_certs

def counted(context, *purpose):
    load(context, *purpose)
    counts.append(context.cert_store_stats()["x509"])

ssl.SSLContext.load_default_certs = counted
with no_authorities() if sys.argv[1] == "none" else nullcontext():
    import aiohttp
print(sum(counts), len(ssl.create_default_context().get_ca_certs()))
"""


@pytest.mark.parametrize(("block", "at_import"), [("none", 0), ("usual", 1)])
def test_importing_aiohttp_reads_no_authorities(tmp_path: Path, block: str, at_import: int) -> None:
    """In the block no authorities are read while aiohttp is imported; contexts made later have them."""
    authority = Authority(tmp_path).pair.certificate
    done = subprocess.run(
        [sys.executable, "-c", AUTHORITIES, block], capture_output=True, text=True, check=True,
        env={**os.environ, "SSL_CERT_FILE": str(authority)},
    )  # fmt: skip

    assert done.stdout.split() == [str(at_import), "1"]


def test_the_version_loads_no_command() -> None:
    """``--version`` is printed before any command is loaded."""
    program = "import sys; from vramledger.cli import main; main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("vramledger ")
    assert "vramledger.cli" in done.stderr
    assert "vramledger.commands.show" not in done.stderr
