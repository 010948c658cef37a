"""Every command line of the documents, and all of COMMANDS.md, is true."""

import argparse
import re
import subprocess
from itertools import islice
from pathlib import Path

import pytest

from vramledger.accounting.tracker import HoldingTracker
from vramledger.cli import parser
from vramledger.sampling.replay import demo_recording, read_recording
from vramledger.views.table import render_table

PAGE = (Path(__file__).parents[2] / "exporter" / "docs" / "COMMANDS.md").read_text(encoding="utf-8")

MOMENT = 901
"""Readings of the bundled recording before the page's sample of the terminal: 30 minutes."""


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))  # noqa: SLF001
    return dict(action.choices)


def strings_of(command: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a command, long and short."""
    return {string for action in command._actions for string in action.option_strings}  # noqa: SLF001


def flags(command: argparse.ArgumentParser) -> set[str]:
    """Return the long flags of a command; those of the collectors count as one."""
    named = {re.sub(r"^(--(?:no-)?collector\.).*", r"\1NAME", each) for each in strings_of(command)}
    return {each for each in named if each.startswith("--")} - {"--help"}


@pytest.mark.parametrize("name", commands())
def test_every_command_is_described(name: str) -> None:
    """Each command is in the table of commands, and every flag of it on the page."""
    assert f"| `vramledger {name}" in PAGE
    assert flags(commands()[name]) - set(re.findall(r"--[\w.-]*\w", PAGE)) == set()


def test_the_table_of_flags_is_true() -> None:
    """Every flag in it exists, and it names each collector, by the name that its flag has."""
    table = PAGE[PAGE.index("| flag |") : PAGE.index("## `show`")]
    known = set().union(*map(flags, commands().values()))
    assert set(re.findall(r"`(--[\w.-]*\w)`", table)) - known == set()
    (row,) = re.findall(r"^\| `--collector\.NAME`.*$", table, re.MULTILINE)
    collectors = {each.partition("--collector.")[2] for each in strings_of(commands()["serve"])} - {""}
    assert collectors == set(re.findall(r"`(\w+)`", row))


def test_the_sample_of_the_terminal_is_real() -> None:
    """The page's sample is the end of the output for the bundled recording after 30 minutes."""
    tracker = HoldingTracker(idle_after=180.0)
    snapshot = tracker.blank
    for reading in islice(read_recording(demo_recording()), MOMENT):
        snapshot = tracker.update(reading)
    lines = render_table(snapshot).splitlines()
    last = lines[next(index for index, line in enumerate(lines) if line.startswith("GPU 2")) :]
    sample = "".join(f"    {line}".rstrip() + "\n" for line in last)
    assert sample in PAGE


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
    known = {name: strings_of(command) for name, command in commands().items()}
    lines = {path: command_lines(path.read_text(encoding="utf-8")) for path in documents()}
    for path, name, rest in [(path, *line) for path, found in lines.items() for line in found]:
        own, _, _ = rest.partition(" -- ")  # what follows is another program's
        given = set(re.findall(r"(?<![\w-])--?[a-z][\w.-]*\w", own))
        assert {flag for flag in given if "NAME" not in flag} - known[name] == set(), f"{path}: {name}{rest}"


def test_the_documents_have_command_lines() -> None:
    """The search finds command lines in code, also after sudo or kubectl and in a block, and not in prose."""
    ended = "A vramledger end is prose; `sudo -u x vramledger end --yes` is code."
    assert command_lines(ended) == [("end", " --yes")]
    block = "    kubectl exec x -- vramledger doctor \\\n        --path.rootfs=/host  # why"
    assert command_lines(block) == [("doctor", "          --path.rootfs=/host ")]
    found = [line for path in documents() for line in command_lines(path.read_text(encoding="utf-8"))]
    assert {name for name, _ in found} == set(commands())
