"""Find running exporters by their command lines, for a user whose command does not reach one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MAX_BYTES = 64 * 1024
_NAMES = ("vramledger", "vramledger-python")
"""The second is what the first starts where pip has installed it."""

_FLAGS = ("--control.socket", "--agent.socket", "--source")


class RunningExporter(NamedTuple):
    """A process that looks like ``vramledger serve``.

    What its flags say is None where they say nothing. Any user can give a process this command line, so it
    is only shown, and never used.
    """

    pid: int
    control_socket: str | None
    agent_socket: str | None
    source: str | None = None


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
            yield RunningExporter(int(home.name), *(_value(words, flag) for flag in _FLAGS))


def _is_exporter(words: Sequence[str]) -> bool:
    """Tell whether a command line is that of ``vramledger serve``, with an interpreter before it or not.

    What only starts one, such as sudo, is not it.
    """
    if "serve" not in words:
        return False
    *before, program = words[: words.index("serve")] or [""]
    started = not before or Path(before[0]).name.startswith("python")
    return started and Path(program).name in _NAMES


def _value(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag, written as one word or as two."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag:
            found = following
    return found
