"""Build both packages as a release does, and install them into environments, without the network."""

import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SOURCES = (PROJECT, PROJECT / "exporter" / "agent")
"""Where the exporter's package is built, and the agent's."""


def build(source: Path, out: Path, target: str) -> None:
    """Build with the hatchling of this environment, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    done = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build_all(out: Path) -> Path:
    """Build both source packages, and from each its wheel, as a distribution would; return their folder."""
    for source in SOURCES:
        build(source, out, "sdist")
    for sdist in sorted(out.glob("*.tar.gz")):
        subprocess.run(["tar", "-xf", sdist, "-C", out], check=True)
        build(out / sdist.name.removesuffix(".tar.gz"), out, "wheel")
    return out


def built(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of both packages, which the first of the workers that need them has built."""
    place = factory.getbasetemp()
    home = (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "packages"
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "dist").exists():
            build_all(factory.mktemp("building")).rename(home / "dist")
    return home / "dist"


def make_environment(home: Path) -> Path:
    """Make an empty environment, without pip, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    return home / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pip on an environment; it may use no index."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    given = [str(each) for each in arguments]
    options = ["--quiet", "--no-index"] if given[0] == "install" else []
    return subprocess.run(
        [*command, given[0], *options, *given[1:]], check=False, capture_output=True, text=True
    )


def install_both(home: Path, dist: Path) -> Path:
    """Make an environment with the wheels of this folder, and what this Python has for them to need."""
    python = make_environment(home)
    done = pip(python, "install", "--no-deps", *sorted(dist.glob("*.whl")))
    assert done.returncode == 0, done.stderr
    (packages,) = home.glob("lib/python3.*/site-packages")
    # A folder that a .pth names is searched last, and its own .pth files, with our checkout, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
