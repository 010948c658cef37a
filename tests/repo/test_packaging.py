"""What pip installs: the two packages with their data, and no development files."""

import os
import re
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from tests.repo.test_layers import MODULES, imports
from tests.support.packages import built
from vramledger import __version__

ROOT = Path(__file__).parents[2]

PACKAGE_CONTENT = {
    **dict.fromkeys((".html", ".css", ".js", ".svg", ".json"), "vramledger/web"),
    ".gz": "vramledger/sampling/recordings",
    ".yml": "vramledger/alerts",
}
"""By suffix, the folder of the package for such files; any other does not belong in a wheel."""


class Package(NamedTuple):
    """One of the two packages: its name as files have it, its sources, what its wheel brings besides."""

    name: str
    project: Path
    modules: Path
    share: Path

    @property
    def command(self) -> str:
        """The name of the command, and of the project."""
        return self.name.replace("_", "-")

    def wheel(self, dist: Path) -> zipfile.ZipFile:
        return zipfile.ZipFile(dist / f"{self.name}-{__version__}-py3-none-any.whl")

    def sdist(self, dist: Path) -> Path:
        return dist / f"{self.name}-{__version__}.tar.gz"


EXPORTER = Package("vramledger", ROOT, ROOT / "exporter", ROOT / "deploy")
AGENT = Package("vramledger_agent", *[ROOT / "exporter" / "agent"] * 3)
BOTH = pytest.mark.parametrize("package", [EXPORTER, AGENT], ids=lambda package: package.name)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory)


def source_files(package: Package) -> set[str]:
    """Return the package's files in the checkout, as a wheel names them."""
    return {
        path.relative_to(package.modules).as_posix()
        for path in package.modules.glob(f"{package.name}/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }


RULE_SOURCES = {
    f"vramledger/{path.relative_to(ROOT).as_posix()}"
    for path in (
        *(ROOT / "alerts" / f"{name}.yml" for name in ("thresholds", "alertmanager")),
        *(ROOT / "alerts" / "src").glob("*.yml"),
    )
}
"""What ``vramledger rules`` needs, as a wheel names it."""


def shared_files(package: Package) -> set[str]:
    """Return the manual page and the completions, as a wheel names them."""
    return {
        f"{package.name}-{__version__}.data/data/{path.relative_to(package.share).as_posix()}"
        for path in package.share.glob("share/*/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@BOTH
def test_wheel_holds_the_package_alone(package: Package, dist: Path) -> None:
    """A wheel has its package's files, also the demo's recording, manual page, completions and metadata."""
    with package.wheel(dist) as wheel:
        names = set(wheel.namelist())
        license_ = wheel.read(f"{package.name}-{__version__}.dist-info/licenses/LICENSE")
    metadata = {name for name in names if name.startswith(f"{package.name}-{__version__}.dist-info/")}
    command = f"{package.name}-{__version__}.data/scripts/{package.command}"
    rules = RULE_SOURCES if package.name == "vramledger" else set()
    assert names - metadata == source_files(package) | shared_files(package) | rules | {command}
    assert len(shared_files(package)) == 3
    assert any(name.endswith(".jsonl.gz") for name in names) == (package is EXPORTER)
    assert license_ == (ROOT / "LICENSE").read_bytes()


@BOTH
def test_package_data_is_of_known_kinds(package: Package) -> None:
    """The package has no file that a user does not need."""
    places = {**PACKAGE_CONTENT, ".py": package.name, ".typed": package.name}
    strays = {
        name
        for name in source_files(package)
        if not PurePosixPath(name).is_relative_to(places.get(PurePosixPath(name).suffix, "nowhere"))
    }
    assert strays == set()
    assert f"{package.name}/py.typed" in source_files(package)


@BOTH
def test_metadata_says_what_pip_needs(package: Package, dist: Path) -> None:
    """Version, command and oldest Python are declared; the dependencies are what the code imports."""
    about = f"{package.name}-{__version__}.dist-info"
    with package.wheel(dist) as wheel:
        metadata = wheel.read(f"{about}/METADATA").decode()
        commands = wheel.read(f"{about}/entry_points.txt").decode()
    own = [module for module in MODULES if module.partition(".")[0] == package.name]
    imported = {name.split(".")[0] for module in own for name, _ in imports(module)}
    foreign = imported - sys.stdlib_module_names - {package.name}
    # An editable install does not say what it provides.
    providing = {"vramledger_agent": ["vramledger-agent"], **packages_distributions()}
    providers = {providing[name][0] for name in foreign}
    needs = set(re.findall(r"^Requires-Dist: ([\w-]+)", metadata, re.MULTILINE))

    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata
    assert needs == {name.replace("_", "-").lower() for name in providers}
    assert f"{package.command}-python = {package.name}.cli:main" in commands


def test_the_exporter_needs_the_agent_of_its_version() -> None:
    """Both are of one version, because the exporter imports from the agent's package."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"vramledger-agent=={__version__}",' in text


@BOTH
def test_the_command_begins_in_a_shell(package: Package, dist: Path) -> None:
    """The command is the shell's script, executable, which pip installs beside Python's program."""
    with package.wheel(dist) as wheel:
        script = wheel.getinfo(f"{package.name}-{__version__}.data/scripts/{package.command}")
        content = wheel.read(script)
    assert content == (AGENT.project / "vramledger.sh").read_bytes()
    assert script.external_attr >> 16 & 0o111 == 0o111


def contents(sdist: Path) -> set[str]:
    """Return the files of a source package, all of them files, and no leftovers."""
    with tarfile.open(sdist) as archive:
        links = [each for each in archive.getmembers() if each.issym()]
        targets = [os.path.normpath(f"{PurePosixPath(each.name).parent}/{each.linkname}") for each in links]
        assert [each for each in targets if each.startswith("..")] == []
        names = {name.partition("/")[2] for name in archive.getnames()}
    leftovers = re.compile(r"(^|/)(__pycache__|\.venv[^/]*|\.cache|\.git)/")
    assert {name for name in names if leftovers.search(name)} == set()
    return names


def test_sdists_can_be_built_and_tested(dist: Path) -> None:
    """The exporter's has what a distribution needs to build and test both; the agent's stands alone."""
    names = contents(EXPORTER.sdist(dist))
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "Makefile", ".ci/task"} <= names
    assert {"tests/conftest.py", "exporter/vramledger/__init__.py", "exporter/agent/pyproject.toml"} <= names
    names = contents(AGENT.sdist(dist))
    assert {"pyproject.toml", "LICENSE", "README.md", "vramledger_agent/__init__.py"} <= names
