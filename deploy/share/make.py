"""Make the manual page and the shell completions from the parser that ``--help`` prints: ``make deploy``.

They do not use the layout of argparse, which differs between versions of Python, so that every interpreter
makes the same files. The argument is the folder to write into, for the test that compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab

from vramledger.cli import parser

COMPLETIONS = {
    "bash": "bash-completion/completions/vramledger",
    "zsh": "zsh/site-functions/_vramledger",
}


def main() -> None:
    """Write every file."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    top = alike(parser())
    made = {path: shtab.complete(top, shell) for shell, path in COMPLETIONS.items()}
    made["man/man1/vramledger.1"] = manual(top)
    for name, text in made.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n", encoding="utf-8")


def alike(top: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Remove what Python before 3.13 adds to the help of a flag with a ``--no-`` form."""
    for _, _, command in commands(top):
        for action in command._actions:  # noqa: SLF001
            if action.help is not None:
                action.help = action.help.removesuffix(" (default: %(default)s)")
    return top


def manual(top: argparse.ArgumentParser) -> str:
    """Return the manual page, in the language of man(7)."""
    lines = [
        '.TH VRAMLEDGER 1 "" "vramledger" "User Commands"',
        ".SH NAME",
        rf"vramledger \- {plain(str(top.description)).rstrip('.')}",
        ".SH SYNOPSIS",
        r".B vramledger",
        r".I COMMAND",
        r"[\fIOPTION\fR]...",
        ".SH DESCRIPTION",
        "For every byte on every NVIDIA GPU of a host it says who holds it, since when and why:",
        "to Prometheus, on a page of its own and in the terminal.",
        ".SH COMMANDS",
    ]
    for name, help_, command in commands(top):
        lines += [".SS " + plain(f"vramledger {name}"), plain(str(command.description or help_))]
        for group in command._action_groups:  # noqa: SLF001 argparse shows its groups nowhere else
            for action in group._group_actions:  # noqa: SLF001
                if action.help not in (argparse.SUPPRESS, None) and action.dest != "help":
                    lines += [".TP", term(action), plain(str(action.help) % expansions(command, action))]
    lines += [
        ".SH EXIT STATUS",
        "0 for success, 1 for a failure, 2 for a wrong flag; more where a command says so.",
    ]
    lines += [".SH SEE ALSO", "The page http://localhost:10839/ of a running exporter; prometheus(1)"]
    return "\n".join(lines)


def commands(top: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield every command: its name, its line in the help, its parser."""
    for action in top._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {choice.dest: str(choice.help) for choice in action._choices_actions}  # noqa: SLF001
            for name, command in action.choices.items():
                yield name, helps.get(name, ""), command


def term(action: argparse.Action) -> str:
    """Return how an argument is written."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return rf"\fI{plain(str(value))}\fR"
    names = ", ".join(rf"\fB{plain(name)}\fR" for name in action.option_strings)
    return names if action.nargs == 0 else rf"{names} \fI{plain(str(value))}\fR"


def expansions(command: argparse.ArgumentParser, action: argparse.Action) -> dict[str, object]:
    """Return the text that argparse inserts for ``%(...)s``."""
    return {**vars(action), "prog": command.prog}


def plain(text: str) -> str:
    """Return a text as roff shows it unchanged."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("\n", " ")
    return rf"\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    main()
