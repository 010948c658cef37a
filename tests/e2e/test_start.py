"""Each process loads only what it uses, and never code from where it is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.support.exporter import LOOPBACK, QUICK, command, entries, environment
from tests.support.standin.library import StandIn
from vramledger.config import SamplingConfig
from vramledger.sampling.protocol import encode_config, sampler_command

COUNTED = ("-X", "importtime")


def imported(log: str) -> set[str]:
    """Return the modules that a program started with COUNTED has imported."""
    return {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}


def test_the_exporter_loads_no_client_no_driver_and_no_storage(standin: StandIn, tmp_path: Path) -> None:
    """The process that listens has served its metrics and its page without what others of ours load."""
    flags = (LOOPBACK, *QUICK, "--web.user=root", f"--agent.socket={tmp_path}/agent")
    program, *rest = command("serve", *flags, f"--control.socket={tmp_path}/control")
    exporter = subprocess.Popen(
        [program, *COUNTED, *rest], env=environment(standin.env()), stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert exporter.stderr is not None
        log = ""
        for line in exporter.stderr:
            log += line
            for entry in entries(line):
                if entry["msg"] == "Listening":
                    for path in ("metrics", ""):
                        with urllib.request.urlopen(f"http://{entry['address']}/{path}") as answer:
                            assert answer.status == 200
                    exporter.terminate()
        assert exporter.wait(30) == 0, log
    finally:
        exporter.kill()
        exporter.wait()
        if exporter.stderr is not None:
            exporter.stderr.close()

    loaded = imported(log)
    assert {"aiohttp.web", "vramledger.accounting.tracker"} <= loaded
    assert not loaded & {
        *("aiohttp.client", "aiohttp.connector", "pynvml", "psutil", "yaml", "bcrypt", "multiprocessing"),
        *(
            "vramledger.sampling.sampler",
            "vramledger.storage.past_writer",
            "sqlite3",
            "vramledger.commands.show",
        ),
    }


def test_the_sampler_loads_no_server(standin: StandIn) -> None:
    """The process that reads the driver has taken a sample without an event loop, TLS or child processes."""
    program, *rest = sampler_command(encode_config(SamplingConfig()), "info", "logfmt")
    sampler = subprocess.Popen(
        [program, *COUNTED, *rest], env={**os.environ, **standin.env()}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert sampler.stdout is not None
    try:
        reading = sampler.stdout.readline()
    finally:
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
