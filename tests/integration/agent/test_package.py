"""The agent's wheel, installed alone: what it needs, what it brings, and that it works."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import vramledger_agent
from tests.support.listening import FAKE, FakeExporter, environment
from tests.support.packages import PROJECT, built, make_environment, pip
from tests.support.real_snapshots import unpack
from tests.support.requirements import do_without
from vramledger_agent import __version__


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory)


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment after ``pip install vramledger-agent``, without an index."""
    python = make_environment(tmp_path_factory.mktemp("alone"))
    done = pip(python, "install", "--find-links", dist, "vramledger-agent")
    assert done.returncode == 0, done.stderr
    return python


def output(*command: str | Path, **variables: str) -> str:
    """Return what a program prints; nothing of this checkout is on its path."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.check_output(command, stderr=subprocess.PIPE, text=True, env={**environ, **variables})


def test_it_brings_itself_alone(installed: Path) -> None:
    """One package is installed, and each of its modules can be imported."""
    found = [path.name for path in installed.parents[1].glob("lib/python3.*/site-packages/*.dist-info")]
    assert found == [f"vramledger_agent-{__version__}.dist-info"]
    names = [module.name for module in pkgutil.walk_packages(vramledger_agent.__path__, "vramledger_agent.")]
    imported = [name for name in names if ".startup" not in name and not name.endswith("__main__")]
    assert len(imported) > 50
    output(installed, "-c", "\n".join(f"import {name}" for name in imported))


def test_a_program_is_reported(installed: Path, place: Path, exporter: FakeExporter) -> None:
    """``vramledger-agent run`` of the wheel brings the agent into a program, which is reported."""
    run = (installed.with_name("vramledger-agent"), "run", "--agent.socket", exporter.path, "--")
    program = (installed, "-c", "import sys, torch; kept = torch.Tensor(8); sys.stdin.read()")
    environ, pipe = environment(place, PYTHONPATH=str(FAKE)), subprocess.PIPE
    process = subprocess.Popen((*run, *program), env=environ, stdin=pipe, text=True)
    exporter.watch(process).communicate()
    assert process.returncode == 0
    assert exporter.reports[process.pid][-1]["agent"] == __version__


def test_the_tools_of_recordings_are_there(installed: Path, tmp_path: Path) -> None:
    """``snapshot show``, ``diff`` and the page with pictures need nothing but the wheel."""
    command = installed.with_name("vramledger-agent")
    first, second = unpack("training", tmp_path), unpack("training-expandable", tmp_path)
    page = tmp_path / "page.html"
    shown = output(command, "snapshot", "show", first)
    assert "GiB" in shown or "MiB" in shown
    assert output(command, "snapshot", "diff", first, second)
    output(command, "snapshot", "show", first, "--html", page)
    assert "<svg" in page.read_text()
    assert (installed.parents[1] / "share/man/man1/vramledger-agent.1").exists()
    assert output(command, "--version") == f"vramledger-agent {__version__}\n"


def test_pip_refuses_an_older_python(dist: Path, tmp_path: Path) -> None:
    """For Python 3.9 pip says which versions the package needs, and installs nothing."""
    target = tmp_path / "target"
    older = ("--python-version", "3.9", "--only-binary", ":all:", "--target", target)
    install = ("install", "--no-index", "--find-links", dist, *older, "vramledger-agent")
    command: list[str | Path] = [sys.executable, "-m", "pip", *install]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "requires a different Python: 3.9.0 not in '>=3.10'" in done.stderr
    assert not target.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_a_program_of_an_older_python_runs(version: str, installed: Path, place: Path) -> None:
    """Under ``run``, a program whose Python is too old for the agent runs as usual, and nothing is said."""
    provision = ["bash", str(PROJECT / ".ci/provision/interpreter"), version]
    found = subprocess.run(provision, check=False, capture_output=True, text=True)
    if found.returncode:
        do_without(f"no Python {version} ({found.stderr.strip()[-200:]})")
    code = "import sys, json; print(sys.version_info[:2], [n for n in sys.modules if 'vramledger' in n])"
    command = (installed.with_name("vramledger-agent"), "run", "--", found.stdout.strip(), "-c", code)
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(place))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"({version.replace('.', ', ')}) []\n"
