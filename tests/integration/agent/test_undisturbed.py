"""With the agent inside, real frameworks behave as without it, and the agent initialises nothing."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.frameworks import programs
from tests.support.listening import AGENT_ROOT
from tests.support.requirements import require_frameworks

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


class Run(NamedTuple):
    """How a program ended: its last output line, what it wrote to stderr without figures, its status."""

    told: dict[str, Any]
    errors: list[str]
    status: int


class Pair(NamedTuple):
    """A framework's program without the agent and with it; whether any process connected to the exporter."""

    framework: str
    without: Run
    inside: Run
    connected: bool


def start(python: Path, program: Path, path: Path, *, agent: bool) -> subprocess.Popen[str]:
    """Start a program, with ``vramledger run`` if the agent is to be inside."""
    own = {"PYTHONPATH": str(AGENT_ROOT) if agent else "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environ = {**os.environ, **own}
    command = [str(python), str(program)]
    if agent:
        told = [f"--agent.socket={path}", "--agent.interval=250ms", "--allow-snapshot", "--allow-reclaim"]
        command = [sys.executable, "-m", "vramledger_agent", "run", *told, "--", *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True, cwd=program.parent)


def ended(process: subprocess.Popen[str]) -> Run:
    out, err = process.communicate(timeout=280)
    assert out.strip(), err
    lines = [re.sub(r"\d+(\.\d+)?", "N", line) for line in err.splitlines()]
    return Run(json.loads(out.splitlines()[-1]), lines, process.returncode)


@pytest.fixture(scope="module", params=["torch", "tensorflow", "jax"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Run a framework's program twice, with an exporter that listens and sends nothing."""
    python = require_frameworks()
    directory = tmp_path_factory.mktemp(request.param)
    program = directory / "program.py"
    program.write_text(programs.PREAMBLE + getattr(programs, request.param.upper()), encoding="utf-8")
    path = directory / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        started = [start(python, program, path, agent=agent) for agent in (False, True)]
        runs = [ended(process) for process in started]
        try:
            listener.accept()[0].close()
            connected = True
        except BlockingIOError:
            connected = False
    return Pair(request.param, runs[0], runs[1], connected)


def test_agent_was_there(pair: Pair) -> None:
    """The comparison is valid: the agent was in the second run, and had noticed the framework."""
    assert not pair.without.told["agent"]
    assert pair.inside.told["agent"]
    # TensorFlow's Keras imports JAX where it is installed.
    assert pair.framework in pair.inside.told["noticed"]


def test_same_results_status_and_words(pair: Pair) -> None:
    """Results, exit status, warnings and stderr are the same, bit for bit."""
    assert pair.inside.told["result"] == pair.without.told["result"]
    assert pair.inside.status == pair.without.status
    assert pair.inside.told["warnings"] == pair.without.told["warnings"]
    assert pair.inside.errors == pair.without.errors


def test_nothing_is_initialised(pair: Pair) -> None:
    """After the import, and after use without a GPU, the framework's state is what the program made it."""
    assert pair.inside.told["stages"] == pair.without.told["stages"]
    imported = pair.inside.told["stages"]["imported"]
    assert not any(imported.values())


def test_no_module_but_ours_and_pythons(pair: Pair) -> None:
    """The agent imports its own modules and Python's, and no part of a framework."""
    more = set(pair.inside.told["modules"]) - set(pair.without.told["modules"])
    expected = {"vramledger_agent", "sitecustomize", *sys.stdlib_module_names}
    assert {name for name in more if name.split(".")[0] not in expected} == set()


def test_no_thread_is_seen_and_nobody_is_told(pair: Pair) -> None:
    """Without a GPU nothing is reported: the agent has no thread, and the exporter no connection."""
    assert pair.inside.told["threads"] == pair.without.told["threads"]
    assert pair.inside.told["agents_thread"] is False
    assert not pair.connected


@pytest.mark.parametrize("pair", ["tensorflow"], indirect=True)
def test_tensorflow_policies(pair: Pair) -> None:
    """Each way to configure TensorFlow's memory is read from its context and reported by its name."""
    extra = pair.inside.told["extra"]
    policies = {name: entry["policy"] for name, entry in extra.items() if name not in ("cpu", "sessions")}
    assert policies == {
        **dict.fromkeys(("growth", "forced growth"), "growth"),
        **dict.fromkeys(("limit", "logical"), "limit"),
        **dict.fromkeys(("default", "no growth", "forbidden growth", "misspelt"), "preallocate"),
        # The first GPU of "second limited" is taken whole.
        **dict.fromkeys(("second limited", "second alone", "other numbers"), "preallocate"),
        **dict.fromkeys(("async", "async by config"), "cuda_malloc_async"),
        "hidden": "no_gpu",
        "fraction": "fraction",
    }
    assert extra["default"]["version"].startswith("2.")
    assert extra["cpu"] is False


@pytest.mark.parametrize("pair", ["tensorflow"], indirect=True)
def test_tensorflow_devices(pair: Pair) -> None:
    """Bytes in use and limits are summed over a GPU's logical devices, under TensorFlow's own number."""
    extra = pair.inside.told["extra"]
    mib = 2**20
    (limited,) = extra["limit"]["devices"]
    assert limited == {"ordinal": 0, "in_use": 1000, "in_use_peak": 2000, "limit": 1024 * mib}
    (divided,) = extra["logical"]["devices"]
    assert divided == {"ordinal": 0, "in_use": 2001, "in_use_peak": None, "limit": 3072 * mib}
    assert [device["ordinal"] for device in extra["second limited"]["devices"]] == [0, 1]
    assert [device["limit"] for device in extra["second limited"]["devices"]] == [None, 512 * mib]
    assert [device["ordinal"] for device in extra["second alone"]["devices"]] == [1]
    assert (extra["hidden"]["devices"], extra["hidden"]["supported"]) == ([], True)
    assert (extra["other numbers"]["devices"], extra["other numbers"]["supported"]) == ([], False)


@pytest.mark.parametrize("pair", ["tensorflow"], indirect=True)
def test_tensorflow_sessions(pair: Pair) -> None:
    """A real Session of TensorFlow 1 is found; its ConfigProto gives policy and GPU, also after its end."""
    sessions = pair.inside.told["extra"]["sessions"]
    assert {name: entry["policy"] for name, entry in sessions.items()} == {
        "growth": "growth",
        "fraction": "fraction",
        "async": "cuda_malloc_async",
        "default": "preallocate",
    }
    assert sessions["growth"]["devices"] == [{"ordinal": 5, "limit": 7000}]
    assert sessions["default"]["devices"] == [{"ordinal": 1, "limit": 7000}]


@pytest.mark.parametrize("pair", ["jax"], indirect=True)
def test_jax_without_a_gpu(pair: Pair) -> None:
    """A device that counts nothing has no figures, and a CPU does not count as a GPU."""
    extra = pair.inside.told["extra"]
    assert extra["cpu"] is False
    assert extra["device"] == {"ordinal": extra["device"]["ordinal"]}
    assert extra["version"]
