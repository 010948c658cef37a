"""The conditions of a release: one version everywhere, a change log in its form, a wheel that runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from datetime import date
from pathlib import Path

import pytest
import yaml

from tests.repo.test_packaging import build
from tests.support.exporter import no_driver
from tests.support.fleet.engines import until
from tests.support.ports import free_port
from tests.support.requirements import do_without
from tests.support.waiting import PATIENCE
from vramledger import __version__

ROOT = Path(__file__).parents[2]


def test_every_version_is_the_packages() -> None:
    """Chart and example have the version of the package; ``make deploy`` writes it there."""
    kubernetes = ROOT / "deploy" / "kubernetes"
    chart = yaml.safe_load((kubernetes / "chart" / "Chart.yaml").read_text(encoding="utf-8"))
    example = yaml.safe_load(
        (kubernetes / "kustomize/example/kustomization.yaml").read_text(encoding="utf-8")
    )

    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    assert {image["newTag"] for image in example["images"]} == {__version__}


def test_change_log_has_its_form() -> None:
    """Headings are versions with their dates, the newest first; entries have the kind and the area."""
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("#")]
    released = [re.fullmatch(r"## (\d+)\.(\d+)\.(\d+) / (\d{4}-\d\d-\d\d)", line) for line in headings]
    if headings[0] == "## Unreleased":
        released.pop(0)
    versions = [tuple(map(int, match.groups()[:3])) for match in released if match]
    dates = [date.fromisoformat(match[4]) for match in released if match]

    assert None not in released
    assert versions == sorted(set(versions), reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert [
        line
        for line in lines
        if line and not re.match(r"## |\* \[(CHANGE|FEATURE|ENHANCEMENT|BUGFIX)\] [\w, ]+: \S|  \S", line)
    ] == []


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment, with only its dependencies, as pipx and uvx do."""
    home = tmp_path_factory.mktemp("fresh")
    build(ROOT, home, "wheel")
    (wheel,) = home.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "venv"), "install", "--quiet", str(wheel)]
    done = subprocess.run(pip, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        do_without(f"pip cannot install what the wheel needs ({done.stderr.strip()[-200:]})")
    return home / "venv"


def alone(directory: Path) -> dict[str, str]:
    """Return an environment in which no file of the checkout can be found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, **no_driver(directory / "none")}


def fetched(url: str, part: str) -> str:
    """Return a page with this part; empty while there is none."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:  # noqa: S310 loopback
            text: str = answer.read().decode()
    except OSError:
        return ""
    return text if part in text else ""


def test_wheel_runs_in_a_fresh_environment(environment: Path, tmp_path: Path) -> None:
    """A program that pipx or uvx starts has its version, page, demo and manual."""
    program = environment / "bin" / "vramledger"
    env = alone(tmp_path)
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, env=env)
    where = f"127.0.0.1:{free_port()}"
    serve = [str(program), "serve", "--source=auto", f"--web.listen-address={where}", "--no-collector.agent"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(serve, stderr=log, env=env, cwd=tmp_path) as process,
    ):
        try:
            page = until(lambda: fetched(f"http://{where}/", "<title>"), "the page", PATIENCE)
            until(
                lambda: fetched(f"http://{where}/metrics", "vramledger_device_memory_bytes{"),
                "data",
                PATIENCE,
            )
        finally:
            process.terminate()
    code = process.returncode

    assert __version__ in said.stdout
    assert "vramledger" in page
    assert code == 0
    assert (environment / "share/man/man1/vramledger.1").exists()
