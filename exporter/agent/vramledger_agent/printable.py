"""Write texts for people: of other programs and users, so that none controls a terminal; bytes and spans."""

from __future__ import annotations

import re
import sys

_GIB = 1024.0**3


_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U00016fe4\U0001d159\U000e0100-\U000e01ef]"
)
"""What Python calls printable, and Unicode ignorable by default, or what is blank."""

_ACCENTS = 2
"""On one letter: more would cover the lines beside it."""


def printable(text: str, replacement: str = "?") -> str:
    """Replace every character that is not printable or cannot be seen, and accents beyond two on a letter.

    What is left neither controls a terminal, nor breaks an encoding, nor covers what is beside it.
    """
    if text.isascii() and text.isprintable():
        return text
    from unicodedata import category

    shown, marks = [], 0
    for char in text:
        marks = marks + 1 if category(char) in ("Mn", "Me") else 0
        seen = marks <= _ACCENTS and char.isprintable() and not _UNSEEN.match(char)
        shown.append(char if seen else replacement)
    return "".join(shown)


class Control(str):
    """A control sequence of our own, which reaches the terminal as it is."""

    __slots__ = ()


def write_plain(*parts: str, error: bool = False, flush: bool = False) -> None:
    """Write text to stdout or stderr; line feeds and each :class:`Control` alone stay. Raises OSError."""
    shown = (
        each if isinstance(each, Control) else "\n".join(map(printable, each.split("\n"))) for each in parts
    )
    print("".join(shown), end="", file=sys.stderr if error else sys.stdout, flush=flush)


def gib(value: int | None) -> str:
    """Write bytes as GiB, or a dash when not known."""
    return "-" if value is None else f"{value / _GIB:.2f} GiB"


def span(seconds: float) -> str:
    """Write a span as its two largest units: ``3d 4h``, ``12m 5s``."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
