"""COMMANDS.md is true: its flags, its commands and its sample of the terminal."""

from __future__ import annotations

import argparse
import re
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
    """Return the parser of every command."""
    (action,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))  # noqa: SLF001
    return dict(action.choices)


def flags(command: argparse.ArgumentParser) -> set[str]:
    """Return the long flags of a command; those of the collectors count as one."""
    strings = {string for action in command._actions for string in action.option_strings}  # noqa: SLF001
    named = {re.sub(r"^(--(?:no-)?collector\.).*", r"\1NAME", each) for each in strings}
    return {each for each in named if each.startswith("--")} - {"--help"}


@pytest.mark.parametrize("name", commands())
def test_every_command_is_described(name: str) -> None:
    """The table of commands has each command."""
    assert f"| `vramledger {name}" in PAGE


@pytest.mark.parametrize("name", commands())
def test_every_flag_is_described(name: str) -> None:
    """Every flag of every command is on the page."""
    described = set(re.findall(r"--[\w.-]*\w", PAGE))

    assert flags(commands()[name]) - described == set()


def test_no_flag_is_made_up() -> None:
    """Every flag in the table of flags exists."""
    flags_table = PAGE[PAGE.index("| flag |") : PAGE.index("## `show`")]
    known = set().union(*(flags(command) for command in commands().values()))

    assert set(re.findall(r"`(--[\w.-]*\w)`", flags_table)) - known == set()


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
