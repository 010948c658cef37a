"""Each process loads only what it uses, and never code from where it is started."""

import os
import re
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.exporter import LOOPBACK, QUICK, command, entries, environment
from tests.support.standin.library import StandIn
from vramledger.config import SamplingConfig
from vramledger.sampling.protocol import encode_config, sampler_command, starter_command

COUNTED = ("-X", "importtime")


def imported(log: str) -> set[str]:
    """Return the modules that a program started with COUNTED has imported."""
    return {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}


def test_the_exporter_loads_no_client_no_driver_and_no_storage(standin: StandIn, tmp_path: Path) -> None:
    """The process that listens has served its metrics and its page without what others of ours load."""
    flags = (LOOPBACK, *QUICK, "--web.user=root", f"--agent.socket={tmp_path}/agent")
    program, *rest = command("serve", *flags, f"--control.socket={tmp_path}/control")
    words, log, environ = [program, *COUNTED, *rest], "", environment(standin.env())
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as exporter:
        assert exporter.stderr is not None
        try:
            for line in exporter.stderr:
                log += line
                if listening := [each["address"] for each in entries(line) if each["msg"] == "Listening"]:
                    for path in ("metrics", ""):
                        with urllib.request.urlopen(f"http://{listening[0]}/{path}") as answer:
                            assert answer.status == 200
                    break
        finally:
            exporter.terminate()
        log += exporter.stderr.read()
    assert exporter.returncode == 0, log
    loaded = imported(log)
    assert {"aiohttp.web", "vramledger.accounting.tracker"} <= loaded
    assert not loaded & {
        *("aiohttp.client", "aiohttp.connector", "pynvml", "psutil", "yaml", "bcrypt", "multiprocessing"),
        *("sqlite3", "vramledger.sampling.sampler", "vramledger.storage.past_writer"),
        "vramledger.commands.show",
    }


def test_the_sampler_loads_no_server(standin: StandIn) -> None:
    """The process that reads the driver has taken a sample without an event loop, TLS or child processes."""
    program, *rest = sampler_command(encode_config(SamplingConfig()), "info", "logfmt")
    pipe, environ = subprocess.PIPE, {**os.environ, **standin.env()}
    words = [program, *COUNTED, *rest]
    with subprocess.Popen(
        words, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    ) as sampler:
        assert sampler.stdout is not None
        reading = sampler.stdout.readline()
        sampler.kill()
        log = sampler.communicate(timeout=30)[1]
    assert re.match(r'\{.*"devices":\[\{', reading), log
    loaded = imported(log)
    assert {"pynvml", "vramledger.sampling.sampler"} <= loaded
    needless = {
        *("asyncio", "ssl", "aiohttp", "prometheus_client", "http.client", "email", "argparse", "psutil"),
        *("ctypes.util", "subprocess", "tempfile", "random", "shutil"),
    }
    if sys.version_info < (3, 11):
        needless.remove("subprocess")  # there uuid, which msgspec needs, imports it
    assert not loaded & needless


def printed(*words: str) -> set[str]:
    return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("name", ["run", "release"])
def test_what_only_passes_something_on_loads_nothing_of_the_exporter(name: str) -> None:
    """``run`` precedes every program of its user, ``release`` a reset: neither loads sampling or psutil."""
    code = f"import sys; from vramledger.cli import parser; parser([{name!r}]); print(*sys.modules)"
    of_flags = {"vramledger.model", "vramledger.model.holder_facts"}
    loaded = printed(sys.executable, "-c", code) - of_flags
    parts = {each.split(".")[1] for each in loaded if each.startswith("vramledger.")}
    assert parts <= {"cli", "commands", "config", "errors", "exchange", "logs", "serving"}
    assert "psutil" not in loaded


def test_the_starter_loads_little() -> None:
    """The process that starts samplers is there all the time: it loads no logging, no JSON and no typing."""
    loaded = printed(*(word.replace("main()", "print(*sys.modules)") for word in starter_command("{}")))
    assert "vramledger.sampling.starter" in loaded
    assert not loaded & {"site", "enum", "collections", "contextlib", "re", "vramledger.logs"}


SERVER_ONLY = """
import sys
from vramledger.web.server_part import import_server_only

import_server_only()
import vramledger.web.app
assert "aiohttp.client" not in sys.modules and "aiohttp.connector" not in sys.modules
import aiohttp
assert aiohttp.__version__ == VERSION and not hasattr(aiohttp, "nothing")
assert aiohttp.ClientSession.__module__ == "aiohttp.client" and aiohttp.__version__ == VERSION
import_server_only()
assert aiohttp is sys.modules["aiohttp"] and sys.modules["aiohttp.web"] is aiohttp.web
assert type(aiohttp).__name__ == "module"
"""


def test_who_asks_for_aiohttps_client_later_gets_it() -> None:
    """The server loads nothing of aiohttp's client, which any other code can still import."""
    printed(sys.executable, "-c", SERVER_ONLY.replace("VERSION", repr(metadata.version("aiohttp"))))


def test_the_version_loads_no_command() -> None:
    """``--version`` is printed before any command is loaded."""
    words = [sys.executable, *COUNTED, "-m", "vramledger", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vramledger ")
    loaded = imported(done.stderr)
    assert "vramledger.cli" in loaded
    assert "vramledger.commands.show" not in loaded


def test_the_current_directory_is_no_place_for_code(tmp_path: Path, standin: StandIn, project: Path) -> None:
    """The sampler imports no module from the current directory, even if it has a library's name."""
    for name in ("queue", "ctypes", "collections", "json"):
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w').close()\n")
    start = (
        "import sys; sys.path[:1] == [''] and sys.path.pop(0)\n"  # as a console script has it
        "from vramledger.cli import main\n"
        "sys.exit(main(['show']))"
    )
    environ = {**os.environ, **standin.env(), "PYTHONPATH": str(project / "exporter")}
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "NVIDIA H200" in done.stdout
    assert not (tmp_path / "EXECUTED").exists()
