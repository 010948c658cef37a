"""What pip installs: the package with its data, and no development files."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath

import pytest

from tests.repo.test_layers import MODULES, imports
from vramledger import __version__

PACKAGE_CONTENT = {
    # By suffix, the files that may be in each folder of the package; any other does not belong in a wheel.
    ".py": "vramledger",
    ".typed": "vramledger",
    ".html": "vramledger/web",
    ".css": "vramledger/web",
    ".js": "vramledger/web",
    ".svg": "vramledger/web",
    ".json": "vramledger/web",
    ".gz": "vramledger/sampling/recordings",
}


@pytest.fixture(scope="module")
def packages(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist, as a distribution would."""
    out = tmp_path_factory.mktemp("dist")
    build(project, out, "sdist")
    sdist = next(out.glob("*.tar.gz"))
    subprocess.run(["tar", "-xf", sdist, "-C", out], check=True)
    build(out / sdist.name.removesuffix(".tar.gz"), out, "wheel")
    return sdist, next(out.glob("*.whl"))


def build(source: Path, out: Path, target: str) -> None:
    """Build with the hatchling of this environment, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    done = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def source_files(project: Path) -> set[str]:
    """Return the package's files in the checkout, as a wheel names them."""
    root = project / "exporter"
    return {
        path.relative_to(root).as_posix()
        for path in root.glob("vramledger/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def shared_files(project: Path) -> set[str]:
    """Return the manual page and the completions, as a wheel names them."""
    root = project / "deploy"
    return {
        f"vramledger-{__version__}.data/data/{path.relative_to(root).as_posix()}"
        for path in root.glob("share/*/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_the_package_alone(packages: tuple[Path, Path], project: Path) -> None:
    """The wheel has exactly the package's files, its manual page and completions, and its metadata."""
    with zipfile.ZipFile(packages[1]) as wheel:
        names = set(wheel.namelist())
    metadata = {name for name in names if name.startswith(f"vramledger-{__version__}.dist-info/")}

    assert names - metadata == source_files(project) | shared_files(project)
    assert shared_files(project)
    assert f"vramledger-{__version__}.dist-info/licenses/LICENSE" in metadata


def test_package_data_is_of_known_kinds(project: Path) -> None:
    """The package has no file that a user does not need."""
    strays = {
        name
        for name in source_files(project)
        if not PurePosixPath(name).is_relative_to(PACKAGE_CONTENT.get(PurePosixPath(name).suffix, "nowhere"))
    }

    assert strays == set()
    assert "vramledger/py.typed" in source_files(project)


def test_demonstration_recording_is_installed(packages: tuple[Path, Path]) -> None:
    """``--source=auto`` finds its recording in an installed package, without a checkout."""
    with zipfile.ZipFile(packages[1]) as wheel:
        recordings = [name for name in wheel.namelist() if name.endswith(".jsonl.gz")]

    assert {str(PurePosixPath(name).parent) for name in recordings} == {"vramledger/sampling/recordings"}


def test_metadata_says_what_pip_needs(packages: tuple[Path, Path]) -> None:
    """Version, command and oldest Python are declared; the dependencies are what the code imports."""
    with zipfile.ZipFile(packages[1]) as wheel:
        metadata = wheel.read(f"vramledger-{__version__}.dist-info/METADATA").decode()
        commands = wheel.read(f"vramledger-{__version__}.dist-info/entry_points.txt").decode()
    imported = {name.split(".")[0] for module in MODULES for name, _ in imports(module)}
    foreign = imported - sys.stdlib_module_names - {"vramledger"}
    providers = {packages_distributions()[name][0] for name in foreign}
    needs = set(re.findall(r"^Requires-Dist: ([\w-]+)", metadata, re.MULTILINE))

    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata
    assert needs == {name.replace("_", "-").lower() for name in providers}
    assert "vramledger = vramledger.cli:main" in commands


def test_sdist_can_be_built_and_tested(packages: tuple[Path, Path]) -> None:
    """The sdist has what a distribution needs to build and test, and no leftovers."""
    with tarfile.open(packages[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    leftovers = {name for name in names if re.search(r"(^|/)(__pycache__|\.venv[^/]*|\.cache|\.git)/", name)}

    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "Makefile", ".ci/task"} <= names
    assert {"tests/conftest.py", "exporter/vramledger/__init__.py"} <= names
    assert leftovers == set()
