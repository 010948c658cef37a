"""Every ``vramledger`` command line in the documents has a command and flags that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.repo.test_command_page import commands

ROOT = Path(__file__).parents[2]

_CODE = re.compile(r"^ {4,}\S.*$|^```.*?^```$|(?<!`)`[^`]+`(?!`)", re.MULTILINE | re.DOTALL)
"""Indented lines, fenced blocks and code spans."""
_LINE = re.compile(rf"(?<![\w/.-])vramledger ({'|'.join(commands())})\b([^`|;\n]*)")


def documents() -> list[Path]:
    """Return the documents of the repository, but for the change log, which tells what was."""
    listed = subprocess.run(
        ["git", "ls-files", "--", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / line for line in listed.stdout.splitlines() if line != "CHANGELOG.md"]


def command_lines(text: str) -> list[tuple[str, str]]:
    """Return each command in the code of a document, with its arguments; a backslash joins two lines."""
    code = "\n".join(_CODE.findall(text.replace("\\\n", " ")))
    return [(name, re.sub(r" #.*$", "", rest)) for name, rest in _LINE.findall(code)]


def test_every_flag_of_a_command_line_exists() -> None:
    """The command takes each flag that a document gives it."""
    known = {
        name: {string for action in command._actions for string in action.option_strings}  # noqa: SLF001
        for name, command in commands().items()
    }
    lines = {path: command_lines(path.read_text(encoding="utf-8")) for path in documents()}
    for path, name, rest in [(path, *line) for path, found in lines.items() for line in found]:
        own, _, _ = rest.partition(" -- ")  # what follows is another program's
        given = set(re.findall(r"(?<![\w-])--?[a-z][\w.-]*\w", own))
        assert {flag for flag in given if "NAME" not in flag} - known[name] == set(), f"{path}: {name}{rest}"


def test_the_documents_have_command_lines() -> None:
    """The search finds command lines in code, also after sudo or kubectl and in a block, and not in prose."""
    assert command_lines("A vramledger end is prose; `sudo -u x vramledger end --yes` is code.") == [
        ("end", " --yes")
    ]
    assert command_lines(
        "    kubectl exec x -- vramledger doctor \\\n        --path.rootfs=/host  # why"
    ) == [("doctor", "          --path.rootfs=/host ")]
    found = [line for path in documents() for line in command_lines(path.read_text(encoding="utf-8"))]
    assert {name for name, _ in found} == set(commands())
