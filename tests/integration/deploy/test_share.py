"""The manual page and the completions, made from the parser and read by their programs."""

import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from tests.support.requirements import require_tool
from vramledger.cli import parser
from vramledger_agent.cli import parser as agent_parser

ROOT = Path(__file__).parents[3]
SHARE = {"vramledger": ROOT / "deploy/share", "vramledger-agent": ROOT / "exporter/agent/share"}


def test_made_from_the_parser(tmp_path: Path) -> None:
    """The committed files are what ``make deploy`` writes now."""
    subprocess.run([sys.executable, ROOT / "deploy/share/make.py", tmp_path], check=True, timeout=60)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == 6
    for path, text in made.items():
        assert (ROOT / path).read_text() == text, f"{path} is stale; run: make deploy"


@pytest.mark.parametrize("top", [parser(), agent_parser()], ids=lambda top: top.prog)
def test_manual_names_every_command(top: ArgumentParser) -> None:
    """The manual page has a section for every command of the program."""
    text = (SHARE[top.prog] / f"man/man1/{top.prog}.1").read_text(encoding="utf-8").replace("\\-", "-")
    (commands,) = (action.choices for action in top._actions if action.dest == "command")  # noqa: SLF001
    assert commands
    assert [name for name in commands if f".SS {top.prog} {name}\n" not in text] == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["vramledger", "sh"], {"show"}),
        (["vramledger", "show", "--wa"], {"--watch"}),
        (["vramledger", "serve", "--log.level", "de"], {"debug"}),
        (["vramledger-agent", "sn"], {"snapshot"}),
        (["vramledger-agent", "run", "--allow-r"], {"--allow-reclaim"}),
    ],
)
def test_bash_completes(typed: list[str], offered: set[str]) -> None:
    """A real bash offers commands, flags and their values."""
    script = (
        'source $1; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1));'
        ' $(complete -p "$1" | sed -E \'s/.*-F ([^ ]+).*/\\1/\') "$1" "${@: -1}" "${@: -2:1}";'
        " printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    answer = subprocess.run(
        [require_tool("bash"), "--norc", "-c", script, "bash",
         SHARE[typed[0]] / f"bash-completion/completions/{typed[0]}", *typed],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert set(answer.stdout.split()) == offered
