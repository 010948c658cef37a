"""What CI runs: the real scripts, with stand-ins for everything that takes long."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.requirements import require_root, require_tool

INTERPRETER = """#!/bin/sh
[ "$1" != 3.12 ] || exit 1
echo "$PWD/python$1"
"""
ENVIRONMENT = r"""#!/bin/sh
mkdir -p "$1/bin"
cp python "$1/bin/python"
tools=$(sed -n 's#^ *\.venv/bin/\([a-z-]*\) .*#\1#p' .ci/task | grep -v python)
for tool in $tools; do ln -sf /bin/true "$1/bin/$tool"; done
"""
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) echo 3.11 ;;
"-m venv "*) for place; do :; done; mkdir -p "$place/bin" && cp "$0" "$place/bin/python" ;;
"-m pip "*) ;;
*cache_tag*) echo cpython-311 ;;
*collect-only*) ;;
*pytest*) echo "$0 $*" >>runs; . ./behaviour ;;
esac
"""
FAILS_ONCE = """
mkdir -p .cache/pytest/v/cache
case "$*" in
*last-failed*) ;;
*) echo '{"tests/test_a.py::test_b": true}' >.cache/pytest/v/cache/lastfailed; exit 1 ;;
esac
"""


@pytest.fixture
def checkout(project: Path, tmp_path: Path) -> Path:
    """Return a checkout with Python 3.11, all other versions except 3.12 available, and tests that pass."""
    shutil.copytree(project / ".ci", tmp_path / ".ci")
    shutil.copy(project / "Makefile", tmp_path)
    shutil.copy(project / "pyproject.toml", tmp_path)
    for name in ("tools", "newer", "slurm", "base", "frameworks", "kube-score", "../kube-score"):
        (tmp_path / ".ci/provision" / name).write_text("exit 0\n")
    (tmp_path / ".ci/provision/interpreter").write_text(INTERPRETER)
    (tmp_path / ".ci/provision/environment").write_text(ENVIRONMENT)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "behaviour").write_text("")
    (tmp_path / "exporter/agent").mkdir(parents=True)
    return tmp_path


def run(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", checkout / ".ci/run"], check=False, capture_output=True, text=True, timeout=60
    )


def runs(checkout: Path) -> list[str]:
    """Return the environment and the markers of each run, in order."""
    lines = (checkout / "runs").read_text().splitlines()
    found = [
        re.search(r"^([^/]+)/.* -m (not thorough and not both|thorough or hypothesis|\w+ thorough)", line)
        for line in lines
    ]
    return [f"{each[1]}: {each[2]}" for each in found if each]


SELECTED = [".venv: not thorough", ".venv: thorough or hypothesis"]
WHEELS = [".cache: not thorough and not both", ".cache: not thorough"]


@pytest.mark.parametrize("lacking", ["3.12", "none"])
def test_every_python_is_run(checkout: Path, lacking: str) -> None:
    """All tests, those of each wheel and each Python in pyproject.toml; one that is lacking fails by name."""
    (checkout / ".ci/provision/interpreter").write_text(INTERPRETER.replace("3.12", lacking))
    done = run(checkout)
    last = done.stdout.splitlines()[-1]
    assert (done.returncode == 1) == (last == "##### FAILED: tests on Python 3.12") == (lacking == "3.12")
    others = [f".venv-{each}: not thorough" for each in ("3.10", "3.12", "3.13", "3.14") if each != lacking]
    assert runs(checkout) == [*SELECTED, *WHEELS, *others]


def test_a_test_that_fails_once_is_named(checkout: Path) -> None:
    """A test that fails with others and passes alone does not fail CI, and is named as flaky."""
    (checkout / ".ci/provision/interpreter").write_text(INTERPRETER.replace("3.12", "none"))
    (checkout / "behaviour").write_text(FAILS_ONCE)
    done = run(checkout)
    assert done.returncode == 0, done.stdout
    _, _, flaky = done.stdout.partition("##### FLAKY")
    assert flaky.count("tests/test_a.py::test_b") == 7


def test_an_unknown_version_is_an_error(project: Path, tmp_path: Path) -> None:
    """A version that this machine lacks and that cannot be fetched ends in one line that says so."""
    shutil.copytree(project / ".ci/provision", tmp_path / ".ci/provision")
    (tmp_path / ".ci/provision/newer").write_text("exit 0\n")
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "uv").chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / ".ci/provision/interpreter", "3.99"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("no Python 3.99 on this machine")


def test_what_a_killed_run_left_mounted_is_unmounted(project: Path, tmp_path: Path) -> None:
    """Only mounts below .cache/container are removed, and their files stay."""
    require_root()
    require_tool("unshare")
    shutil.copytree(project / ".ci/provision", tmp_path / ".ci/provision")
    inside, kept, elsewhere = (tmp_path / name for name in (".cache/container/root/a b", "kept", "elsewhere"))
    for directory in (inside, kept, elsewhere):
        directory.mkdir(parents=True)
    (kept / "file").touch()
    script = (
        'mount --bind kept "$1" && mount --bind kept elsewhere'
        ' && mkdir "$1/proc" && mount -t proc proc "$1/proc"'
        " && bash .ci/provision/unmount && cut -d ' ' -f 5 /proc/self/mountinfo"
    )
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "-", inside],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip

    assert [line for line in done.stdout.splitlines() if line.startswith(str(tmp_path))] == [str(elsewhere)]
    assert (kept / "file").exists()
