"""Make the manual pages and the shell completions from the parsers that ``--help`` prints: ``make deploy``.

They do not use the layout of argparse, which differs between versions of Python, so that every interpreter
makes the same files. The argument is the folder to write into, for the test that compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab

from vramledger import cli
from vramledger_agent import cli as agent_cli

COMPLETIONS = {"bash": "bash-completion/completions/{}", "zsh": "zsh/site-functions/_{}"}

ABOUT = {
    # In whose wheel the files are, and what the manual page says first.
    "vramledger": (
        "deploy/share",
        [
            "For every byte on every NVIDIA GPU of a host it says who holds it, since when and why:",
            "to Prometheus, on a page of its own and in the terminal.",
        ],
    ),
    "vramledger-agent": (
        "exporter/agent/share",
        [
            "It runs inside programs that use PyTorch, JAX, TensorFlow, CuPy or RMM,",
            "and reports what these hold; it needs no other package.",
        ],
    ),
}


def main() -> None:
    """Write every file."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    for top in (alike(cli.parser()), alike(agent_cli.parser())):
        folder, about = ABOUT[top.prog]
        made = {path.format(top.prog): shtab.complete(top, shell) for shell, path in COMPLETIONS.items()}
        made[f"man/man1/{top.prog}.1"] = manual(top, about)
        for name, text in made.items():
            path = target / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.rstrip() + "\n", encoding="utf-8")


def alike(top: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Remove what Python before 3.13 adds to the help of a flag with a ``--no-`` form."""
    for _, _, command in commands(top):
        for action in command._actions:  # noqa: SLF001
            if action.help is not None:
                action.help = action.help.removesuffix(" (default: %(default)s)")
    return top


def manual(top: argparse.ArgumentParser, about: list[str]) -> str:
    """Return the manual page, in the language of man(7)."""
    lines = [
        f'.TH {plain(top.prog.upper())} 1 "" "vramledger" "User Commands"',
        ".SH NAME",
        rf"{plain(top.prog)} \- {plain(str(top.description)).rstrip('.')}",
        ".SH SYNOPSIS",
        f".B {plain(top.prog)}",
        r".I COMMAND",
        r"[\fIOPTION\fR]...",
        ".SH DESCRIPTION",
        *about,
        ".SH COMMANDS",
    ]
    for name, help_, command in commands(top):
        lines += [".SS " + plain(f"{top.prog} {name}"), plain(str(command.description or help_))]
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
