"""What must not be in the repository, and what the commands promise about themselves."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TOP_LEVEL = {
    *("pyproject.toml", "Makefile", "LICENSE", ".gitattributes", ".gitignore", ".ci"),
    *("README.md", "README.ko.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("exporter", "dashboards", "alerts", "deploy", "tests"),
}

# With a class of one letter in some places, so that this file does not find itself.
REGISTRIES = re.compile(
    r"\b(pyp[i]|pythonhoste[d]|npmj[s]|(deb|security)\.debia[n]|archive\.ubunt[u])\.(org|com|io)\b"
)
MACHINE_PATHS = re.compile(r"(?<![\w.*/~-])/(roo[t]|wor[k])/[\w.]")


@pytest.fixture(scope="module")
def tracked(project: Path, require_tool: Callable[[str], Path]) -> list[Path]:
    """Return the files that git keeps or would add; skip where there is no git."""
    if not (project / ".git").exists():
        pytest.skip("not a git checkout")
    git = str(require_tool("git"))
    command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout
    return [project / name for name in listing.split("\0") if name and (project / name).is_file()]


def lines(path: Path) -> list[str]:
    """Return a text file's lines, none for a binary file."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []


def names(path: Path, pattern: str) -> set[str]:
    """Return what a pattern names at the start of a file's lines."""
    return set(re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE))


def test_top_level_is_fixed(tracked: list[Path], project: Path) -> None:
    """The top level has only the known entries: a new file goes into a folder."""
    assert {path.relative_to(project).parts[0] for path in tracked} <= TOP_LEVEL


def test_no_registry_and_no_path_of_a_machine_is_named(tracked: list[Path], project: Path) -> None:
    """The user chooses where packages come from, and no file depends on where a checkout is."""
    here = re.escape(f"{project}/") if len(project.parts) > 2 else "(?!)"
    wrong = re.compile(f"{REGISTRIES.pattern}|{MACHINE_PATHS.pattern}|{here}")
    found = [
        f"{path.relative_to(project)}:{number}: {line.strip()[:80]}"
        for path in tracked
        if wrong.search("\n".join(lines(path)))
        for number, line in enumerate(lines(path), 1)
        if wrong.search(line)
    ]
    assert found == []


def test_make_alone_explains_every_target(project: Path, require_tool: Callable[[str], Path]) -> None:
    """``make`` prints every target with a description."""
    targets = names(project / "Makefile", r"^([a-z-]+):")
    make = require_tool("make")
    text = subprocess.run([make], cwd=project, check=True, capture_output=True, text=True).stdout
    assert {"help", "run", "test", "lint", "bench", "recordings"} <= targets
    assert targets == set(re.findall(r"^  make ([a-z-]+) +\S", text, re.MULTILINE))


def test_every_target_has_a_task(project: Path) -> None:
    """Every target except ``help`` is a task that works without make."""
    targets = names(project / "Makefile", r"^([a-z-]+):")
    tasks = {task.replace("_", "-") for task in names(project / ".ci/task", r"^task_(\w+)\(\)")}
    assert targets - {"help"} == tasks - {"test-on", "test-packages", "test-rest"}


SAYS_THAT_IT_IS_GENERATED = re.compile(r"Written by `make|Rendered from|AUTOMATICALLY GENERATE[D]")


def test_generated_files_are_marked(
    tracked: list[Path], project: Path, require_tool: Callable[[str], Path]
) -> None:
    """A file whose head says that a program wrote it is ``linguist-generated`` in .gitattributes."""
    generated = {
        path.relative_to(project).as_posix()
        for path in tracked
        if any(SAYS_THAT_IT_IS_GENERATED.search(line) for line in lines(path)[:2])
    }
    command = [str(require_tool("git")), "check-attr", "linguist-generated", "--", *sorted(generated)]
    answer = subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout
    assert len(generated) > 10
    assert [line for line in answer.splitlines() if not line.endswith(": set")] == []


def test_every_generated_mark_names_a_file(tracked: list[Path], project: Path) -> None:
    """Each line of .gitattributes matches a file."""
    attributes = project / ".gitattributes"
    assert attributes in tracked
    patterns = names(attributes, r"^([^#\s]\S*) ")
    assert patterns
    assert {pattern for pattern in patterns if not any(project.glob(pattern))} == set()
