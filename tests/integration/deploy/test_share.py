"""The manual page and the completions, made from the parser and read by their programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.requirements import require_tool
from vramledger.cli import parser

SHARE = Path(__file__).parents[3] / "deploy" / "share"
MANUAL = SHARE / "man" / "man1" / "vramledger.1"


def test_made_from_the_parser(tmp_path: Path) -> None:
    """The committed files are what ``make deploy`` writes now."""
    subprocess.run([sys.executable, SHARE / "make.py", tmp_path], check=True, timeout=60)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}

    assert made
    for path, text in made.items():
        assert (SHARE / path).read_text() == text, f"{path} is stale; run: make deploy"


def test_manual_names_every_command() -> None:
    """The manual page has a section for every command of the program."""
    text = MANUAL.read_text(encoding="utf-8")
    (commands,) = (action.choices for action in parser()._actions if action.dest == "command")  # noqa: SLF001

    assert commands
    assert [name for name in commands if f".SS vramledger {name}\n" not in text] == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["vramledger", "sh"], {"show"}),
        (["vramledger", "show", "--wa"], {"--watch"}),
        (["vramledger", "serve", "--log.level", "de"], {"debug"}),
    ],
)
def test_bash_completes(typed: list[str], offered: set[str]) -> None:
    """A real bash offers commands, flags and their values."""
    script = (
        'source $1; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1));'
        ' $(complete -p vramledger | sed -E \'s/.*-F ([^ ]+).*/\\1/\') vramledger "${@: -1}" "${@: -2:1}";'
        " printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    answer = subprocess.run(
        [require_tool("bash"), "--norc", "-c", script, "bash",
         SHARE / "bash-completion/completions/vramledger", *typed],
        check=True, capture_output=True, text=True,
    )  # fmt: skip

    assert set(answer.stdout.split()) == offered
