"""Find running exporters by their command lines, for a user whose command does not reach one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MAX_BYTES = 64 * 1024
_NAME = "vramledger"
_SOCKETS = ("--control.socket", "--agent.socket")


class RunningExporter(NamedTuple):
    """A process that looks like ``vramledger serve``.

    Its sockets are those of its flags, None for the usual ones. Any user can give a process this command
    line, so it is only shown, and never used.
    """

    pid: int
    control_socket: str | None
    agent_socket: str | None


def find_exporters(procfs: Path) -> tuple[RunningExporter, ...]:
    """Return the running exporters that we can see, by pid."""
    return tuple(sorted(_search(procfs)))


def _search(procfs: Path) -> Iterator[RunningExporter]:
    for home in procfs.iterdir():
        if not home.name.isdigit():
            continue
        try:
            with (home / "cmdline").open("rb") as file:
                words = file.read(_MAX_BYTES).decode(errors="replace").rstrip("\0").split("\0")
        except OSError:  # it has ended, or may not be read
            continue
        if _is_exporter(words):
            yield RunningExporter(int(home.name), *(_value(words, flag) for flag in _SOCKETS))


def _is_exporter(words: Sequence[str]) -> bool:
    """Tell whether a command line is that of ``vramledger serve``, with an interpreter before it or not."""
    if "serve" not in words:
        return False
    program = words[: words.index("serve")]
    return bool(program) and Path(program[-1]).name == _NAME


def _value(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag, written as one word or as two."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag:
            found = following
    return found
